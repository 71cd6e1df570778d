"""The queries of an attention call as rows of texts, which rows count in the summary of a statistic, and summaries.

A row is one query of one text. Batches with padding, packed rows of tokens, the steps of cached decoding, windows and
the queries of one rank all become such rows, so that one rule decides which of them count. A value that is NaN or
infinite counts in no summary, because one among millions of queries would leave nothing else of a mean; how many there
are is counted apart.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from itertools import pairwise
from math import isfinite
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from multihead.errors import ArgumentError
from multihead.probes.catalogue import statistic
from multihead.probes.probe import Statistic
from multihead.tensors.shapes import AttentionShape

SummaryName = Literal["mean", "median", "p95", "max"]
QUANTILE_OF_SUMMARY = {"median": 0.5, "p95": 0.95, "max": 1.0}


class MeasuredStatistic(NamedTuple):
    """The values of one statistic for the rows of some texts.

    Attributes:
        values: (heads, rows).
        counted: (heads, rows) bool, True for rows that count in a summary.
        chance: (heads or 1, rows), chance level (even weights over the visible keys); None if it was not measured.
        nonfinite: (heads, rows) bool, True for rows that do not count only because their value is NaN or infinite;
            None if there are none.
    """

    values: Tensor
    counted: Tensor
    chance: Tensor | None = None
    nonfinite: Tensor | None = None

    @staticmethod
    def of_rows(values: Tensor, counted: Tensor, chance: Tensor | None = None) -> MeasuredStatistic:
        """Create the statistic from its values, and from the rows that count if their value is finite."""
        counted, nonfinite = finite_rows(values, counted)
        return MeasuredStatistic(values, counted, chance, nonfinite)

    def rows_between(self, start: int, stop: int) -> MeasuredStatistic:
        """Slice the rows [start, stop)."""
        return MeasuredStatistic(*(None if each is None else each[:, start:stop] for each in self))  # type: ignore[arg-type]


def concatenate_ranges(starts: Tensor, lengths: Tensor) -> Tensor:
    """Concatenate the ranges [start, start + length) to one int64 tensor.

    >>> concatenate_ranges(torch.tensor([5, 0]), torch.tensor([2, 3])).tolist()
    [5, 6, 0, 1, 2]
    """
    first = starts - (lengths.cumsum(0) - lengths)
    return first.repeat_interleave(lengths) + torch.arange(int(lengths.sum()))


def finite_rows(values: Tensor, counted: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return which values count and are finite, and which count but are not, None if there are none; of equal shapes.

    Args:
        values: (..., heads, rows).
        counted: (..., heads, rows) bool, True for values that count if they are finite.
    """
    if values.is_cpu and isfinite(float(values.sum())):  # on another device the host would wait for it
        return counted, None
    finite = values.isfinite()
    return counted & finite, counted & ~finite


@dataclass(frozen=True, eq=False)
class TextRows:
    """The queries of one attention call that belong to texts: one row per query, text after text, without padding.

    Attributes:
        ends: (texts + 1,) int64, the first row of each text, and the number of rows.
        positions: (rows,) int64, the position of each query among the keys of its text; of its window, if a layer
            attends within windows.
        num_keys: (rows,) int64, the number of keys of the same text or window so far.
        places: (rows,) int64, the index of each query in the flattened (batch * queries) of the call; None if the call
            has exactly these queries in this order.
        occurred: returns whether the token of each query occurs earlier in its text, (rows,) bool; None if unknown.
        keys_before: (rows,) int64 or 0, the number of keys of the text when its rows were counted before; a row that
            counts because of one of these keys does not count again.
        placed: (rows,) bool, whether each query comes from a place in a picture; None without pictures.
    """

    ends: Tensor
    positions: Tensor
    num_keys: Tensor
    places: Tensor | None = None
    occurred: Callable[[], Tensor] | None = None
    keys_before: Tensor | int = 0
    placed: Tensor | None = None
    _counted_by_offset: dict[int, Tensor] = field(default_factory=dict, init=False)

    @staticmethod
    def of_text(positions: Tensor, num_keys: int | Tensor, ids: Tensor | None) -> TextRows:
        """Create the rows of some queries of one text.

        Args:
            positions: (queries,) int64, see above.
            num_keys: number of keys of the text, or (queries,) int64.
            ids: (keys,) int64, the token id of each key; None if unknown.
        """
        ends = torch.tensor([0, len(positions)])
        occurred = None if ids is None else lambda: occurred_before(positions, ids)
        return TextRows(ends, positions, torch.as_tensor(num_keys).expand(len(positions)), occurred=occurred)

    @staticmethod
    def of_spans(
        span_ends: Tensor, shape: AttentionShape, query_start: int | Tensor, keys_before: int | Tensor = 0
    ) -> TextRows:
        """Create the rows of some texts of a call.

        Args:
            span_ends: (5, texts) int64, per text its index in the batch, query range and key range, [first, stop) each.
            shape: shape of the call.
            query_start: position of the first query among the keys of the call; a tensor has one per index in the
                batch.
            keys_before: number of keys of each text before those of the call, (texts,) int64 or one for all.
        """
        sample, first, stop, first_key, stop_key = span_ends
        start = query_start.cpu()[sample] if isinstance(query_start, Tensor) else query_start
        lengths = stop - first
        ends = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        places = concatenate_ranges(sample * shape.query_length + first, lengths)
        whole = len(places) == shape.batch * shape.query_length
        positions = concatenate_ranges(keys_before + start + first - first_key, lengths)
        num_keys = (keys_before + stop_key - first_key).repeat_interleave(lengths)
        return TextRows(ends, positions, num_keys, None if whole else places)

    @staticmethod
    def concatenate(rows: Sequence[TextRows]) -> TextRows:
        """Concatenate the rows of several calls, each text of each call as a text of its own."""
        if len(rows) == 1:
            return rows[0]
        sizes = torch.cat([each.ends.diff() for each in rows])
        before = [torch.as_tensor(each.keys_before).expand(len(each.positions)) for each in rows]

        def occurred() -> Tensor:
            found = [None if each.occurred is None else each.occurred() for each in rows]
            return torch.cat(
                [
                    torch.ones_like(each.positions, dtype=torch.bool) if known is None else known
                    for each, known in zip(rows, found, strict=True)
                ]
            )

        placed = [
            torch.ones_like(each.positions, dtype=torch.bool) if each.placed is None else each.placed for each in rows
        ]
        return TextRows(
            torch.cat([torch.zeros(1, dtype=torch.int64), sizes.cumsum(0)]),
            torch.cat([each.positions for each in rows]),
            torch.cat([each.num_keys for each in rows]),
            occurred=occurred,
            keys_before=torch.cat(before),
            placed=None if all(each.placed is None for each in rows) else torch.cat(placed),
        )

    @property
    def num_texts(self) -> int:
        """Number of texts."""
        return len(self.ends) - 1

    @cached_property
    def text(self) -> Tensor:
        """(rows,) int64, the number of each row's text."""
        return torch.arange(self.num_texts).repeat_interleave(self.ends.diff())

    @cached_property
    def end_with_their_keys(self) -> bool:
        """Whether the last query of each text is that of its last key, so that the keys are the tokens of the text."""
        last = self.ends[1:][self.ends.diff() > 0] - 1
        return bool((self.positions[last] + 1 == self.num_keys[last]).all())

    def select(self, values: Tensor) -> Tensor:
        """Select the rows of a tensor of the call: (batch, heads, queries) -> (heads, rows)."""
        if values.shape[0] != 1:
            values = values.transpose(0, 1).reshape(1, values.shape[1], -1)
        return values[0] if self.places is None else values[0].index_select(1, self.places.to(values.device))

    def with_token_ids(self, ids: Tensor | None) -> TextRows:
        """Return the rows with the token ids of their queries, which tell which token occurred before.

        Args:
            ids: (rows,) int64; None if unknown. They must be all tokens of the texts up to these queries.
        """
        if ids is None:
            return self
        occurred = cache(lambda: _occurred_in_text(ids, self.text) & (self.positions < self.num_keys))
        return replace(self, occurred=occurred)

    def with_ids_so_far(self, ids: Tensor | None) -> TextRows:
        """Return the rows of one text with the token ids of its keys so far, (keys,) int64; None if unknown."""
        if ids is None or not len(self.num_keys) or len(ids) != int(self.num_keys[-1]):
            return self
        occurred = occurred_before(self.positions, ids)  # now, because the rows may wait, and the ids grow
        return replace(self, occurred=lambda: occurred)

    def counted(self, measured: Statistic, sees: Tensor) -> Tensor:
        """Return which rows count in the summary of a statistic, see `Statistic.counted`: (heads, rows) bool."""
        if measured.counted == "repeated":
            return sees if self.occurred is None else sees & self.occurred().to(sees.device)
        if measured.counted == "placed":
            return sees if self.placed is None else sees & self.placed.to(sees.device)
        if measured.counted_offset is not None:
            return sees & self._count_by_key_at(measured.counted_offset).to(sees.device)
        return sees

    def _count_by_key_at(self, offset: int) -> Tensor:
        """Return which rows count because of the key at an offset, (rows,) bool; found once, as layers share rows."""
        if offset not in self._counted_by_offset:
            keys = self.positions + offset
            self._counted_by_offset[offset] = (keys >= self.keys_before) & (keys < self.num_keys)
        return self._counted_by_offset[offset]


@dataclass(frozen=True, eq=False)
class MeasuredRows:
    """The statistics of the rows of some texts.

    Attributes:
        rows: the rows.
        sees: (heads, rows) bool, True for queries that see a key.
        values: name of a statistic -> (heads, rows).
        chance: name of a statistic -> its chance levels (even weights over the visible keys), (heads or 1, rows).
        own: the statistics that are not built in.
    """

    rows: TextRows
    sees: Tensor
    values: Mapping[str, Tensor]
    chance: Mapping[str, Tensor] = field(default_factory=dict)
    own: Mapping[str, Statistic] = field(default_factory=dict)

    @staticmethod
    def concatenate(measured: Sequence[MeasuredRows]) -> MeasuredRows:
        """Concatenate the rows of several calls, each text of each call as one of its own.

        A statistic, or a chance level, that was not measured in one of the calls is left out.
        """
        if len(measured) == 1:
            return measured[0]

        def joined(columns: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
            common = [name for name in columns[0] if all(name in each for each in columns)]
            return {name: torch.cat([each[name] for each in columns], 1) for name in common}

        return MeasuredRows(
            TextRows.concatenate([each.rows for each in measured]),
            torch.cat([each.sees for each in measured], 1),
            joined([each.values for each in measured]),
            joined([each.chance for each in measured]),
            measured[0].own,
        )

    @cached_property
    def of_queries(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Each statistic that has a mean -> its values, and which rows count in it if their value is finite."""
        found = {}
        for name, values in self.values.items():
            measured = statistic(name, self.own)
            if measured.has_mean:
                found[name] = values, self.rows.counted(measured, self.sees).to(values.device)
        return found

    @cached_property
    def statistics(self) -> dict[str, MeasuredStatistic]:
        """Each statistic that has a mean, and which rows count in it."""
        return {name: MeasuredStatistic.of_rows(*each, self.chance.get(name)) for name, each in self.of_queries.items()}

    def by_text(self, windows: int = 1) -> list[dict[str, MeasuredStatistic]]:
        """Return the statistics of each text; each `windows` texts of the rows are windows of one."""
        return [
            {name: each.rows_between(first, stop) for name, each in self.statistics.items()}
            for first, stop in pairwise(self.rows.ends[::windows].tolist())
        ]

    def waiting(self, latest_offset: int) -> MeasuredRows:
        """Return the rows that may count because of a key that their text does not have yet.

        Args:
            latest_offset: the largest offset of a key because of which a row counts.
        """
        rows = self.rows
        left = (rows.positions + latest_offset >= rows.num_keys).nonzero().flatten()
        names = [name for name in self.values if (statistic(name, self.own).counted_offset or 0) > 0]
        of_texts = TextRows(torch.searchsorted(left, rows.ends), rows.positions[left], rows.num_keys[left])
        there = left.to(self.sees.device)
        chance = {name: self.chance[name][:, there] for name in names if name in self.chance}
        values = {name: self.values[name][:, there] for name in names}
        return MeasuredRows(of_texts, self.sees[:, there], values, chance, self.own)

    def texts(self) -> list[MeasuredRows]:
        """Return the rows of each text alone."""
        rows, found = self.rows, []
        for first, stop in pairwise(rows.ends.tolist()):
            part = slice(first, stop)
            alone = TextRows(torch.tensor([0, stop - first]), rows.positions[part], rows.num_keys[part])
            chance = {name: each[:, part] for name, each in self.chance.items()}
            values = {name: each[:, part] for name, each in self.values.items()}
            found.append(MeasuredRows(alone, self.sees[:, part], values, chance, self.own))
        return found

    def with_num_keys(self, num_keys: int) -> MeasuredRows:
        """Return the rows of one text after it has grown to `num_keys` keys, without those that counted before."""
        rows = replace(
            self.rows, num_keys=torch.full_like(self.rows.num_keys, num_keys), keys_before=self.rows.num_keys
        )
        return replace(self, rows=rows)


def occurred_before(positions: Tensor, ids: Tensor) -> Tensor:
    """Return whether each query's token occurs earlier in the text: (queries,) bool; `ids` are those of the keys."""
    inside = (positions >= 0) & (positions < len(ids))
    occurred = _occurred_in_text(ids, torch.zeros_like(ids))
    return inside & occurred[positions.clamp(0, len(ids) - 1)]


def _occurred_in_text(ids: Tensor, text: Tensor) -> Tensor:
    """Return for tokens in their order whether the same id occurs earlier in the same text: (tokens,) bool."""
    _, token = (ids + text * (int(ids.max()) + 1 if len(ids) else 1)).unique(return_inverse=True)
    place = torch.arange(len(ids))
    first = torch.full_like(place, len(ids)).scatter_reduce(0, token, place, "amin")
    return place > first[token]


def check_summary_name(of: object) -> None:
    """Raise ArgumentError unless `of` is "mean", "median", "p95" or "max"."""
    if of != "mean" and of not in QUANTILE_OF_SUMMARY:
        raise ArgumentError(f"of is {of!r}.", 'Give "mean", "median", "p95" or "max".')


def summarise_samples(
    samples: Sequence[Mapping[str, MeasuredStatistic]], of: SummaryName, names: Collection[str] | None = None
) -> dict[str, Tensor]:
    """Summarise each statistic over the counted queries of all samples.

    Args:
        samples: statistics of each sample of one layer; statistics that a sample lacks are left out.
        of: "mean", "median", "p95" or "max"; quantiles are interpolated as in torch.quantile.
        names: the statistics to summarise; None takes all.

    Returns:
        statistic -> (heads,) float64; 0 where no query counts, NaN where all that would count are NaN or infinite.
    """
    check_summary_name(of)
    common = set(samples[0]).intersection(*samples)
    found = {}
    for name in [name for name in samples[0] if name in common and (names is None or name in names)]:
        measured = [each[name] for each in samples]
        counts = torch.stack([each.counted.sum(-1) for each in measured]).sum(0)
        if of == "mean":
            totals = torch.stack([each.values.double().masked_fill(~each.counted, 0).sum(-1) for each in measured])
            summary = totals.sum(0) / counts.clamp(min=1)
        else:
            values = torch.cat([each.values for each in measured], 1)  # (heads, queries of all samples)
            counted = torch.cat([each.counted for each in measured], 1)
            heads = zip(values, counted, strict=True)
            summary = torch.stack([_quantile_of_counted(*each, share=QUANTILE_OF_SUMMARY[of]) for each in heads])
        left_out = [each.nonfinite.any(-1) for each in measured if each.nonfinite is not None]
        if left_out:
            summary = nan_where_nothing_is_finite(summary, counts, torch.stack(left_out).any(0))
        found[name] = summary
    return found


def count_nonfinite(samples: Sequence[Mapping[str, MeasuredStatistic]]) -> Tensor:
    """Return how many queries of each head are NaN or infinite in a statistic; of several the most: (heads,) int64."""
    heads = max((len(each.values) for each in samples[0].values()), default=0)
    by_name: dict[str, Tensor] = {"": torch.zeros(heads, dtype=torch.int64)}
    for one in samples:
        for name, each in one.items():
            if each.nonfinite is not None:
                by_name[name] = by_name.get(name, by_name[""]) + each.nonfinite.sum(-1)
    return torch.stack(list(by_name.values())).amax(0)


def nan_where_nothing_is_finite(summary: Tensor, counts: Tensor, nonfinite: Tensor) -> Tensor:
    """Replace the summaries of heads without a finite value, but with others, by NaN; (heads,) each."""
    return summary.masked_fill((counts == 0) & (nonfinite > 0), torch.nan)


def _quantile_of_counted(values: Tensor, counted: Tensor, *, share: float) -> Tensor:
    """Return a quantile of the values that count, all finite; 0 if none counts."""
    ordered = values[counted].double().sort().values
    if not ordered.numel():
        return torch.zeros((), dtype=torch.float64)
    place = share * (ordered.numel() - 1)
    below = int(place)
    above = min(below + 1, ordered.numel() - 1)
    return torch.lerp(ordered[below], ordered[above], place - below)
