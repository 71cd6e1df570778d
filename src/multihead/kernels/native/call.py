"""Call the native operators with a request and its key bounds; a dense mask is passed in blocks of queries.

The blocks keep the memory of a mask that is not an interval linear in the length, also with gradients, dropout,
statistics and int8. An operator returns new tensors, so that a block's results are copied into those of the call. The
gradient of a relative bias sums the diagonals of a map; `attention_backward` computes that map in blocks of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from multihead.kernels.call import AttentionRequest, DropoutOffset
from multihead.kernels.dense_tile import visible_in_mask
from multihead.kernels.native import library
from multihead.masks.base import KeyBounds
from multihead.scores.bias import Bias, RelativeBias, slice_bias, values_of, with_values
from multihead.tensors.shapes import consecutive_slices

# Size in bytes of a block (queries x keys) in which a mask that is not one interval per query is materialised.
DENSE_BLOCK_BYTES = 8 << 20
ALL_QUERIES = slice(None)
NO_DROPOUT_OFFSET = DropoutOffset()


def function_of_operator(name: str, *, overload: str = "default") -> Any:
    """Return the function that `OpOverload.__call__` calls, which is faster to call; None without the library."""
    if library.reason_of_absence():
        return None
    return getattr(getattr(torch.ops.multihead, name), overload)._op  # noqa: SLF001


_attention, _attention_backward, key_sums = map(function_of_operator, ("attention", "attention_backward", "key_sums"))
# Context in which the operators skip PyTorch's autograd: `kernel.py` records the gradients itself, in half of the time.
below_autograd = torch._C._AutoDispatchBelowAutograd  # noqa: SLF001 - torch has no public name for it


class QueryBlock(NamedTuple):
    """A slice of the queries of a call, and the keys that they see.

    Key j is visible if it is within `bounds`, and `visible`, (batch or 1, heads or 1, queries, keys or 1) bool or None,
    is True.
    """

    queries: slice
    bounds: KeyBounds
    visible: Tensor | None

    def slice_queries(self, tensor: Tensor) -> Tensor:
        """Slice the block's queries from a tensor (batch, heads, queries, ...), which is returned for all queries."""
        return tensor if self.queries is ALL_QUERIES else tensor[:, :, self.queries]


def iterate_query_blocks(request: AttentionRequest, bounds: KeyBounds, *, step: int = 1) -> Iterator[QueryBlock]:
    """Yield one block of all queries, or if the mask must be dense, blocks that start at multiples of `step`."""
    queries = request.shape.query_length
    if not queries or bounds.remainder is None:
        yield QueryBlock(ALL_QUERIES, bounds, None)
        return
    height = -(-min(queries_per_block(request, bounds), queries) // step) * step
    for rows in consecutive_slices(queries, height):
        part = replace(bounds, start=bounds.start[:, rows], stop=bounds.stop[:, rows])
        yield QueryBlock(rows, part, visible_in_mask(bounds.remainder, request, rows))


def queries_per_block(request: AttentionRequest, bounds: KeyBounds) -> int:
    """Return the number of queries per block, so that the block's dense mask takes about DENSE_BLOCK_BYTES."""
    shape = request.shape
    row = shape.key_length
    if bounds.remainder is not None and bounds.remainder.holds_tensors:
        row *= shape.batch * shape.num_heads  # a mask that holds tensors may differ by sample and head
    elif not bounds.is_shared_by_samples:
        row *= shape.batch
    return max(96, DENSE_BLOCK_BYTES // max(row, 1))


class OperatorCall(NamedTuple):
    """Inputs of the native operators: request, key bounds, dropout seed (() int64; None: no dropout) and offset.

    If `with_values` is False, the operator gets no v, and its output has 0 features.
    """

    request: AttentionRequest
    bounds: KeyBounds
    seed: Tensor | None = None
    dropout_offset: DropoutOffset = NO_DROPOUT_OFFSET
    with_values: bool = True


def operator_arguments(job: OperatorCall, block: QueryBlock) -> tuple[Any, ...]:
    """Return the operators' arguments from `q` to `key_start`, for one block of queries."""
    request, offset = job.request, job.dropout_offset
    bias = None if request.bias is None else _slice_bias(request.bias, block, request)
    if block.queries.start:
        offset = offset._replace(query_start=offset.query_start + block.queries.start)
    return (
        block.slice_queries(request.q),
        request.k,
        request.v if job.with_values else None,
        block.bounds.start,
        block.bounds.stop,
        block.visible,
        None if isinstance(bias, RelativeBias) else bias,
        bias.values if isinstance(bias, RelativeBias) else None,
        request.sinks,
        request.scale,
        request.softcap,
        0.0 if job.seed is None else request.dropout,
        job.seed,
        *offset,
    )


def _slice_bias(bias: Bias, block: QueryBlock, request: AttentionRequest) -> Bias:
    """Slice a bias to the queries of a block."""
    if block.queries.stop is None:  # all queries; a compiler may copy ALL_QUERIES, so `is` would fail
        return bias
    queries, keys = request.shape.query_length, request.shape.key_length
    return slice_bias(bias, queries, (block.queries.start, block.queries.stop), (0, keys))


def forward(job: OperatorCall, statistics: tuple[Any, ...] = ()) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Run the forward operator without recording gradients.

    `statistics` are the operator's arguments after `v_scales`; () measures no statistics.

    Returns:
        Output (batch, heads, queries, value_dim), logsumexp (batch, heads, queries), the requested statistics
        (number, batch, heads, queries), and the largest keys (batch, heads, queries) or (0).
    """
    request = job.request
    scales: tuple[Any, ...] = () if request.scales is None else tuple(request.scales)
    if statistics and not scales:
        scales = (None, None)
    whole: tuple[Tensor, ...] = ()
    with below_autograd():
        for block in iterate_query_blocks(request, job.bounds):
            found: tuple[Tensor, ...] = _attention(*operator_arguments(job, block), *scales, *statistics)
            if block.queries is ALL_QUERIES:
                return found  # type: ignore[return-value]
            if not whole:
                whole = tuple(
                    map(_allocate_for_all_queries, found, _QUERY_AXES, (request.shape.query_length,) * len(found))
                )
            for tensor, part, axis in zip(whole, found, _QUERY_AXES, strict=True):
                if part.dim() > 1:
                    tensor.narrow(axis, block.queries.start, part.shape[axis]).copy_(part)
    return whole  # type: ignore[return-value]


_QUERY_AXES = (-2, -1, -1, -1)  # the query axis of each result of the operator `attention`


def _allocate_for_all_queries(part: Tensor, axis: int, queries: int) -> Tensor:
    """Allocate a result for all queries, shaped like a block's result `part`; a `part` of shape (0) is returned."""
    if part.dim() == 1:
        return part
    sizes = list(part.shape)
    sizes[axis] = queries
    if axis == -2:  # memory (batch, queries, heads, dim), so that merging the heads copies nothing
        return part.new_empty(sizes[0], sizes[2], sizes[1], sizes[3]).transpose(1, 2)
    return part.new_empty(sizes)


Gradients = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def backward(
    job: OperatorCall,
    outputs: tuple[Tensor, Tensor],
    grad_output: Tensor,
    grad_logsumexp: Tensor | None,
    *,
    bias_wanted: bool,
) -> Gradients:
    """Run the backward operator: the gradients of q, k, v, bias values and sinks, in the dtypes of these tensors."""
    request = job.request
    totals: tuple[Tensor, ...] = ()
    for block in iterate_query_blocks(request, job.bounds):
        of_logsumexp = None if grad_logsumexp is None else block.slice_queries(grad_logsumexp)
        given = (
            *(block.slice_queries(each) for each in (*outputs, grad_output)),
            of_logsumexp,
            *operator_arguments(job, block),
        )
        with below_autograd():
            found: Gradients = _attention_backward(*given, bias_wanted=bias_wanted)
        if block.queries is ALL_QUERIES:
            return found
        if not totals:
            bias = found[3] if request.bias is None or not bias_wanted else values_of(request.bias)
            # The gradients are summed in float32: bfloat16 would lose small terms of the sum over blocks.
            whole = (request.q, request.k, request.v, bias, found[4])
            totals = tuple(torch.zeros_like(each, dtype=torch.float32) for each in whole)
        dq, dk, dv, dbias, dsinks = totals
        if request.bias is not None and bias_wanted:
            dbias = values_of(_slice_bias(with_values(request.bias, dbias), block, request))
        for total, part in zip((block.slice_queries(dq), dk, dv, dbias, dsinks), found, strict=True):
            total.add_(part)
    return tuple(total.to(part.dtype) for total, part in zip(totals, found, strict=True))  # type: ignore[return-value]
