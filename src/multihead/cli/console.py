"""Print sentences to the terminal, wrapped between words or Chinese characters."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from rich.cells import cell_len

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["print_sentence", "text_width", "wrap_words"]

WORD_OR_CHARACTER = re.compile(
    r"[（“]*[\u2e80-\uffef“][，。；：、）”？！]*|\s+|[^\s\u2e80-\uffef“]+[，。；：、）”？！]*"
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


def text_width(console: Console) -> int:
    """Return the line length for text, 40 to 100 columns: longer lines are hard to read."""
    return min(max(console.width, 40), 100)


def print_sentence(console: Console, sentence: str, *, style: str = "", indent: int = 0) -> None:
    """Print text, wrapped into lines that are indented by `indent` columns."""
    for line in wrap_words(sentence, text_width(console) - indent):
        console.print(" " * indent + line, style=style, markup=False)
