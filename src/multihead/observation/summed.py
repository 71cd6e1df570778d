"""Sum up a layer over any number of texts in memory that does not grow: sums, counts and bins of equal ratio."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from multihead.observation.summaries import SHARES, Of, counted, refuse_unless_summary

if TYPE_CHECKING:
    from multihead.observation.sample import SampleRecord

RATIO = 1.02  # between the ends of a bin: a percentile is at most 1 % off
LEAST, MOST = 1e-9, 1e9  # what is smaller counts as 0, what is larger as the largest
BINS = 2 + math.ceil(math.log(MOST / LEAST) / math.log(RATIO))


@dataclass(eq=False)
class Sketch:
    """One statistic of all heads, over all queries so far.

    Fields:
        total: (heads,) float64, the sum.
        count: (heads,) float64, how many queries counted.
        bins: (heads, bins) int64, how many of them lie in each bin; the first is 0.

    Source: DDSketch, arXiv:1908.10693, whose bins have equal ratios, so that a percentile is right up to a share of
    itself.
    """

    total: Tensor
    count: Tensor
    bins: Tensor

    @staticmethod
    def zero(heads: int) -> Sketch:
        """Sum up nothing."""
        blank = torch.zeros(heads, dtype=torch.float64)
        return Sketch(blank, blank.clone(), torch.zeros(heads, BINS, dtype=torch.int64))

    def add(self, values: Tensor, rows: Tensor) -> None:
        """Add some queries: values (heads, queries), and which of them count (heads, queries) bool."""
        values = values.double()
        self.total += values.masked_fill(~rows, 0).sum(-1)
        self.count += rows.sum(-1)
        place = ((values / LEAST).log() / math.log(RATIO)).ceil().nan_to_num(nan=0, neginf=0).clamp(0, BINS - 1).long()
        head = torch.arange(len(values))[:, None] * BINS
        self.bins += (head + place)[rows].bincount(minlength=self.bins.numel()).view_as(self.bins)

    def quantile(self, share: float) -> Tensor:
        """Return the value below which a share of the queries lies: (heads,) float64, within 1 %; 0 of none."""
        before = self.bins.cumsum(-1)
        wanted = share * (self.count - 1).clamp(min=0)
        place = (before <= wanted[:, None].floor()).sum(-1)  # (heads,)
        value = LEAST * RATIO ** place.double() * 2 / (1 + RATIO)
        value = torch.where((place == 0) | (self.count == 0), 0.0, value)
        return torch.where(self.total.isnan(), torch.nan, value)


@dataclass(eq=False)
class Summed:
    """A layer over all texts so far.

    Fields:
        num_heads: how many query heads the layer has.
        num_samples: how many texts there were.
        statistics: name -> what was summed up.
    """

    num_heads: int
    num_samples: int = 0
    statistics: dict[str, Sketch] = field(default_factory=dict)

    def add(self, call: SampleRecord, *, first: bool) -> None:
        """Add one call of a text, the first of it or one that goes on."""
        self.num_samples += first
        for name, values in call.per_query.items():
            if values.is_floating_point():
                self.statistics.setdefault(name, Sketch.zero(self.num_heads)).add(values, counted(call, name))

    def summary(self, of: Of) -> dict[str, Tensor]:
        """Sum up each statistic: (heads,) float64 each; "mean" is exact, "median" and "p95" within 1 %."""
        refuse_unless_summary(of)
        if of == "mean":
            return {name: each.total / each.count.clamp(min=1) for name, each in self.statistics.items()}
        return {name: each.quantile(SHARES[of]) for name, each in self.statistics.items()}
