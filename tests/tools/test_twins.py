"""Chinese pages that do not match their English twins are named, in one sentence a difference."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools import twins
from tools.pages import parse

ENGLISH = """\
# Heads
See [the map](docs/architecture.md), [中文](README.zh.md) and [below](#one-head).
```python
heads = 8
```
## One head
```text
head 0
```
"""
CHINESE = """\
# 头
参见[下文](#一个头)、[English](README.md) 和[地图](docs/architecture.zh.md)。
```python
heads = 8
```
## 一个头
```text zh
第 0 头
```
"""


def differences(chinese: str) -> list[str]:
    return twins.differences(parse(ENGLISH), parse(chinese))


def test_a_faithful_twin_has_no_differences() -> None:
    assert differences(CHINESE) == []


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        (
            "## 一个头",
            "### 一个头",
            'has heading 2, "一个头" (line 6), at level 3; its English twin has "One head" (line 6) at level 2.',
        ),
        (
            "## 一个头\n",
            "",
            'ends after 1 headings; its English twin goes on with "One head" (line 6).',
        ),
        (
            "## 一个头\n",
            "## 一个头\n## 又一个\n",
            'has the heading "又一个" (line 7), and its English twin ends after 2.',
        ),
        (
            "heads = 8",
            "heads = 9",
            "has code block 1 (line 3) that differs from its English twin (line 3): 'heads = 9' beside 'heads = 8'.",
        ),
        (
            "heads = 8\n",
            "heads = 8\nx = 1\n",
            "has code block 1 (line 3) that differs from its English twin (line 3): 'x = 1' beside no such line.",
        ),
        (
            "text zh",
            "text",
            "has code block 2 (line 7) that differs from its English twin (line 7): '第 0 头' beside 'head 0'.",
        ),
        (
            "text zh",
            "console zh",
            "has code block 2 (line 7) in 'console zh'; its English twin (line 7) is 'text'.",
        ),
        (
            "```python",
            "```py",
            "has code block 1 (line 3) in 'py'; its English twin (line 3) is 'python'.",
        ),
        (
            "```python\nheads = 8\n```\n",
            "",
            "has 1 code blocks; its English twin has 2.",
        ),
        (
            "docs/architecture.zh.md",
            "docs/heads.md",
            "links to docs/heads.md 1 times; its English twin does so 0 times.",
        ),
        (
            "[下文](#一个头)",
            "下文",
            "links to a heading of its own 0 times; its English twin does so 1 times.",
        ),
    ],
)
def test_each_difference_is_one_sentence(old: str, new: str, sentence: str) -> None:
    assert old in CHINESE
    assert sentence in differences(CHINESE.replace(old, new))


def test_a_block_of_the_english_page_may_not_be_marked_as_chinese() -> None:
    page = parse("```text zh\nx\n```\n")
    assert twins.differences(page, page) == [
        "has code block 1 (line 1) whose English twin (line 1) is marked as Chinese: take the zh away there."
    ]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A small repository whose pages are in order."""
    (tmp_path / "docs").mkdir()
    (tmp_path / "README.md").write_text(ENGLISH, encoding="utf-8")
    (tmp_path / "README.zh.md").write_text(CHINESE, encoding="utf-8")
    (tmp_path / "docs" / "architecture.md").write_text("# Map\n[中文](architecture.zh.md)\n", encoding="utf-8")
    (tmp_path / "docs" / "architecture.zh.md").write_text("# 地图\n[English](architecture.md)\n", encoding="utf-8")
    (tmp_path / "docs" / "more.md").write_text("# No twin was promised\n", encoding="utf-8")
    return tmp_path


def test_pages_in_order_pass(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert twins.main(root) == 0
    assert capsys.readouterr().out == ("twins: 2 Chinese pages match their twins; all links of 5 pages hold.\n")


def test_a_difference_is_printed_with_its_page_and_fails(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (root / "docs" / "architecture.zh.md").write_text("## 地图\n[English](architecture.md)\n", encoding="utf-8")
    assert twins.main(root) == 1
    assert capsys.readouterr().out == (
        'docs/architecture.zh.md has heading 1, "地图" (line 1), at level 2; '
        'its English twin has "Map" (line 1) at level 1.\n'
    )


@pytest.mark.parametrize(
    ("gone", "twin"),
    [
        ("README.zh.md", "README.md"),
        ("README.md", "README.zh.md"),
        ("docs/architecture.md", "docs/architecture.zh.md"),
        ("docs/architecture.zh.md", "docs/architecture.md"),
    ],
)
def test_a_missing_twin_is_named(root: Path, gone: str, twin: str) -> None:
    (root / gone).unlink()
    assert f"{gone} is missing. Write it, as whole as {twin}." in twins.complaints_of(root)


def test_two_missing_twins_are_asked_for_together(tmp_path: Path) -> None:
    assert twins.complaints_of(tmp_path) == ["README.md and README.zh.md are missing. Write both."]


def test_a_link_that_leads_nowhere_is_named(root: Path) -> None:
    (root / "docs" / "more.md").write_text("# More\n\nSee [that](gone.md#part).\n", encoding="utf-8")
    assert twins.complaints_of(root) == ["docs/more.md line 3 links to gone.md#part, and there is no such file."]
