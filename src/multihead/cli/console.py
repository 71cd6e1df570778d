"""Print sentences to the terminal, wrapped between words or Chinese characters."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from rich.cells import cell_len

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["print_sentence", "width_of", "wrap_words"]

PIECES = re.compile(r"[（“]*[\u2e80-\uffef“][，。；：、）”？！]*|\s+|[^\s\u2e80-\uffef“]+[，。；：、）”？！]*")


def wrap_words(sentence: str, width: int) -> list[str]:
    """Break text between words or Chinese characters, but never before closing punctuation."""
    lines, line = [], ""
    for piece in PIECES.findall(sentence):
        if line and cell_len(line + piece.rstrip()) > width:
            lines.append(line.rstrip())
            line = ""
        line += piece if line or not piece.isspace() else ""
    return [*lines, line.rstrip()] if line.strip() else lines


def width_of(console: Console) -> int:
    """Return the columns that text may take: long lines are hard to read."""
    return min(max(console.width, 40), 100)


def print_sentence(console: Console, sentence: str, *, style: str = "", indent: int = 0) -> None:
    """Print text in as many lines as it needs, each indented by some columns."""
    for line in wrap_words(sentence, width_of(console) - indent):
        console.print(" " * indent + line, style=style, markup=False)
