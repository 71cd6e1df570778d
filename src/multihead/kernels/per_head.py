"""Attention a few heads at a time, so that their weights stay in the cache: for dropout, and for weights asked for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from multihead import listeners
from multihead.call import Attended, AttentionCall, AttentionRequest
from multihead.kernels.dense_tile import seen, without_autocast
from multihead.kernels.native import library
from multihead.scores.bias import dense_bias
from multihead.tracing import traced

# Weights computed together, over samples and heads. 1 MiB of float32: the matrix products are as fast as large ones,
# and the softmax is 5 times faster than over all weights at once.
CELLS = 1 << 18
# Up to here this is within 5 % of the fused kernel (measured in a whole layer), and its weights cost next to nothing;
# beside the fused kernel they would cost a third of the layer once more.
KEYS = 1024


def suits(request: AttentionRequest, *, need_weights: bool) -> bool:
    """Whether a call is computed here.

    Under dropout it always is, so that it falls as that of the original does. Without it a kernel is the better one
    for gradients, for masks of which it skips a part, and for many keys; the native one where no weights are returned.
    """
    shape = request.shape
    if traced() or shape.device.type != "cpu" or not shape.cells:
        return False
    if not need_weights and not request.dropout and library.absence() is None and shape.dtype == torch.float32:
        return False
    if shape.dtype not in (torch.float32, torch.float64):
        return False
    if not request.dropout and (_follows(request) or not request.mask.hides_nothing or shape.key_length > KEYS):
        return False
    return _finite(request)


def attended_by_head(request: AttentionRequest, *, need_weights: bool, average: bool) -> tuple[Tensor, Tensor | None]:
    """Attend, publish the call, and return the output and the weights after dropout.

    Args:
        request: a call that suits, with as many key/value heads as heads.
        need_weights: whether the weights are returned.
        average: whether they are averaged over the heads.

    Returns: (batch, heads, queries, value_dim); (batch, queries, keys) or (batch, heads, queries, keys), or None.
    """
    request = replace(request, wanted=listeners.wanted())
    keep = None
    if request.dropout:
        shape = request.shape
        size = (shape.batch, shape.num_heads, shape.query_length, shape.key_length)
        # One draw of the whole falls as that of the original does.
        keep = torch.empty(size, dtype=torch.bool).bernoulli_(1 - request.dropout)
    given = (request.q, request.k, request.v, _bias_of(request), keep, request, need_weights, average)
    with without_autocast(request.shape.device):
        if _follows(request):
            output, weights = _ByHead.apply(*given)  # type: ignore[no-untyped-call]
        else:
            output, weights = _forward(*given)
        if listeners.listeners():
            listeners.publish(AttentionCall(request, Attended(output, _logsumexp(request))))
    return output, weights


class _ByHead(torch.autograd.Function):
    """The attention whose backward pass computes the weights anew: of all weights a graph holds a bit of dropout."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> tuple[Tensor, Tensor | None]:
        ctx.save_for_backward(*given[:5])
        ctx.request, ctx.need_weights, ctx.average = given[5:]
        ctx.set_materialize_grads(False)
        return _forward(*given)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_output: Tensor | None, of_weights: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, bias, keep = ctx.saved_tensors
        request, heads = ctx.request, q.shape[1]
        dq, dk, dv = (torch.zeros_like(tensor, memory_format=torch.preserve_format) for tensor in (q, k, v))
        dbias = torch.zeros_like(bias) if ctx.needs_input_grad[3] else None
        hidden = _hidden(request)
        for tile in _tiles(request):
            weights = _weights(request, hidden, tile)  # (samples, heads, queries, keys), before dropout
            factor = None if keep is None else _factor(request, keep[tile])
            of_dropped = torch.zeros_like(weights) if of_output is None else of_output[tile] @ v[tile].mT
            if of_weights is not None:
                of_dropped += of_weights[tile[0]][:, None] / heads if ctx.average else of_weights[tile]
            if of_output is not None:
                dropped = weights if factor is None else weights * factor
                dv[tile] = dropped.mT @ of_output[tile]
            # The softmax: dp_ij / ds_ik = p_ij (1[j = k] - p_ik).
            of_cells = of_dropped if factor is None else of_dropped.mul_(factor)
            of_cells = weights * of_cells.sub_((weights * of_cells).sum(-1, keepdim=True))
            dq[tile] = (of_cells @ k[tile]).mul_(request.scale)
            dk[tile] = (of_cells.mT @ q[tile]).mul_(request.scale)
            if dbias is not None:
                part = _cut(dbias, tile)
                part += of_cells.sum_to_size(part.shape)
        return dq, dk, dv, dbias, None, None, None, None


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    keep: Tensor | None,
    request: AttentionRequest,
    need_weights: bool,  # noqa: FBT001  (autograd takes no keywords)
    average: bool,  # noqa: FBT001
) -> tuple[Tensor, Tensor | None]:
    """Compute the output, laid out for merging heads without a copy, and the weights that are asked for."""
    batch, heads, queries, _ = q.shape
    output = q.new_empty(batch, queries, heads, v.shape[3]).transpose(1, 2)  # (batch, heads, queries, value_dim)
    kept = None
    if need_weights:
        sizes = (batch, queries, k.shape[2]) if average else (batch, heads, queries, k.shape[2])
        kept = q.new_zeros(sizes)
    hidden = _hidden(request)
    for tile in _tiles(request):
        weights = _weights(request, hidden, tile)
        if keep is not None:
            weights.mul_(_factor(request, keep[tile]))
        output[tile] = weights @ v[tile]
        if kept is not None and average:
            for head in weights.unbind(1):  # added while they are in the cache, where a sum over heads is not
                kept[tile[0]] += head
        elif kept is not None:
            kept[tile] = weights
    return output, kept.div_(heads) if kept is not None and average else kept


def _weights(request: AttentionRequest, hidden: Tensor | None, tile: tuple[slice, slice]) -> Tensor:
    """Compute softmax(scores) of some samples and heads, 0 where hidden."""
    weights = _scores(request, hidden, tile).softmax(-1)
    # A query that sees no key divides 0 by 0.
    return weights if hidden is None else weights.masked_fill_(_cut(hidden, tile), 0)


def _scores(request: AttentionRequest, hidden: Tensor | None, tile: tuple[slice, slice]) -> Tensor:
    """Compute the scores of some samples and heads, -inf where hidden: (samples, heads, queries, keys)."""
    cells = (request.q[tile] * request.scale) @ request.k[tile].mT
    bias = _bias_of(request)
    if bias is not None:
        cells += _cut(bias, tile)
    return cells if hidden is None else cells.masked_fill_(_cut(hidden, tile), -torch.inf)


def _factor(request: AttentionRequest, kept: Tensor) -> Tensor:
    """Say what dropout makes of weights: 1 / (1 - share) of those that are kept, 0 of the others."""
    return kept.to(request.q.dtype).mul_(1 / (1 - request.dropout) if request.dropout < 1 else 0.0)


def _logsumexp(request: AttentionRequest) -> Tensor:
    """Compute the logsumexp, (batch, heads, queries), for those who listen."""
    logsumexp, hidden = request.q.new_empty(request.q.shape[:3]), _hidden(request)
    with torch.no_grad():
        for tile in _tiles(request):
            logsumexp[tile] = _scores(request, hidden, tile).logsumexp(-1)
    return logsumexp


def _hidden(request: AttentionRequest) -> Tensor | None:
    """Tell which cells no query may see: bool, (batch or 1, heads or 1, queries, keys); None where all are seen."""
    return None if request.mask.hides_nothing and request.bias is None else ~seen(request)


def _cut(tensor: Tensor, tile: tuple[slice, slice]) -> Tensor:
    """Cut some samples and heads out of a tensor whose axes have size 1 where they do not matter."""
    samples, heads = tile
    tensor = tensor[samples] if tensor.shape[0] > 1 else tensor
    return tensor[:, heads] if tensor.shape[1] > 1 else tensor


def _tiles(request: AttentionRequest) -> Iterator[tuple[slice, slice]]:
    """Share out samples and heads, so that no tile has more weights than the cache holds, or than one head has."""
    shape = request.shape
    of_head = shape.query_length * shape.key_length
    heads = min(max(1, CELLS // of_head), shape.num_heads)
    samples = max(1, CELLS // (of_head * heads)) if heads == shape.num_heads else 1
    for sample in range(0, shape.batch, samples):
        for head in range(0, shape.num_heads, heads):
            yield slice(sample, sample + samples), slice(head, head + heads)


def _bias_of(request: AttentionRequest) -> Tensor | None:
    return None if request.bias is None else dense_bias(request.bias, request.shape)


def _follows(request: AttentionRequest) -> bool:
    tensors = (request.q, request.k, request.v, _bias_of(request))
    return torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)


def _finite(request: AttentionRequest) -> bool:
    """Whether there is no NaN and no inf to be kept away from anybody: what is not finite makes a sum so."""
    total = request.q.detach().sum() + request.k.detach().sum() + request.v.detach().sum()
    bias = _bias_of(request)
    if bias is not None:
        total = total + bias.detach().masked_fill(bias.detach() == -torch.inf, 0).sum()
    return bool(torch.isfinite(total))
