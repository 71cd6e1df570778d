"""The kernel that materialises the weights: any dtype, any option; in float64 the oracle of the tests."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import dropout

from multihead.call import Attended, AttentionRequest, Work
from multihead.kernels.tile import scores, seen, working_dtype
from multihead.plan.bounds import KeyBounds


def refusal(request: AttentionRequest, bounds: KeyBounds) -> str | None:
    """Say in one sentence why this kernel will not take a request: it takes all."""
    return None


def attend(request: AttentionRequest, bounds: KeyBounds) -> Attended:
    """Compute softmax(scores) v with every weight written down."""
    dtype = working_dtype(request.q.dtype)
    visible = seen(request)
    cells = scores(request).masked_fill(~visible, -torch.inf)  # (batch, heads, queries, keys)
    weights, logsumexp = softmax(cells, request.sinks)
    dropped = dropout(weights, request.dropout) if request.dropout else weights
    grouped = dropped.unflatten(1, (request.shape.num_kv_heads, -1))  # (batch, kv_heads, group, queries, keys)
    summed = grouped.flatten(2, 3) @ request.v.to(dtype)  # (batch, kv_heads, group * queries, value_dim)
    output = summed.unflatten(2, grouped.shape[2:4]).flatten(1, 2)
    return Attended(output.to(request.q.dtype), logsumexp)


def softmax(cells: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """Softmax whose rows may be empty: weights 0 and logsumexp -inf there, and no NaN in any gradient.

    Args:
        cells: (batch, heads, queries, keys), scores, -inf where hidden.
        sinks: (heads,) logits that take weight, or None.

    Returns: weights (batch, heads, queries, keys) and logsumexp (batch, heads, queries).
    """
    empty = (cells == -torch.inf).all(-1, keepdim=True)  # (batch, heads, queries, 1)
    if cells.shape[-1] == 0:
        return cells, cells.new_full(cells.shape[:-1], -torch.inf)
    # exp(s - m) cannot overflow where m is the row's largest score; m cancels in the ratio (arXiv:1805.02867).
    largest = cells.detach().amax(-1, keepdim=True)
    sink = None if sinks is None else sinks.to(cells.dtype).view(-1, 1, 1)
    if sink is not None:
        largest = torch.maximum(largest, sink.detach())
    largest = largest.masked_fill(empty, 0)
    exponentials = (cells - largest).exp()
    total = exponentials.sum(-1, keepdim=True)
    if sink is not None:
        total = total + (sink - largest).exp()
    total = total.masked_fill(empty, 1)
    logsumexp = (largest + total.log()).masked_fill(empty, -torch.inf)
    return exponentials / total, logsumexp[..., 0]


def work(request: AttentionRequest, bounds: KeyBounds) -> Work:
    """Estimate what a call computes and holds: every cell, and at its peak three tensors of that size."""
    cells = request.shape.cells
    return Work(cells, 3 * cells * working_dtype(request.q.dtype).itemsize)
