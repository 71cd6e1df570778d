"""Find the samples in a call of a batch, and cut each out without its padding and without other packed samples."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from threading import RLock
from typing import Any

import torch
from torch import Tensor

from multihead.errors import ModelError
from multihead.kernels.call import AttentionCall, AttentionRequest, AttentionResult
from multihead.kernels.dense_tile import first_key_of_queries
from multihead.kernels.native.statistics import FIRST_KEY
from multihead.kernels.parts import Part
from multihead.kernels.plan.bounds import bounds_of
from multihead.masks import Keep
from multihead.masks.leading_keys import LeadingKeys
from multihead.masks.place import SampleSpan
from multihead.probes.probe import Parts, Probe
from multihead.probes.statistics import OF_POSITIONS, from_kernel
from multihead.record import summaries
from multihead.record.sample import SampleRecord
from multihead.record.segments import Rows, Segment, kept_rows
from multihead.record.summaries import Measured, queries_that_count
from multihead.record.token_ids import Ids
from multihead.scores.bias import Bias, RelativeBias, dense_bias

CUTTING = RLock()
"""Held while samples are cut out, because several threads may read a record."""


@dataclass(frozen=True, eq=False)
class BatchRows:
    """Rows of a tensor (batch, heads, rows, features), some of each sample.

    Attributes:
        spans: per sample, its index in the batch, its first row and the row after its last, once the others are left
            out.
        index: (kept rows,) int64, their indices among batch * rows; None if no row is left out.
    """

    spans: list[list[int]]
    index: Tensor | None

    @staticmethod
    def of(sample: Tensor, start: Tensor, stop: Tensor, *, batch: int, rows: int) -> BatchRows:
        """Find the rows to keep.

        Args:
            sample: (samples,) int64, index of each sample in the batch.
            start: (samples,) int64, its first row.
            stop: (samples,) int64, the row after its last.
            batch: number of samples in the tensor.
            rows: number of rows of each.
        """
        lengths = stop - start
        if int(lengths.sum()) == batch * rows:
            return BatchRows(torch.stack([sample, start, stop], 1).tolist(), None)
        end = lengths.cumsum(0)
        spans = torch.stack([torch.zeros_like(end), end - lengths, end], 1).tolist()
        return BatchRows(spans, ranges(sample * rows + start, lengths))

    def compact(self, tensor: Tensor) -> Tensor:
        """Return only the kept rows, (1, heads, rows, features); the tensor itself if all are kept."""
        if self.index is None:
            return tensor
        # (batch * rows, heads * features): no copy where a projection was split into heads; then rows are copied whole
        flat = tensor.transpose(1, 2).flatten(0, 1).flatten(1)
        tokens = flat.index_select(0, self.index.to(tensor.device))
        return tokens.view(len(tokens), tensor.shape[1], tensor.shape[3]).transpose(0, 1)[None]

    def copy(self, tensor: Tensor, device: torch.device) -> Tensor:
        """Copy the rows in one operation, because a model may overwrite the original; see `compact`."""
        if self.index is not None:
            return self.compact(tensor.detach()).to(device)
        # In the same layout the copy is one of contiguous memory.
        return tensor.detach().to(device, copy=True) if tensor.stride(-1) == 1 else kept_rows(tensor, device)

    def of_sample(self, index: int, compact: Tensor) -> Tensor:
        """Return the rows of a sample: (1, heads, its rows, features), of what `compact` or `copy` returned."""
        sample, start, stop = self.spans[index]
        return compact[sample : sample + 1, :, start:stop]


@dataclass(frozen=True, eq=False)
class KeptRows:
    """Rows of a call's tensor that a record keeps: a copy, or the tensor itself until they are read.

    Copying takes longer than measuring, and tables need neither q nor k.

    Attributes:
        tensor: (batch, heads, rows, features), or a copy that `BatchRows.copy` returned.
        rows: finds the rows to keep; None in a copy.
        version: the tensor's version, which changes when something writes to it.
        layer: the name of the layer that computed it.
    """

    tensor: Tensor
    rows: Callable[[], BatchRows] | None
    version: int
    layer: str

    @staticmethod
    def of(tensor: Tensor, rows: Callable[[], BatchRows], device: torch.device, *, layer: str, fresh: bool) -> KeptRows:
        """Keep rows of a tensor.

        Args:
            tensor: (batch, heads, rows, features).
            rows: finds the rows to keep, when they are copied.
            device: where they are kept.
            layer: the name of the layer that computed the tensor.
            fresh: whether the layer computed the tensor for this call alone; otherwise something may write to it later.
        """
        # A part of a larger tensor would keep all of it in memory; what writes to inference tensors leaves no trace.
        whole = tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
        if not fresh or not whole or type(tensor) is not Tensor or tensor.device != device or tensor.is_inference():
            return KeptRows(rows().copy(tensor, device), None, 0, layer)
        return KeptRows(tensor.detach(), rows, tensor._version, layer)  # noqa: SLF001 - PyTorch documents it

    def read(self) -> Tensor:
        """Return a copy of the rows, see `BatchRows.compact`.

        Raises:
            ModelError: something wrote to the tensor.
        """
        if self.rows is None:
            return self.tensor
        if self.tensor._version != self.version:  # noqa: SLF001
            raise ModelError(
                f"Queries or keys of {self.layer} were changed in place after the layer computed them.",
                "Change a copy of what its projections return, such as output.clone() in a hook.",
            )
        return self.rows().copy(self.tensor, self.tensor.device)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle a copy, because a tensor's version is lost in a file."""
        return KeptRows, (self.read(), None, 0, self.layer)


def ranges(starts: Tensor, lengths: Tensor) -> Tensor:
    """Concatenate the ranges [start, start + length): int64.

    >>> ranges(torch.tensor([5, 0]), torch.tensor([2, 3])).tolist()
    [5, 6, 0, 1, 2]
    """
    first = starts - (lengths.cumsum(0) - lengths)
    return first.repeat_interleave(lengths) + torch.arange(int(lengths.sum()))


@dataclass(eq=False)
class SampleSpans:
    """The place of each sample in a call; layers of a model that share a mask share this too.

    Attributes:
        request: the call, without its tensors and its origin.
        packed_lengths: (samples,), a copy of their tokens where they are packed in one row, or None.
        real: (batch, queries) bool, False for padding, or None.
        padding: (batch, keys) bool, False for padding, or None.
        requests: per sample, its own request as a record keeps it; empty until needed.
    """

    request: AttentionRequest
    packed_lengths: Tensor | None = None
    real: Tensor | None = None
    padding: Tensor | None = None
    requests: list[AttentionRequest] = field(default_factory=list)

    @property
    def packed(self) -> bool:
        """Whether its samples are packed in one row."""
        return self.packed_lengths is not None

    @cached_property
    def found(self) -> list[SampleSpan]:
        """Per sample, its rows and columns."""
        if self.packed_lengths is not None:
            return packed_spans(self.packed_lengths)
        return spans_of_call(self.request, queries=self.real, keys=self.padding)

    @cached_property
    def ends(self) -> Tensor:
        """(5, samples) int64: index in the batch, first query and that after the last, first key and that after it."""
        found = [(span.sample, *span.queries, *span.keys) for span in self.found]
        return torch.tensor(found, dtype=torch.int64).view(-1, 5).T

    def key_starts(self, offset: int | Tensor) -> Tensor:
        """Return the position of the first key of each sample in the sequence: (samples,) int64.

        Args:
            offset: position of the call's first key, one number or (batch,).
        """
        sample, first_key = self.ends[0], self.ends[3]
        return first_key + (offset.cpu()[sample] if isinstance(offset, Tensor) else offset)

    def key_lengths(self, windows: int) -> Tensor:
        """Return the number of keys of each row: (samples, windows) int64, where as many are windows of a sample."""
        return (self.ends[4] - self.ends[3]).view(-1, windows)

    @cached_property
    def query_rows(self) -> BatchRows:
        """The queries that belong to samples."""
        shape = self.request.shape
        return BatchRows.of(*self.ends[:3], batch=shape.batch, rows=shape.query_length)

    @cached_property
    def key_rows(self) -> BatchRows:
        """The keys that belong to samples."""
        shape, (sample, _, _, start, stop) = self.request.shape, self.ends
        return BatchRows.of(sample, start, stop, batch=shape.batch, rows=shape.key_length)

    @cached_property
    def not_sliceable(self) -> frozenset[Part] | None:
        """The parts measured of the whole call that are not valid for each sample; None for all parts.

        There is no valid one if there is padding between the queries of a sample.
        """
        if self.packed:  # each sample begins at position 0, and its queries see its own keys only
            return frozenset()
        if self.real is not None and self.real.sum(1).tolist() != (self.ends[2] - self.ends[1]).tolist():
            return None
        found = frozenset[Part]()
        for span in self.found:
            of_span = not_sliceable(self.request, span, packed=False)
            if of_span is None:
                return None
            found |= of_span
        return found

    @cached_property
    def queries(self) -> tuple[Tensor, Tensor, Tensor]:
        """The queries of the call that belong to a sample, and where they are in it: (batch, 1, queries) each.

        Returns:
            whether the query belongs to a sample, bool; its position among the keys of its sample; the number
            of keys of its sample.
        """
        shape, start = self.request.shape, self.request.query_start
        sample, first, stop, first_key, stop_key = self.ends
        if isinstance(start, Tensor):
            start = start.cpu()[sample]
        length = stop - first
        row = ranges(sample * shape.query_length + first, length)
        position = ranges(start + first - first_key, length)
        num_keys = (stop_key - first_key).repeat_interleave(length)
        whole = torch.zeros(3, shape.batch * shape.query_length, dtype=torch.int64)
        whole[:, row] = torch.stack([torch.ones_like(row), position, num_keys])
        real, positions, keys = whole.view(3, shape.batch, 1, shape.query_length)
        return real.bool(), positions, keys

    @cached_property
    def first_keys(self) -> Tensor:
        """(batch, 1, 1 or queries) int64: the first key of the sample of each query."""
        first, stop, first_key = self.ends[1:4].unbind()
        if self.packed:
            return first_key.repeat_interleave(stop - first)[None, None]
        return first_key[:, None, None]

    def fits(self, request: AttentionRequest, real: Tensor | None, padding: Tensor | None) -> bool:
        """Whether another call has its samples at the same places, with the same mask and options."""
        mine = self.request
        for each in (request, mine):
            if isinstance(each.query_start, Tensor) or each.bias is not None:
                return False
        return (
            request.mask is mine.mask
            and (request.query_start, request.scale, request.softcap) == (mine.query_start, mine.scale, mine.softcap)
            and request.shape == mine.shape
            and _all_same(request.packed_lengths, self.packed_lengths)
            and _all_same(real, self.real)
            and _all_same(padding, self.padding)
        )


@dataclass(eq=False)
class RecordedBatch:
    """A call with which each of its samples begins. They are cut out of it when one of them is read.

    Cutting takes longer than recording, and tables need statistics only, which are computed when they are read.

    Attributes:
        new_sample: returns an empty sample of the layer.
        places: where the samples are.
        request: the call as a record keeps it, without q, k, v and its origin.
        logsumexp: (batch, heads, queries), nats.
        parts: what the kernel measured of the whole call, on the CPU.
        ids: the token ids.
        probes: the statistics; those whose parts were measured are computed.
        q: the queries of `places.query_rows`, or None if only statistics are kept.
        k: the keys of `places.key_rows`, or None.
        windows: how many consecutive rows of the batch are windows of one sample.
    """

    new_sample: Callable[[], SampleRecord]
    places: SampleSpans
    request: AttentionRequest
    logsumexp: Tensor
    parts: Parts
    ids: Ids
    probes: tuple[Probe, ...]
    q: KeptRows | None = None
    k: KeptRows | None = None
    windows: int = 1
    _statistics: dict[str, Tensor] | None = None  # once they are computed
    _samples: list[SampleRecord] | None = None  # once they are cut out

    @property
    def statistics(self) -> dict[str, Tensor]:
        """Name -> (batch, heads, queries), on the CPU."""
        with CUTTING:
            if self._statistics is None:
                parts, logsumexp = moved_together(self.parts, self.places), self.logsumexp.cpu()
                usual = bool((logsumexp > -torch.inf).all())
                self._statistics = {
                    probe.name: from_kernel(probe, parts, logsumexp, usual=usual)
                    for probe in self.probes
                    if probe.parts <= parts.keys()
                }
                self.parts = {}
            return self._statistics

    def measured(self) -> dict[str, Measured]:
        """Return each floating-point statistic, and which queries count in a summary: (batch, heads, queries) each."""
        real, positions, num_keys = self.places.queries
        sees = real & (self.logsumexp.cpu() != -torch.inf)  # (batch, heads, queries)
        rules, found = {probe.name: probe.counted for probe in self.probes}, {}
        for name, value in self.statistics.items():
            if value.is_floating_point():
                found[name] = Measured(value, queries_that_count(rules[name], sees, positions, num_keys, None))
        return found

    def measured_samples(self) -> list[dict[str, Measured]]:
        """Return each floating-point statistic per query of each sample, see `SampleRecord.measured`."""
        if self._samples is not None:  # later calls may have continued them
            return [sample.measured() for sample in self._samples]
        whole, found = self.measured(), []
        for span in self.places.found:
            rows = slice(*span.queries)
            sample = {}
            for name, (values, counted, _) in whole.items():
                sample[name] = Measured(values[span.sample, :, rows], counted[span.sample, :, rows])
            found.append(sample)
        if self.windows == 1:
            return found
        return [summaries.join_windows(found[at : at + self.windows]) for at in range(0, len(found), self.windows)]

    @property
    def num_samples(self) -> int:
        """Number of samples."""
        return len(self.places.found) // self.windows

    @property
    def samples(self) -> list[SampleRecord]:
        """The samples, each without padding."""
        with CUTTING:
            if self._samples is None:
                self._samples = self._cut_batch()
                self.q = self.k = None
                self._statistics = {}  # with their padding they may take twice the memory of the samples
        return self._samples

    def cut_requests(self) -> None:
        """Make the request of each sample; at once where the mask holds tensors, such as lengths that may change."""
        places = self.places
        if not places.requests:
            places.requests = [part_of(self.request, span, packed=places.packed) for span in places.found]

    def _cut_batch(self) -> list[SampleRecord]:
        places, rows = self.places, self.places.query_rows
        self.cut_requests()
        logsumexp = rows.compact(self.logsumexp[..., None])
        statistics = {name: rows.compact(value[..., None]) for name, value in self.statistics.items()}
        samples = new_samples(self.new_sample, places, self.ids)
        kept = None if self.q is None or self.k is None else (self.q.read(), self.k.read())
        for index, (sample, request) in enumerate(zip(samples, places.requests, strict=True)):
            if kept is not None:
                sample.q = Rows(2, [rows.of_sample(index, kept[0])])
                sample.k = Rows(2, [places.key_rows.of_sample(index, kept[1])])
            sample.begin(
                Segment(replace(request, sinks=self.request.sinks)),  # each layer has its own
                rows.of_sample(index, logsumexp)[..., 0],
                {name: rows.of_sample(index, value)[0, ..., 0] for name, value in statistics.items()},
            )
        if self.windows > 1:
            samples = [_join_windows(samples[at : at + self.windows]) for at in range(0, len(samples), self.windows)]
        return samples


def _join_windows(windows: list[SampleRecord]) -> SampleRecord:
    """Return the first of some windows of a sample, with the segments of the others."""
    sample, *others = windows
    for each in others:
        segment = replace(each.segments[0], key_start=sample.num_keys, apart=True)
        if sample.k is not None and each.k is not None:
            sample.k.add(each.k.whole())
        sample.add(segment, each.logsumexp.whole(), each.statistics, None if each.q is None else each.q.whole())
    return sample


def new_samples(new_sample: Callable[[], SampleRecord], places: SampleSpans, ids: Ids) -> list[SampleRecord]:
    """Return a sample for each place in a first call, with its token ids and nothing else."""
    samples = [new_sample() for _ in places.found]
    for index, (sample, span) in enumerate(zip(samples, places.found, strict=True)):
        ids.add_to(sample, span, index, -span.keys[0])
    return samples


def spans_of_call(
    request: AttentionRequest, *, queries: Tensor | None = None, keys: Tensor | None = None
) -> list[SampleSpan]:
    """Find the place of each sample in a call.

    Args:
        request: the call.
        queries: (batch, queries) bool, False for padding; None if unknown: then queries at the end that see no key
            count as padding.
        keys: (batch, keys) bool, False for padding; None if unknown. Keys at the end that no query may see are left
            out in any case.
    """
    shape = request.shape
    if request.packed_lengths is not None:
        return packed_spans(request.packed_lengths)
    bounds, batch, columns = bounds_of(request), shape.batch, shape.key_length
    stop, seeing = (each.expand(batch, -1) for each in (bounds.stop, ~bounds.sees_nothing))  # (batch, queries)
    if queries is not None:
        first, end = _hull_of_each_row(queries)
    else:
        end = _hull_of_each_row(seeing)[1]
        end = torch.where(end > 0, end, shape.query_length)
        first = torch.zeros_like(end)
    row = torch.arange(shape.query_length, device=shape.device)
    counted = seeing & (row >= first[:, None]) & (row < end[:, None])
    none = columns if queries is None else torch.where(queries.any(1), columns, 0)  # a text without tokens has no key
    last = torch.where(counted.any(1), _largest_counted(stop, counted), none)
    first_key, end_key = torch.zeros_like(last), last
    if keys is not None:
        first_key, end_key = _hull_of_each_row(keys)
        end_key = first_key.maximum(end_key.minimum(last))
    # A statistic of a row is valid for its sample if the row sees keys of that sample only.
    real = counted if queries is None else counted & queries
    start = first_key_of_queries(request, bounds).expand(batch, -1)
    earliest = columns - _largest_counted(columns - start, real)  # after the last key if no query counts
    holds_all = (earliest >= first_key) & (_largest_counted(stop, real) <= end_key)
    holds_first = (earliest == columns - _largest_counted(columns - start, seeing)) | ~real.any(1)
    found = torch.stack((first, end, first_key, end_key, holds_all, holds_first)).tolist()
    return [
        SampleSpan(index, (row_first, row_end), (key_first, key_end), bool(inside), bool(same))
        for index, (row_first, row_end, key_first, key_end, inside, same) in enumerate(zip(*found, strict=True))
    ]


def packed_spans(lengths: Tensor) -> list[SampleSpan]:
    """Return the places of packed samples, whose mask hides other samples.

    Args:
        lengths: (samples,), tokens of each.
    """
    end = lengths.cumsum(0)
    places = zip((end - lengths).tolist(), end.tolist(), strict=True)
    return [SampleSpan(0, place, place, holds_all=True, holds_first=True) for place in places]


def _all_same(one: Tensor | None, other: Tensor | None) -> bool:
    return one is other or (one is not None and other is not None and torch.equal(one, other))


def _hull_of_each_row(flags: Tensor) -> tuple[Tensor, Tensor]:
    """Return the index of the first True of each row and that after the last; (0, 0) without one.

    Args:
        flags: (rows, n) bool.
    """
    end = _largest_counted(torch.arange(1, flags.shape[1] + 1, device=flags.device).expand_as(flags), flags)
    count = flags.shape[1]
    first = count - _largest_counted(torch.arange(count, 0, -1, device=flags.device).expand_as(flags), flags)
    return first.masked_fill(end == 0, 0), end


def _largest_counted(values: Tensor, counted: Tensor) -> Tensor:
    """Return the largest counted value of each row, 0 if none is counted; values are 0 or more."""
    padded = torch.nn.functional.pad(values.masked_fill(~counted, 0), (1, 0))  # so that no row is empty
    return padded.amax(1)


def hull_of_flags(flags: Tensor) -> tuple[int, int]:
    """Return the index of the first True and that after the last, (0, 0) without one: (n,) bool.

    >>> hull_of_flags(torch.tensor([False, True, False, True, False]))
    (1, 4)
    """
    found = flags.nonzero().flatten()
    return (int(found[0]), int(found[-1]) + 1) if found.numel() else (0, 0)


def cut_request(call: AttentionCall, span: SampleSpan) -> AttentionCall:
    """Slice one sample out of a call: an equivalent call with a batch of one.

    The kernel's statistics are sliced too; those that have another meaning within the sample are left out.
    """
    request, attended = call.request, call.attended
    sample, rows, columns = slice(span.sample, span.sample + 1), slice(*span.queries), slice(*span.keys)
    packed = request.packed_lengths is not None
    part = replace(
        part_of(request, span, packed=packed),
        q=request.q[sample, :, rows],
        k=request.k[sample, :, columns],
        v=request.v[sample, :, columns],
    )
    left_out = not_sliceable(request, span, packed=packed)
    kept = {
        part: shift_key_indices(part, value[sample, :, rows], span)
        for part, value in attended.statistics.items()
        if left_out is not None and part not in left_out
    }
    return AttentionCall(
        part, AttentionResult(attended.output[sample, :, rows], attended.logsumexp[sample, :, rows], kept)
    )


def part_of(request: AttentionRequest, span: SampleSpan, *, packed: bool) -> AttentionRequest:
    """Slice one sample out of a request as `cut_request` does, except q, k and v, which stay whole.

    Args:
        request: the call.
        span: the sample's rows and columns.
        packed: whether the samples are packed in one row.
    """
    rows, columns = slice(*span.queries), slice(*span.keys)
    shape = request.shape._replace(
        batch=1,
        query_length=rows.stop - rows.start,
        key_length=columns.stop - columns.start,
    )
    position = position_of(request, span)
    mask = (request.mask.without_documents() if packed else request.mask).select_span(span)
    if not mask.uses_positions:
        position = max(position, 0)  # a position before the first key has no meaning in cross-attention
    return replace(
        request,
        shape=shape,
        mask=mask,
        query_start=position,
        bias=None if request.bias is None else _bias_of_part(request.bias, request.shape.query_length, span),
        origin=None,
    )


def not_sliceable(request: AttentionRequest, span: SampleSpan, *, packed: bool) -> frozenset[Part] | None:
    """Return which parts that a kernel measured of a whole call are not valid for one of its samples; None for all.

    Sums over a row of weights are valid if the sample's queries see its own keys only. Distances are valid too, since
    queries and keys of a sample shift together, unless a query is before the first key. The weight on the first key
    depends on which key counted as the first.
    """
    whole = (span.queries, span.keys) == ((0, request.shape.query_length), (0, request.shape.key_length))
    if not (span.holds_all or (whole and not packed)):
        return None
    left_out = frozenset[Part]() if span.holds_first else frozenset({FIRST_KEY})
    return left_out | OF_POSITIONS if position_of(request, span) < 0 else left_out


def shift_key_indices(part: Part, value: Tensor, span: SampleSpan) -> Tensor:
    """Shift a part that holds key indices so that the first key of the sample is 0."""
    return value - span.keys[0] * (value >= 0) if part == "largest_key" and span.keys[0] else value


def moved_together(parts: Mapping[Any, Tensor], places: SampleSpans) -> Mapping[Any, Tensor]:
    """Shift the key indices of a whole call, a part or a statistic, so that the first key of each sample is 0."""
    keys = parts.get("largest_key")
    if keys is None or not bool(places.ends[3].any()):
        return parts
    return {**parts, "largest_key": (keys - places.first_keys.to(keys.device)).clamp_(min=-1)}  # -1 stays -1


def position_of(request: AttentionRequest, span: SampleSpan) -> int:
    """Return the position of the first query of a sample among its keys."""
    start = request.query_start
    origin = int(start[span.sample]) if isinstance(start, Tensor) else start
    return origin + span.queries[0] - span.keys[0]


def with_dropped_keys(call: AttentionCall, key_start: int) -> tuple[AttentionCall, int]:
    """Put back the keys that a cache dropped after leading keys: then a call's keys are a range of its sample's.

    They are zeros, and the mask hides them: a cache drops keys that no later query may see. What the kernel measured is
    left out, because its distances and indices are those without these keys.

    Args:
        call: a call with a batch of one.
        key_start: how many keys of the sample were dropped.

    Returns:
        the call, and the index of its first key among those of the sample.
    """
    request, mask, shape = call.request, call.request.mask, call.request.shape
    if not isinstance(mask, LeadingKeys) or key_start <= 0:
        return call, key_start
    if shape.key_length < mask.count:  # a call without a token of this sample has no key of it either
        return call, 0
    bias = None
    if request.bias is not None:
        bias = _with_gap(dense_bias(request.bias, shape).expand(-1, -1, -1, shape.key_length), 3, mask.count, key_start)
    whole = replace(
        request,
        k=_with_gap(request.k, 2, mask.count, key_start),
        v=_with_gap(request.v, 2, mask.count, key_start),
        shape=shape._replace(key_length=key_start + shape.key_length),
        mask=LeadingKeys(mask.count, mask.mask.after_dropping_keys(-key_start)),
        query_start=request.query_start + key_start,
        bias=bias,
    )
    return AttentionCall(whole, replace(call.attended, statistics={})), 0


def without_queries(call: AttentionCall, real: Tensor) -> AttentionCall:
    """Make queries that are padding between real ones see no key, so that no summary counts them.

    Args:
        call: a call with a batch of one.
        real: (queries,) bool, False for padding.
    """
    if bool(real.all()):
        return call
    logsumexp = call.attended.logsumexp.masked_fill(~real, -torch.inf)
    mask = call.request.mask & Keep(real, "queries")
    statistics = {
        part: value.masked_fill(~real, 0 if value.is_floating_point() else -1)
        for part, value in call.attended.statistics.items()
    }
    return AttentionCall(replace(call.request, mask=mask), AttentionResult(call.attended.output, logsumexp, statistics))


def _with_gap(tensor: Tensor, axis: int, place: int, count: int) -> Tensor:
    """Insert `count` zeros along an axis, before the index `place`."""
    before, after = tensor.tensor_split([place], axis)
    sizes = [*tensor.shape[:axis], count, *tensor.shape[axis + 1 :]]
    return torch.cat([before, tensor.new_zeros(sizes), after], axis)


def _bias_of_part(bias: Bias, queries: int, span: SampleSpan) -> Bias:
    """Slice a bias to the rows and columns of one sample."""
    if isinstance(bias, RelativeBias):
        part = bias.part(queries, span.queries, span.keys)
        return part if len(part.values) == 1 else RelativeBias(part.values[span.sample][None])
    return _slice_of_span(bias, span)


def _slice_of_span(tensor: Tensor, span: SampleSpan) -> Tensor:
    """Slice a tensor that broadcasts to (batch, heads, queries, keys): (1, heads or 1, rows or 1, columns or 1)."""
    if tensor.shape[0] > 1:
        tensor = tensor[span.sample : span.sample + 1]
    if tensor.shape[2] > 1:
        tensor = tensor[:, :, slice(*span.queries)]
    if tensor.shape[3] > 1:
        tensor = tensor[..., slice(*span.keys)]
    return tensor
