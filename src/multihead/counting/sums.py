"""Sums of the statistics of one layer's heads over one shard: moments, extremes, bins, and the strongest examples.

The k strongest examples of a batch are found by k searches for the first maximum, in the order of texts and positions.
These searches resolve ties without a stable sort, which takes ten times as long. After each search the text of the
maximum is left out. All tokens of a text are in one batch, so the text's largest value in the batch is its largest of
all, and examples of one text are never merged. A head whose values in the batch cannot replace its weakest example is
skipped.

The standard error in a census is computed as in a record, from one number per text: the text's mean of value - chance.
A shard stores the number of texts, the mean of these numbers and the sum of their squared deviations, which are merged
like the moments over queries. A ratio estimate, with n and n² of each text, would give a head another standard error in
a census than in a record.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from math import inf
from typing import ClassVar, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from multihead.counting.batches import CurrentBatch, TextBatch
from multihead.probes.catalogue import LARGEST_KEY
from multihead.record.running_summary import QuantileSketch, RunningSummary, value_of_bin
from multihead.record.summaries import MeasuredStatistic

TOKENS_BEFORE, TOKENS_AFTER = 24, 8
"""Numbers of tokens before and after the query of an example that are stored with the example."""


class StatisticSums(NamedTuple):
    """Sums of statistics of heads over the queries and the texts that count; a row is one statistic of one head.

    Attributes:
        num_queries: (rows,) int64, number of queries that count.
        num_nonfinite: (rows,) int64, number of NaN and infinite values, which are left out of all other sums.
        mean: (rows,) float64, mean of the values over the queries.
        squares: (rows,) float64, sum of the squared deviations of the values from `mean`.
        chance: (rows,) float64, mean chance level (even weights over the visible keys) over the queries; NaN where
            unknown.
        num_texts: (rows,) int64, number of texts that have a query that counts.
        excess: (rows,) float64, mean over the texts of each text's mean of value - chance; NaN where unknown.
        excess_squares: (rows,) float64, the sum of the squared deviations of the texts' means from `excess`.
        minimum: (rows,) float64, smallest value; inf without a query.
        maximum: (rows,) float64, largest value; -inf without a query.
    """

    num_queries: Tensor
    num_nonfinite: Tensor
    mean: Tensor
    squares: Tensor
    chance: Tensor
    num_texts: Tensor
    excess: Tensor
    excess_squares: Tensor
    minimum: Tensor
    maximum: Tensor

    @staticmethod
    def empty(rows: int) -> StatisticSums:
        """Return the sums of `rows` rows without a query."""
        return StatisticSums(*(torch.from_numpy(np.full(rows, value)) for value in SUMS_WITHOUT_QUERIES.values()))

    def merge(self, other: StatisticSums) -> StatisticSums:
        """Return the sums over the queries and texts of both, row by row; no text is in both."""
        zeros = torch.zeros_like(self.mean)
        num_queries, mean, squares = merge_moments(
            (self.num_queries, self.mean, self.squares), (other.num_queries, other.mean, other.squares)
        )
        _, chance, _ = merge_moments((self.num_queries, self.chance, zeros), (other.num_queries, other.chance, zeros))
        num_texts, excess, excess_squares = merge_moments(
            (self.num_texts, self.excess, self.excess_squares), (other.num_texts, other.excess, other.excess_squares)
        )
        num_nonfinite = self.num_nonfinite + other.num_nonfinite
        extremes = torch.minimum(self.minimum, other.minimum), torch.maximum(self.maximum, other.maximum)
        moments = num_queries, num_nonfinite, mean, squares, chance, num_texts, excess, excess_squares
        return StatisticSums(*moments, *extremes)


SUMS_WITHOUT_QUERIES = {
    "count": 0,
    "nonfinite": 0,
    "mean": 0.0,
    "squares": 0.0,
    "chance": 0.0,
    "texts": 0,
    "excess": 0.0,
    "excess_squares": 0.0,
    "minimum": inf,
    "maximum": -inf,
}
"""Column of the table of heads -> its value in a row without a query, in the order of the fields of `StatisticSums`."""


Moments: TypeAlias = tuple[Tensor, Tensor, Tensor]
"""Moments of sets of numbers: count, mean, and sum of the squared deviations from the mean; (rows,) each."""


def merge_moments(one: Moments, other: Moments) -> Moments:
    """Return the moments of the union of two sets of numbers, row by row.

    Source: Chan, Golub and LeVeque, "Updating formulae and a pairwise algorithm for computing sample variances".

    >>> merge_moments(*[(torch.tensor(n), torch.tensor(mean), torch.tensor(0.0)) for n, mean in ((2, 1.0), (1, 4.0))])
    (tensor(3), tensor(2.), tensor(6.))
    """
    (before, mean, squares), (count, new_mean, new_squares) = one, other
    both = before + count
    difference = new_mean - mean
    moved = difference * count / both.clamp(min=1)
    return both, mean + moved, squares + new_squares + difference * moved * before


class StrongestExamples(NamedTuple):
    """The k texts with the largest values of each statistic and head; of texts with equal values the earlier is kept.

    Attributes:
        largest_value: (rows, k) float64, descending: largest value of the statistic in a text; -inf if there are fewer
            than k texts.
        text_index: (rows, k) int64, index in the shard of the text that has the value.
        query_position: (rows, k) int64, position in the text of the query that has the value.
        largest_key: (rows, k) int64, position of the key with the largest weight of the query; -1 where unknown.
        values_around: (rows, k, window) float32, value of the statistic at each token around the query; NaN outside the
            text and where a token's query does not count.
    """

    largest_value: Tensor
    text_index: Tensor
    query_position: Tensor
    largest_key: Tensor
    values_around: Tensor

    @staticmethod
    def empty(rows: int, k: int) -> StrongestExamples:
        """Return a table of `rows` rows without examples."""
        window = TOKENS_BEFORE + 1 + TOKENS_AFTER
        text, position, largest_key = torch.full((3, rows, k), -1, dtype=torch.int64)
        return StrongestExamples(
            torch.full((rows, k), -torch.inf, dtype=torch.float64),
            text,
            position,
            largest_key,
            torch.full((rows, k, window), torch.nan),
        )

    def add(self, values: Tensor, batch: TextBatch, largest_keys: Tensor) -> None:
        """Keep the largest values of a batch of complete texts.

        Args:
            values: (statistics, heads, tokens), -inf where a query does not count.
            batch: the batch of texts to which the tokens belong.
            largest_keys: (heads, tokens) int64, position in the text of the key with the largest weight.
        """
        k, heads = self.largest_value.shape[1], values.shape[1]
        flat = values.flatten(0, 1)
        best = flat.amax(-1).double()
        weakest, last_text = self.largest_value[:, -1], self.text_index[:, -1]
        # An equal value replaces the weakest example if the value may be from an earlier text.
        better = (best > weakest) | ((best == weakest) & (batch.text_indices[0] < last_text) & (best > -torch.inf))
        rows = better.nonzero().flatten()
        if not len(rows):
            return
        left = flat[rows]  # a copy, in which values are set to -inf
        found = []
        for _ in range(min(k, len(batch.lengths))):
            found.append(left.max(-1))  # `max` returns the first of equal values
            text = batch.text_of_token[found[-1].indices]
            left.masked_fill_(batch.text_of_token == text[:, None], -torch.inf)
        value = torch.stack([each.values for each in found], 1)  # (some rows, k)
        index = torch.stack([each.indices for each in found], 1)
        place = index[..., None] + torch.arange(-TOKENS_BEFORE, TOKENS_AFTER + 1)  # (some rows, k, window)
        inside = (place >= batch.text_start_of_token[index][..., None]) & (
            place < batch.text_stop_of_token[index][..., None]
        )
        place = place.clamp(0, batch.num_tokens - 1)
        around = flat[rows[:, None, None], place].float()
        new = StrongestExamples(
            value.double(),
            batch.text_of_token[index],
            batch.position_in_text[index],
            largest_keys[(rows % heads)[:, None], index],
            around.masked_fill(~inside | (around == -torch.inf), torch.nan),
        )
        self._merge_rows(rows, new)

    def _merge_rows(self, rows: Tensor, new: StrongestExamples) -> None:
        """Merge new examples, (len(rows), k), into the rows with the indices `rows`."""
        k = self.largest_value.shape[1]
        both = StrongestExamples(*(torch.cat([mine[rows], theirs], 1) for mine, theirs in zip(self, new, strict=True)))
        keys = both.query_position, both.text_index, -both.largest_value
        order = np.lexsort([key.numpy() for key in keys], axis=-1)
        chosen = torch.from_numpy(order[:, :k].copy())
        for column, values in zip(self, both, strict=True):
            column[rows] = values.take_along_dim(chosen if values.dim() == 2 else chosen[..., None], 1)


@dataclass(eq=False)
class LayerSums(RunningSummary):
    """The running summary of one layer with moments, extremes and the strongest examples, over the texts of a shard.

    NaN and infinite values are left out of all sums. A row is one statistic of one head: rows = statistics * heads.

    Attributes:
        name: the layer's qualified name.
        examples: number of strongest examples that are kept per row.
        current_batch: the batch of texts on which the model runs now.
        sketch_of_all_rows: one quantile sketch of all rows; the sketches in `statistics` are views of its tensors.
        row_sums: the moments and extremes of each row.
        strongest: the strongest examples of each row.
    """

    name: str = field(kw_only=True)
    examples: int = field(kw_only=True)
    current_batch: CurrentBatch = field(kw_only=True)
    sketch_of_all_rows: QuantileSketch = field(init=False)
    row_sums: StatisticSums = field(init=False)
    strongest: StrongestExamples = field(init=False)
    takes_batches: ClassVar[bool] = True

    def _create_rows(self, names: list[str]) -> None:
        """Create the sums of the statistics `names`, without a query."""
        rows = len(names) * self.num_heads
        self.sketch_of_all_rows = QuantileSketch.empty(rows)
        whole = self.sketch_of_all_rows
        views = (getattr(whole, each.name).split(self.num_heads) for each in fields(QuantileSketch))
        self.statistics = {name: QuantileSketch(*tensors) for name, *tensors in zip(names, *views, strict=True)}
        self.row_sums = StatisticSums.empty(rows)
        self.strongest = StrongestExamples.empty(rows, self.examples)

    def add(self, measured: Mapping[str, MeasuredStatistic], *, samples: int) -> None:
        """Add the statistics of a batch; `measured` includes "largest_key", as positions of keys in each text."""
        self.num_samples += samples
        batch = self.current_batch.batch
        if not self.statistics:
            self._create_rows([name for name in measured if name != LARGEST_KEY.name])
        values = torch.stack([batch.drop_padding(measured[each].values) for each in self.statistics])
        counted = torch.stack([batch.drop_padding(measured[each].counted) for each in self.statistics])
        flat, taken = values.flatten(0, 1), counted.flatten(0, 1)  # (rows, tokens)
        num_nonfinite = torch.zeros(len(flat), dtype=torch.int64)
        if not bool(flat.sum().isfinite()):
            finite = flat.isfinite()
            num_nonfinite = (taken & ~finite).sum(-1)
            taken &= finite
        whole = self.sketch_of_all_rows
        total, count = torch.zeros(2, len(flat), dtype=torch.float64)
        replace(whole, total=total, count=count).add(flat[None], taken[None])
        whole.total += total
        whole.count += count
        mean = total / count.clamp(min=1)
        left_out = ~taken
        deviation = (flat - mean[:, None]).masked_fill_(left_out, 0)  # float64
        squares = torch.linalg.vecdot(deviation, deviation)
        levels = torch.cat([self._chance_per_token(measured[each], like=values[0]) for each in self.statistics])
        about_chance = self._compare_with_chance(flat, levels, taken, total)
        extremes = [each.clone() for each in (whole.minimum, whole.maximum) if each is not None]
        sums = StatisticSums(count.long(), num_nonfinite, mean, squares, *about_chance, *extremes)
        self.row_sums = self.row_sums.merge(sums)
        flat.masked_fill_(left_out, -torch.inf)
        self.strongest.add(flat.view(values.shape), batch, batch.drop_padding(measured[LARGEST_KEY.name].values))

    def _chance_per_token(self, measured: MeasuredStatistic, *, like: Tensor) -> Tensor:
        """Return the chance level of a statistic at each token's query: (heads, tokens), NaN where unknown."""
        if measured.chance is None:
            return torch.full_like(like, torch.nan)
        return self.current_batch.batch.drop_padding(measured.chance).expand_as(like)

    def _compare_with_chance(
        self, flat: Tensor, levels: Tensor, taken: Tensor, total: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return `chance`, `num_texts`, `excess` and `excess_squares` of a batch, as in `StatisticSums`.

        Args:
            flat: (rows, tokens), the values.
            levels: (rows, tokens), the chance level of each value.
            taken: (rows, tokens) bool, which values count.
            total: (rows,) float64, the sum of the values that count.
        """
        starts = self.current_batch.batch.text_starts.numpy()
        difference = torch.where(taken, flat.double() - levels, 0.0)
        excess = torch.from_numpy(np.add.reduceat(difference.numpy(), starts, axis=1))  # (rows, texts)
        num_queries = torch.from_numpy(np.add.reduceat(taken.numpy(), starts, axis=1, dtype=np.int32))
        chance = (total - excess.sum(-1)) / num_queries.sum(-1).clamp(min=1)
        has_query, excess = num_queries > 0, excess / num_queries.clamp(min=1)
        num_texts = has_query.sum(-1)
        mean = excess.sum(-1) / num_texts.clamp(min=1)
        squares = torch.where(has_query, excess - mean[:, None], 0.0).square().sum(-1)
        return chance, num_texts, mean, squares

    def filled_bins(self) -> tuple[NDArray[np.int64], NDArray[np.float64], NDArray[np.int64]]:
        """Return row, representative value and count of each non-empty bin, ordered by row and value: (bins,) each."""
        bins = self.sketch_of_all_rows.bins
        row, place = bins.nonzero().unbind(1)
        return row.numpy(), value_of_bin(place).numpy(), bins[row, place].numpy()
