"""Numbers of heads over texts: their means and standard errors, and how many heads are beyond chance."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from multihead.locale.texts import text
from multihead.probes.probe import Statistic

STANDARD_ERRORS = 2.0
"""Number of standard errors from which a mean counts as more than the texts' spread."""


class HeadColumn(NamedTuple):
    """Numbers of heads that were measured apart from a record, which become a column of it.

    Attributes:
        statistic: how they are shown; its name is that of the column.
        numbers: name of a layer -> (texts, heads) float64, NaN for a head that was not measured; None where the record
            has the numbers already.
    """

    statistic: Statistic
    numbers: Mapping[str, Tensor | None]


def standard_error(values: Tensor) -> Tensor:
    """Return the standard error of the mean over texts: (texts, ...) -> (...), NaN for one text.

    A text whose number is NaN does not count.
    """
    texts = values.isfinite().sum(0)
    return ((values - values.nanmean(0)).square().nansum(0) / (texts - 1) / texts).sqrt()


def stack_layers(rows: Sequence[Tensor]) -> Tensor:
    """Stack numbers per layer, (heads, ...) each, to (layers, heads, ...), NaN where there is no such head."""
    return pad_sequence([*rows], batch_first=True, padding_value=torch.nan)


def number_with_error(shown: Statistic, number: float, error: float) -> str:
    """Return a number with its standard error, without a unit; NaN is no error.

    Significant digits become as many decimals as two digits of the error have.

    >>> number_with_error(Statistic("effect"), 0.5217, 0.0312)
    '0.522 ± 0.031'
    """
    if math.isnan(error):
        return shown.number(number)
    if shown.number_format.endswith("g") and 0 < error < math.inf:
        shown = replace(shown, number_format=f".{max(0, 1 - math.floor(math.log10(error)))}f")
    return f"{shown.number(number)} ± {shown.number(error)}"


def cells_with_error(shown: Statistic, number: float, error: float) -> dict[str, str]:
    """Return a number and its standard error as cells of a row of a table: heading -> text."""
    return {shown.heading: shown.number(number), "standard error": shown.number(error)}


@dataclass(frozen=True, eq=False)
class NumbersOverTexts:
    """Numbers of the heads of some layers, of which each text counts alike.

    Attributes:
        of_layers: per layer (texts, heads, ...) float64, NaN for a head that was not measured.
    """

    of_layers: Sequence[Tensor]

    @property
    def texts(self) -> int:
        """Number of texts."""
        return len(self.of_layers[0])

    @cached_property
    def means(self) -> list[Tensor]:
        """The mean over texts: per layer (heads, ...) float64."""
        return [values.nanmean(0) for values in self.of_layers]

    @cached_property
    def errors(self) -> list[Tensor]:
        """The standard error of each mean: per layer (heads, ...) float64, NaN for one text."""
        return [standard_error(values) for values in self.of_layers]

    @property
    def num_heads(self) -> int:
        """Number of heads that were measured."""
        return sum(int(values.isfinite().sum()) for values in self.means)

    @property
    def within_errors(self) -> list[Tensor]:
        """Which means are at most two standard errors from 0: per layer (heads, ...) bool, none for one text."""
        pairs = zip(self.means, self.errors, strict=True)
        return [mean.abs() <= STANDARD_ERRORS * error for mean, error in pairs]

    @property
    def beyond_errors(self) -> int:
        """Number of heads whose mean is more than two standard errors from 0."""
        pairs = zip(self.means, self.errors, strict=True)
        return sum(int((mean.abs() > STANDARD_ERRORS * error).sum()) for mean, error in pairs)

    @property
    def expected_by_chance(self) -> float:
        """Number of heads of which this is expected if all means are 0, by Student's t distribution; NaN for a text."""
        return self.num_heads * chance_beyond(STANDARD_ERRORS, self.texts - 1) if self.texts > 1 else math.nan

    def describe(self, lang: str, *, pairs: bool = False) -> str:
        """Return a sentence: how many heads change the measure, and how many would by chance.

        Args:
            lang: "en" or "zh".
            pairs: whether the texts are pairs.
        """
        of = ("one text", "several texts", "one pair", "several pairs")
        return text(
            f"importance.{of[2 * pairs + (self.texts > 1)]}",
            lang,
            heads=self.num_heads,
            texts=self.texts,
            beyond=self.beyond_errors,
            chance=f"{self.expected_by_chance:.0f}",
        )


def chance_beyond(errors: float, freedom: int) -> float:
    """Return the chance that Student's t with some degrees of freedom is further from 0 than a number.

    >>> round(270 * chance_beyond(2.0, 19), 1)  # 270 heads, 20 texts
    16.2
    """
    angle = math.atan2(errors, math.sqrt(freedom))
    cosine, odd = math.cos(angle) ** 2, freedom % 2
    term = total = math.cos(angle) if odd else 1.0
    for k in range(3 if odd else 2, freedom - 1, 2):
        term *= cosine * (k - 1) / k
        total += term
    series = math.sin(angle) * total * (freedom > 1)
    return 1 - (2 / math.pi * (angle + series) if odd else series)
