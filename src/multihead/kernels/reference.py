"""The reference kernel, which supports all requests by materialising the weights; second derivatives.

A second derivative through the native and the fused kernel is computed by the reference kernel, with a warning. Those
kernels have no second derivative, and without this fallback their gradients would silently count as constants. Calls
inside `torch.func` transforms, whose tensors have no memory to read, use the reference kernel too. `strict()` turns
both fallbacks into errors.

The weights are computed in float32 (float64 for float64). This kernel also supports what the others refuse: float64
with dropout, softcap or a bias with gradient, and tensors on an accelerator. Without gradients and dropout it computes
blocks of 256 queries over the keys that these queries see. Otherwise it holds a whole queries x keys matrix, which no
other kernel does.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import dropout

from multihead.errors import ArgumentError
from multihead.kernels.call import (
    AttentionRequest,
    AttentionResult,
    WorkEstimate,
    concatenate_queries,
    find_surroundings,
)
from multihead.kernels.dense_tile import scores, visible_cells, working_dtype
from multihead.kernels.nonfinite import make_rows_nan, replace_nonfinite
from multihead.kernels.slow_paths import warn_of_slow_path
from multihead.masks.base import KeyBounds
from multihead.tensors.shapes import consecutive_slices

HANDLES_NONFINITE = False
GPU_PATH = None  # it consists of PyTorch's operators, each of which runs on every device
QUERIES_PER_BLOCK = 256  # queries per block, if the weights are not materialised all at once


def refusal(request: AttentionRequest, bounds: KeyBounds) -> str | None:
    """Return None: this kernel accepts every request."""
    return None


def reads_int8(request: AttentionRequest) -> bool:
    """Return False: int8 keys and values are dequantised before this kernel runs."""
    return False


def attend(request: AttentionRequest, bounds: KeyBounds) -> AttentionResult:
    """Compute softmax(scores) v with materialised weights; without gradients one block of queries at a time."""
    return concatenate_queries([_attend_rows(request, rows, keys) for rows, keys in _query_blocks(request, bounds)])


def _query_blocks(request: AttentionRequest, bounds: KeyBounds) -> list[tuple[slice, slice]]:
    """Return the blocks of queries that are computed one after the other, each with a range of all its visible keys."""
    queries = request.shape.query_length
    if _materialises_all_weights(request) or queries <= QUERIES_PER_BLOCK:
        return [(slice(0, queries), slice(0, request.shape.key_length))]
    return [(rows, _range_of_visible_keys(bounds, rows)) for rows in consecutive_slices(queries, QUERIES_PER_BLOCK)]


def _attend_rows(request: AttentionRequest, rows: slice, keys: slice) -> AttentionResult:
    """Compute attention of a range of queries, given a range of keys that contains all their visible keys."""
    dtype = working_dtype(request.q.dtype)
    hidden = ~visible_cells(request, rows, keys)
    cells = scores(request, rows, keys, hidden=hidden)
    weights, logsumexp = softmax(cells, request.sinks)  # (batch, heads, queries, keys), (batch, heads, queries)
    if request.surroundings.traced or request.needs_gradient:
        # The gradient of a hidden weight may overflow, and 0 * inf is NaN.
        weights = weights.masked_fill(hidden, 0)
    dropped = dropout(weights, request.dropout) if request.dropout else weights
    grouped = dropped.unflatten(1, (request.shape.num_kv_heads, -1))  # (batch, kv_heads, group, queries, keys)
    summed = grouped.flatten(2, 3) @ request.v[:, :, keys].to(dtype)  # (batch, kv_heads, group * queries, value_dim)
    output = summed.unflatten(2, grouped.shape[2:4]).flatten(1, 2)
    return AttentionResult(output.to(request.q.dtype), logsumexp)


def _materialises_all_weights(request: AttentionRequest) -> bool:
    """Whether all weights are materialised at once.

    With gradients autograd saves all weights anyway, dropout draws a number for each weight, and in a graph or a
    transform the visible keys of a block are unknown.
    """
    return request.dropout > 0 or request.surroundings.traced or request.needs_gradient


def _range_of_visible_keys(bounds: KeyBounds, rows: slice) -> slice:
    """Return the smallest range of keys that contains the intervals of some queries."""
    start, stop = bounds.start[:, rows], bounds.stop[:, rows]
    seeing = start < stop
    return slice(int(start[seeing].min()), int(stop.max())) if bool(seeing.any()) else slice(0, 0)


def softmax(cells: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """Compute weights (batch, heads, queries, keys) and logsumexp (batch, heads, queries) of masked scores.

    Hidden scores are -inf. A query without visible keys has weights of 0, a logsumexp of -inf, and gradients without
    NaN. Sinks (heads,) are additional logits of the softmax.
    """
    empty = (cells == -torch.inf).all(-1, keepdim=True)  # (batch, heads, queries, 1)
    if cells.shape[-1] == 0:
        return cells, cells.new_full(cells.shape[:-1], -torch.inf)
    # exp(s - m) cannot overflow where m is the row's largest score; m cancels in the ratio (arXiv:1805.02867).
    largest = cells.detach().amax(-1, keepdim=True)
    sink = None if sinks is None else sinks.to(cells.dtype).view(-1, 1, 1)
    if sink is not None:
        largest = torch.maximum(largest, sink.detach())
    largest = largest.masked_fill(largest == -torch.inf, 0)
    exponentials = (cells - largest).exp()
    total = exponentials.sum(-1, keepdim=True)
    if sink is not None:
        total = total + (sink - largest).exp()
    total = total.masked_fill(empty, 1)
    logsumexp = (largest + total.log()).masked_fill(empty, -torch.inf)
    return exponentials / total, logsumexp[..., 0]


def estimate_work(request: AttentionRequest, bounds: KeyBounds) -> WorkEstimate:
    """Estimate the scores computed and the memory: three tensors of scores at the peak."""
    shape = request.shape
    heads = shape.batch * shape.num_heads
    blocks = [(rows.stop - rows.start, keys.stop - keys.start) for rows, keys in _query_blocks(request, bounds)]
    cells = sum(queries * keys for queries, keys in blocks)
    scores_bytes = 3 * heads * blocks[0][0] * max(keys for _, keys in blocks) * working_dtype(shape.dtype).itemsize
    # The results of several blocks are concatenated, so that all results are held twice.
    copies_bytes = 2 * shape.num_rows * (shape.value_dim + 1) * shape.dtype.itemsize
    return WorkEstimate(heads * cells, scores_bytes + (copies_bytes if len(blocks) > 1 else 0))


def differentiable_gradients(
    kernel: str,
    request: AttentionRequest,
    bounds: KeyBounds,
    grad_output: Tensor | None,
    grad_logsumexp: Tensor | None,
) -> tuple[Tensor | None, ...]:
    """Compute the required gradients of q, k, v, bias and sinks such that they can be differentiated again.

    Args:
        kernel: name of the kernel that computed the call, for the warning.
        request: the request, with the tensors that autograd saved.
        bounds: the key interval of each query.
        grad_output: gradient of the output, or None.
        grad_logsumexp: gradient of the logsumexp, or None.

    Raises:
        ArgumentError: the call has dropout, and its random choice cannot be repeated.
    """
    if request.dropout:
        raise ArgumentError(
            f"Kernel {kernel!r} has no second derivative with dropout, and create_graph=True requires one.",
            "Set dropout to 0, or give kernel='reference'.",
        )
    warn_of_slow_path(
        f"Kernel {kernel!r} has no second derivative, and create_graph=True requires one: "
        "the reference kernel computes the call again, and holds queries x keys.",
        "Give kernel='reference' to compute the call only once.",
    )
    tensors = (request.q, request.k, request.v, request.bias_values, request.sinks)
    inputs = [tensor for tensor in tensors if tensor is not None and tensor.requires_grad]
    fresh = replace(request, requested_statistics=frozenset(), surroundings=find_surroundings())
    with torch.enable_grad():
        cleaned, bad_rows = replace_nonfinite(fresh, bounds)
        attended = attend(cleaned, bounds)
        attended = attended if bad_rows is None else make_rows_nan(attended, bad_rows)
        pairs = ((attended.output, grad_output), (attended.logsumexp, grad_logsumexp))
        outputs, gradients = zip(*((out, of) for out, of in pairs if of is not None), strict=True)
        results = iter(torch.autograd.grad(outputs, inputs, gradients, create_graph=True, materialize_grads=True))
    return tuple(next(results) if tensor is not None and tensor.requires_grad else None for tensor in tensors)
