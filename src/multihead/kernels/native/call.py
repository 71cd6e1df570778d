"""Convert a request to a call of the native kernel: addresses, sizes, strides and options of csrc/call.h."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from multihead.call import AttentionRequest
from multihead.kernels.native import library
from multihead.kernels.native.library import AT, STRIDES_AT
from multihead.masks.base import KeyBounds
from multihead.masks.place import Place
from multihead.scores.bias import Bias
from multihead.scores.relative import RelativeBias

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # `enum class Dtype` in csrc/call.h
# A mask that is not an interval per query is made dense in blocks of queries x keys of this size.
DENSE_BYTES = 8 << 20

Fields = list[float]

_CPU = torch.device("cpu")

# Indices of frequent fields, looked up once: preparing a call should take microseconds.
_Q, _K, _START, _STOP = (AT[name] for name in ("q", "k", "start", "stop"))
_BOUNDS_BATCH_STRIDE, _DTYPE, _SCALE = AT["bounds_batch_stride"], AT["dtype"], AT["scale"]
_SIZES_AND_STRIDES = slice(AT["batch"], STRIDES_AT["k"].stop)  # the sizes, then the strides of q and k
WHOLE = slice(None)


class Rows(NamedTuple):
    """Consecutive queries of a call, and the keys that they see.

    Attributes:
        rows: the queries.
        bounds: their bounds.
        visible: (batch or 1, heads or 1, rows, keys or 1) bool, the part of the mask that is not an interval; or None.
    """

    rows: slice
    bounds: KeyBounds
    visible: Tensor | None

    def of(self, tensor: Tensor) -> Tensor:
        """Slice these queries from a tensor (batch, heads, queries, ...); all queries return the tensor itself."""
        return tensor if self.rows is WHOLE else tensor[:, :, self.rows]


def blocks(request: AttentionRequest, bounds: KeyBounds, *, step: int = 1, height: int | None = None) -> Iterator[Rows]:
    """Yield all queries at once, or blocks of queries where the mask must be dense.

    Args:
        request: the call.
        bounds: its plan.
        step: the first query of each block is a multiple of it.
        height: the largest number of queries of a block, or None for no limit.
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
    """Return the number of queries of a block of a dense mask."""
    shape = request.shape
    row = shape.key_length
    if bounds.remainder is not None and bounds.remainder.holds_tensors:
        row *= shape.batch * shape.num_heads  # a tensor may differ in each
    elif not bounds.shared:
        row *= shape.batch
    return max(96, DENSE_BYTES // max(row, 1))


def call_fields(request: AttentionRequest, rows: Rows, q: Tensor, k: Tensor) -> Fields:
    """Return the fields that all passes read: q, k, the bounds, the terms of the scores and the sizes.

    The tensors must stay alive until the call returns. The last dimension of q and k is contiguous, and `request.bias`
    is in float32.
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
        fields[_BOUNDS_BATCH_STRIDE] = start.stride(0)
    fields[_DTYPE], fields[_SCALE] = DTYPES[shape.dtype], request.scale
    if rows.rows.start:
        fields[AT["first_row"]] = rows.rows.start
    if request.softcap is not None:
        fields[AT["softcap"]] = request.softcap
    if request.bias is not None:
        set_bias(fields, request.bias, rows, shape.query_length)
    if rows.visible is not None:
        set_broadcast(fields, "visible", rows.visible)
    return fields


def set_bias(fields: Fields, bias: Bias, rows: Rows, queries: int) -> None:
    """Set the bias of some rows. A RelativeBias is one number per diagonal: a tensor whose row stride is -1."""
    if isinstance(bias, RelativeBias):
        values = bias.values
        if not values.numel():
            return  # there are no queries, and the address of an empty tensor is 0
        steps = (stride if size > 1 else 0 for size, stride in zip(values.shape[:2], values.stride(), strict=False))
        fields[AT["bias"]] = values.data_ptr() + values.element_size() * (queries - 1 - (rows.rows.start or 0))
        fields[STRIDES_AT["bias"]] = (*steps, -1, 1)
    else:
        set_broadcast(fields, "bias", rows.of(bias) if bias.shape[2] > 1 else bias)


def bias_as_read(bias: Bias) -> Bias:
    """Return a bias in float32 as it is stored, a RelativeBias contiguous; no copy where it is so already."""
    if not isinstance(bias, RelativeBias):
        return bias.float().resolve_neg()
    values = bias.values.float().resolve_neg().contiguous()
    return bias if values is bias.values else RelativeBias(values)


def sinks_as_read(sinks: Tensor) -> Tensor:
    """Return sinks (heads,) in float32 as they are stored, contiguous; no copy where they are so already."""
    return sinks.float().resolve_neg().contiguous()


def set_tensor(fields: Fields, name: str, tensor: Tensor) -> None:
    """Set the address and the strides of a tensor (batch, heads, rows, features)."""
    fields[AT[name]] = tensor.data_ptr()
    fields[STRIDES_AT[name]] = tensor.stride()[:3]


def set_broadcast(fields: Fields, name: str, tensor: Tensor) -> None:
    """Set the address and the strides of a tensor (batch, heads, queries, keys); axes of size 1 are repeated."""
    fields[AT[name]] = tensor.data_ptr()
    fields[STRIDES_AT[name]] = (
        stride if size > 1 else 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )


def empty_float32(*size: int) -> Tensor:
    """Allocate an uninitialised float32 CPU tensor, independent of the default dtype and device."""
    return torch.empty(*size, dtype=torch.float32, device=_CPU)


def contiguous_features(tensor: Tensor) -> Tensor:
    """Return the tensor with stride 1 in its last dimension; no copy if it has that already."""
    if tensor.is_neg():
        tensor = tensor.resolve_neg()  # the imaginary part of a conjugate stores its numbers negated
    return tensor if tensor.stride(-1) == 1 or tensor.shape[-1] == 1 else tensor.contiguous()
