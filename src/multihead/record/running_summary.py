"""Summarise a layer over any number of texts in constant memory: sums, counts, and histograms for percentiles.

Medians over any number of batches are within 1 % in constant memory, and adding values takes no logarithm. The native
library adds a batch in one pass, head by head; most of the remaining time goes to the first access to the memory of the
histograms. Files of version 1 had bins of the ratio 1.02; they are converted when they are read.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from multihead.kernels.native import library
from multihead.record.summaries import SHARES, Measured, Of, check_summary_name

LEAST, MOST = 2.0**-30, 2.0**30
"""Smaller values count as 0, larger ones as the largest."""

BINS = 2 + 60 * 64
"""64 bins per octave from LEAST to MOST, one for smaller and one for larger values."""


# By the dtype of the bits: how many bits of the mantissa follow the first six, and what to subtract: LEAST is in bin 1.
_SHIFT_AND_FIRST_BIN = {torch.int32: (17, (127 - 30) * 64 - 1), torch.int64: (46, (1023 - 30) * 64 - 1)}


@dataclass(eq=False)
class QuantileSketch:
    """Sum, count and histogram of one statistic, over all queries so far.

    A value's bin is the exponent and the first six bits of the mantissa of the floating-point number, so the ends of
    a bin differ by at most 1/64 of the value, and a percentile is at most 1 % off.

    Attributes:
        total: (heads,) float64, the sum.
        count: (heads,) float64, how many queries counted.
        bins: (heads, bins) int64, how many values lie in each bin; the first is for values below LEAST.
        maximum: (heads,) float64, the exact maximum, -inf without values; None if only the bin of the maximum is known.

    Source: DDSketch with linearly interpolated bins, arXiv:1908.10693.
    """

    total: Tensor
    count: Tensor
    bins: Tensor
    maximum: Tensor | None = None

    @staticmethod
    def empty(heads: int) -> QuantileSketch:
        """Return an empty sketch."""
        return QuantileSketch.empty_list(1, heads)[0]

    @staticmethod
    def empty_list(count: int, heads: int) -> list[QuantileSketch]:
        """Return `count` empty sketches, which are views of shared tensors."""
        sums = torch.zeros(2, count, heads, dtype=torch.float64)
        # NumPy's zeros come from calloc: only the pages that are written to take time and memory.
        bins = torch.from_numpy(np.zeros((count, heads, BINS), np.int64))
        return [QuantileSketch(*each) for each in zip(*sums, bins, strict=True)]

    def add(self, values: Tensor, counted: Tensor) -> None:
        """Add the values of queries, with the native library if it is available, else with tensors.

        Args:
            values: ([batch,] heads, queries), floating-point.
            counted: the same shape, bool: which of them count.
        """
        if self.maximum is not None:
            largest = values.double().masked_fill(~counted, -torch.inf).transpose(0, -2).flatten(1)
            self.maximum = torch.maximum(self.maximum, nn.functional.pad(largest, (1, 0), value=-torch.inf).amax(1))
        if values.dtype == torch.float32 and values.is_cpu and library.reason_of_absence() is None:
            first_bin = _SHIFT_AND_FIRST_BIN[torch.int32][1]
            library.add_to_histograms(values, counted, first_bin, self.total, self.count, self.bins)
            return
        heads, rest = len(self.total), (*range(values.dim() - 2), -1)
        # Multiplying the bits by False sets values that do not count to 0, even NaN, 10 times faster than masked_fill.
        bits = _bits_as_integers(values) * counted
        count = counted.sum(rest)
        floats = torch.float64 if bits.dtype == torch.int64 else torch.float32
        self.total += bits.view(floats).sum(rest, dtype=torch.float64)
        self.count += count
        place = _bin_of_bits(bits).add_(torch.arange(0, heads * BINS, BINS)[:, None]).flatten()
        self.bins.view(-1).scatter_add_(0, place, torch.ones(1, dtype=torch.int64).expand_as(place))
        self.bins[:, 0] -= values.numel() // max(heads, 1) - count  # values that do not count are zeros, in bin 0

    def quantile(self, share: float) -> Tensor:
        """Return the value below which a share of the queries lies: (heads,) float64, within 1 %; 0 without queries."""
        if share == 1 and self.maximum is not None:
            return torch.where(self.count == 0, 0.0, self.maximum)
        wanted = share * (self.count - 1).clamp(min=0)
        place = (self.bins.cumsum(-1) <= wanted[:, None].floor()).sum(-1).clamp(max=BINS - 1)  # (heads,)
        value = torch.where(self.count == 0, 0.0, value_of_bin(place))
        return torch.where(self.total.isnan(), torch.nan, value)


@dataclass(eq=False)
class RunningSummary:
    """The summary of one layer over all texts so far.

    Attributes:
        num_heads: number of query heads.
        num_samples: number of texts.
        statistics: name -> its sketch.
        maxima: the statistics whose exact maximum is kept too.
        takes_batches: whether it takes all texts of a call at once, and never a part of a text.
    """

    num_heads: int
    num_samples: int = 0
    statistics: dict[str, QuantileSketch] = field(default_factory=dict)
    maxima: Collection[str] = ()
    takes_batches: ClassVar[bool] = False

    def add(self, measured: Mapping[str, Measured], *, samples: int) -> None:
        """Add the statistics of one text, or of all texts of a batch at once.

        Args:
            measured: statistic -> its values and which of them count, ([batch,] heads, queries).
            samples: how many texts begin with this call.
        """
        self.num_samples += samples
        new = [name for name in measured if name not in self.statistics]
        self.statistics.update(zip(new, QuantileSketch.empty_list(len(new), self.num_heads), strict=True))
        for name in self.maxima:
            if name in new:
                self.statistics[name].maximum = torch.full((self.num_heads,), -torch.inf, dtype=torch.float64)
        for name, each in measured.items():
            self.statistics[name].add(each.values, each.counted)

    def summary(self, of: Of, names: Collection[str] | None = None) -> dict[str, Tensor]:
        """Summarise each statistic, or some: (heads,) float64 each; "mean" is exact, the others within 1 %."""
        check_summary_name(of)
        chosen = {name: each for name, each in self.statistics.items() if names is None or name in names}
        if of == "mean":
            return {name: each.total / each.count.clamp(min=1) for name, each in chosen.items()}
        return {name: each.quantile(SHARES[of]) for name, each in chosen.items()}


def bin_of(values: Tensor) -> Tensor:
    """Return the bin of each value, int64 of the same shape; NaN is in the last one."""
    return _bin_of_bits(_bits_as_integers(values))


def value_of_bin(place: Tensor) -> Tensor:
    """Return the value that a bin stands for, within 1 % of all in it: float64; 0 for the first bin."""
    low, high = _lower_end_of_bin(place), _lower_end_of_bin(place + 1)
    # The harmonic mean has the same relative distance from both ends.
    return torch.where(place == 0, 0.0, 2 * low * high / (low + high))


def _bits_as_integers(values: Tensor) -> Tensor:
    """Return the bits of floating-point numbers as integers: int64 for float64, else int32 of the float32."""
    return values.view(torch.int64) if values.dtype == torch.float64 else values.float().view(torch.int32)


def _bin_of_bits(bits: Tensor) -> Tensor:
    shift, first_bin = _SHIFT_AND_FIRST_BIN[bits.dtype]
    return ((bits >> shift) - first_bin).clamp_(0, BINS - 1).long()


def _lower_end_of_bin(place: Tensor) -> Tensor:
    """Return the lower end of a bin from 1 on: float64."""
    octave, part = (place - 1) // 64, (place - 1) % 64
    return LEAST * 2.0 ** octave.double() * (1 + part.double() / 64)
