"""Add up statistics of a layer over any number of texts in constant memory: moments, extremes and histograms.

`keep="summary"`, `Watch` and a census use the same sums. A row is one statistic of one head. Means and extremes are
exact, medians over any number of batches exact to 1 %: a histogram has 64 bins per power of two for each sign, so the
bin of a value follows from the value's first bits, without a logarithm. The native library adds all statistics of a
call in one pass over its values; most of its time goes to the first access to the memory of histograms. All of it is
on the CPU: what was measured on another device is copied, from a GPU without waiting (`add_later`). Histograms in
files of version 1, whose bins are each 1.02 times as wide as the one before, are converted when read.

The standard error of value - chance is computed from one number per text, as in a record: the text's mean. A text may
go on in later calls, as in cached decoding, so its sum stays apart (`OpenTexts`) until the recorder knows that it has
ended. Of the texts only the number, the mean of their means and the sum of the squared deviations are kept. A ratio
estimate, with n and n² of each text, would give a head another standard error in a summary than in a record. With fewer
than four texts the standard error is computed from blocks of their queries, as in a record; the calls of a text that
are added together are divided together, so that only a text of many long calls has other blocks than in a record.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import inf
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from multihead.kernels.native import library
from multihead.kernels.native.library import RowSums
from multihead.record.chance import (
    BLOCKS_PER_TEXT,
    MIN_OBSERVATIONS,
    ChanceComparison,
    Moments,
    error_of_mean,
    means_of_blocks,
    moments_of_units,
)
from multihead.record.text_rows import (
    QUANTILE_OF_SUMMARY,
    MeasuredRows,
    SummaryName,
    check_summary_name,
    finite_rows,
    nan_where_nothing_is_finite,
)

MIN_BINNED_VALUE, MAX_BINNED_VALUE = 2.0**-30, 2.0**30
"""Range of the absolute values in a histogram: smaller ones count as 0, and larger ones are in the outermost bins."""

NUM_BINS = 2 + 60 * 64
"""Number of bins of each sign: 64 per factor of two, one bin for values below the range and one for those above. A
histogram has the bins of negative values first, in descending order of their absolute value, so that values ascend; the
last of these bins is empty, because values near 0 have one bin, the first of the others."""

MIN_ADDED_ROWS = 512
"""Number of rows that are added together, unless the sums are read before."""

# Integer dtype of a number's bits -> number of mantissa bits after the first six, and the offset of bin numbers.
_SHIFT_AND_FIRST_BIN = {torch.int32: (17, (127 - 30) * 64 - 1), torch.int64: (46, (1023 - 30) * 64 - 1)}


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


def concatenate_moments(moments: Sequence[Moments]) -> Moments:
    """Concatenate the rows of several moments."""
    number, mean, squares = map(torch.cat, zip(*moments, strict=True))
    return number, mean, squares


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
        """Return the sums of `rows` rows without a query; columns of equal numbers share memory."""
        none = torch.zeros(rows, dtype=torch.int64)
        zeros = none.double()
        columns = {repr(each): zeros + each for each in (0.0, inf, -inf)} | {"0": none}
        return StatisticSums(*(columns[repr(value)] for value in SUMS_WITHOUT_QUERIES.values()))

    def merge(self, other: StatisticSums) -> StatisticSums:
        """Return the sums over the queries and texts of both, row by row; no text is in both."""
        # One operation for three means: of the values, of chance, whose squares are not kept, and of the texts.
        (number, mean, squares), another = (
            (
                torch.stack([each.num_queries, each.num_queries, each.num_texts]),
                torch.stack([each.mean, each.chance, each.excess]),
                torch.stack([each.squares, each.squares, each.excess_squares]),
            )
            for each in (self, other)
        )
        numbers, means, all_squares = (each.unbind() for each in merge_moments((number, mean, squares), another))
        return StatisticSums(
            num_queries=numbers[0],
            num_nonfinite=self.num_nonfinite + other.num_nonfinite,
            mean=means[0],
            squares=all_squares[0],
            chance=means[1],
            num_texts=numbers[2],
            excess=means[2],
            excess_squares=all_squares[2],
            minimum=torch.minimum(self.minimum, other.minimum),
            maximum=torch.maximum(self.maximum, other.maximum),
        )

    def rows(self, rows: Any) -> StatisticSums:
        """Return some rows, given by a slice or by indices."""
        return StatisticSums(*(column[rows] for column in self))

    @staticmethod
    def concatenate(sums: Sequence[StatisticSums]) -> StatisticSums:
        """Concatenate the rows of several sums."""
        return StatisticSums(*map(torch.cat, zip(*sums, strict=True)))


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


@dataclass(eq=False)
class OpenTexts:
    """The texts of a batch, which later calls may continue.

    Attributes:
        excess: (rows, texts) float64, the sum of value - chance over the queries that count; NaN where unknown.
        num_queries: (rows, texts) float64, number of queries that count.
        begun: per text, whether a call with queries of it was added.
    """

    excess: Tensor
    num_queries: Tensor
    begun: list[bool]

    def moments(self) -> Moments:
        """Return the moments of the texts' means of value - chance."""
        return moments_of_units(self.excess / self.num_queries.clamp(min=1), self.num_queries > 0)

    def grow(self, rows: int) -> None:
        """Append rows without a query until there are `rows`."""
        before, texts = self.excess.shape
        if before < rows:
            nothing = self.excess.new_zeros(rows - before, texts)
            self.excess, self.num_queries = (torch.cat([each, nothing]) for each in (self.excess, self.num_queries))


class _PendingRows(NamedTuple):
    """Rows that were given to `RunningSummary.add`.

    Attributes:
        measured: the statistics.
        texts: their texts.
        first: number of the first text.
        context: what `RunningSummary.context_of_rows` returned when they were given.
    """

    measured: MeasuredRows
    texts: OpenTexts
    first: int
    context: object


class _ArrivingRows(NamedTuple):
    """Rows that were given to `RunningSummary.add_later`: a function waits for them; the rest as in `_PendingRows`."""

    measure: Callable[[], Iterable[tuple[MeasuredRows, int]]]
    texts: OpenTexts
    context: object

    def awaited(self) -> Iterator[_PendingRows]:
        """Wait for the statistics, and yield them."""
        for measured, first in self.measure():
            yield _PendingRows(measured, self.texts, first, self.context)


@dataclass(eq=False)
class RunningSummary:
    """Sums of the statistics of one layer over the texts added so far.

    Attributes:
        num_heads: number of query heads.
        num_samples: number of texts.
        cross_attention: whether the keys of some text are not the tokens of its queries.
        keeps_quantiles: whether there are histograms; their memory takes time at each first access.
        takes_batches: whether `add` must receive all texts of an attention call at once, and each text completely.
    """

    num_heads: int
    num_samples: int = 0
    cross_attention: bool = False
    keeps_quantiles: bool = True
    _names: list[str] = field(default_factory=list)
    _bins: Tensor = field(default_factory=lambda: empty_histograms(0))
    _closed: StatisticSums = field(default_factory=lambda: StatisticSums.empty(0))  # without the means of open texts
    _blocks: Moments = field(default_factory=lambda: no_moments(0))  # of blocks of queries, of the first few texts
    _open: list[OpenTexts] = field(default_factory=list)
    _ended: list[OpenTexts] = field(default_factory=list)  # open ones that no later call continues
    _pending: list[_PendingRows | _ArrivingRows] = field(default_factory=list)  # what was given and is not added yet
    _num_pending: int = 0  # number of their rows, without those on their way
    _num_arrived: int = 0  # number of rows that were on their way and have arrived
    _has_chance: bool = False  # whether a chance level was added
    takes_batches: ClassVar[bool] = False

    @staticmethod
    def from_sums(
        num_heads: int, num_samples: int, names: list[str], sums: StatisticSums, bins: Tensor, blocks: Moments | None
    ) -> RunningSummary:
        """Create a summary from what another one had; `blocks` are None if they are unknown."""
        blocks = no_moments(0) if blocks is None else blocks
        return RunningSummary(num_heads, num_samples, _names=names, _bins=bins, _closed=sums, _blocks=blocks)

    @property
    def names(self) -> list[str]:
        """The names of the statistics: row `index * num_heads + head` is that of statistic `index` and of a head."""
        self._add_pending()
        return self._names

    @property
    def bins(self) -> Tensor:
        """Histograms, (rows, 2 * NUM_BINS) int64: the number of values in each bin."""
        self._add_pending()
        return self._bins

    @property
    def blocks(self) -> Moments | None:
        """The moments of value - chance over blocks of the first texts' queries, (rows,) each; None if unknown."""
        self._add_pending()
        return self._blocks if len(self._blocks[0]) == len(self._names) * self.num_heads else None

    @property
    def sums(self) -> StatisticSums:
        """The sums of all rows over the queries and texts so far."""
        self._add_pending()
        found = self._closed
        for texts in self._open if self._has_chance else ():
            found = _with_texts(found, texts)
        return found

    @property
    def _sums_of_queries(self) -> StatisticSums:
        """The sums of all rows, without the means of open texts, which a summary of the queries does not need."""
        self._add_pending()
        return self._closed

    def begin_texts(self, count: int) -> OpenTexts:
        """Begin some texts, to be given to `add`."""
        self.num_samples += count
        excess, num_queries = torch.zeros(2, 0, count, dtype=torch.float64)
        texts = OpenTexts(excess, num_queries, [False] * count)
        self._open.append(texts)
        return texts

    def end_texts(self, texts: OpenTexts) -> None:
        """End some texts, which no later call continues."""
        self._ended.append(texts)

    def add(self, measured: MeasuredRows, texts: OpenTexts, *, first: int = 0) -> None:
        """Add the statistics of an attention call.

        The rows of small calls, such as steps of cached decoding, are kept until there are `MIN_ADDED_ROWS` of them, or
        the sums are read, because adding takes as long for one row as for hundreds.

        Args:
            measured: the statistics, on the CPU.
            texts: the texts that were begun for these rows.
            first: number in `texts` of the first text of the rows.
        """
        self._pending.append(_PendingRows(measured, texts, first, self.context_of_rows()))
        self._num_pending += len(measured.rows.positions)
        if self.takes_batches or self._num_pending >= MIN_ADDED_ROWS:
            self._add_pending()

    def add_later(
        self, measure: Callable[[], Iterable[tuple[MeasuredRows, int]]], num_rows: int, texts: OpenTexts
    ) -> Callable[[], None]:
        """Add the statistics of an attention call that are on their way from a GPU, when the sums are read.

        Args:
            measure: waits for the statistics, and returns them with the number of the first text of the rows.
            num_rows: number of their rows.
            texts: the texts that were begun for these rows.

        Returns:
            a function to be called after the statistics have arrived: it adds them, so that rows take no memory.
        """
        pending = _ArrivingRows(measure, texts, self.context_of_rows())
        self._pending.append(pending)

        def arrive() -> None:
            place = next((index for index, each in enumerate(self._pending) if each is pending), None)
            if place is None:
                return  # the sums were read
            self._num_arrived += num_rows
            if self.takes_batches or self._num_arrived >= MIN_ADDED_ROWS:
                self._add_pending(place + 1)

        return arrive

    def context_of_rows(self) -> object:
        """Return what `_keep_examples` needs to know of the rows that are added now, in subclasses."""

    def _add_pending(self, count: int | None = None) -> None:
        """Add the first `count` calls whose rows were kept, or all, those with the same statistics together."""
        if not (self._pending or self._ended):
            return
        pending, self._pending = self._pending[:count], [] if count is None else self._pending[count:]
        self._num_pending = self._num_arrived = 0
        alike: dict[object, list[_PendingRows]] = {}
        for place, each in enumerate(_awaited(pending)):
            chance = [(name, len(level)) for name, level in each.measured.chance.items()]
            alone = place if self.takes_batches else 0
            alike.setdefault((alone, *each.measured.values, *chance), []).append(each)
        for group in alike.values():
            self._add_rows(MeasuredRows.concatenate([each.measured for each in group]), group)
        ended = self._ended
        if self._pending:  # the others end after their last rows
            ended = [texts for texts in ended if all(texts is not each.texts for each in self._pending)]
        closed = [texts for texts in self._open if texts in ended]
        self._open = [texts for texts in self._open if texts not in ended]
        self._ended = [texts for texts in self._ended if texts not in ended]
        for texts in closed if self._has_chance else ():
            self._closed = _with_texts(self._closed, texts)

    def _add_rows(self, measured: MeasuredRows, group: Sequence[_PendingRows]) -> None:
        """Add the rows of some calls, which `measured` has one after another."""
        found = measured.of_queries
        if not found:
            return
        self._has_chance |= bool(measured.chance)
        self._create_rows([name for name in found if name not in self._names])
        nothing = torch.zeros(self.num_heads, len(measured.rows.positions), dtype=torch.bool)
        columns = [found.get(name, (nothing, nothing)) for name in self._names]
        # Both are (statistics, heads, queries), and flat the rows of the sums.
        values = torch.stack([_as_float(each) for each, _ in columns])
        counted, nonfinite = finite_rows(values, torch.stack([each for _, each in columns]))
        flat, taken = values.flatten(0, 1), counted.flatten(0, 1)
        levels, level_of_row = self._levels(measured.chance, like=flat)
        sums = _sum_rows(flat, taken, levels, level_of_row, measured.rows.ends, self._bins)
        number, nothing_new = sums.number.long(), torch.zeros_like(self._closed.mean)
        excess, chance = sums.text_totals, torch.full_like(sums.total, torch.nan)
        if self._has_chance:
            unknown = (level_of_row < 0)[:, None]
            excess.masked_fill_(unknown & (sums.text_counts > 0), torch.nan)
            chance = (sums.total - excess.sum(-1)) / sums.number.clamp(min=1)
            if self.num_samples < MIN_OBSERVATIONS and measured.chance:
                level = levels.double()[level_of_row] if len(levels) else 0.0
                of_queries = (flat.double() - level).masked_fill(unknown, torch.nan)
                self._add_blocks(of_queries, taken, measured.rows.ends, group)
        self._closed = self._closed.merge(
            StatisticSums(
                num_queries=number,
                num_nonfinite=torch.zeros_like(number) if nonfinite is None else nonfinite.sum(-1).flatten(),
                mean=sums.total / sums.number.clamp(min=1),
                squares=sums.squares,
                chance=chance,
                num_texts=torch.zeros_like(number),
                excess=nothing_new,
                excess_squares=nothing_new,
                minimum=sums.minimum,
                maximum=sums.maximum,
            )
        )
        at = 0
        for each in group:
            lengths = each.measured.rows.ends.diff().tolist()
            ours, theirs = slice(at, at + len(lengths)), slice(each.first, each.first + len(lengths))
            if self._has_chance:
                each.texts.grow(len(excess))
                each.texts.excess[:, theirs] += excess[:, ours]
                each.texts.num_queries[:, theirs] += sums.text_counts[:, ours]
            for text, length in enumerate(lengths, each.first):
                each.texts.begun[text] |= length > 0
            at += len(lengths)
        self._keep_examples(values, counted, measured, group[0].context)

    def _keep_examples(self, values: Tensor, counted: Tensor, measured: MeasuredRows, context: object) -> None:
        """Keep single queries of a call, in subclasses; `values` and `counted` are (statistics, heads, rows)."""

    def _add_blocks(self, excess: Tensor, taken: Tensor, ends: Tensor, group: Sequence[_PendingRows]) -> None:
        """Add the blocks of texts that begin, or that have many queries in the calls; a text may be in several of them.

        Args:
            excess: (rows, queries) float64, value - chance; NaN where it is unknown.
            taken: (rows, queries) bool, which values count.
            ends: (texts + 1,) int64, the first query of each text of the calls, and the number of queries.
            group: the calls.
        """
        texts = [(each.texts, each.first + text) for each in group for text in range(each.measured.rows.num_texts)]
        parts: dict[tuple[int, int], list[slice]] = {}  # text -> its queries in each call
        for (of, text), (start, stop) in zip(texts, pairwise(ends.tolist()), strict=True):
            parts.setdefault((id(of), text), []).append(slice(start, stop))
        begun = {(id(of), text): of.begun[text] for of, text in texts}
        for key, places in parts.items():
            count = sum(each.stop - each.start for each in places)
            if count >= BLOCKS_PER_TEXT or (count and not begun[key]):
                values, counted = (torch.cat([each[:, place] for place in places], 1) for each in (excess, taken))
                units = means_of_blocks(values, counted, BLOCKS_PER_TEXT)
                self._blocks = merge_moments(self._blocks, moments_of_units(*units))

    def _create_rows(self, names: list[str]) -> None:
        """Create the rows of new statistics, without a query."""
        if not names:
            return
        old, self._names = self._bins, [*self._names, *names]
        rows, new = len(self._names) * self.num_heads, len(names) * self.num_heads
        self._bins = empty_histograms(rows, NUM_BINS if self.keeps_quantiles else 1)
        empty, new_blocks = StatisticSums.empty(new), no_moments(new)
        if len(old):
            place = old.nonzero().unbind(1)
            self._bins[place] = old[place]
            empty = StatisticSums.concatenate([self._closed, empty])
            new_blocks = concatenate_moments([self._blocks, new_blocks])
        self._closed, self._blocks = empty, new_blocks

    def _levels(self, chance: Mapping[str, Tensor], *, like: Tensor) -> tuple[Tensor, Tensor]:
        """Return all chance levels, (levels, queries), and the index of each row's own, (rows,) int64, or -1."""
        levels = [torch.zeros(0, like.shape[1], dtype=like.dtype)]
        if not self._has_chance:
            return levels[0], torch.full((len(like),), -1)
        of_rows: list[int] = []
        at, heads = 0, self.num_heads
        for name in self._names:
            level = chance.get(name)
            if level is None:
                of_rows += [-1] * heads
                continue
            levels.append(level.to(like.dtype))
            of_rows += [at + head % len(level) for head in range(heads)]
            at += len(level)
        return torch.cat(levels), torch.tensor(of_rows, dtype=torch.int64)

    def evidence(self) -> dict[str, ChanceComparison]:
        """Return name of a statistic -> its comparison with chance, for the statistics whose chance level is known."""
        sums = self.sums
        number, squares = sums.num_texts, sums.excess_squares
        if self.num_samples < MIN_OBSERVATIONS and self.blocks is not None:
            number, _, squares = self.blocks
        compared = sums.mean, sums.chance, error_of_mean(number, squares), sums.num_queries.double()
        found = {}
        for name, rows in self.rows_of_statistics().items():
            if not bool(sums.chance[rows].isnan().any()):
                found[name] = ChanceComparison(*(each[rows] for each in compared))
        return found

    def rows_of_statistics(self) -> dict[str, slice]:
        """Return name of a statistic -> its rows, one per head."""
        heads = self.num_heads
        return {name: slice(index * heads, (index + 1) * heads) for index, name in enumerate(self.names)}

    def summary(self, of: SummaryName, names: Collection[str] | None = None) -> dict[str, Tensor]:
        """Return the summary `of` each statistic: name -> (heads,) float64; quantiles are within 1 %.

        0 where no query counts, NaN where all that would count are NaN or infinite.
        """
        check_summary_name(of)
        sums, places = self._sums_of_queries, self.rows_of_statistics()
        chosen = [name for name in places if names is None or name in names]
        if of == "mean":
            values = sums.mean
        elif of == "max" and not bool(sums.maximum.isnan().any()):  # unknown in files of earlier versions
            values = sums.maximum.masked_fill(sums.num_queries == 0, 0)
        else:
            values = torch.zeros_like(sums.mean)
            for name in chosen:
                rows = places[name]
                values[rows] = self._quantiles(sums.rows(rows), rows, QUANTILE_OF_SUMMARY[of])
        values = nan_where_nothing_is_finite(values, sums.num_queries, sums.num_nonfinite)
        return {name: values[places[name]] for name in chosen}

    def _quantiles(self, sums: StatisticSums, rows: slice, share: float) -> Tensor:
        """Return the quantile below which a share of the values of each row lies, within 1 %: (rows,) float64."""
        assert self.keeps_quantiles
        return quantile_of_bins(self.bins[rows], sums, share)

    def filled_bins(self) -> tuple[NDArray[np.int64], NDArray[np.float64], NDArray[np.int64]]:
        """Return row, representative value and count of each non-empty bin, ordered by row and value: (bins,) each."""
        bins = self.bins
        row, place = bins.nonzero().unbind(1)
        return row.numpy(), value_of_bin(place).numpy(), bins[row, place].numpy()

    def __getstate__(self) -> dict[str, Any]:
        """Return the state on the CPU without open texts, and of the histograms only the bins that are not empty."""
        bins, sums, blocks = self.bins, self.sums, self.blocks
        place = bins.nonzero()
        state = {**self.__dict__, "_bins": (bins.shape, place, bins[tuple(place.unbind(1))])}
        return state | {"_closed": sums, "_blocks": no_moments(0) if blocks is None else blocks, "_open": []}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore the histograms from the bins that are not empty."""
        (rows, columns), place, counts = state["_bins"]
        self.__dict__.update(state, _bins=empty_histograms(rows, columns // 2))
        self._bins[tuple(place.unbind(1))] = counts


def _awaited(pending: Sequence[_PendingRows | _ArrivingRows]) -> Iterator[_PendingRows]:
    """Yield rows that were kept; wait for those on their way from a GPU."""
    for each in pending:
        if isinstance(each, _PendingRows):
            yield each
        else:
            yield from each.awaited()


def _with_texts(sums: StatisticSums, texts: OpenTexts) -> StatisticSums:
    """Return sums of rows with the means of some texts added."""
    texts.grow(len(sums.mean))
    moments = merge_moments((sums.num_texts, sums.excess, sums.excess_squares), texts.moments())
    return sums._replace(num_texts=moments[0], excess=moments[1], excess_squares=moments[2])


def no_moments(rows: int) -> Moments:
    """Return the moments of no numbers in `rows` rows, (rows,) float64 each."""
    number, mean, squares = torch.zeros(3, rows, dtype=torch.float64).unbind()
    return number, mean, squares


def _as_float(values: Tensor) -> Tensor:
    """Return values as float64 if they are, else as float32, which the native library takes."""
    return values if values.dtype == torch.float64 else values.float()


def empty_histograms(rows: int, num_bins: int = NUM_BINS) -> Tensor:
    """Return histograms without values, (rows, 2 * num_bins) int64, of `num_bins` bins of each sign."""
    # np.zeros uses calloc, so memory pages without values take neither time nor memory.
    return torch.from_numpy(np.zeros((rows, 2 * num_bins), np.int64))


def _sum_rows(
    values: Tensor, counted: Tensor, levels: Tensor, level_of_row: Tensor, ends: Tensor, bins: Tensor
) -> RowSums:
    """Sum rows and add them to `bins`, with the native library if it is available; arguments as in `sum_rows`."""
    if values.dtype == torch.float32 and values.is_cpu and library.reason_of_absence() is None:
        first_bin = _SHIFT_AND_FIRST_BIN[torch.int32][1]
        return library.sum_rows(values, counted, levels, level_of_row, ends.contiguous(), first_bin, bins)
    values = values.masked_fill(~counted, 0)
    known, lengths = values.double(), ends.diff().tolist()
    count, total = counted.sum(-1), known.sum(-1)
    deviations = (known - (total / count.clamp(min=1))[:, None]).masked_fill_(~counted, 0)
    unknown = (level_of_row < 0)[:, None]
    level = levels.double()[level_of_row] if len(levels) else 0.0
    difference = (known - level).masked_fill(~counted | unknown, 0)
    least, most = (
        torch.nn.functional.pad(known.masked_fill(~counted, none), (1, 0), value=none) for none in (inf, -inf)
    )
    if bins.shape[1] == 2 * NUM_BINS:
        bins.scatter_add_(1, bin_of_value(values), counted.long())
    of_texts = [
        torch.stack([part.sum(-1) for part in each.split(lengths, 1)], 1).double() if lengths else known[:, :0]
        for each in (difference, counted)
    ]
    squares = torch.linalg.vecdot(deviations, deviations)
    return RowSums(count.double(), total, squares, least.amin(1), most.amax(1), *of_texts)


def quantile_of_bins(bins: Tensor, sums: StatisticSums, share: float) -> Tensor:
    """Return a quantile of histograms, (rows, 2 * NUM_BINS), with their sums: (rows,) float64; 0 if empty."""
    count = sums.num_queries
    wanted = share * (count - 1).clamp(min=0)
    place = (bins.cumsum(-1) <= wanted[:, None].floor()).sum(-1).clamp(max=2 * NUM_BINS - 1)  # (rows,)
    value = value_of_bin(place)
    # The value of a bin may exceed those in it; the extremes are unknown in files of earlier versions.
    value = torch.fmin(torch.fmax(value, sums.minimum), sums.maximum)
    return torch.where(count == 0, 0.0, value)


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
