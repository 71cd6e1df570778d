"""Fill the lab's sentences with numbers, in one of two languages."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from multihead.errors import ArgumentError
from multihead.lab.matching import Spread

__all__ = ["NBSP", "Chapter", "Phrases", "Table", "language", "percent", "shape", "small"]

NBSP = "\u00a0"  # "67 %" is not broken over a line


@dataclass(frozen=True)
class Table:
    """A table of a chapter: its caption, the heads of its columns, and its rows, whose first cell names them."""

    caption: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Chapter:
    """One question and its answer.

    Attributes:
        name: what the page's links call it.
        title: the question.
        answer: the answer in a sentence or two, made of what was measured.
        text: what there is to know beside it.
        tables: the numbers.
        chart: a drawing as SVG with its caption, or None.
        task: the task whose heads' pictures belong here, or "".
        looks: what there is to say about these.
        looks_tables: and their numbers.
    """

    name: str
    title: str
    answer: str
    text: tuple[str, ...]
    tables: tuple[Table, ...]
    chart: tuple[str, str] | None = None
    task: str = ""
    looks: tuple[str, ...] = ()
    looks_tables: tuple[Table, ...] = ()


@dataclass(frozen=True)
class Phrases:
    """The words of one language.

    Attributes:
        lang: "en" or "zh".
        words: sentence by its key, with {holes}.
    """

    lang: str
    words: dict[str, str]

    def say(self, key: str, **given: Any) -> str:
        """Fill the holes of a sentence."""
        return self.words[key].format(**given)

    def heads(self, number: int) -> str:
        """Say a number of heads.

        >>> language("en").heads(2).replace(NBSP, " ")
        '2 heads'
        """
        return self.words["head"] if number == 1 else self.say("heads", n=number)

    def listed(self, items: Iterable[str], last: str = "and") -> str:
        """Join items: "1, 2 or 4".

        >>> language("en").listed("124", "or")
        '1, 2 or 4'
        """
        *before, final = items
        return self.words["comma"].join(before) + self.words[last] + final if before else final

    def joined(self, sentences: Iterable[str]) -> str:
        """Set sentences behind each other."""
        return self.words["sentence gap"].join(sentence for sentence in sentences if sentence)

    def spread(self, value: Spread) -> str:
        """Say a share and its spread over seeds in percent.

        >>> language("en").spread(Spread(0.5, 0.01)).replace(NBSP, " ")
        '50.0 ± 1.0 %'
        """
        mean, deviation = f"{100 * value.mean:.1f}", f"{100 * value.deviation:.1f}{NBSP}%"
        return self.say("share", mean=mean, deviation=deviation).replace(" ± ", f"{NBSP}±{NBSP}")

    def number(self, value: Spread, digits: int = 1) -> str:
        """Say a number and its spread over seeds."""
        given = self.say("share", mean=f"{value.mean:.{digits}f}", deviation=f"{value.deviation:.{digits}f}")
        return given.replace(" ± ", f"{NBSP}±{NBSP}")


def percent(share: float, digits: int = 1) -> str:
    """Write a share in percent.

    >>> percent(0.125).replace(NBSP, " ")
    '12.5 %'
    """
    return f"{100 * share:.{digits}f}{NBSP}%"


def small(value: float) -> str:
    """Write a rounding error.

    >>> small(2.4424906541753444e-15)
    '2.4e-15'
    """
    return f"{value:.1e}" if value else "0"


def shape(sizes: Sequence[int]) -> str:
    """Write a shape.

    >>> shape((512,))
    '(512)'
    """
    return f"({', '.join(str(size) for size in sizes)})"


@cache
def language(lang: str) -> Phrases:
    """Read the words of a language.

    Raises:
        ArgumentError: the lab does not speak it.
    """
    words = json.loads((resources.files("multihead.lab") / "static" / "words.json").read_text("utf-8"))
    if lang not in words:
        raise ArgumentError(f'lang is "{lang}", and the lab speaks "en" or "zh".', 'Give "en" or "zh".')
    return Phrases(lang, words[lang])
