"""The record of one sample (one text) in one layer: its statistics, and tiles of its attention map."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from multihead.errors import ProbeError
from multihead.errors.arguments import check_integer
from multihead.kernels.call import AttentionRequest
from multihead.kernels.dense_tile import visible_cells, working_dtype
from multihead.kernels.parts import POOLED_MAP, RECEIVED, PartName
from multihead.kernels.plan.bounds import bounds_of
from multihead.locale.escaping import escape_controls
from multihead.probes.blocks import BlockSums
from multihead.probes.catalogue import statistic
from multihead.probes.context import PoolOperation
from multihead.probes.lookups import weight_at_offset
from multihead.probes.measured_call import MeasuredCall
from multihead.probes.probe import PartValues, Probe, Statistic
from multihead.probes.statistics import NO_CONTEXT, complete_statistics, possible_probes
from multihead.probes.tile import head_indices, tile
from multihead.record.blocks import (
    checked_slice_ends,
    checked_slice_indices,
    index_of_heads,
    number_pair,
    sum_blocks,
)
from multihead.record.segments import Segment, copy_contiguous, join_segments
from multihead.record.split import TokensOfRank, count_tokens
from multihead.record.table import head_rows, html_of_table, number_with_noun
from multihead.record.text_rows import MeasuredRows, MeasuredStatistic, SummaryName, TextRows, summarise_samples
from multihead.record.text_table import (
    LaterRows,
    RaggedRows,
    RowsInTable,
    RowsInTensor,
    RowsOfText,
    TextTable,
    append_new_keys,
)
from multihead.record.texts import GrowingText, Text
from multihead.scores.bias import values_of


class OwnStatistics(dict[str, Statistic]):
    """The statistics of a record that are not built in, by name; pickled without functions, which may not be known."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the statistics without the functions of probes."""
        return OwnStatistics, ({name: each.without_function() for name, each in self.items()},)


@dataclass(eq=False, repr=False)
class SampleRecord:
    """One sample (one text) in one layer, without padding; the calls of cached decoding are merged.

    Attributes:
        name: the layer's name.
        map_size: largest number of rows and columns of the pooled map.
        map_pool: whether a cell of the pooled map is the "mean" or the "max" of the weights in its block.
        logsumexp: (1, heads, queries), nats.
        q: (1, heads, queries, head_dim), or None if only statistics were kept.
        k: (1, kv_heads, keys, head_dim), or None if only statistics were kept.
        segments: the calls of the sample, where consecutive calls with the same kind of mask are merged.
        calls: query range and key range of each call, [first, stop) each.
        cross_attention: whether keys come from another text than queries (cross-attention).
        growing_key_text: text of the keys so far, to which each attention call adds tokens.
        growing_query_text: text of the queries so far in cross-attention; without tokens in self-attention.
        split: tokens of this rank if a sequence is split over ranks, else None. In a split sample `q`, `logsumexp` and
            the statistics are for the rank's queries, and `k` has the rank's keys.
        own: the statistics that are not built in.
        table: the table of the layer, of whose rows the sample is a view; None if it has tensors of its own.
        text_in_table: number of the text in the table.
    """

    name: str
    map_size: int
    map_pool: PoolOperation = "mean"
    logsumexp: RowsOfText = field(default_factory=RowsOfText)
    q: RowsOfText | None = None
    k: RowsOfText | None = None
    segments: list[Segment] = field(default_factory=list)
    calls: list[tuple[tuple[int, int], tuple[int, int]]] = field(default_factory=list)
    cross_attention: bool = False
    growing_key_text: GrowingText = field(default_factory=GrowingText)
    growing_query_text: GrowingText = field(default_factory=GrowingText)
    split: TokensOfRank | None = None
    own: OwnStatistics = field(default_factory=OwnStatistics)
    table: TextTable | None = None
    text_in_table: int = 0
    _per_query: dict[str, Tensor] | None = None  # (heads, queries) each; None: those of the table
    _per_key: dict[str, Tensor] = field(default_factory=dict)  # (heads, keys) each, over all calls
    _maps: dict[str, Tensor] = field(default_factory=dict)  # (heads, rows, columns) each
    _calls_of_maps: int = 0  # number of calls that the maps are of
    _later: tuple[Sequence[Probe], Set[str]] | None = None  # see `measure_later`
    _added: dict[str, Tensor] = field(default_factory=dict)  # the statistics that were measured later
    _left_out: Set[str] = frozenset()  # names of statistics per query

    def view_table(self, table: TextTable, text: int, *, keeps_qk: bool) -> SampleRecord:
        """Make the sample a view of the rows of a text in a table, and return it."""
        self.table, self.text_in_table, self.logsumexp = table, text, RowsInTable(table.logsumexp, text)
        if keeps_qk:
            self.q, self.k = RowsInTable(table.q, text), RowsInTable(table.k, text)
        return self

    @property
    def num_heads(self) -> int:
        """Number of query heads."""
        return self.segments[0].request.shape.num_heads

    @property
    def head_dim(self) -> int:
        """Number of features of a query and a key."""
        return self.segments[0].request.shape.head_dim

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of q and k in the model."""
        return self.segments[0].request.shape.dtype

    @property
    def num_queries(self) -> int:
        """Number of queries (of this rank, if a sequence is split)."""
        return self.segments[-1].row_stop if self.split is None else count_tokens(self.split.queries)

    @property
    def num_keys(self) -> int:
        """Number of keys."""
        return max(segment.key_stop for segment in self.segments)

    @property
    def query_start(self) -> int:
        """Position of the first query, counted from the first key."""
        return self.segments[0].query_start

    @property
    def positions(self) -> Tensor:
        """Position of each query, counted from the first key: (queries,) int64."""
        if self.split is not None:
            # A rank has no queries of a text that is shorter than the part of the others.
            return self.query_start + torch.cat(
                [torch.arange(0), *(torch.arange(*each) for each in self.split.queries)]
            )
        return torch.cat([torch.arange(each.num_queries) + each.query_start for each in self.segments])

    @property
    def sees(self) -> Tensor:
        """Whether each query sees any key: (heads, queries) bool."""
        return (self.logsumexp.all_rows()[0] != -torch.inf).cpu()

    @property
    def keeps_weights(self) -> bool:
        """Whether q and k were kept, so that attention weights can be computed."""
        return self.q is not None and self.split is None

    @property
    def text(self) -> Text:
        """The text of the keys, one token per key."""
        return self.growing_key_text.text(self.num_keys)

    @property
    def query_text(self) -> Text:
        """The text of the queries, one token per query."""
        if self.cross_attention:
            return self.growing_query_text.text(self.num_queries)
        if self.split is not None:
            return self.text.select_tokens(self.positions.tolist())
        return self.text.slice_tokens(self.query_start, self.query_start + self.num_queries)

    @property
    def statistics(self) -> dict[str, Tensor]:
        """All statistics, name -> (heads, queries), on the CPU; (heads, keys) or (heads, rows, columns) by their axes.

        A sample with several calls has maps only if q and k were kept, and `map_pool` is "mean" or one call was added.
        """
        if self._maps and self._calls_of_maps != len(self.calls):
            # The map of one call has smaller blocks than the map of all calls.
            can = self.keeps_weights and self.map_pool == "mean"
            whole: dict[PartName, Tensor] = {POOLED_MAP.name: self.map(bins=self.map_size)} if can else {}
            self._maps, self._calls_of_maps = self._computed_from(whole, self._maps), len(self.calls)
        return self.per_query | self._per_key | self._maps

    @property
    def has_statistics_per_key(self) -> bool:
        """Whether there is a statistic with a number per key."""
        return bool(self._per_key)

    @property
    def per_query(self) -> dict[str, Tensor]:
        """Statistics with one number per query: name -> (heads, queries)."""
        if (later := self._later) is not None:
            self._added, self._left_out = self._measure_in_pictures(later[0]), later[1]
            if not self.growing_key_text.has_places:
                self._left_out = frozenset()
            self._later = None
        found = self._per_query
        if found is None:
            found = {} if self.table is None else self.table.statistics_of(self.text_in_table)
        return {name: values for name, values in found.items() if name not in self._left_out} | self._added

    def measure_later(self, probes: Sequence[Probe], left_out: Set[str]) -> None:
        """Measure probes of pictures when a statistic is first read, and leave others out, if there are pictures."""
        self._later = probes, left_out

    def _measure_in_pictures(self, probes: Sequence[Probe]) -> dict[str, Tensor]:
        """Return the statistics that need the places of keys in pictures, from q and k: name -> (heads, queries)."""
        if not self.keeps_weights or self.cross_attention or not self.growing_key_text.has_places:
            return {}
        parts = []
        for segment in self.segments:
            request, logsumexp = self.request_of(segment)
            context = self.growing_key_text.add_places(NO_CONTEXT, segment.key_start, segment.key_stop)
            possible = possible_probes(probes, request, context, has_values=False)
            found = complete_statistics(request, logsumexp, possible, context)
            parts.append({name: value[0].cpu() for name, value in found.items()})
        return self.join_queries(parts)

    @property
    def means(self) -> dict[str, Tensor]:
        """Mean of each statistic over the queries that see a key: name -> (heads,) float64.

        The mean of a weight at an offset, such as `previous_mass`, leaves out the queries without a key at that offset.
        """
        return self.summary()

    def summary(self, of: SummaryName = "mean") -> dict[str, Tensor]:
        """Summarise each statistic over the queries that count, see `Statistic.counted`: name -> (heads,) float64."""
        return summarise_samples([self.measured()], of)

    def measured(self) -> dict[str, MeasuredStatistic]:
        """Return each statistic that has a mean, and which queries count in its summaries: (heads, queries) each."""
        return self.measured_rows().statistics

    def measured_rows(self) -> MeasuredRows:
        """Return the statistics of the queries as the rows of one text."""
        # Each window is a text of its own.
        have_windows = any(each.is_window for each in self.segments)
        ends = [(each.key_start, each.key_stop) if have_windows else (0, self.num_keys) for each in self.segments]
        queries = torch.tensor([each.num_queries for each in self.segments])
        positions = self.positions
        first, stop = (each.repeat_interleave(queries)[: len(positions)] for each in torch.tensor(ends).unbind(1))
        ids = None if self.cross_attention else self.text.ids
        rows = TextRows.of_text(positions, stop, ids)
        rows = replace(rows, positions=positions - first, num_keys=stop - first)
        if self.growing_key_text.has_places and not self.cross_attention:
            assert self.growing_key_text.pictures is not None
            rows = replace(rows, placed=self.growing_key_text.pictures.boxes.placed_at(positions))
        return MeasuredRows(rows, self.sees, self.per_query, own=self.own)

    def set_statistics(self, statistics: dict[str, Tensor]) -> None:
        """Replace all statistics of the sample, which are over all its calls."""
        self._per_query, self._per_key, self._maps = self._divide_by_axes(statistics)
        self._calls_of_maps, self._later, self._added, self._left_out = len(self.calls), None, {}, frozenset()

    def _divide_by_axes(self, statistics: dict[str, Tensor]) -> tuple[dict[str, Tensor], ...]:
        """Divide statistics by their axes: those per query, those per key, and maps."""
        by_axes: dict[str, dict[str, Tensor]] = {"queries": {}, "keys": {}, "map": {}}
        for name, value in statistics.items():
            by_axes[statistic(name, self.own).axes][name] = value
        return tuple(by_axes.values())

    def append_segment(self, segment: Segment) -> None:
        """Append an attention call whose rows are appended to the table."""
        segment = replace(segment, row_start=self.segments[-1].row_stop if self.segments else 0)
        self.calls.append(((segment.row_start, segment.row_stop), (segment.key_start, segment.key_stop)))
        both = join_segments(self.segments[-1], segment) if self.segments else None
        if both is None:
            self.segments.append(segment)
        else:
            self.segments[-1] = both

    def append_call(self, call: RecordedCall) -> None:
        """Append an attention call that continues the sample's previous calls, and its rows to the table.

        Of its keys those are appended, as a copy, that are new to the text.
        """
        assert self.table is not None
        text, first = self.text_in_table, not self.calls
        if self.k is not None and call.k is not None:
            self._append_keys(self.table.k, call)
        self.append_segment(call.segment)
        q, statistics = None if self.q is None or call.q is None else without_batch(call.q), call.statistics
        if first:
            of_call, self._per_key, self._maps = self._divide_by_axes(call.measured_statistics)
            per_query: dict[str, Tensor | LaterRows] = {**of_call}
            self._calls_of_maps = 1
        else:
            # A statistic that was not measured in one call is dropped for the whole sample.
            per_query = {name: statistics[name] for name in self.table.statistics if name in statistics}
            self._maps = {name: value for name, value in self._maps.items() if name in statistics}
            names = [name for name in self._per_key if name in statistics]
            received: dict[PartName, Tensor] = {}
            if (name := str(RECEIVED.name)) in names:
                total, more = self._per_key[name], call.measured_statistics[name]
                received[RECEIVED.name] = add_received_weights(total, more, call.segment.key_start)
            self._per_key = self._computed_from(received, names) if names else {}
        self.table.append([(text, call.segment.num_queries)], without_batch(call.logsumexp), per_query, q)

    def _append_keys(self, column: RaggedRows, call: RecordedCall) -> None:
        """Append the keys of a call that are new to the text to the column of the keys."""
        text, start, k = self.text_in_table, call.key_start, call.k
        if isinstance(k, Tensor):
            append_new_keys(column, text, k[0], start=start, device=k.device if call.device is None else call.device)
        elif k is not None and column.length(text) == start:
            column.append(k, [(text, call.segment.key_stop - start)])
        elif k is not None:  # a cache dropped keys before them
            read = k.read()
            append_new_keys(column, text, read, start=start, device=read.device)

    def join_queries(self, pieces: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """Join statistics of this text, measured on different queries of it, in the order of these.

        Args:
            pieces: name -> (heads, queries of the piece), or (heads, keys), summed over these queries.
        """
        common = [name for name in pieces[0] if all(name in each for each in pieces)]
        by_key = [name for name in common if statistic(name, self.own).axes == "keys"]
        joined = {name: torch.cat([each[name] for each in pieces], 1) for name in common if name not in by_key}
        received: dict[PartName, Tensor] = {
            name: torch.stack([each[name] for each in pieces]).sum(0) for name in by_key if name == RECEIVED.name
        }
        return joined | self._computed_from(received, by_key)

    def _computed_from(self, parts: PartValues, names: Iterable[str]) -> dict[str, Tensor]:
        """Compute statistics from parts over all calls; leave out those whose function or part is unknown."""
        found = {}
        for name in names:
            probe = statistic(name, self.own)
            if isinstance(probe, Probe) and probe.parts <= parts.keys():
                found[name] = probe.of(parts)
        return found

    def __repr__(self) -> str:
        """Return one line: the name of the layer, and the numbers of heads, queries and keys."""
        heads = number_with_noun(self.num_heads, "head")
        return f"<SampleRecord of {escape_controls(self.name)}: {heads}, {self._describe_size()}>"

    def _repr_html_(self) -> str:
        """Return HTML for a notebook: a table with one row per head."""
        rows = head_rows(0, self.name, self.num_heads, self.means)
        return html_of_table(self.name, self._describe_size(), rows, ["head"])

    def _describe_size(self) -> str:
        size = f"{number_with_noun(self.num_queries, 'query')} and {number_with_noun(self.num_keys, 'key')}"
        return size if self.keeps_weights else f"{size}; statistics only"

    def call(self, index: int) -> SampleRecord:
        """Return one call of the sample as a separate sample."""
        if self.split is not None:  # a sample that is split over ranks has one call
            return self
        rows, keys = self.calls[index]
        segment = next(each for each in self.segments if each.row_start <= rows[0] and rows[1] <= each.row_stop)
        alone = SampleRecord(
            self.name, self.map_size, self.map_pool, cross_attention=self.cross_attention, own=self.own
        )
        alone.logsumexp = RowsInTensor(self.logsumexp.rows_between(*rows))
        alone.q = None if self.q is None else RowsInTensor(self.q.rows_between(*rows))
        alone.k = self.k
        alone.segments, alone.calls = (
            [replace(segment.slice_rows_and_keys(rows, keys), row_start=0)],
            [((0, rows[1] - rows[0]), keys)],
        )
        alone.growing_key_text = GrowingText.from_text(
            self.growing_key_text.text(self.num_keys).slice_tokens(0, keys[1])
        )
        alone.growing_query_text = GrowingText.from_text(
            self.growing_query_text.text(self.num_queries).slice_tokens(*rows)
        )
        alone._per_query = {name: each[:, slice(*rows)] for name, each in self.per_query.items()}
        if len(self.calls) == 1:
            alone._per_key, alone._maps, alone._calls_of_maps = dict(self._per_key), dict(self._maps), 1
        return alone

    def weights(self, head: int | None = None, *, queries: slice = slice(None), keys: slice = slice(None)) -> Tensor:
        """Compute a tile of the attention weights.

        Args:
            head: which head, or None for all.
            queries: which queries.
            keys: which keys.

        Returns:
            (queries, keys), or (heads, queries, keys) without a head; float32 (float64 for float64).

        Raises:
            ProbeError: only statistics were kept.
            ArgumentError: the head does not exist, or queries or keys are not slices.
        """
        heads = index_of_heads(head, self.num_heads)
        found = []
        for segment, rows in self._segments_of_rows(queries):
            request, logsumexp = self.request_of(segment, head)
            columns = self._columns_of_segment(segment, keys)
            part = tile(request, logsumexp, heads=heads, queries=rows, keys=columns, totals=segment.row_logsumexps)
            found.append(part[0].cpu())
        if not found:
            self._check_weights_kept()
        cells = self._assemble_tiles(found, queries, keys, self.num_heads if head is None else 1)
        return cells if head is None else cells[0]

    def visible(self, *, queries: slice = slice(None), keys: slice = slice(None)) -> Tensor:
        """Return which keys each query may see.

        Returns:
            (queries, keys) bool; (heads, queries, keys) if heads may see different keys.
        """
        self._check_not_split()
        found = [
            visible_cells(segment.request, rows, self._columns_of_segment(segment, keys))[0].cpu()
            for segment, rows in self._segments_of_rows(queries)
        ]
        heads = max((each.shape[0] for each in found), default=1)
        cells = self._assemble_tiles([each.expand(heads, -1, -1) for each in found], queries, keys, heads)
        return cells if heads > 1 else cells[0]

    def at_offset(self, offset: int) -> Tensor:
        """Compute each query's weight on the key at an offset from its own position: -1 is the key before the query.

        Returns:
            (heads, queries), a share from 0 to 1; 0 if the key at this offset is hidden or does not exist.

        Raises:
            ProbeError: only statistics were kept.
        """
        parts = (MeasuredCall.from_request(*self.request_of(segment), NO_CONTEXT) for segment in self.segments)
        with torch.no_grad():
            return torch.cat([weight_at_offset(part, offset)[0].cpu() for part in parts], 1).to(
                working_dtype(self.dtype)
            )

    def intervals(self) -> tuple[Tensor, Tensor] | None:
        """Return the interval of keys that each query may see.

        Returns:
            first key and stop (index after the last key), (queries,) int64 each, equal if a query sees no key; None if
            the keys of some query are not an interval, or differ between heads.
        """
        self._check_not_split()
        starts, stops = [], []
        for segment in self.segments:
            bias = segment.request.bias
            if bias is not None and bool((values_of(bias) == -torch.inf).any()):
                return None
            bounds = bounds_of(segment.request)
            if bounds.remainder is not None:
                return None
            empty = bounds.sees_nothing[0]
            starts.append((bounds.start[0] + segment.key_start).masked_fill(empty, 0).cpu())
            stops.append((bounds.stop[0] + segment.key_start).masked_fill(empty, 0).cpu())
        return torch.cat(starts), torch.cat(stops)

    def blocks(
        self,
        head: int | None = None,
        *,
        queries: slice = slice(None),
        keys: slice = slice(None),
        block: int | tuple[int, int],
        without_first_key: bool = False,
        cancelled: Callable[[], bool] | None = None,
    ) -> BlockSums:
        """Sum the weights in each block of a rectangle of the attention map, and count the visible cells.

        Blocks start at the first query and key of the rectangle; the last blocks may be smaller. Memory is used for the
        blocks and a strip of the map, never for queries x keys.

        Args:
            head: which head, or None for all.
            queries: a slice of the queries, without steps.
            keys: a slice of the keys, without steps.
            block: numbers of queries and keys per block, or one number for both.
            without_first_key: whether key 0 counts as hidden.
            cancelled: called before each strip of rows; if it returns True, `CancelledError` is raised.

        Returns:
            sums and counts, (heads or 1, row blocks, column blocks) each.

        Raises:
            ProbeError: only statistics were kept.
            ArgumentError: the head does not exist, a slice has another step than 1, or the block is empty.
        """
        self._check_weights_kept()
        size = number_pair("block", block)
        for length in size:
            check_integer("block", length)
        return sum_blocks(
            ((segment, *self.request_of(segment, head)) for segment in self.segments),
            heads=head_indices(index_of_heads(head, self.num_heads), self.num_heads).tolist(),
            rows=checked_slice_ends(queries, self.num_queries, "queries"),
            columns=checked_slice_ends(keys, self.num_keys, "keys"),
            block=size,
            without_first_key=without_first_key,
            cancelled=cancelled,
        )

    def map(
        self,
        head: int | None = None,
        *,
        queries: slice = slice(None),
        keys: slice = slice(None),
        bins: int | tuple[int, int] = 256,
    ) -> Tensor:
        """Downsample a rectangle of the attention map to the mean weights of bins.

        Args:
            head: which head, or None for all.
            queries: a slice of the queries, without steps.
            keys: a slice of the keys, without steps.
            bins: largest number of rows and columns of the result; bins have equal sizes, except the last.

        Returns:
            (row bins, column bins), or (heads, row bins, column bins) without a head; float32, the mean weight
            over the visible cells of a bin, NaN if it has none.

        Raises:
            ProbeError: only statistics were kept.
            ArgumentError: the head does not exist, a slice has another step than 1, or there are no bins.
        """
        most = number_pair("bins", bins)
        for each in most:
            check_integer("bins", each)
        rows, columns = (
            checked_slice_ends(queries, self.num_queries, "queries"),
            checked_slice_ends(keys, self.num_keys, "keys"),
        )
        height, width = (
            max(-(-(last - first) // each), 1) for (first, last), each in zip((rows, columns), most, strict=True)
        )
        means = self.blocks(head, queries=queries, keys=keys, block=(height, width)).means().float()
        return means if head is None else means[0]

    def request_of(self, segment: Segment, head: int | None = None) -> tuple[AttentionRequest, Tensor]:
        """Return the request of a segment with q and k, for one head or all, and its logsumexp (1, heads, queries).

        Raises:
            ProbeError: only statistics were kept.
        """
        self._check_weights_kept()
        assert self.q is not None
        assert self.k is not None
        of_q, of_k = segment.head_indices(head)
        k = self.k.rows_between(segment.key_start, segment.key_stop, heads=of_k)
        request = replace(
            segment.request, q=self.q.rows_between(segment.row_start, segment.row_stop, heads=of_q), k=k, v=k
        )
        return request, self.logsumexp.rows_between(segment.row_start, segment.row_stop)

    def _check_not_split(self) -> None:
        if self.split is not None:
            raise ProbeError(
                f"{self.name} was observed on one of several ranks, which has "
                f"{number_with_noun(self.num_queries, 'query')} of the text and not all keys.",
                'Join the records of all ranks: seen.reduce(group), or Record.load("run.*.safetensors") after each '
                "rank has saved its own.",
            )

    def _check_weights_kept(self) -> None:
        self._check_not_split()
        if not self.keeps_weights:
            raise ProbeError(
                f'{self.name} was observed with keep="statistics", so its weights cannot be computed.',
                'Observe with keep="cpu" or keep="device".',
            )

    def _segments_of_rows(self, queries: slice) -> Iterator[tuple[Segment, slice]]:
        """Yield the segments that contain queries of a slice, and the slice in each segment's own queries."""
        first, stop, step = checked_slice_indices(queries, self.num_queries, "queries")
        for segment in self.segments:
            low = first + max(-(-(segment.row_start - first) // step), 0) * step
            high = min(stop, segment.row_stop)
            if low < high:
                yield segment, slice(low - segment.row_start, high - segment.row_start, step)

    def _columns_of_segment(self, segment: Segment, keys: slice) -> slice:
        """Convert a slice of the sample's keys to a slice of a segment's own keys, ignoring its step."""
        first, stop, _ = checked_slice_indices(keys, self.num_keys, "keys")
        low = min(max(first, segment.key_start), segment.key_stop)
        return slice(low - segment.key_start, max(low, min(stop, segment.key_stop)) - segment.key_start)

    def _assemble_tiles(self, tiles: list[Tensor], queries: slice, keys: slice, heads: int) -> Tensor:
        """Concatenate the tiles of segments, (heads, rows, columns) each, by rows, and apply the step of `keys`."""
        left, right, key_step = checked_slice_indices(keys, self.num_keys, "keys")
        whole = [torch.zeros(heads, 0, max(right - left, 0), dtype=tiles[0].dtype if tiles else torch.float32)]
        for (segment, _), each in zip(self._segments_of_rows(queries), tiles, strict=True):
            row = each.new_zeros(heads, each.shape[1], max(right - left, 0))
            place = segment.key_start + self._columns_of_segment(segment, keys).start - left
            row[:, :, place : place + each.shape[2]] = each
            whole.append(row)
        return torch.cat(whole, 1)[:, :, ::key_step]


@dataclass(frozen=True, eq=False)
class RecordedCall:
    """A call of one text, as a record keeps it; rows that are read later have no axis of the batch.

    Attributes:
        segment: the call, without tensors.
        logsumexp: (1, heads, queries), nats.
        statistics: statistics of the call.
        q: (1, heads, queries, head_dim); None if only statistics are kept.
        k: (1, kv_heads, keys, head_dim), the keys of the call from `key_start` on, which a cache may overwrite later;
            None if only statistics are kept.
        key_start: index of the first of these keys in the text.
        device: where keys are copied to; None: where they are.
    """

    segment: Segment
    logsumexp: Tensor | LaterRows
    statistics: Mapping[str, Tensor | LaterRows]
    q: Tensor | LaterRows | None
    k: Tensor | LaterRows | None
    key_start: int
    device: torch.device | None = None

    @property
    def measured_statistics(self) -> dict[str, Tensor]:
        """The statistics; waits for those on their way."""
        return {name: each if isinstance(each, Tensor) else each.read() for name, each in self.statistics.items()}

    def with_own_keys(self, *, first: bool, cross_attention: bool) -> RecordedCall:
        """Return the call with a copy of its keys, to be appended later; unless it is the `first`, of the new ones."""
        if not isinstance(self.k, Tensor):
            return self
        new = 0 if first else self.k.shape[2] - (0 if cross_attention else self.segment.num_queries)
        k = copy_contiguous(self.k[:, :, new:], self.k.device if self.device is None else self.device)
        return replace(self, k=k, key_start=self.key_start + new)


def without_batch(rows: Tensor | LaterRows) -> Tensor | LaterRows:
    """Return the rows of a text without the axis of its batch, which rows that are read later do not have."""
    return rows[0] if isinstance(rows, Tensor) else rows


def add_received_weights(total: Tensor, more: Tensor, start: int) -> Tensor:
    """Add `more`, (heads, keys of a later call), to `total`, (heads, keys so far), from key `start` on."""
    longer = torch.nn.functional.pad(total, (0, max(start + more.shape[1] - total.shape[1], 0)))
    longer[:, start : start + more.shape[1]] += more
    return longer
