"""Print sentences and tables to the terminal; into a file or a pipe, as wide as they are."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.cells import cell_len, set_cell_size

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

__all__ = [
    "column_width",
    "cut_names",
    "empty_table",
    "open_console",
    "print_entry",
    "print_sentence",
    "text_width",
    "wrap_words",
]

UNLIMITED_WIDTH = 100_000  # columns of a file or a pipe
NARROW_TERMINAL_WIDTH = 90  # number of terminal columns below which the columns of a table have one space between

WORD_OR_CHARACTER = re.compile(
    r"[（“]*[\u2e80-\uffef“][，。；：、）”？！]*|[^\S\u00a0]+|(?:\u00a0|[^\s\u2e80-\uffef“])+[，。；：、）”？！]*"
)


def wrap_words(sentence: str, width: int) -> list[str]:
    """Break text into lines of at most `width` columns, between words or Chinese characters, not before punctuation."""
    lines, line = [], ""
    for piece in WORD_OR_CHARACTER.findall(sentence):
        if line and cell_len(line + piece.rstrip()) > width:
            lines.append(line.rstrip())
            line = ""
        line += piece if line or not piece.isspace() else ""
    return [*lines, line.rstrip()] if line.strip() else lines


def open_console() -> Console:
    """Return the console of standard output, as wide as the terminal or COLUMNS; no limit in a file or a pipe."""
    from rich.console import Console

    console = Console(highlight=False, markup=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = UNLIMITED_WIDTH
    return console


def text_width(console: Console) -> int:
    """Return the line length for text: 40 to 100 columns, because longer lines are hard to read, or no limit."""
    return console.width if console.width == UNLIMITED_WIDTH else min(max(console.width, 40), 100)


def print_sentence(console: Console, sentence: str, *, style: str = "", indent: int = 0) -> None:
    """Print text, wrapped into lines that are indented by `indent` columns."""
    for line in wrap_words(sentence, text_width(console) - indent):
        console.print(" " * indent + line, style=style, markup=False, soft_wrap=True)  # no break in a long path


def print_entry(console: Console, label: str, text: str, *, width: int, indent: int, style: str = "") -> None:
    """Print a label and, in the column next to it, its text.

    Args:
        console: where to print.
        label: the label, in a style of its own.
        text: the text, which is wrapped.
        width: columns of the label and the space after it.
        indent: columns before the label.
        style: the style of the label.
    """
    for number, line in enumerate(wrap_words(text, text_width(console) - indent - width)):
        shown = " " * indent + set_cell_size("" if number else label, width)
        console.print(shown, style=style, end="", markup=False)
        console.print(line.replace("\u00a0", " "), markup=False, soft_wrap=True)


def empty_table(gap: int) -> Table:
    """Return an empty table with `gap` spaces between its columns, and a line below its headings."""
    from rich import box
    from rich.table import Table

    return Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, gap - 1, 0, 0))


def column_width(heading: str, cells: Sequence[str]) -> int:
    """Return the number of terminal columns of a table's column, whose heading may have several lines."""
    return max(map(cell_len, [*heading.splitlines(), *cells]))


def cut_names(names: Sequence[str], most: int) -> list[str]:
    """Cut names to `most` terminal columns: at the end, or in the middle or with a number where they would be equal.

    A Chinese character takes two columns. At least the first character of a name remains.

    >>> cut_names(["the key is in the house", "the key is in the door"], 12)
    ['the k…house', 'the k…e door']
    >>> cut_names(["a key is in the door every day", "a key is in the house every day"], 12)
    ['1. a key is…', '2. a key is…']
    """
    for end in (0, most // 2):
        cut = [_cut_name(name, most, end) for name in names]
        if len(set(cut)) == len(set(names)):
            return cut
    return [_cut_name(f"{number}. {name}", most, 0) for number, name in enumerate(names, start=1)]


def _cut_name(name: str, most: int, end: int) -> str:
    """Cut a name to `most` terminal columns, of which the last `end` show its end."""
    if cell_len(name) <= most:
        return name
    start = max(most - 1 - end, cell_len(name[0]))
    tail = next(
        name[place:] for place in range(max(len(name) - end, 0), len(name) + 1) if cell_len(name[place:]) <= end
    )
    return f"{set_cell_size(name, start).rstrip()}…{tail.strip()}"
