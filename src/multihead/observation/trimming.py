"""Cut one sample out of an attention call, without its padding and without the samples packed beside it."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from multihead.call import Attended, AttentionCall, AttentionRequest
from multihead.masks import Keep
from multihead.masks.base import KeyBounds
from multihead.masks.counts import as_tensor
from multihead.masks.place import Span
from multihead.plan.bounds import bounds_of
from multihead.scores.bias import Bias
from multihead.scores.relative import Relative


def spans(request: AttentionRequest, *, queries: Tensor | None = None, keys: Tensor | None = None) -> list[Span]:
    """Say where each sample of a call stands.

    Args:
        request: the call.
        queries: (batch, queries) bool, True = no padding; None where nothing says: then queries at the end that
            see no key are taken for padding.
        keys: (batch, keys) bool, True = no padding; None where nothing says. Keys at the end that no query may
            see are left out in any case.
    """
    shape = request.shape
    if request.packed_lengths is not None:
        ends = as_tensor(request.packed_lengths, "cpu").cumsum(0).tolist()
        places = list(zip([0, *ends[:-1]], ends, strict=True))
        return [Span(0, place, place) for place in places]
    bounds = bounds_of(request)
    return [_span(bounds, sample, shape.key_length, queries, keys) for sample in range(shape.batch)]


def _span(bounds: KeyBounds, sample: int, keys: int, real: Tensor | None, real_keys: Tensor | None) -> Span:
    row = 0 if bounds.shared else sample
    start, stop = bounds.start[row], bounds.stop[row]
    seeing = start < stop  # (queries,)
    if real is not None:
        first, behind = hull(real[sample])
    else:
        first, behind = 0, hull(seeing)[1] if bool(seeing.any()) else seeing.numel()
    counted = stop[first:behind][seeing[first:behind]]
    last = int(counted.max()) if counted.numel() else keys
    if real_keys is None:
        return Span(sample, (first, behind), (0, last))
    first_key, behind_key = hull(real_keys[sample])
    return Span(sample, (first, behind), (first_key, max(first_key, min(behind_key, last))))


def hull(flags: Tensor) -> tuple[int, int]:
    """Find the first True and the place behind the last: (n,) bool; (0, 0) where there is none.

    >>> hull(torch.tensor([False, True, False, True, False]))
    (1, 4)
    """
    found = flags.nonzero().flatten()
    return (int(found[0]), int(found[-1]) + 1) if found.numel() else (0, 0)


def cut(call: AttentionCall, span: Span) -> AttentionCall:
    """Cut one sample out of a call: a call with a batch of one, that means the same on what is left.

    Statistics that the kernel gave are kept where the whole sample is.
    """
    request, attended = call.request, call.attended
    sample = slice(span.sample, span.sample + 1)
    rows, columns = slice(*span.queries), slice(*span.keys)
    shape = replace(
        request.shape,
        batch=1,
        query_length=rows.stop - rows.start,
        key_length=columns.stop - columns.start,
    )
    start = request.query_start
    origin = int(start[span.sample]) if isinstance(start, Tensor) else start
    position = origin + rows.start - columns.start
    packed = request.packed_lengths is not None
    mask = (request.mask.without_documents() if packed else request.mask).part(span)
    if not mask.uses_positions:
        position = max(position, 0)  # a place before the first key means nothing to a mask of cross-attention
    small = replace(
        request,
        q=request.q[sample, :, rows],
        k=request.k[sample, :, columns],
        v=request.v[sample, :, columns],
        shape=shape,
        mask=mask,
        query_start=position,
        bias=None if request.bias is None else _bias_of_part(request.bias, request.shape.query_length, span),
        packed_lengths=None,
    )
    whole = (rows.stop - rows.start, columns.stop - columns.start) == (
        request.shape.query_length,
        request.shape.key_length,
    )
    kept = {name: value[sample] for name, value in attended.statistics.items()} if whole else {}
    return AttentionCall(small, Attended(attended.output[sample, :, rows], attended.logsumexp[sample, :, rows], kept))


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
    return AttentionCall(replace(call.request, mask=mask), Attended(call.attended.output, logsumexp))


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
