"""Translations that are missing or outdated are warnings, errors for a release; what is wrong is always an error."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools import translations
from tools.markdown import parse

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
参见[下文](#一个头)、[English](README.md) 和[地图](docs/architecture.md)。
```python
heads = 8
```
## 一个头
```text zh
第 0 头
```
"""


def differences(chinese: str) -> list[tuple[str, bool]]:
    return [tuple(each) for each in translations.differences(parse(ENGLISH), parse(chinese))]


def test_a_complete_translation_has_no_differences() -> None:
    assert differences(CHINESE) == []


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        (
            "## 一个头",
            "### 一个头",
            'has heading 2, "一个头" (line 6), at level 3; the English page has "One head" (line 6) at level 2.',
        ),
        (
            "## 一个头\n",
            "",
            'ends after 1 headings; the English page continues with "One head" (line 6).',
        ),
        (
            "## 一个头\n",
            "## 一个头\n## 又一个\n",
            'has the heading "又一个" (line 7), and the English page ends after 2.',
        ),
        (
            "```python\nheads = 8\n```\n",
            "",
            "has 1 code blocks; the English page has 2.",
        ),
        (
            "docs/architecture.md",
            "docs/masks.md",
            "links to docs/masks.md once; the English page 0 times.",
        ),
        (
            "[下文](#一个头)",
            "下文",
            "links to a heading of its own 0 times; the English page once.",
        ),
    ],
)
def test_an_outdated_translation_is_a_warning(old: str, new: str, sentence: str) -> None:
    assert old in CHINESE
    assert (sentence, False) in differences(CHINESE.replace(old, new))


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        (
            "heads = 8",
            "heads = 9",
            (
                "has code block 1 (line 3) that differs from the English page (line 3): "
                "'heads = 9' here, 'heads = 8' there."
            ),
        ),
        (
            "heads = 8\n",
            "heads = 8\nx = 1\n",
            "has code block 1 (line 3) that differs from the English page (line 3): 'x = 1' here, no such line there.",
        ),
        (
            "text zh",
            "text",
            "has code block 2 (line 7) that differs from the English page (line 7): '第 0 头' here, 'head 0' there.",
        ),
        (
            "text zh",
            "console zh",
            "has code block 2 (line 7) in 'console zh'; the English page (line 7) has 'text'.",
        ),
        (
            "```python",
            "```py",
            "has code block 1 (line 3) in 'py'; the English page (line 3) has 'python'.",
        ),
    ],
)
def test_a_code_block_that_differs_is_an_error(old: str, new: str, sentence: str) -> None:
    assert old in CHINESE
    assert (sentence, True) in differences(CHINESE.replace(old, new))


def test_a_block_of_the_english_page_may_not_be_marked_as_chinese() -> None:
    page = parse("```text zh\nx\n```\n")
    assert [each.sentence for each in translations.differences(page, page)] == [
        "has code block 1 (line 1) that the English page (line 1) marks as Chinese: remove the zh there."
    ]


def test_comments_may_be_translated() -> None:
    english = parse(
        "```console\n$ make demo  # every head\n```\n```python\n# the layer\nx = y[1:]  # (batch, heads)\n```\n"
    )
    chinese = parse(
        "```console\n$ make demo  # 每个头\n```\n```python\n# 层\nx = y[1:]  # （批，头）\n```\n".replace(
            "    #", "  #"
        )
    )
    assert translations.differences(english, chinese) == []


def test_a_link_of_a_chinese_page_to_a_page_that_has_a_translation_is_a_warning(root: Path) -> None:
    (root / "README.zh.md").write_text(CHINESE.replace("docs/architecture.md", "docs/heads.md#one"), encoding="utf-8")
    sentence = "README.zh.md line 2 links to docs/heads.md#one, and docs/heads.zh.md is its translation."
    assert translations.Finding(sentence, is_error=False) in translations.check(root)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A small repository whose pages and notebooks are in order."""
    for folder in ("docs", "examples"):
        (tmp_path / folder).mkdir()
    (tmp_path / "README.md").write_text(ENGLISH, encoding="utf-8")
    (tmp_path / "README.zh.md").write_text(CHINESE, encoding="utf-8")
    (tmp_path / "docs" / "heads.md").write_text("# Heads\n[中文](heads.zh.md)\n", encoding="utf-8")
    (tmp_path / "docs" / "heads.zh.md").write_text("# 头\n[English](heads.md)\n", encoding="utf-8")
    (tmp_path / "docs" / "architecture.md").write_text("# Needs no translation\n", encoding="utf-8")
    (tmp_path / "CONTRIBUTING.md").write_text("# Nor does this\n", encoding="utf-8")
    for name in ("split.ipynb", "split.zh.ipynb"):
        (tmp_path / "examples" / name).touch()
    return tmp_path


@pytest.mark.parametrize("arguments", [(), ("--release",)])
def test_pages_in_order_pass(root: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...]) -> None:
    assert translations.main(arguments, root) == 0
    assert capsys.readouterr().out == "2 translations match their English pages; all links of 6 pages work.\n"


@pytest.mark.parametrize(
    ("page", "translation"),
    [
        ("README.md", "README.zh.md"),
        ("docs/heads.md", "docs/heads.zh.md"),
        ("examples/split.ipynb", "examples/split.zh.ipynb"),
    ],
)
class TestAMissingTranslation:
    def test_is_a_warning(self, root: Path, capsys: pytest.CaptureFixture[str], page: str, translation: str) -> None:
        (root / translation).unlink()
        assert translations.main((), root) == 0
        assert capsys.readouterr().out == f"warning: {translation} is missing. Translate {page} into Chinese.\n"

    def test_is_an_error_for_a_release(
        self, root: Path, capsys: pytest.CaptureFixture[str], page: str, translation: str
    ) -> None:
        (root / translation).unlink()
        assert translations.main(("--release",), root) == 1
        assert capsys.readouterr().out == f"error: {translation} is missing. Translate {page} into Chinese.\n"

    def test_is_no_missing_page(self, root: Path, page: str, translation: str) -> None:
        (root / page).unlink()
        sentence = f"{page} is missing, and {translation} is its translation. Write it, or remove the translation."
        assert translations.Finding(sentence, is_error=True) in translations.check(root)


def test_a_new_page_needs_a_translation_even_if_it_links_to_none(root: Path) -> None:
    (root / "docs" / "new.md").write_text("# New\n", encoding="utf-8")
    assert translations.check(root) == [
        translations.Finding("docs/new.zh.md is missing. Translate docs/new.md into Chinese.", is_error=False)
    ]


def test_an_outdated_translation_fails_a_release_only(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (root / "docs" / "heads.md").write_text("# Heads\n[中文](heads.zh.md)\n## New\n", encoding="utf-8")
    sentence = 'docs/heads.zh.md ends after 1 headings; the English page continues with "New" (line 3).\n'
    assert translations.main((), root) == 0
    assert capsys.readouterr().out == f"warning: {sentence}"
    assert translations.main(("--release",), root) == 1
    assert capsys.readouterr().out == f"error: {sentence}"


def test_a_broken_link_is_always_an_error(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (root / "CONTRIBUTING.md").write_text("# More\n\nSee [that](gone.md#part).\n", encoding="utf-8")
    assert translations.main((), root) == 1
    assert capsys.readouterr().out == (
        "error: CONTRIBUTING.md line 3 links to gone.md#part, and there is no such file.\n"
    )


def test_an_option_that_does_not_exist_is_rejected(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert translations.main(("--realese",), root) == 2
    assert capsys.readouterr().out == ("There is no option --realese. Use: python -m tools.translations [--release]\n")
