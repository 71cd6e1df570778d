"""Compute the attention weights of a call along with its output, for drop-ins that return both.

The weights are softmax(scores). To save memory, a custom gradient computes them again in groups of heads: as many heads
at a time as fit in 1 MiB, and at least one. NaN in hidden keys is replaced before the scores, because in the gradient
of q it would be multiplied by 0; rows that see NaN are filled with NaN afterwards. Hidden scores are filled with -inf,
and with 0 in a row without visible keys, whose softmax would be 0 / 0. Under dropout the output is computed from the
returned weights themselves, which needs no second draw of the generator. Where operations are recorded or transformed
(`is_traced()`) all heads are computed at once with plain operations. A forward and backward pass takes 1.0 to 1.4 times
as long as one that stores the weights of all heads (one thread, 10 to 1,024 tokens), and the autograd graph keeps 8 MiB
instead of 43 MiB at 8 heads of 1,024 tokens. Groups of heads are used because one head at a time took twice as long as
all heads at once in small calls (0.4 against 0.2 ms at 8 heads of 10 tokens).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import dropout

from multihead.functional import attend
from multihead.kernels import head_changes
from multihead.kernels.call import NOTHING_AROUND, AttentionRequest
from multihead.kernels.dense_tile import hidden_cells, visible_cells, without_autocast, without_qkv, working_dtype
from multihead.kernels.nonfinite import replace_nonfinite
from multihead.kernels.per_head import MAX_WEIGHTS_PER_TILE
from multihead.kernels.plan.bounds import bounds_of
from multihead.tensors.shapes import consecutive_slices
from multihead.tensors.tracing import is_traced


def attend_with_weights(request: AttentionRequest, *, average: bool = False) -> tuple[Tensor, Tensor]:
    """Compute the output and the weights of a call, both differentiable.

    With dropout, the weights are returned after dropout, and the output is computed from them. Observers of the call
    then receive it without dropout, because statistics are those of the weights before dropout. Without dropout,
    averaging holds the weights of one head at a time (or 1 MiB of weights), also in the backward pass.

    The request must have no softcap and no sinks, and as many key/value heads as query heads.

    Returns:
        the output (batch, heads, queries, value_dim), and the weights (batch, heads, queries, keys), or
        (batch, queries, keys) if averaged, both in the dtype of q; a query that sees no key has 0 in both.

    >>> from multihead.functional import request_of
    >>> output, weights = attend_with_weights(request_of(*torch.randn(3, 1, 2, 4, 8).unbind()))
    >>> weights.shape, torch.allclose(weights.sum(-1), torch.ones(1, 2, 4))
    (torch.Size([1, 2, 4, 4]), True)
    """
    dtype = request.q.dtype
    if not request.dropout:
        return attend(request).output, _weights_before_dropout(request, average=average)[0].to(dtype)
    if request.surroundings.listeners:
        with torch.no_grad():
            attend(replace(request, dropout=0.0))
    weights, v = _weights_before_dropout(request)
    dropped = dropout(weights, request.dropout)
    with without_autocast(request.shape.device):
        output = dropped @ v.to(dropped.dtype)
    if head_changes.active_changes:
        output = head_changes.change_output(request, output)[0]
    return output.to(dtype), (dropped.mean(1) if average else dropped).to(dtype)


class LastWeights:
    """The weights of a layer's last call, computed when they are read.

    It stores the request of the call, and no queries x keys tensor. A copied or unpickled layer starts without weights,
    because a tensor with a graph cannot be copied.
    """

    def __init__(self) -> None:
        self._source: AttentionRequest | Tensor | None = None

    def __reduce__(self) -> tuple[type[LastWeights], tuple[()]]:
        return LastWeights, ()

    def store(self, source: AttentionRequest | Tensor) -> None:
        """Store the request of a call, or its weights, (batch, heads, queries, keys), if they are computed already.

        The origin and the listeners of the request are removed: the origin refers to the layer that holds this object.
        """
        self._source = source
        if not isinstance(source, Tensor):
            self._source = replace(source, origin=None, surroundings=NOTHING_AROUND)

    def weights(self) -> Tensor | None:
        """Return the stored weights, or compute them before dropout: (batch, heads, queries, keys)."""
        source = self._source
        if isinstance(source, AttentionRequest):
            return _weights_before_dropout(source)[0].to(source.q.dtype)
        return source


def _weights_before_dropout(request: AttentionRequest, *, average: bool = False) -> tuple[Tensor, Tensor]:
    """Return the weights of a call before dropout, in the dtype of the computation, and v with hidden NaN set to 0."""
    with without_autocast(request.shape.device):
        # Hidden NaN is replaced first: it would reach the gradient of the weights, where 0 * NaN is summed.
        request, bad_rows = replace_nonfinite(request, bounds_of(request))
        q, k, bias = request.q, request.k, request.dense_bias
        # torch.func and torch.jit.trace do not support such an autograd.Function; a compiler decides what to keep.
        if is_traced():
            weights = _softmax_of_heads(q, k, bias, hidden_cells(request), request.scale, slice(None))
            weights = weights.mean(1) if average else weights
        else:
            weights = _AttentionWeights.apply(q, k, bias, without_qkv(request), average)  # type: ignore[no-untyped-call]
        if bad_rows is not None:
            bad = bad_rows[..., None] & visible_cells(request)  # (batch, heads, queries, keys)
            weights = weights.masked_fill(bad.any(1) if average else bad, torch.nan)
    return weights, request.v


class _AttentionWeights(torch.autograd.Function):
    """Differentiable softmax(scores), a few heads at a time: only q, k and the bias are saved for the backward pass.

    The backward pass consists of differentiable operations, so second derivatives exist.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        bias: Tensor | None,
        request: AttentionRequest,
        average: bool,  # noqa: FBT001  (autograd takes no keywords)
    ) -> Tensor:
        ctx.save_for_backward(q, k, bias)
        ctx.request, ctx.average = request, average
        batch, heads, queries, _ = q.shape
        result = q.new_zeros((batch, 1 if average else heads, queries, k.shape[2]), dtype=working_dtype(q.dtype))
        hidden = hidden_cells(request)
        for some in _groups_of_heads(q, k):
            weights = _softmax_of_heads(q, k, bias, hidden, request.scale, some)
            if average:
                result += weights.sum(1, keepdim=True)
            else:
                result[:, some] = weights
        return result[:, 0] / heads if average else result

    @staticmethod
    def backward(ctx: Any, grad_weights: Tensor) -> tuple[Tensor | None, ...]:
        q, k, bias = ctx.saved_tensors
        request, heads, dtype = ctx.request, q.shape[1], grad_weights.dtype
        dq, dk = torch.empty_like(q, dtype=dtype), torch.empty_like(k, dtype=dtype)
        dbias = torch.zeros_like(bias, dtype=dtype) if ctx.needs_input_grad[2] else None
        hidden = hidden_cells(request)
        with without_autocast(q.device):
            for some in _groups_of_heads(q, k):
                weights = _softmax_of_heads(q, k, bias, hidden, request.scale, some)
                d_some = grad_weights[:, None] / heads if ctx.average else grad_weights[:, some]
                # The derivative of the softmax: dp_ij / ds_ik = p_ij (1[j = k] - p_ik).
                d_scores = weights * (d_some - (weights * d_some).sum(-1, keepdim=True))
                dq[:, some] = d_scores @ k[:, some].to(dtype) * request.scale
                dk[:, some] = d_scores.mT @ q[:, some].to(dtype) * request.scale
                if dbias is not None:
                    part = _slice_heads(dbias, some)
                    part += d_scores.sum_to_size(part.shape)
        return dq.to(q.dtype), dk.to(k.dtype), None if dbias is None else dbias.to(bias.dtype), None, None


def _softmax_of_heads(
    q: Tensor, k: Tensor, bias: Tensor | None, hidden: Tensor | None, scale: float, heads: slice
) -> Tensor:
    """Compute the weights of some heads: (batch, heads, queries, keys), in the dtype of the computation; 0 if hidden.

    Each row is divided by its own sum, not by the logsumexp of a kernel: a kernel adds the products of q and k in
    another order, so at scores of 400 the rows would sum to 1 only within 1e-4.
    """
    dtype = working_dtype(q.dtype)
    scores = (q[:, heads].to(dtype) * scale) @ k[:, heads].to(dtype).mT
    if bias is not None:
        scores = scores + _slice_heads(bias, heads).to(dtype)
    if hidden is None:
        return scores.softmax(-1)
    hidden = _slice_heads(hidden, heads)
    # Hidden scores become -inf. In a row without visible keys they become 0, because softmax(-inf, ...) is 0 / 0.
    sees_keys = ~hidden.all(-1, keepdim=True)
    filling = torch.zeros(sees_keys.shape, dtype=dtype, device=scores.device).masked_fill(sees_keys, -torch.inf)
    return torch.where(hidden, filling, scores).softmax(-1).masked_fill(hidden, 0)


def _groups_of_heads(q: Tensor, k: Tensor) -> list[slice]:
    """Return the heads to compute together: one, or as many as have at most MAX_WEIGHTS_PER_TILE weights in total."""
    batch, heads, queries, _ = q.shape
    step = max(1, MAX_WEIGHTS_PER_TILE // max(1, batch * queries * k.shape[2]))
    return list(consecutive_slices(heads, step))


def _slice_heads(tensor: Tensor, heads: slice) -> Tensor:
    """Slice the heads of a tensor, unless all heads share it: (batch or 1, heads or 1, ...)."""
    return tensor[:, heads] if tensor.shape[1] > 1 else tensor
