"""Parse the headings, code blocks and links of a Markdown page."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

_FENCE = re.compile(r"^ {0,3}(`{3,}|~{3,})\s*(.*?)\s*$")
_HEADING = re.compile(r"^ {0,3}(#{1,6})\s+(.*?)\s*#*\s*$")
_INLINE_CODE = re.compile(r"(`+)(?!`).*?(?<!`)\1(?!`)")
_LINK_IN_TEXT = re.compile(r"\]\(\s*<?([^\s)>]+)>?(?:\s+[\"'][^)]*)?\)")
_LINK_IN_HTML = re.compile(r"<(?:a|img|source)\b[^>]*?\b(?:href|src|srcset)=[\"']([^\"']+)[\"']")


@dataclass(frozen=True)
class Heading:
    """A heading: its level (1 to 6), its text and its line."""

    level: int
    text: str
    line: int


@dataclass(frozen=True)
class Block:
    """A fenced code block: its info string, its text, and the line of its opening fence."""

    info: str
    text: str
    line: int

    @property
    def language(self) -> str:
        """The first word of the info string, or an empty string."""
        return self.info.split()[0] if self.info else ""

    @property
    def is_chinese(self) -> bool:
        """Whether the info string marks the block as Chinese: ```text zh."""
        return "zh" in self.info.split()[1:]


@dataclass(frozen=True)
class Link:
    """A link or picture: its target and its line."""

    target: str
    line: int


@dataclass(frozen=True)
class Page:
    """The parts of a page, in their order."""

    headings: tuple[Heading, ...]
    blocks: tuple[Block, ...]
    links: tuple[Link, ...]


def read_page(path: Path) -> Page:
    """Read the page at `path`; see `parse`."""
    return parse(path.read_text(encoding="utf-8"))


def parse(text: str) -> Page:
    r"""Parse a page. Code blocks and inline code contain no headings or links.

    >>> page = parse("# Title\n\nSee [the map](map.md), not `[a](b)`.\n")
    >>> page.headings, page.links
    ((Heading(level=1, text='Title', line=1),), (Link(target='map.md', line=3),))
    """
    headings: list[Heading] = []
    blocks: list[Block] = []
    links: list[Link] = []
    fence: re.Match[str] | None = None
    fence_line = 0
    inside: list[str] = []
    for number, line in enumerate(text.splitlines(), start=1):
        mark = _FENCE.match(line)
        if fence is not None:
            if mark and not mark[2] and mark[1].startswith(fence[1]):
                blocks.append(Block(fence[2], "\n".join(inside), fence_line))
                fence, inside = None, []
            else:
                inside.append(line)
        elif mark:
            fence, fence_line = mark, number
        else:
            if heading := _HEADING.match(line):
                headings.append(Heading(len(heading[1]), heading[2], number))
            links.extend(Link(target, number) for target in _targets(line))
    if fence is not None:  # an unclosed fence ends with the page
        blocks.append(Block(fence[2], "\n".join(inside), fence_line))
    return Page(tuple(headings), tuple(blocks), tuple(links))


def _targets(line: str) -> list[str]:
    """Return the targets of the links and pictures of one line, nested ones (a linked picture) included."""
    prose = _INLINE_CODE.sub("", line)
    return _LINK_IN_TEXT.findall(prose) + _LINK_IN_HTML.findall(prose)
