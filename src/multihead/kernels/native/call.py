"""Lay a call out for the native kernel: addresses, sizes and strides by the names of csrc/call.h."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from multihead.call import AttentionRequest
from multihead.kernels.native import library
from multihead.kernels.native.library import AT
from multihead.masks.base import KeyBounds
from multihead.masks.place import Place
from multihead.scores.bias import Bias
from multihead.scores.relative import RelativeBias

DTYPES = {torch.float32: 0, torch.bfloat16: 1}
# A part of the mask that is no interval is made dense for so many bytes of queries x keys at a time.
DENSE_BYTES = 8 << 20

Fields = list[float]

_CPU = torch.device("cpu")

# Where in a call's fields the usual ones stand: a call should cost microseconds.
_Q, _K, _START, _STOP = (AT[name] for name in ("q", "k", "start", "stop"))
_BOUNDS_BATCH, _DTYPE, _SCALE = AT["bounds_batch"], AT["dtype"], AT["scale"]
_SIZES_AND_STRIDES = slice(AT["batch"], AT["k_row"] + 1)  # batch, ..., value_dim, those of q, those of k
WHOLE = slice(None)


class Rows(NamedTuple):
    """Some consecutive queries of a call, and what they may see.

    Fields:
        rows: which queries.
        bounds: theirs.
        seen: (batch or 1, heads or 1, rows, keys or 1) bool, the part of the mask that is no interval; or None.
    """

    rows: slice
    bounds: KeyBounds
    seen: Tensor | None

    def of(self, tensor: Tensor) -> Tensor:
        """Cut these queries out of a tensor (batch, heads, queries, ...), or keep it whole where all are meant."""
        return tensor if self.rows is WHOLE else tensor[:, :, self.rows]


def blocks(request: AttentionRequest, bounds: KeyBounds, *, step: int = 1, height: int | None = None) -> Iterator[Rows]:
    """Yield all queries at once, or block by block where what they see must be written down cell by cell.

    A block's first query is a multiple of `step`; with a `height` there are blocks of at most so many queries.
    """
    queries = request.shape.query_length
    if not queries or (bounds.remainder is None and height is None):
        yield Rows(WHOLE, bounds, None)
        return
    if bounds.remainder is not None:
        height = min(block_height(request, bounds), height or queries)
    height = -(-max(height or 1, 1) // step) * step
    for first in range(0, queries, height):
        rows = slice(first, min(first + height, queries))
        place = Place.of(
            queries,
            request.shape.key_length,
            query_start=request.query_start,
            device=request.shape.device,
            rows=rows,
        )
        part = replace(bounds, start=bounds.start[:, rows], stop=bounds.stop[:, rows])
        yield Rows(rows, part, None if bounds.remainder is None else bounds.remainder.tile(place))


def block_height(request: AttentionRequest, bounds: KeyBounds) -> int:
    """Return how many queries of a mask that is no interval are looked at together."""
    shape = request.shape
    row = shape.key_length
    if bounds.remainder is not None and bounds.remainder.holds_tensors:
        row *= shape.batch * shape.num_heads  # a tensor may speak of each
    elif not bounds.shared:
        row *= shape.batch
    return max(96, DENSE_BYTES // max(row, 1))


def call_fields(request: AttentionRequest, rows: Rows, q: Tensor, k: Tensor) -> Fields:
    """Lay out what every pass takes: q, k, the bounds, the terms of the scores and the sizes.

    The tensors must outlive the call. q, k have features beside each other, `request.bias` is in float32.
    """
    shape, start, stop = request.shape, rows.bounds.start, rows.bounds.stop
    q = rows.of(q)
    fields = library.blank()
    fields[_Q], fields[_K] = q.data_ptr(), k.data_ptr()
    fields[_START], fields[_STOP] = start.data_ptr(), stop.data_ptr()
    fields[_SIZES_AND_STRIDES] = (
        shape.batch,
        shape.num_heads,
        shape.num_kv_heads,
        q.shape[2],
        shape.key_length,
        shape.head_dim,
        shape.value_dim,
        *q.stride()[:3],
        *k.stride()[:3],
    )
    if start.shape[0] > 1:
        fields[_BOUNDS_BATCH] = start.stride(0)
    fields[_DTYPE], fields[_SCALE] = DTYPES[shape.dtype], request.scale
    if rows.rows.start:
        fields[AT["first_row"]] = rows.rows.start
    if request.softcap is not None:
        fields[AT["softcap"]] = request.softcap
    if request.bias is not None:
        put_bias(fields, request.bias, rows, shape.query_length)
    if rows.seen is not None:
        put_broadcast(fields, "seen", rows.seen)
    return fields


def put_bias(fields: Fields, bias: Bias, rows: Rows, queries: int) -> None:
    """Put in the bias of some rows: along a diagonal of a RelativeBias one number, a row further on one number back."""
    if isinstance(bias, RelativeBias):
        values = bias.values
        if not values.numel():
            return  # no query, and an address before no memory is none
        first = AT["bias_batch"]
        steps = (stride if size > 1 else 0 for size, stride in zip(values.shape[:2], values.stride(), strict=False))
        fields[AT["bias"]] = values.data_ptr() + values.element_size() * (queries - 1 - (rows.rows.start or 0))
        fields[first : first + 4] = (*steps, -1, 1)
    else:
        put_broadcast(fields, "bias", rows.of(bias) if bias.shape[2] > 1 else bias)


def bias_as_read(bias: Bias) -> Bias:
    """Return a bias in float32, a RelativeBias's numbers one after the other: itself, if it is so already."""
    if not isinstance(bias, RelativeBias):
        return bias.float()
    values = bias.values.float().contiguous()
    return bias if values is bias.values else RelativeBias(values)


def put(fields: Fields, name: str, tensor: Tensor) -> None:
    """Put in a tensor (batch, heads, rows, features): its address and its outer strides."""
    first = AT[f"{name}_batch"]
    fields[AT[name]] = tensor.data_ptr()
    fields[first : first + 3] = tensor.stride()[:3]


def put_broadcast(fields: Fields, name: str, tensor: Tensor) -> None:
    """Put in a tensor (batch, heads, queries, keys) whose axes of size 1 stand for all."""
    first = AT[f"{name}_batch"]
    fields[AT[name]] = tensor.data_ptr()
    fields[first : first + 4] = (
        stride if size > 1 else 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )


def room(*size: int) -> Tensor:
    """Make room for float32 numbers that the kernel writes, whatever default dtype and device are set."""
    return torch.empty(*size, dtype=torch.float32, device=_CPU)


def contiguous_features(tensor: Tensor) -> Tensor:
    """Return a tensor whose features lie beside each other as they are meant: itself, if they do."""
    if tensor.is_neg():
        tensor = tensor.resolve_neg()  # the imaginary part of a conjugate holds its numbers negated
    return tensor if tensor.stride(-1) == 1 or tensor.shape[-1] == 1 else tensor.contiguous()
