"""The lab's texts in a language, filled with numbers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from multihead.locale.texts import section
from multihead_lab.locale import LOCALE_PACKAGE
from multihead_lab.matching import MeanOverSeeds

__all__ = [
    "NBSP",
    "Chapter",
    "Phrases",
    "Table",
    "format_mean",
    "format_mean_percent",
    "format_percent",
    "format_rounding_error",
    "format_shape",
    "load_phrases",
]

NBSP = "\u00a0"  # keeps "67 %" on one line


@dataclass(frozen=True)
class Table:
    """A table of a chapter: its caption, the column headings, and its rows, whose first cell is the row's heading."""

    caption: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Chapter:
    """One question of the lab and its answer, as the page and the command show them.

    Attributes:
        name: the anchor on the page, and the name of the task in the chapter of a task.
        title: the question.
        short_answer: the answer in a sentence or two, with the measured numbers.
        paragraphs: paragraphs that explain the answer.
        table: the numbers from which the answer follows.
        chart: an SVG chart and its caption, or None.
        head_paragraphs: paragraphs about the pictures of heads.
        head_table: what the heads of the task attend to, in numbers; None in a chapter without pictures of heads.
    """

    name: str
    title: str
    short_answer: str
    paragraphs: tuple[str, ...]
    table: Table
    chart: tuple[str, str] | None = None
    head_paragraphs: tuple[str, ...] = ()
    head_table: Table | None = None


@dataclass(frozen=True)
class Phrases:
    """The texts of a command or page in one language, by key and with {placeholders}."""

    texts_by_key: Mapping[str, str]

    def translate(self, key: str, **values: Any) -> str:
        """Return a text with its placeholders filled in."""
        return self.texts_by_key[key].format(**values)

    def format_count(self, noun: str, number: int) -> str:
        """Format a number of things, such as heads or seeds.

        >>> load_phrases("en").format_count("head", 2).replace(NBSP, " ")
        '2 heads'
        """
        return self.translate(f"1 {noun}") if number == 1 else self.translate(f"{noun}s", n=number)

    def join_items(self, items: Iterable[str], last: str = "and") -> str:
        """Join items by commas and a word before the last item, as in "1, 2 or 4".

        >>> load_phrases("en").join_items("124", "or")
        '1, 2 or 4'
        """
        *before, final = items
        texts = self.texts_by_key
        return texts["join.comma"].join(before) + texts[f"join.{last}"] + final if before else final

    def join_sentences(self, sentences: Iterable[str]) -> str:
        """Join sentences into a paragraph."""
        return self.texts_by_key["join.sentences"].join(sentence for sentence in sentences if sentence)


def format_percent(share: float, digits: int = 1) -> str:
    """Format a share in percent.

    >>> format_percent(0.125).replace(NBSP, " ")
    '12.5 %'
    """
    return f"{100 * share:.{digits}f}{NBSP}%"


def format_mean(value: MeanOverSeeds, digits: int = 1) -> str:
    """Format a mean over seeds and its standard deviation, if there are several seeds.

    >>> format_mean(MeanOverSeeds(12.34, 0.5)).replace(NBSP, " ")
    '12.3 ± 0.5'
    """
    mean = f"{value.mean:.{digits}f}"
    return mean if value.deviation is None else f"{mean}{NBSP}±{NBSP}{value.deviation:.{digits}f}"


def format_mean_percent(value: MeanOverSeeds) -> str:
    """Format a mean share over seeds and its standard deviation in percent.

    >>> format_mean_percent(MeanOverSeeds(0.5, 0.01)).replace(NBSP, " ")
    '50.0 ± 1.0 %'
    """
    deviation = None if value.deviation is None else 100 * value.deviation
    return f"{format_mean(MeanOverSeeds(100 * value.mean, deviation))}{NBSP}%"


def format_rounding_error(value: float) -> str:
    """Format a rounding error with two digits.

    >>> format_rounding_error(2.4424906541753444e-15)
    '2.4e-15'
    """
    return f"{value:.1e}" if value else "0"


def format_shape(sizes: Sequence[int]) -> str:
    """Format the shape of a tensor.

    >>> format_shape((512,))
    '(512)'
    """
    return f"({', '.join(str(size) for size in sizes)})"


@cache
def load_phrases(lang: str) -> Phrases:
    """Return the lab's texts in a language, "en" or "zh"."""
    return Phrases({**section(lang, "common"), **section(lang, "lab", store=LOCALE_PACKAGE)})
