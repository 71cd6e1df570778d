"""A few weights of each query, exp(s_ij - L_i), in memory that grows with the queries: offsets and few keys."""

from __future__ import annotations

import torch
from torch import Tensor

from multihead.errors import ArgumentError
from multihead.kernels.dense_tile import working_dtype
from multihead.probes.measured_call import MeasuredCall
from multihead.scores.terms import apply_softcap

KEYS = 32  # keys whose weights are held at once
FEW = 16  # a set is small if it holds at most one key in this many


def weight_at_offset(call: MeasuredCall, offset: int) -> Tensor:
    """Return the weight on the key at an offset from each query's position: (batch, heads, queries), 0 if hidden."""
    if isinstance(offset, bool) or not isinstance(offset, int):
        raise ArgumentError(f"offset is {offset!r}.", "Give an integer, such as -1 for the key before the query.")
    return weight_at_keys(call, call.positions + offset)


def weight_at_keys(call: MeasuredCall, keys: Tensor) -> Tensor:
    """Return the weight on one key of each query: (batch, heads, queries) of (batch, queries) int64, 0 if hidden."""
    request, shape = call.request_without_nonfinite, call.request.shape
    if not shape.key_length:
        return torch.zeros_like(call.finite_logsumexp)
    keys = keys[..., None]
    clamped = keys.clamp(0, shape.key_length - 1)
    dtype = working_dtype(shape.dtype)
    if shape.batch == 1:  # index_select copies whole rows, faster than gather copies numbers
        k = request.k.to(dtype).index_select(2, clamped.flatten())[:, :, None]  # (1, kv_heads, 1, queries, head_dim)
    else:
        index = clamped[:, None].expand(-1, shape.num_kv_heads, -1, shape.head_dim)
        k = request.k.to(dtype).gather(2, index)[:, :, None]  # (batch, kv_heads, 1, queries, head_dim)
    q = request.q.to(dtype).unflatten(1, (shape.num_kv_heads, -1))  # (batch, kv_heads, group, queries, head_dim)
    return _weights_of_products(call, torch.linalg.vecdot(q, k).flatten(1, 2)[..., None], keys)[..., 0]


def weight_after_dropped_key(call: MeasuredCall, id_before: Tensor) -> Tensor:
    """Return the weight on the first key, 0 for queries whose token is not `id_before`: (batch, heads, queries)."""
    ids, place = call.context.ids, call.positions.clamp(0, max(call.request.shape.key_length - 1, 0))
    assert ids is not None
    alike = ids.to(place.device).gather(1, place) == id_before.to(place.device)[:, None]
    return weight_at_keys(call, torch.zeros_like(call.positions)).masked_fill(~alike[:, None], 0)


def weight_on_first_keys(call: MeasuredCall, count: int) -> Tensor:
    """Sum the weights on the first keys of each sample: (batch, heads, queries)."""
    least, most = (int(edge) for edge in call.first_keys.aminmax()) if len(call.first_keys) else (0, 0)
    # Other places lie outside every sample.
    places = torch.arange(max(0, -most), max(0, -most, min(count, call.request.shape.key_length - least)))
    return weight_on_keys(call, call.first_keys[:, None] + places.to(call.first_keys.device))


def is_small_set(flags: Tensor) -> bool:
    """Whether a set, (batch, keys) bool, holds so few keys that looking them up takes the least work."""
    return int(flags.sum(-1).max()) * FEW <= flags.shape[1] if flags.numel() else True


def weight_on_set(call: MeasuredCall, flags: Tensor) -> Tensor:
    """Sum the weights on a small set of keys, (batch, keys) bool: (batch, heads, queries)."""
    most = int(flags.sum(-1).max()) if flags.numel() else 0
    keys = (~flags).int().argsort(stable=True, dim=-1)[:, :most]  # keys of the set first
    return weight_on_keys(call, keys.masked_fill(~flags.gather(-1, keys), -1))


def weight_on_keys(call: MeasuredCall, keys: Tensor) -> Tensor:
    """Sum the weights on some keys of each sample: (batch, heads, queries) of (batch, n); keys outside count for none.

    It holds a few numbers per query at once.
    """
    request, shape = call.request_without_nonfinite, call.request.shape
    total = torch.zeros_like(call.finite_logsumexp)
    if not shape.key_length:
        return total
    dtype = working_dtype(shape.dtype)
    q = request.q.to(dtype).unflatten(1, (shape.num_kv_heads, -1)).flatten(2, 3)
    for some in keys.split(KEYS, 1):
        index = some.clamp(0, shape.key_length - 1)[:, None, :, None]
        k = request.k.to(dtype).gather(2, index.expand(-1, shape.num_kv_heads, -1, shape.head_dim))
        product = (q @ k.mT).view(*total.shape, some.shape[1])  # (batch, heads, queries, n)
        total += _weights_of_products(call, product, some[:, None].expand(-1, shape.query_length, -1)).sum(-1)
    return total


def _weights_of_products(call: MeasuredCall, product: Tensor, keys: Tensor) -> Tensor:
    """Turn q . k into weights: (batch, heads, queries, n) of keys (batch, queries, n), 0 where hidden."""
    cells = apply_softcap(product * call.request.scale, call.request.softcap)
    bias = call.bias_at(keys.clamp(0, call.request.shape.key_length - 1))
    if bias is not None:
        cells = cells + bias.to(cells.dtype)
    return call.log_weights(cells).exp_().masked_fill_(~call.visible_at_keys(keys), 0)
