"""Sums of the statistics of one layer's heads over one shard: moments, extremes, bins, and the strongest examples."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from multihead.counting.batches import Batch
from multihead.record.running_summary import BINS, Sketch, value_of_bin

BEFORE, AFTER = 24, 8
"""Tokens of a text that are kept around the position of an example."""


@dataclass(eq=False)
class Strongest:
    """The largest values of each row of statistics, and where they are; ties go to the earlier text and position.

    Attributes:
        value: (rows, k) float64, descending; -inf where there are fewer.
        text: (rows, k) int64, index of the text in its shard.
        position: (rows, k) int64, the query.
        key: (rows, k) int64, the key with the largest weight of that query, -1 where unknown.
        values: (rows, k, window) float32, the statistic at these tokens; NaN outside the
            text and where a query does not count.
    """

    value: Tensor
    text: Tensor
    position: Tensor
    key: Tensor
    values: Tensor

    @staticmethod
    def none(rows: int, k: int) -> Strongest:
        """Return a table without examples."""
        window = BEFORE + 1 + AFTER
        text, position, key = torch.full((3, rows, k), -1, dtype=torch.int64)
        return Strongest(
            torch.full((rows, k), -torch.inf, dtype=torch.float64),
            text,
            position,
            key,
            torch.full((rows, k, window), torch.nan),
        )

    def add(self, values: Tensor, batch: Batch, largest_keys: Tensor) -> None:
        """Keep the largest values of a batch.

        Args:
            values: (statistics, heads, tokens), -inf where a query does not count.
            batch: the tokens.
            largest_keys: (heads, tokens) int64, the key with the largest weight, its position in its text.
        """
        k, heads = self.value.shape[1], values.shape[1]
        flat = values.flatten(0, 1)
        best = flat.amax(-1).double()
        weakest, last_text = self.value[:, -1], self.text[:, -1]
        # A tie with the weakest example counts if it may come from an earlier text.
        better = (best > weakest) | ((best == weakest) & (batch.texts[0] < last_text) & (best > -torch.inf))
        rows = better.nonzero().flatten()
        if not len(rows):
            return
        left = flat[rows]  # a copy
        found = []
        for _ in range(min(k, left.shape[1])):
            found.append(left.max(-1))  # of equal values the first
            left.scatter_(1, found[-1].indices[:, None], -torch.inf)
        value = torch.stack([each.values for each in found], 1)  # (some rows, k)
        index = torch.stack([each.indices for each in found], 1)
        place = index[..., None] + torch.arange(-BEFORE, AFTER + 1)  # (some rows, k, window)
        inside = (place >= batch.start[index][..., None]) & (place < batch.stop[index][..., None])
        place = place.clamp(0, batch.num_tokens - 1)
        around = flat[rows[:, None, None], place].float()
        new = Strongest(
            value.double(),
            batch.text[index],
            batch.position[index],
            largest_keys[(rows % heads)[:, None], index],
            around.masked_fill(~inside | (around == -torch.inf), torch.nan),
        )
        self._merge(rows, new)

    def _merge(self, rows: Tensor, new: Strongest) -> None:
        """Merge the examples of some rows with new ones."""
        k = self.value.shape[1]
        both = {
            name: torch.cat([getattr(self, name)[rows], getattr(new, name)], 1)
            for name in ("value", "text", "position", "key", "values")
        }
        order = np.lexsort((both["position"].numpy(), both["text"].numpy(), -both["value"].numpy()), axis=-1)
        chosen = torch.from_numpy(order[:, :k].copy())
        for name, value in both.items():
            index = chosen if value.dim() == 2 else chosen[..., None].expand(-1, -1, value.shape[2])
            getattr(self, name)[rows] = value.gather(1, index)


@dataclass(eq=False)
class LayerSums:
    """The sums of all statistics of one layer, (statistics * heads,) rows, over the texts of a shard so far.

    Attributes:
        name: the layer's qualified name.
        heads: number of query heads.
        statistics: the names of its statistics.
        examples: how many of the strongest examples are kept.
        count: (rows,) int64, how many queries counted.
        nonfinite: (rows,) int64, how many more were NaN or infinite; they are in no other number.
        mean: (rows,) float64.
        squares: (rows,) float64, the sum of the squared deviations from the mean.
        minimum: (rows,) float64, inf of none.
        maximum: (rows,) float64, -inf of none.
        bins: (rows, bins) int64, how many values lie in each bin of `record.running_summary`.
        negative_bins: the same of the negated negative values; None while there are none.
        strongest: the strongest examples.
    """

    name: str
    heads: int
    statistics: tuple[str, ...]
    examples: int
    count: Tensor = field(init=False)
    nonfinite: Tensor = field(init=False)
    mean: Tensor = field(init=False)
    squares: Tensor = field(init=False)
    minimum: Tensor = field(init=False)
    maximum: Tensor = field(init=False)
    bins: Tensor = field(init=False)
    negative_bins: Tensor | None = None
    strongest: Strongest = field(init=False)

    def __post_init__(self) -> None:
        rows = len(self.statistics) * self.heads
        self.count, self.nonfinite = torch.zeros(2, rows, dtype=torch.int64)
        self.mean, self.squares = torch.zeros(2, rows, dtype=torch.float64)
        self.minimum = torch.full((rows,), torch.inf, dtype=torch.float64)
        self.maximum = -self.minimum
        self.bins = _no_bins(rows)
        self.strongest = Strongest.none(rows, self.examples)

    def add(self, values: Tensor, counted: Tensor, batch: Batch, largest_keys: Tensor) -> None:
        """Add the queries of a batch.

        Args:
            values: (statistics, heads, tokens), float32 or float64, changed in place.
            counted: the same shape, bool: which of them count; changed in place.
            batch: the tokens.
            largest_keys: (heads, tokens) int64, see `Strongest.add`.
        """
        shape = values.shape
        flat, taken = values.flatten(0, 1), counted.flatten(0, 1)
        if not bool(flat.sum().isfinite()):
            finite = flat.isfinite()
            self.nonfinite += (taken & ~finite).sum(-1)
            taken &= finite
        total, count = torch.zeros(2, len(flat), dtype=torch.float64)
        Sketch(total, count, self.bins).add(flat[None], taken[None])
        left_out = ~taken
        self._add_moments(flat, left_out, total, count)
        flat.masked_fill_(left_out, torch.inf)
        least = flat.amin(-1).double()
        self.minimum = torch.minimum(self.minimum, least)
        if bool((least < 0).any()):
            self._add_negative(flat, taken)
        flat.masked_fill_(left_out, -torch.inf)
        self.maximum = torch.maximum(self.maximum, flat.amax(-1).double())
        self.strongest.add(flat.view(shape), batch, largest_keys)

    def _add_moments(self, flat: Tensor, left_out: Tensor, total: Tensor, number: Tensor) -> None:
        """Merge the mean and the squares about it with those of a batch.

        Args:
            flat: (rows, tokens).
            left_out: (rows, tokens) bool.
            total: (rows,) float64, the sums of the values that count.
            number: (rows,) float64, how many count.

        Source: Chan, Golub and LeVeque, "Updating formulae and a pairwise algorithm for computing sample variances".
        """
        count = number.long()
        mean = total / number.clamp(min=1)
        deviation = (flat - mean[:, None]).masked_fill_(left_out, 0)  # float64
        squares = torch.linalg.vecdot(deviation, deviation)
        both = (self.count + count).clamp(min=1)
        difference = mean - self.mean
        self.mean = self.mean + difference * count / both
        self.squares = self.squares + squares + difference.square() * self.count * count / both
        self.count = self.count + count

    def _add_negative(self, flat: Tensor, taken: Tensor) -> None:
        """Count negative values in bins of their own; the sketch put them into the first bin."""
        negative = taken & (flat < 0)
        if self.negative_bins is None:
            self.negative_bins = _no_bins(len(flat))
        total, count = torch.zeros(2, len(flat), dtype=torch.float64)
        Sketch(total, count, self.negative_bins).add(-flat[None], negative[None])
        self.bins[:, 0] -= negative.sum(-1)

    def histograms(self) -> tuple[NDArray[np.int64], NDArray[np.float64], NDArray[np.int64]]:
        """Return the bins that hold any: of each its row, ascending, its value, ascending, and how many it holds."""
        row, place = self.bins.nonzero().unbind(1)
        count, value = self.bins[row, place], value_of_bin(place)
        if self.negative_bins is not None:
            below, place = self.negative_bins.nonzero().unbind(1)
            row = torch.cat([below, row])
            count = torch.cat([self.negative_bins[below, place], count])
            value = torch.cat([-value_of_bin(place), value])
            order = torch.from_numpy(np.lexsort((value.numpy(), row.numpy())))
            row, value, count = row[order], value[order], count[order]
        return row.numpy(), value.numpy(), count.numpy()


def _no_bins(rows: int) -> Tensor:
    # NumPy's zeros come from calloc: only the pages that are written to take time and memory.
    return torch.from_numpy(np.zeros((rows, BINS), np.int64))
