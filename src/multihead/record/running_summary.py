"""Summarise a layer over any number of texts in constant memory: sums, counts and bins of equal ratio."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from multihead.record.summaries import SHARES, Measured, Of, check_summary

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

    def add(self, values: Tensor, counted: Tensor) -> None:
        """Add further queries: values and which of them count, ([batch,] heads, queries) each."""
        self.include(*_sums(values, counted))

    def include(self, total: Tensor, count: Tensor, bins: Tensor) -> None:
        """Add the sums, counts and bins of further queries."""
        self.total += total
        self.count += count
        self.bins += bins

    def quantile(self, share: float) -> Tensor:
        """Return the value below which a share of the queries lies: (heads,) float64, within 1 %; 0 of none."""
        before = self.bins.cumsum(-1)
        wanted = share * (self.count - 1).clamp(min=0)
        place = (before <= wanted[:, None].floor()).sum(-1)  # (heads,)
        value = LEAST * RATIO ** place.double() * 2 / (1 + RATIO)
        value = torch.where((place == 0) | (self.count == 0), 0.0, value)
        return torch.where(self.total.isnan(), torch.nan, value)


@dataclass(eq=False)
class RunningSummary:
    """A layer over all texts so far.

    Fields:
        num_heads: how many query heads the layer has.
        num_samples: how many texts there were.
        statistics: name -> what was summed up.
    """

    num_heads: int
    num_samples: int = 0
    statistics: dict[str, Sketch] = field(default_factory=dict)

    def add(self, measured: Mapping[str, Measured], *, samples: int) -> None:
        """Add the statistics of one text, or of all texts of a batch at once.

        Args:
            measured: statistic -> its values and which of them count, ([batch,] heads, queries).
            samples: how many texts begin with this call.
        """
        self.num_samples += samples
        for name, each in measured.items():
            sums = _sums(*each)
            sketch = self.statistics.get(name)
            if sketch is None:
                self.statistics[name] = Sketch(*sums)
            else:
                sketch.include(*sums)

    def summary(self, of: Of) -> dict[str, Tensor]:
        """Sum up each statistic: (heads,) float64 each; "mean" is exact, "median" and "p95" within 1 %."""
        check_summary(of)
        if of == "mean":
            return {name: each.total / each.count.clamp(min=1) for name, each in self.statistics.items()}
        return {name: each.quantile(SHARES[of]) for name, each in self.statistics.items()}


def _sums(values: Tensor, counted: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Sum one statistic over the queries that count.

    Args:
        values: ([batch,] heads, queries).
        counted: the same shape, bool.

    Returns: the sum and the count, (heads,) float64 each, and the number of values per bin, (heads, bins) int64.
    """
    heads, rest = values.shape[-2], (*range(values.dim() - 2), -1)
    values = values.masked_fill(~counted, 0)
    # log_RATIO(value / LEAST); bins are far wider than the rounding of a float32 logarithm: one in 10,000 of a bin.
    place = values.log2().mul_(1 / math.log2(RATIO)).sub_(math.log2(LEAST) / math.log2(RATIO)).ceil_()
    place = place.clamp_(0, BINS - 1).nan_to_num_(nan=0).int()
    place.add_(torch.arange(0, heads * BINS, BINS, dtype=torch.int32)[:, None])
    bins = place.flatten().bincount(minlength=heads * BINS).view(heads, BINS)
    count = counted.sum(rest)
    bins[:, 0] -= values.numel() // heads - count  # values that do not count are zeros, in bin 0
    return values.sum(rest, dtype=torch.float64), count.double(), bins
