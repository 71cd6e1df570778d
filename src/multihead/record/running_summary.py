"""Summarise statistics of a layer over any number of texts in constant memory, by sums, counts and histograms.

Medians over any number of batches are exact to 1 %. A histogram has 64 bins per power of two for each sign, so the bin
of a value follows from the value's first bits, without a logarithm. The native library adds a batch to the histograms
in one pass, head by head; most of its time goes to the first access to their memory. Histograms in files of version 1,
whose bins are each 1.02 times as wide as the one before, are converted when read.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from multihead.kernels.native import library
from multihead.record.summaries import QUANTILE_OF_SUMMARY, MeasuredStatistic, SummaryName, check_summary_name

MIN_BINNED_VALUE, MAX_BINNED_VALUE = 2.0**-30, 2.0**30
"""Range of the absolute values in a histogram: smaller ones count as 0, and larger ones are in the outermost bins."""

NUM_BINS = 2 + 60 * 64
"""Number of bins of each sign: 64 per factor of two, one bin for values below the range and one for those above. A
histogram has the bins of negative values first, in descending order of their absolute value, so that values ascend; the
last of these bins is empty, because values near 0 have one bin, the first of the others."""

# Integer dtype of a number's bits -> number of mantissa bits after the first six, and the offset of bin numbers.
_SHIFT_AND_FIRST_BIN = {torch.int32: (17, (127 - 30) * 64 - 1), torch.int64: (46, (1023 - 30) * 64 - 1)}


@dataclass(eq=False)
class QuantileSketch:
    """Sum, count, extremes and histogram of one statistic over the queries added so far.

    The bin of a value is given by the exponent and the first six mantissa bits of the floating-point number. So the
    ends of a bin differ by at most 1/64 of the value, and percentiles have errors of at most 1 %.

    Attributes:
        total: (heads,) float64, sum of the values.
        count: (heads,) float64, number of values.
        bins: (heads, 2 * NUM_BINS) int64, number of values in each bin.
        minimum: (heads,) float64, inf without values; None in a file of an earlier version.
        maximum: (heads,) float64, -inf without values; None in a file of an earlier version.

    Source: DDSketch with linearly interpolated bins, arXiv:1908.10693.
    """

    total: Tensor
    count: Tensor
    bins: Tensor
    minimum: Tensor | None = None
    maximum: Tensor | None = None

    @staticmethod
    def empty(heads: int) -> QuantileSketch:
        """Create a sketch without values."""
        return QuantileSketch.empty_list(1, heads)[0]

    @staticmethod
    def empty_list(count: int, heads: int) -> list[QuantileSketch]:
        """Create `count` sketches without values, which are views of shared tensors."""
        total, number = torch.zeros(2, count, heads, dtype=torch.float64)
        minimum, maximum = (torch.full_like(total, value) for value in (torch.inf, -torch.inf))
        # np.zeros uses calloc, so memory pages without values take neither time nor memory.
        bins = torch.from_numpy(np.zeros((count, heads, 2 * NUM_BINS), np.int64))
        return [QuantileSketch(*each) for each in zip(total, number, bins, minimum, maximum, strict=True)]

    @staticmethod
    def from_tensors(
        total: Tensor,
        count: Tensor,
        bins: Tensor,
        negative_bins: Tensor | None = None,
        minimum: Tensor | None = None,
        maximum: Tensor | None = None,
    ) -> QuantileSketch:
        """Create a sketch from the results of `tensors`."""
        below = torch.zeros_like(bins) if negative_bins is None else negative_bins
        return QuantileSketch(total, count, torch.cat([below, bins], 1), minimum, maximum)

    def tensors(self) -> dict[str, Tensor]:
        """Return copies of what a file stores, by name.

        `total` and `count`; `bins`, (heads, NUM_BINS), those of values from 0; `negative_bins`, the others, if some
        value was negative; `minimum` and `maximum`, if they are known.
        """
        below, above = self.bins.tensor_split(2, 1)
        found = {"total": self.total, "count": self.count, "bins": above, "minimum": self.minimum}
        found |= {"maximum": self.maximum, "negative_bins": below if bool(below.any()) else None}
        return {name: tensor.clone() for name, tensor in found.items() if tensor is not None}

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle copies, because each view would be pickled with the whole tensor that all sketches share."""
        return partial(QuantileSketch.from_tensors, **self.tensors()), ()

    def add(self, values: Tensor, counted: Tensor) -> None:
        """Add the values of queries, with the native library if it is available, else with tensors.

        Args:
            values: ([batch,] heads, queries), floating-point.
            counted: ([batch,] heads, queries) bool, which values to add.
        """
        assert self.minimum is not None
        assert self.maximum is not None
        if values.dtype == torch.float32 and values.is_cpu and library.reason_of_absence() is None:
            first_bin = _SHIFT_AND_FIRST_BIN[torch.int32][1]
            sums = self.total, self.count, self.minimum, self.maximum
            library.add_to_histograms(values, counted, first_bin, *sums, self.bins)
            return
        for extreme, choose, none in (
            (self.minimum, torch.minimum, torch.inf),
            (self.maximum, torch.maximum, -torch.inf),
        ):
            rows = values.double().masked_fill(~counted, none).transpose(0, -2).flatten(1)  # (heads, batch * queries)
            rows = nn.functional.pad(rows, (1, 0), value=none)
            choose(extreme, rows.amax(1) if none < 0 else rows.amin(1), out=extreme)
        heads, rest = len(self.total), (*range(values.dim() - 2), -1)
        # Multiplying the bits of a value by False sets it to 0, even NaN, and is 10 times faster than masked_fill.
        bits = _bits_as_integers(values) * counted
        count = counted.sum(rest)
        numbers = bits.view(torch.float64 if bits.dtype == torch.int64 else torch.float32)
        self.total += numbers.sum(rest, dtype=torch.float64)
        self.count += count
        place = bin_of_value(numbers).add_(torch.arange(heads)[:, None] * 2 * NUM_BINS).flatten()
        self.bins.view(-1).scatter_add_(0, place, torch.ones(1, dtype=torch.int64).expand_as(place))
        self.bins[:, NUM_BINS] -= values.numel() // max(heads, 1) - count  # uncounted values were set to 0

    def quantile(self, share: float) -> Tensor:
        """Return the quantile below which a share of the values lies, within 1 %: (heads,) float64; 0 if empty."""
        if share == 1 and self.maximum is not None:
            return torch.where(self.count == 0, 0.0, self.maximum)
        wanted = share * (self.count - 1).clamp(min=0)
        place = (self.bins.cumsum(-1) <= wanted[:, None].floor()).sum(-1).clamp(max=2 * NUM_BINS - 1)  # (heads,)
        value = value_of_bin(place)
        if self.minimum is not None and self.maximum is not None:  # the value of a bin may exceed those in it
            value = value.maximum(self.minimum).minimum(self.maximum)
        value = torch.where(self.count == 0, 0.0, value)
        return torch.where(self.total.isnan(), torch.nan, value)


@dataclass(eq=False)
class RunningSummary:
    """Summary of the statistics of one layer over the texts added so far.

    Attributes:
        num_heads: number of query heads.
        num_samples: number of texts.
        statistics: name of a statistic -> its sketch.
        takes_batches: whether `add` must receive all texts of an attention call at once, and each text completely.
    """

    num_heads: int
    num_samples: int = 0
    statistics: dict[str, QuantileSketch] = field(default_factory=dict)
    takes_batches: ClassVar[bool] = False

    def add(self, measured: Mapping[str, MeasuredStatistic], *, samples: int) -> None:
        """Add the statistics of one text, or of all texts of a batch at once.

        Args:
            measured: name of a statistic -> values and which of them count, ([batch,] heads, queries) each.
            samples: number of texts that begin with this call.
        """
        self.num_samples += samples
        new = [name for name in measured if name not in self.statistics]
        self.statistics.update(zip(new, QuantileSketch.empty_list(len(new), self.num_heads), strict=True))
        for name, each in measured.items():
            self.statistics[name].add(each.values, each.counted)

    def summary(self, of: SummaryName, names: Collection[str] | None = None) -> dict[str, Tensor]:
        """Return the summary `of` each statistic: name -> (heads,) float64; quantiles are within 1 %."""
        check_summary_name(of)
        chosen = {name: each for name, each in self.statistics.items() if names is None or name in names}
        if of == "mean":
            return {name: each.total / each.count.clamp(min=1) for name, each in chosen.items()}
        return {name: each.quantile(QUANTILE_OF_SUMMARY[of]) for name, each in chosen.items()}


def bin_of_value(values: Tensor) -> Tensor:
    """Return the index of the histogram bin of each value, int64; NaN is in the last bin."""
    shift, first_bin = _SHIFT_AND_FIRST_BIN[_bits_as_integers(values).dtype]
    size = ((_bits_as_integers(values.abs()) >> shift) - first_bin).clamp_(0, NUM_BINS - 1).long()
    return torch.where((values < 0) & (size > 0), NUM_BINS - 1 - size, NUM_BINS + size)


def value_of_bin(place: Tensor) -> Tensor:
    """Return a representative value of each bin, float64, within 1 % of all values in the bin; 0 for that of 0."""
    size = torch.where(place < NUM_BINS, NUM_BINS - 1 - place, place - NUM_BINS)
    low, high = _lower_end_of_bin(size), _lower_end_of_bin(size + 1)
    # The harmonic mean has the same relative distance to both ends.
    found = torch.where(size == 0, 0.0, 2 * low * high / (low + high))
    return torch.where(place < NUM_BINS, -found, found)


def _bits_as_integers(values: Tensor) -> Tensor:
    """View the bits of numbers as integers: int64 for float64, else int32 after converting to float32."""
    return values.view(torch.int64) if values.dtype == torch.float64 else values.float().view(torch.int32)


def _lower_end_of_bin(size: Tensor) -> Tensor:
    """Return the smallest absolute value in a bin of one sign, whose index is 1 or higher, float64."""
    octave, part = (size - 1) // 64, (size - 1) % 64
    return MIN_BINNED_VALUE * 2.0 ** octave.double() * (1 + part.double() / 64)
