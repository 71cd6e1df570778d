"""The weights that nn.MultiheadAttention returns: head by head, with gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import dropout

from multihead.call import Attended, AttentionRequest
from multihead.kernels.dense_tile import scores, seen, without_autocast, working_dtype
from multihead.kernels.reference import softmax
from multihead.scores.bias import dense_bias
from multihead.tracing import traced


def returned_weights(
    request: AttentionRequest, attended: Attended, *, average: bool, random_state: Tensor | None
) -> Tensor:
    """Compute the weights of a call that has run.

    Args:
        request: the call, with as many key/value heads as heads.
        attended: what came of it.
        average: whether the heads are averaged; then no more than one head's weights are held beside the result.
        random_state: that of the generator before the call, so that dropout falls on the same weights again.

    Returns: (batch, queries, keys), or (batch, heads, queries, keys), in the dtype of q; after dropout.
    """
    at_once = average and not request.dropout  # what is dropped of each head decides their average
    if traced() and not torch.compiler.is_compiling():  # other tracers record no autograd.Function, or half of one
        weights = _all_heads(request)
        weights = weights.mean(1) if at_once else weights
    else:
        weights = _Weights.apply(  # type: ignore[no-untyped-call]
            request.q, request.k, request.bias, attended.logsumexp.detach(), request, at_once
        )
    if request.dropout:
        weights = weights * _dropped_again(weights, request.dropout, random_state)
        weights = weights.mean(1) if average else weights
    return weights.to(request.q.dtype)


def _all_heads(request: AttentionRequest) -> Tensor:
    """Compute the weights before dropout: (batch, heads, queries, keys), in the working dtype."""
    with without_autocast(request.q.device):
        weights, _ = softmax(scores(request).masked_fill(~seen(request), -torch.inf), None)
    return weights


def random_state(device: torch.device) -> Tensor:
    """Read the state of a device's random generator."""
    state: Tensor
    state = torch.get_rng_state() if device.type == "cpu" else torch.get_device_module(device).get_rng_state(device)
    return state


def _dropped_again(weights: Tensor, share: float, state: Tensor | None) -> Tensor:
    """Draw what a call's dropout drew: 0, or 1 / (1 - share). The generator is left as it was."""
    device = weights.device
    with torch.random.fork_rng([] if device.type == "cpu" else [device], device_type=device.type):
        if state is not None:
            if device.type == "cpu":
                torch.set_rng_state(state)
            else:
                torch.get_device_module(device).set_rng_state(state, device)
        return dropout(torch.ones_like(weights), share)


class _Weights(torch.autograd.Function):
    """softmax(scores), one head at a time, forward and backward: a graph holds no head's weights."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        bias: Tensor | None,
        logsumexp: Tensor,
        request: AttentionRequest,
        average: bool,  # noqa: FBT001  (autograd takes no keywords)
    ) -> Tensor:
        ctx.save_for_backward(q, k, bias, logsumexp)
        ctx.request, ctx.average = request, average
        batch, heads, queries = logsumexp.shape
        hidden = _hidden(request)
        if not average:
            every = logsumexp.new_empty(batch, heads, queries, k.shape[2])
            for head in range(heads):
                every[:, head] = _of_head(request, logsumexp, hidden, head)
            return every
        total = _of_head(request, logsumexp, hidden, 0)
        for head in range(1, heads):
            total += _of_head(request, logsumexp, hidden, head)
        return total.div_(heads)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_weights: Tensor) -> tuple[Tensor, Tensor, Tensor | None, None, None, None]:
        q, k, bias, logsumexp = ctx.saved_tensors
        request, heads = ctx.request, q.shape[1]
        dtype = logsumexp.dtype
        dq, dk = torch.empty_like(q, dtype=dtype), torch.empty_like(k, dtype=dtype)
        dbias = None if bias is None or not ctx.needs_input_grad[2] else torch.zeros_like(bias, dtype=dtype)
        hidden = _hidden(request)
        for head in range(heads):
            weights = _of_head(request, logsumexp, hidden, head)
            of_head = of_weights / heads if ctx.average else of_weights[:, head]
            # The softmax: dp_ij / ds_ik = p_ij (1[j = k] - p_ik).
            of_scores = weights * (of_head - (weights * of_head).sum(-1, keepdim=True))  # (batch, queries, keys)
            dq[:, head] = of_scores @ k[:, head].to(dtype) * request.scale
            dk[:, head] = of_scores.mT @ q[:, head].to(dtype) * request.scale
            if dbias is not None:
                part = dbias[:, head : head + 1] if dbias.shape[1] > 1 else dbias
                part += of_scores[:, None].sum_to_size(part.shape)
        of_bias = None if dbias is None else dbias.to(bias.dtype)
        return dq.to(q.dtype), dk.to(k.dtype), of_bias, None, None, None


def _hidden(request: AttentionRequest) -> Tensor | None:
    """Tell which cells no query may see: bool, (batch or 1, heads or 1, queries, keys); None where all are seen."""
    if request.mask.hides_nothing and request.bias is None:
        return None
    return ~seen(request)


def _of_head(request: AttentionRequest, logsumexp: Tensor, hidden: Tensor | None, head: int) -> Tensor:
    """Compute one head's weights: (batch, queries, keys), in the working dtype; 0 where hidden.

    Each row is normalised by its own sum. The logsumexp of a kernel, whose scores were summed in another order, is
    off by 1e-4 at scores of 400; here it marks the rows of NaN.
    """
    dtype = working_dtype(request.q.dtype)
    row = logsumexp[:, head, :, None]  # (batch, queries, 1)
    with torch.no_grad(), without_autocast(request.q.device):
        q, k = request.q[:, head].to(dtype), request.k[:, head].to(dtype)
        cells = (q * request.scale) @ k.mT
        if request.bias is not None:
            bias = dense_bias(request.bias, request.shape).detach()
            cells += bias[:, head if bias.shape[1] > 1 else 0].to(dtype)
        if hidden is None:
            return cells.softmax(-1).masked_fill_(row.isnan(), torch.nan)
        hidden = hidden[:, head if hidden.shape[1] > 1 else 0]
        weights = cells.masked_fill_(hidden, -torch.inf).softmax(-1)
        # A query that sees no key divides 0 by 0.
        return weights.masked_fill_(row.isnan(), torch.nan).masked_fill_(hidden, 0)
