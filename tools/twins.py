"""Compare each Chinese page with its English twin, and follow the links of every page.

A page X.md and its twin X.zh.md have the same headings (as many, as deep, in the same order), the same code blocks
and the same links. A block may differ only where its fence says that it speaks Chinese: ```text zh beside ```text,
for what `--lang zh` prints. README.md always has a twin. A page of docs/ has one as soon as X.zh.md exists or X.md
links to it.

    python -m tools.twins
"""

from __future__ import annotations

import sys
from collections import Counter
from itertools import zip_longest
from pathlib import Path

from tools.pages import Block, Heading, Link, Page, read_page

ROOT = Path(__file__).resolve().parent.parent
_OUTWARD = ("http://", "https://", "mailto:")


def main(root: Path = ROOT) -> int:
    """Print one sentence a difference; return 1 if there is any, 0 if not."""
    complaints = complaints_of(root)
    for complaint in complaints:
        print(complaint)
    if complaints:
        return 1
    print(f"twins: {len(pairs(root))} Chinese pages match their twins; all links of {len(pages(root))} pages hold.")
    return 0


def complaints_of(root: Path) -> list[str]:
    """Every difference between twins and every broken link under `root`, one sentence each."""
    complaints: list[str] = []
    for english, chinese in pairs(root):
        if not chinese.exists() and not english.exists():
            complaints.append(f"{_name(english, root)} and {_name(chinese, root)} are missing. Write both.")
        elif not chinese.exists():
            complaints.append(f"{_name(chinese, root)} is missing. Write it, as whole as {_name(english, root)}.")
        elif not english.exists():
            complaints.append(f"{_name(english, root)} is missing. Write it, as whole as {_name(chinese, root)}.")
        else:
            found = differences(read_page(english), read_page(chinese))
            complaints += [f"{_name(chinese, root)} {difference}" for difference in found]
    for page in pages(root):
        complaints += broken_links(page, root)
    return complaints


def pairs(root: Path) -> list[tuple[Path, Path]]:
    """Each English page that has, or must have, a Chinese twin, with that twin."""
    english = {root / "README.md"}
    for page in sorted((root / "docs").rglob("*.md")):
        if page.name.endswith(".zh.md"):
            english.add(page.with_name(page.name.removesuffix(".zh.md") + ".md"))
        elif any(Path(_path_of(link)).name == _twin(page).name for link in read_page(page).links):
            english.add(page)
    return [(page, _twin(page)) for page in sorted(english)]


def pages(root: Path) -> list[Path]:
    """Every page a reader may open: those of the root and those of docs/."""
    return sorted(root.glob("*.md")) + sorted((root / "docs").rglob("*.md"))


def differences(english: Page, chinese: Page) -> list[str]:
    r"""What a Chinese page does otherwise than its twin, each the end of a sentence that the page's name begins.

    >>> from tools.pages import parse
    >>> differences(parse("# One\n## Two\n"), parse("# 一\n### 二\n"))
    ['has heading 2, "二" (line 2), at level 3; its English twin has "Two" (line 2) at level 2.']
    """
    return [
        *_heading_differences(english.headings, chinese.headings),
        *_block_differences(english.blocks, chinese.blocks),
        *_link_differences(english.links, chinese.links),
    ]


def _heading_differences(english: tuple[Heading, ...], chinese: tuple[Heading, ...]) -> list[str]:
    for number, (theirs, ours) in enumerate(zip_longest(english, chinese), start=1):
        if ours is None:
            return [
                f'ends after {number - 1} headings; its English twin goes on with "{theirs.text}" (line {theirs.line}).'
            ]
        if theirs is None:
            return [f'has the heading "{ours.text}" (line {ours.line}), and its English twin ends after {number - 1}.']
        if ours.level != theirs.level:  # all further ones would be out of step: one sentence says it
            here = f'has heading {number}, "{ours.text}" (line {ours.line}), at level {ours.level}'
            return [f'{here}; its English twin has "{theirs.text}" (line {theirs.line}) at level {theirs.level}.']
    return []


def _block_differences(english: tuple[Block, ...], chinese: tuple[Block, ...]) -> list[str]:
    if len(english) != len(chinese):
        return [f"has {len(chinese)} code blocks; its English twin has {len(english)}."]
    found = []
    for number, (theirs, ours) in enumerate(zip(english, chinese, strict=True), start=1):
        where = f"code block {number} (line {ours.line})"
        if theirs.is_chinese:
            found.append(
                f"has {where} whose English twin (line {theirs.line}) is marked as Chinese: take the zh away there."
            )
        elif ours.is_chinese:
            if ours.language != theirs.language:
                found.append(f"has {where} in {ours.info!r}; its English twin (line {theirs.line}) is {theirs.info!r}.")
        elif ours.info != theirs.info:
            found.append(f"has {where} in {ours.info!r}; its English twin (line {theirs.line}) is {theirs.info!r}.")
        elif ours.text != theirs.text:
            found.append(f"has {where} that differs from its English twin (line {theirs.line}): {_first(theirs, ours)}")
    return found


def _first(english: Block, chinese: Block) -> str:
    """The first line in which two blocks differ, both ways."""
    for theirs, ours in zip_longest(english.text.split("\n"), chinese.text.split("\n")):
        if theirs != ours:
            missing = "no such line"
            return f"{missing if ours is None else repr(ours)} beside {missing if theirs is None else repr(theirs)}."
    raise AssertionError("equal blocks were compared")


def _link_differences(english: tuple[Link, ...], chinese: tuple[Link, ...]) -> list[str]:
    # A sentence may name two things in the other order in Chinese, so the links are counted, not lined up.
    theirs = Counter(_without_language(link) for link in english)
    ours = Counter(_without_language(link) for link in chinese)
    lines = {_without_language(link): link.line for link in (*english, *chinese)}
    return [
        f"links to {target} {ours[target]} times; its English twin does so {theirs[target]} times."
        for target in sorted((theirs | ours), key=lambda target: lines[target])
        if ours[target] != theirs[target]
    ]


def broken_links(page: Path, root: Path) -> list[str]:
    """The links of `page` into this repository that lead nowhere, one sentence each."""
    return [
        f"{_name(page, root)} line {link.line} links to {link.target}, and there is no such file."
        for link in read_page(page).links
        if not link.target.startswith(_OUTWARD) and (path := _path_of(link)) and not (page.parent / path).exists()
    ]


def _path_of(link: Link) -> str:
    """The file a link names, without the place in it."""
    return link.target.split("#", 1)[0]


def _without_language(link: Link) -> str:
    """A link's target as both twins would have it: without the heading, whose name differs."""
    if link.target.startswith(_OUTWARD):
        return link.target
    return _path_of(link).replace(".zh.", ".") or "a heading of its own"


def _twin(english: Path) -> Path:
    return english.with_name(english.stem + ".zh.md")


def _name(path: Path, root: Path) -> str:
    return str(path.relative_to(root))


if __name__ == "__main__":
    sys.exit(main())
