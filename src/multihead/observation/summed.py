"""Sum up a layer over any number of texts in memory that does not grow: sums, counts and bins of equal ratio."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from multihead.call import AttentionRequest
from multihead.masks.place import Span
from multihead.observation.summaries import SHARES, Of, counted, refuse_unless_summary
from multihead.observation.trimming import position_of

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
        self.include(*_sums(values[None], rows[None]))

    def include(self, total: Tensor, count: Tensor, bins: Tensor) -> None:
        """Add what was summed up of some queries."""
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

    def add_together(
        self, measured: Mapping[str, Tensor], logsumexp: Tensor, request: AttentionRequest, found: Sequence[Span]
    ) -> None:
        """Add a call that begins all its samples, in a few steps for the whole batch.

        Args:
            measured: its statistics, (batch, heads, queries) each; rows of padding do not count.
            logsumexp: (batch, heads, queries).
            request: the call.
            found: where each sample stands in it.
        """
        self.num_samples += len(found)
        names = [name for name, value in measured.items() if value.is_floating_point()]
        if not names:
            return
        # One entry per real query: its row of the batch, its place there, its position among the sample's keys.
        lengths = torch.tensor([stop - first for first, stop in (span.queries for span in found)])
        sample = torch.arange(len(found)).repeat_interleave(lengths)
        place = torch.arange(len(sample)) - (lengths.cumsum(0) - lengths)[sample]
        row = place + torch.tensor([span.queries[0] for span in found])[sample]
        position = place + torch.tensor([position_of(request, span) for span in found])[sample]
        keys = torch.tensor([span.keys[1] - span.keys[0] for span in found])[sample]
        batch = torch.tensor([span.sample for span in found])[sample]
        real = torch.zeros(3, request.shape.batch, 1, request.shape.query_length, dtype=torch.bool)
        real[:, batch, 0, row] = torch.stack(
            [torch.ones_like(row, dtype=torch.bool), position >= 1, position + 1 < keys]
        )
        every, previous, following = real & (logsumexp.cpu() != -torch.inf)  # (batch, heads, queries) each
        having = {"previous_mass": previous, "next_mass": following}
        for name in names:
            sums = _sums(measured[name].cpu(), having.get(name, every))
            sketch = self.statistics.get(name)
            if sketch is None:
                self.statistics[name] = Sketch(*sums)
            else:
                sketch.include(*sums)

    def summary(self, of: Of) -> dict[str, Tensor]:
        """Sum up each statistic: (heads,) float64 each; "mean" is exact, "median" and "p95" within 1 %."""
        refuse_unless_summary(of)
        if of == "mean":
            return {name: each.total / each.count.clamp(min=1) for name, each in self.statistics.items()}
        return {name: each.quantile(SHARES[of]) for name, each in self.statistics.items()}


def _sums(values: Tensor, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Sum up one statistic: values (batch, heads, queries), and which of them count, bool.

    Returns: the sum and how many count, (heads,) float64 each, and how many lie in each bin, (heads, bins) int64.
    """
    heads = values.shape[1]
    values = values.masked_fill(~rows, 0)
    # log_RATIO(value / LEAST); bins are far wider than what float32 rounds of a logarithm: one in 10,000 of a bin.
    place = values.log2().mul_(1 / math.log2(RATIO)).sub_(math.log2(LEAST) / math.log2(RATIO)).ceil_()
    place = place.clamp_(0, BINS - 1).nan_to_num_(nan=0).int()
    place.add_(torch.arange(0, heads * BINS, BINS, dtype=torch.int32)[:, None])
    bins = place.flatten().bincount(minlength=heads * BINS).view(heads, BINS)
    count = rows.sum((0, 2))
    bins[:, 0] -= values.shape[0] * values.shape[2] - count  # what does not count is a 0 there
    return values.sum((0, 2), dtype=torch.float64), count.double(), bins
