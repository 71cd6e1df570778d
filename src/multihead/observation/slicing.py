"""Cut one sample out of an attention call, without its padding and without the samples packed beside it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from multihead.call import Attended, AttentionCall, AttentionRequest
from multihead.kernels.native.statistics import FIRST_KEY
from multihead.masks import Keep
from multihead.masks.counts import as_tensor
from multihead.masks.place import Span
from multihead.parts import Part
from multihead.plan.bounds import bounds_of
from multihead.probes.statistics import OF_POSITIONS
from multihead.scores.bias import Bias
from multihead.scores.relative import Relative


@dataclass(eq=False)
class SampleSpans:
    """Where the samples of a call stand: the layers of a model that share a mask share this too.

    Fields:
        request: the call, without its tensors.
        real: (batch, queries) bool, True = no padding, or None.
        padding: (batch, keys) bool, True = no padding, or None.
        found: of each sample its rows and columns.
        parts: of each sample its own request, as a record keeps it; empty until they are needed.
    """

    request: AttentionRequest
    real: Tensor | None
    padding: Tensor | None
    found: list[Span]
    parts: list[AttentionRequest] = field(default_factory=list)

    @cached_property
    def queries(self) -> tuple[Tensor, Tensor, Tensor]:
        """The queries of the call that belong to a sample, and where they are in it: (batch, 1, queries) each.

        Returns: whether the query belongs to a sample, bool; its position among the keys of its sample; the number
            of keys of its sample.
        """
        shape, found = self.request.shape, self.found
        lengths = torch.tensor([stop - first for first, stop in (span.queries for span in found)])
        sample = torch.arange(len(found)).repeat_interleave(lengths)  # per query of all samples: its sample
        place = torch.arange(len(sample)) - (lengths.cumsum(0) - lengths)[sample]
        row = place + torch.tensor([span.queries[0] for span in found])[sample]
        batch = torch.tensor([span.sample for span in found])[sample]
        position = place + torch.tensor([position_of(self.request, span) for span in found])[sample]
        keys = torch.tensor([span.keys[1] - span.keys[0] for span in found])[sample]
        whole = torch.zeros(3, shape.batch, 1, shape.query_length, dtype=torch.int64)
        whole[:, batch, 0, row] = torch.stack([torch.ones_like(row), position, keys])
        return whole[0].bool(), whole[1], whole[2]

    def cover(self, request: AttentionRequest) -> bool:
        """Whether every query and every key of the call belongs to a sample."""
        rows = sum(span.queries[1] - span.queries[0] for span in self.found)
        columns = sum(span.keys[1] - span.keys[0] for span in self.found)
        batch = request.shape.batch
        return (rows, columns) == (batch * request.shape.query_length, batch * request.shape.key_length)

    def fits(self, request: AttentionRequest, real: Tensor | None, padding: Tensor | None) -> bool:
        """Whether another call has its samples at the same places, and asks the same of them."""
        mine = self.request
        for each in (request, mine):
            if isinstance(each.query_start, Tensor) or each.bias is not None or each.packed_lengths is not None:
                return False
        return (
            request.mask is mine.mask
            and (request.query_start, request.scale, request.softcap) == (mine.query_start, mine.scale, mine.softcap)
            and vars(request.shape) == vars(mine.shape)
            and _same(real, self.real)
            and _same(padding, self.padding)
        )


def spans(request: AttentionRequest, *, queries: Tensor | None = None, keys: Tensor | None = None) -> list[Span]:
    """Find where each sample of a call stands.

    Args:
        request: the call.
        queries: (batch, queries) bool, True = no padding; None where nothing says: then queries at the end that
            see no key are taken for padding.
        keys: (batch, keys) bool, True = no padding; None where nothing says. Keys at the end that no query may
            see are left out in any case.
    """
    shape, bounds = request.shape, bounds_of(request)
    batch, columns = shape.batch, shape.key_length
    if request.packed_lengths is not None:
        ends = as_tensor(request.packed_lengths, "cpu").cumsum(0).tolist()
        places = list(zip([0, *ends[:-1]], ends, strict=True))
        lengths = request.packed_lengths.to(shape.device)
        behind = lengths.cumsum(0).repeat_interleave(lengths)
        inside = (bounds.start >= behind - lengths.repeat_interleave(lengths)) & (bounds.stop <= behind)
        within = bool((bounds.sees_nothing | inside).all())
        return [Span(0, place, place, holds_all=within, holds_first=True) for place in places]
    start, stop, seeing = (
        each.expand(batch, -1) for each in (bounds.start, bounds.stop, ~bounds.sees_nothing)
    )  # (batch, queries)
    if queries is not None:
        first, behind = _hulls(queries)
    else:
        behind = _hulls(seeing)[1]
        behind = torch.where(behind > 0, behind, shape.query_length)
        first = torch.zeros_like(behind)
    row = torch.arange(shape.query_length, device=shape.device)
    counted = seeing & (row >= first[:, None]) & (row < behind[:, None])
    last = torch.where(counted.any(1), _largest(stop, counted), columns)
    first_key, behind_key = torch.zeros_like(last), last
    if keys is not None:
        first_key, behind_key = _hulls(keys)
        behind_key = first_key.maximum(behind_key.minimum(last))
    # A statistic of a row is that of its sample where the sample's keys are all that the row sees.
    real = counted if queries is None else counted & queries
    earliest = columns - _largest(columns - start, real)  # where no query counts it is behind the last key
    holds_all = (earliest >= first_key) & (_largest(stop, real) <= behind_key)
    holds_first = (earliest == columns - _largest(columns - start, seeing)) | ~real.any(1)
    found = torch.stack((first, behind, first_key, behind_key, holds_all, holds_first)).tolist()
    return [
        Span(index, (row_first, row_behind), (key_first, key_behind), bool(inside), bool(same))
        for index, (row_first, row_behind, key_first, key_behind, inside, same) in enumerate(zip(*found, strict=True))
    ]


def _same(one: Tensor | None, other: Tensor | None) -> bool:
    return one is other or (one is not None and other is not None and torch.equal(one, other))


def _hulls(flags: Tensor) -> tuple[Tensor, Tensor]:
    """Find the first True of each row and the place behind the last: (rows, n) bool; (0, 0) where there is none."""
    behind = _largest(torch.arange(1, flags.shape[1] + 1, device=flags.device).expand_as(flags), flags)
    count = flags.shape[1]
    first = count - _largest(torch.arange(count, 0, -1, device=flags.device).expand_as(flags), flags)
    return first.masked_fill(behind == 0, 0), behind


def _largest(values: Tensor, counted: Tensor) -> Tensor:
    """Return the largest of the values of each row that count, 0 where none does; they are 0 or more."""
    padded = torch.nn.functional.pad(values.masked_fill(~counted, 0), (1, 0))  # so that no row is empty
    return padded.amax(1)


def hull(flags: Tensor) -> tuple[int, int]:
    """Find the first True and the place behind the last: (n,) bool; (0, 0) where there is none.

    >>> hull(torch.tensor([False, True, False, True, False]))
    (1, 4)
    """
    found = flags.nonzero().flatten()
    return (int(found[0]), int(found[-1]) + 1) if found.numel() else (0, 0)


def cut(call: AttentionCall, span: Span) -> AttentionCall:
    """Cut one sample out of a call: a call with a batch of one, that means the same on what is left.

    The statistics that the kernel measured are sliced with it; those that mean something else in the sample are left
    out.
    """
    request, attended = call.request, call.attended
    sample, rows, columns = slice(span.sample, span.sample + 1), slice(*span.queries), slice(*span.keys)
    part = replace(
        part_of(request, span),
        q=request.q[sample, :, rows],
        k=request.k[sample, :, columns],
        v=request.v[sample, :, columns],
    )
    parts = sliceable(request, span, attended.statistics)
    kept = {
        part: moved(part, value[sample, :, rows], span) for part, value in attended.statistics.items() if part in parts
    }
    return AttentionCall(part, Attended(attended.output[sample, :, rows], attended.logsumexp[sample, :, rows], kept))


def part_of(request: AttentionRequest, span: Span) -> AttentionRequest:
    """Cut one sample out of a request as `cut` does, but for q, k and v, which stay those of the whole."""
    rows, columns = slice(*span.queries), slice(*span.keys)
    shape = replace(
        request.shape,
        batch=1,
        query_length=rows.stop - rows.start,
        key_length=columns.stop - columns.start,
    )
    position = position_of(request, span)
    packed = request.packed_lengths is not None
    mask = (request.mask.without_documents() if packed else request.mask).part(span)
    if not mask.uses_positions:
        position = max(position, 0)  # a place before the first key means nothing to a mask of cross-attention
    return replace(
        request,
        shape=shape,
        mask=mask,
        query_start=position,
        bias=None if request.bias is None else _bias_of_part(request.bias, request.shape.query_length, span),
        packed_lengths=None,
    )


def sliceable(request: AttentionRequest, span: Span, parts: Iterable[Part]) -> frozenset[Part]:
    """Return the parts that a kernel measured of a whole call and that are, row by row, those of a sample.

    Sums over a row of weights are, where the sample's keys are all that its queries see. Distances are too, since a
    sample's queries and keys move together, unless a query stands before the first key. That of
    the first key depends on which key counted as the first.
    """
    whole = (span.queries, span.keys) == ((0, request.shape.query_length), (0, request.shape.key_length))
    if not (span.holds_all or (whole and request.packed_lengths is None)):
        return frozenset()
    left_out = frozenset[Part]() if span.holds_first else frozenset({FIRST_KEY})
    if position_of(request, span) < 0:
        left_out |= OF_POSITIONS
    return frozenset(parts) - left_out


def moved(part: Part, value: Tensor, span: Span) -> Tensor:
    """Count the indices of keys in a sliced part from the first key of the sample."""
    return value - span.keys[0] * (value >= 0) if part == "largest_key" and span.keys[0] else value


def moved_together(parts: Mapping[Part, Tensor], found: Sequence[Span]) -> Mapping[Part, Tensor]:
    """Count the indices of keys in the parts of a whole call, each from the first key of its sample."""
    keys = parts.get("largest_key")
    if keys is None or not any(span.keys[0] for span in found):
        return parts
    keys = keys.clone()
    for span in found:
        rows = keys[span.sample, :, slice(*span.queries)]
        rows -= span.keys[0] * (rows >= 0)
    return {**parts, "largest_key": keys}


def position_of(request: AttentionRequest, span: Span) -> int:
    """Return where the first query of a sample stands among its keys."""
    start = request.query_start
    origin = int(start[span.sample]) if isinstance(start, Tensor) else start
    return origin + span.queries[0] - span.keys[0]


def without_queries(call: AttentionCall, real: Tensor) -> AttentionCall:
    """Let the queries that are padding between real ones see nothing, so that they count nowhere.

    Args:
        call: a call with a batch of one.
        real: (queries,) bool, True = no padding.
    """
    if bool(real.all()):
        return call
    logsumexp = call.attended.logsumexp.masked_fill(~real, -torch.inf)
    mask = call.request.mask & Keep(real, "queries")
    statistics = {
        part: value.masked_fill(~real, 0 if value.is_floating_point() else -1)
        for part, value in call.attended.statistics.items()
    }
    return AttentionCall(replace(call.request, mask=mask), Attended(call.attended.output, logsumexp, statistics))


def _bias_of_part(bias: Bias, queries: int, span: Span) -> Bias:
    """Cut a bias to the rows and columns of one sample."""
    if isinstance(bias, Relative):
        part = bias.part(queries, span.queries, span.keys)
        return part if len(part.values) == 1 else Relative(part.values[span.sample][None])
    return _tile(bias, span)


def _tile(tensor: Tensor, span: Span) -> Tensor:
    """Cut a tensor that broadcasts to (batch, heads, queries, keys): (1, heads or 1, rows or 1, columns or 1)."""
    if tensor.shape[0] > 1:
        tensor = tensor[span.sample : span.sample + 1]
    if tensor.shape[2] > 1:
        tensor = tensor[:, :, slice(*span.queries)]
    if tensor.shape[3] > 1:
        tensor = tensor[..., slice(*span.keys)]
    return tensor
