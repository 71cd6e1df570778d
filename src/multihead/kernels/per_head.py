"""Compute attention a few heads at a time, so that their weights fit the CPU cache; for dropout and `need_weights`.

Tiles of 1 MiB are faster than a fused call followed by a second pass for the weights. The drop-in for
nn.MultiheadAttention (`compat/torch_nn/attention.py`) uses this module where it returns weights or applies dropout.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from multihead.kernels import head_changes
from multihead.kernels.call import (
    AttentionCall,
    AttentionRequest,
    AttentionResult,
    publish,
)
from multihead.kernels.choose import is_kernel_added
from multihead.kernels.dense_tile import hidden_cells, without_autocast
from multihead.kernels.native import library
from multihead.tensors.shapes import index_axes

# Number of weights computed at once, over samples and heads: 1 MiB of float32. Matrix products of this size are as fast
# as larger ones, and the softmax is 5 times faster than over all weights of a call.
MAX_WEIGHTS_PER_TILE = 1 << 18
# Up to this many keys this code is within 5 % of the fused kernel (measured in a whole layer), and returns the weights
# at almost no cost; computing the weights next to the fused kernel would cost another third of the layer.
MAX_KEYS = 1024


def is_computed_per_head(request: AttentionRequest, *, need_weights: bool) -> bool:
    """Whether a CPU call in float32 or float64 is computed by this module.

    Calls with dropout always are, so that a seed drops the same weights as in torch.nn. Without dropout a kernel is
    faster for gradients, masks that hide keys and many keys, and the native kernel if no weights are needed.
    """
    shape = request.shape
    if request.surroundings.traced or shape.device.type != "cpu" or not shape.num_cells:
        return False
    if shape.dtype not in (torch.float32, torch.float64):
        return False
    if not request.dropout:
        has_native_kernel = shape.dtype == torch.float32 and library.reason_of_absence() is None
        if not need_weights and (has_native_kernel or is_kernel_added()):
            return False
        if request.needs_gradient or not request.mask.hides_nothing or shape.key_length > MAX_KEYS:
            return False
    return _has_finite_inputs(request)


def attend_per_head(request: AttentionRequest, *, need_weights: bool, average: bool) -> tuple[Tensor, Tensor | None]:
    """Compute and publish a call; return the output (batch, heads, queries, value_dim) and the weights after dropout.

    `is_computed_per_head` must be True, and the request must have as many key/value heads as heads. The weights are
    (batch, heads, queries, keys), or averaged over the heads (batch, queries, keys), or None if not needed.
    """
    receivers = request.surroundings.listeners
    request = request.as_listeners_receive_it()
    keep = None
    if request.dropout:
        shape = request.shape
        size = (shape.batch, shape.num_heads, shape.query_length, shape.key_length)
        # The dropout mask is drawn once for all heads, as in torch.nn, so that a seed drops the same weights.
        keep = torch.empty(size, dtype=torch.bool).bernoulli_(1 - request.dropout)
    arguments = (request.q, request.k, request.v, request.dense_bias, keep, request, need_weights, average)
    with without_autocast(request.shape.device):
        if request.needs_gradient:
            output, weights = _AttentionPerHead.apply(*arguments)  # type: ignore[no-untyped-call]
        else:
            output, weights = _forward_per_head(*arguments)
        output, factors = head_changes.change_output(request, output) if head_changes.active_changes else (output, None)
        if receivers:
            attended = AttentionResult(output, _logsumexp_per_head(request), head_factors=factors)
            publish(AttentionCall(request, attended), receivers)
    return output, weights


class _AttentionPerHead(torch.autograd.Function):
    """Autograd function that saves only the dropout mask (bool), and recomputes the weights in the backward pass."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, Tensor | None]:
        ctx.save_for_backward(*arguments[:5])
        ctx.request, ctx.need_weights, ctx.average = arguments[5:]
        ctx.set_materialize_grads(False)
        return _forward_per_head(*arguments)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor | None, grad_weights: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, bias, keep = ctx.saved_tensors
        request, heads = ctx.request, q.shape[1]
        dq, dk, dv = (torch.zeros_like(tensor, memory_format=torch.preserve_format) for tensor in (q, k, v))
        dbias = torch.zeros_like(bias) if ctx.needs_input_grad[3] else None
        hidden = hidden_cells(request)
        for tile in _tiles_of_heads(request):
            weights = _weights_of_tile(request, hidden, tile)  # (samples, heads, queries, keys), before dropout
            factor = None if keep is None else _dropout_factor(request, keep[tile])
            of_dropped = torch.zeros_like(weights) if grad_output is None else grad_output[tile] @ v[tile].mT
            if grad_weights is not None:
                of_dropped += grad_weights[tile[0]][:, None] / heads if ctx.average else grad_weights[tile]
            if grad_output is not None:
                dropped = weights if factor is None else weights * factor
                dv[tile] = dropped.mT @ grad_output[tile]
            # Gradient of the softmax: dp_ij / ds_ik = p_ij (1[j = k] - p_ik).
            of_cells = of_dropped if factor is None else of_dropped.mul_(factor)
            of_cells = weights * of_cells.sub_((weights * of_cells).sum(-1, keepdim=True))
            dq[tile] = (of_cells @ k[tile]).mul_(request.scale)
            dk[tile] = (of_cells.mT @ q[tile]).mul_(request.scale)
            if dbias is not None:
                part = _slice_of_tile(dbias, tile)
                part += of_cells.sum_to_size(part.shape)
        return dq, dk, dv, dbias, None, None, None, None


def _forward_per_head(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    keep: Tensor | None,
    request: AttentionRequest,
    need_weights: bool,  # noqa: FBT001  (autograd takes no keywords)
    average: bool,  # noqa: FBT001
) -> tuple[Tensor, Tensor | None]:
    """Compute the output (batch, heads, queries, value_dim), laid out as merged heads, and the weights if needed."""
    batch, heads, queries, _ = q.shape
    output = q.new_empty(batch, queries, heads, v.shape[3]).transpose(1, 2)  # (batch, heads, queries, value_dim)
    returned = None
    if need_weights:
        sizes = (batch, queries, k.shape[2]) if average else (batch, heads, queries, k.shape[2])
        returned = q.new_zeros(sizes)
    hidden = hidden_cells(request)
    for tile in _tiles_of_heads(request):
        weights = _weights_of_tile(request, hidden, tile)
        if keep is not None:
            weights.mul_(_dropout_factor(request, keep[tile]))
        output[tile] = weights @ v[tile]
        if returned is not None and average:
            for head in weights.unbind(1):  # heads are averaged while their weights are in the CPU cache
                returned[tile[0]] += head
        elif returned is not None:
            returned[tile] = weights
    return output, returned.div_(heads) if returned is not None and average else returned


def _weights_of_tile(request: AttentionRequest, hidden: Tensor | None, tile: tuple[slice, slice]) -> Tensor:
    """Compute softmax(scores) of a tile of samples and heads, 0 where hidden: (samples, heads, queries, keys)."""
    weights = _scores_of_tile(request, hidden, tile).softmax(-1)
    # The softmax of a query that sees no key is NaN (0 / 0), and becomes 0 here.
    return weights if hidden is None else weights.masked_fill_(_slice_of_tile(hidden, tile), 0)


def _scores_of_tile(request: AttentionRequest, hidden: Tensor | None, tile: tuple[slice, slice]) -> Tensor:
    """Compute the scores of some samples and heads, -inf where hidden: (samples, heads, queries, keys)."""
    cells = (request.q[tile] * request.scale) @ request.k[tile].mT
    bias = request.dense_bias
    if bias is not None:
        cells += _slice_of_tile(bias, tile)
    return cells if hidden is None else cells.masked_fill_(_slice_of_tile(hidden, tile), -torch.inf)


def _dropout_factor(request: AttentionRequest, kept: Tensor) -> Tensor:
    """Return the dropout factor of each weight: 1 / (1 - dropout) where `kept`, else 0."""
    return kept.to(request.q.dtype).mul_(1 / (1 - request.dropout) if request.dropout < 1 else 0.0)


def _logsumexp_per_head(request: AttentionRequest) -> Tensor:
    """Compute the logsumexp of the scores: (batch, heads, queries)."""
    logsumexp, hidden = request.q.new_empty(request.q.shape[:3]), hidden_cells(request)
    with torch.no_grad():
        for tile in _tiles_of_heads(request):
            logsumexp[tile] = _scores_of_tile(request, hidden, tile).logsumexp(-1)
    return logsumexp


def _slice_of_tile(tensor: Tensor, tile: tuple[slice, slice]) -> Tensor:
    """Slice samples and heads of a tensor; axes of size 1 are kept for broadcasting."""
    return index_axes(tensor, dict(enumerate(tile)))


def _tiles_of_heads(request: AttentionRequest) -> Iterator[tuple[slice, slice]]:
    """Split samples and heads into tiles of at most MAX_WEIGHTS_PER_TILE weights, but at least one head."""
    shape = request.shape
    of_head = shape.query_length * shape.key_length
    heads = min(max(1, MAX_WEIGHTS_PER_TILE // of_head), shape.num_heads)
    samples = max(1, MAX_WEIGHTS_PER_TILE // (of_head * heads)) if heads == shape.num_heads else 1
    for sample in range(0, shape.batch, samples):
        for head in range(0, shape.num_heads, heads):
            yield slice(sample, sample + samples), slice(head, head + heads)


def _has_finite_inputs(request: AttentionRequest) -> bool:
    """Whether q, k, v and the bias are finite, by the sum of their elements."""
    total = request.q.detach().sum() + request.k.detach().sum() + request.v.detach().sum()
    bias = None if request.bias_values is None else request.bias_values.detach()
    if bias is not None:
        total = total + bias.masked_fill(bias == -torch.inf, 0).sum()
    return bool(torch.isfinite(total))
