"""Compare each Chinese page with its English page, and check the links of every page.

README.md, every page of docs/ but those in UNTRANSLATED, and every notebook of examples/ has a Chinese translation:
X.zh.md for X.md. A page and its translation have the same headings (number, levels and order), code blocks and links.
Comments of a block may be translated. A block that is marked as Chinese may differ altogether: ```text zh in the place
of ```text, for what `--lang zh` prints. Links of a Chinese page lead to Chinese pages, where there are any.

A missing or outdated translation is a warning, because not everybody who contributes writes Chinese; a release needs
all of them. A broken link, or a code block that differs, is an error at any time.

    python -m tools.translations [--release]
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

from tools.markdown import Block, Heading, Link, Page, read_page

ROOT = Path(__file__).resolve().parent.parent
UNTRANSLATED = frozenset({"docs/api.md", "docs/architecture.md"})  # made of docstrings; for developers
_EXTERNAL = ("http://", "https://", "mailto:")
_COMMENT = re.compile(r"(?:^|(?<=\s)|(?<=>>>))\s*# .*$")  # of a line of Python or of a shell


class Finding(NamedTuple):
    """Something that is missing, outdated or wrong.

    Attributes:
        sentence: what it is, and where.
        is_error: whether it is wrong at any time; a warning is an error only for a release.
    """

    sentence: str
    is_error: bool


def main(arguments: Sequence[str] = (), root: Path = ROOT) -> int:
    """Print one line per finding, and return the exit code: 1 for errors, and for warnings if `--release` is given."""
    if unknown := [each for each in arguments if each != "--release"]:
        print(f"There is no option {unknown[0]}. Use: python -m tools.translations [--release]")
        return 2
    found = check(root)
    is_wrong = [each.is_error or "--release" in arguments for each in found]
    for each, wrong in zip(found, is_wrong, strict=True):
        print(f"{'error' if wrong else 'warning'}: {each.sentence}")
    if not found:
        print(f"{len(pairs(root))} translations match their English pages; all links of {len(pages(root))} pages work.")
    return int(any(is_wrong))


def check(root: Path) -> list[Finding]:
    """Return all findings under a folder."""
    found: list[Finding] = []
    for english, chinese in [*pairs(root), *notebook_pairs(root)]:
        if not english.exists():
            sentence = f"{_name(english, root)} is missing, and {_name(chinese, root)} is its translation."
            found.append(Finding(f"{sentence} Write it, or remove the translation.", is_error=True))
        elif not chinese.exists():
            sentence = f"{_name(chinese, root)} is missing. Translate {_name(english, root)} into Chinese."
            found.append(Finding(sentence, is_error=False))
        elif english.suffix == ".md":
            for difference in differences(read_page(english), read_page(chinese)):
                sentence = f"{_name(chinese, root)} {difference.sentence}"
                found.append(Finding(sentence, difference.is_error))
    for page in pages(root):
        found += [Finding(sentence, is_error=True) for sentence in broken_links(page, root)]
        if page != _english(page):
            found += [Finding(sentence, is_error=False) for sentence in links_to_english(page, root)]
    return found


def pairs(root: Path) -> list[tuple[Path, Path]]:
    """Return each English page that has or needs a translation, with the path of that translation."""
    in_docs = (_english(path) for path in (root / "docs").rglob("*.md"))
    return [
        (page, translation(page))
        for page in sorted({root / "README.md", *in_docs})
        if _name(page, root) not in UNTRANSLATED or translation(page).exists()
    ]


def notebook_pairs(root: Path) -> list[tuple[Path, Path]]:
    """Return each English notebook with the path of its translation; tests/examples compares their contents."""
    notebooks = {_english(path) for path in (root / "examples").glob("*.ipynb")}
    return [(notebook, translation(notebook)) for notebook in sorted(notebooks)]


def pages(root: Path) -> list[Path]:
    """Return every page that a reader may open: those of the root folder and those of docs/."""
    return sorted(root.glob("*.md")) + sorted((root / "docs").rglob("*.md"))


def translation(path: Path) -> Path:
    """Return the path of the Chinese translation of a page or a notebook.

    >>> translation(Path("docs/heads.md")).name
    'heads.zh.md'
    """
    return path.with_suffix(f".zh{path.suffix}")


def differences(english: Page, chinese: Page) -> list[Finding]:
    r"""Compare a page with its translation; each sentence is a predicate of the translation.

    >>> from tools.markdown import parse
    >>> [each.sentence for each in differences(parse("# One\n## Two\n"), parse("# 一\n### 二\n"))]
    ['has heading 2, "二" (line 2), at level 3; the English page has "Two" (line 2) at level 2.']
    """
    return [
        *_heading_differences(english.headings, chinese.headings),
        *_block_differences(english.blocks, chinese.blocks),
        *_link_differences(english.links, chinese.links),
    ]


def _heading_differences(english: tuple[Heading, ...], chinese: tuple[Heading, ...]) -> list[Finding]:
    """Compare the headings up to the first difference, which would move all later ones out of step."""
    for number, (theirs, ours) in enumerate(zip_longest(english, chinese), start=1):
        if ours is None:
            rest = f'the English page continues with "{theirs.text}" (line {theirs.line}).'
            return [Finding(f"ends after {number - 1} headings; {rest}", is_error=False)]
        if theirs is None:
            sentence = (
                f'has the heading "{ours.text}" (line {ours.line}), and the English page ends after {number - 1}.'
            )
            return [Finding(sentence, is_error=False)]
        if ours.level != theirs.level:
            here = f'has heading {number}, "{ours.text}" (line {ours.line}), at level {ours.level}'
            there = f'the English page has "{theirs.text}" (line {theirs.line}) at level {theirs.level}.'
            return [Finding(f"{here}; {there}", is_error=False)]
    return []


def _block_differences(english: tuple[Block, ...], chinese: tuple[Block, ...]) -> list[Finding]:
    """Compare the code blocks one by one, unless one page has more of them: then nobody knows which belong together."""
    if len(english) != len(chinese):
        return [Finding(f"has {len(chinese)} code blocks; the English page has {len(english)}.", is_error=False)]
    found = []
    for number, (theirs, ours) in enumerate(zip(english, chinese, strict=True), start=1):
        where = f"code block {number} (line {ours.line})"
        there = f"the English page (line {theirs.line})"
        if theirs.is_chinese:
            found.append(f"has {where} that {there} marks as Chinese: remove the zh there.")
        elif ours.language != theirs.language or (not ours.is_chinese and ours.info != theirs.info):
            found.append(f"has {where} in {ours.info!r}; {there} has {theirs.info!r}.")
        elif not ours.is_chinese and without_comments(ours) != without_comments(theirs):
            found.append(f"has {where} that differs from {there}: {_first_difference(theirs, ours)}")
    return [Finding(sentence, is_error=True) for sentence in found]


def without_comments(block: Block) -> list[str]:
    r"""Return the lines of a block without comments, which may be translated.

    >>> without_comments(Block("console", "$ make demo    # every head\n$ make test\n# all", 1))
    ['$ make demo', '$ make test', '']
    """
    return [_COMMENT.sub("", line).rstrip() for line in block.text.split("\n")]


def _first_difference(english: Block, chinese: Block) -> str:
    """Quote the first line that differs, from both pages."""
    for theirs, ours in zip_longest(without_comments(english), without_comments(chinese)):
        if theirs != ours:
            here, there = ("no such line" if line is None else repr(line) for line in (ours, theirs))
            return f"{here} here, {there} there."
    raise AssertionError("equal blocks were compared")


def _link_differences(english: tuple[Link, ...], chinese: tuple[Link, ...]) -> list[Finding]:
    """Compare how often each target is linked: a Chinese sentence may name two things in the other order."""
    theirs = Counter(_without_language(link) for link in english)
    ours = Counter(_without_language(link) for link in chinese)
    lines = {_without_language(link): link.line for link in (*english, *chinese)}
    return [
        Finding(f"links to {target} {_times(ours[target])}; the English page {_times(theirs[target])}.", is_error=False)
        for target in sorted((theirs | ours), key=lambda target: lines[target])
        if ours[target] != theirs[target]
    ]


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def broken_links(page: Path, root: Path) -> list[str]:
    """Return one sentence per link of a page to a missing file of the repository, or to a missing heading of a page.

    The link to a page's own translation is left out: a missing translation is reported by itself.
    """
    return [
        f"{_name(page, root)} line {link.line} links to {link.target}, and there is no such file."
        for link in read_page(page).links
        if not link.target.startswith(_EXTERNAL)
        and (path := _path_of(link))
        and path != translation(page).name
        and not (page.parent / path).exists()
    ] + [
        f"{_name(page, root)} line {link.line} links to {link.target}, and there is no such heading."
        for link in read_page(page).links
        if not link.target.startswith(_EXTERNAL)
        and "#" in link.target
        and (target := page.parent / _path_of(link) if _path_of(link) else page).suffix == ".md"
        and target.exists()
        and link.target.partition("#")[2] not in anchors(read_page(target))
    ]


def anchors(page: Page) -> set[str]:
    r"""Return the names under which GitHub links to the headings of a page.

    >>> from tools.markdown import parse
    >>> sorted(anchors(parse("# One `head`, two\n## 一个头：图\n")))
    ['one-head-two', '一个头图']
    """
    names = (re.sub(r"[^\w\- ]", "", heading.text.lower()).replace(" ", "-") for heading in page.headings)
    return set(names)


def links_to_english(page: Path, root: Path) -> list[str]:
    """Return one sentence per link of a Chinese page to an English one that has a translation, its own one left out."""
    found = []
    for link in read_page(page).links:
        target = page.parent / _path_of(link)
        is_page = not link.target.startswith(_EXTERNAL) and target.suffix in (".md", ".ipynb")
        if is_page and target == _english(target) and translation(target).exists() and target != _english(page):
            other = f"{_name(translation(target.resolve()), root)} is its translation."
            found.append(f"{_name(page, root)} line {link.line} links to {link.target}, and {other}")
    return found


def _path_of(link: Link) -> str:
    """Return the file that a link names, without the heading in it."""
    return link.target.split("#", 1)[0]


def _without_language(link: Link) -> str:
    """Return a link's target as both pages have it: without the heading, whose name is translated."""
    if link.target.startswith(_EXTERNAL):
        return link.target
    return _path_of(link).replace(".zh.", ".") or "a heading of its own"


def _english(path: Path) -> Path:
    """Return the English page or notebook of one in either language."""
    return path.with_name(path.name.replace(f".zh{path.suffix}", path.suffix))


def _name(path: Path, root: Path) -> str:
    return path.relative_to(root).as_posix()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
