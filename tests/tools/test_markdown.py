"""The headings, code blocks and links of a Markdown page."""

from __future__ import annotations

from tools.markdown import Block, Heading, Link, parse


def test_a_hash_in_a_code_block_is_no_heading() -> None:
    page = parse("# Title\n```python\n# a comment\n```\n## Part\n")
    assert page.headings == (Heading(1, "Title", 1), Heading(2, "Part", 5))
    assert page.blocks == (Block("python", "# a comment", 2),)


def test_a_longer_fence_contains_a_shorter_one() -> None:
    page = parse("````markdown\n```python\nx\n```\n````\n")
    assert page.blocks == (Block("markdown", "```python\nx\n```", 1),)


def test_an_unclosed_fence_ends_with_the_page() -> None:
    assert parse("```\na\nb\n").blocks == (Block("", "a\nb", 1),)


def test_a_block_marked_zh_is_chinese_and_keeps_its_language() -> None:
    (block,) = parse("```text zh\n头\n```\n").blocks
    assert block.is_chinese
    assert block.language == "text"


def test_a_picture_that_is_a_link_counts_as_two_links() -> None:
    page = parse("[![a map](docs/map.png)](docs/map.md 'the map')\n")
    assert page.links == (Link("docs/map.png", 1), Link("docs/map.md", 1))


def test_links_written_in_html_are_read_too() -> None:
    page = parse('<picture><source srcset="dark.png"><img alt="a" src="light.png"></picture> <a href="x.md">x</a>\n')
    assert [link.target for link in page.links] == ["dark.png", "light.png", "x.md"]


def test_inline_code_contains_no_link() -> None:
    assert parse("`[a](b.md)` and ``x ` [c](d.md)`` and [e](f.md)\n").links == (Link("f.md", 1),)
