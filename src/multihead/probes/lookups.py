"""Compute single attention weights per query, exp(s_ij - L_i): at an offset, or on a few keys; O(queries) memory."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from multihead.errors import ArgumentError
from multihead.kernels.dense_tile import working_dtype
from multihead.probes.measured_call import MeasuredCall
from multihead.scores.terms import apply_softcap

KEYS_PER_STEP = 32  # keys whose weights are computed at once
SMALL_SET_RATIO = 16  # a set is small if it has at most 1/16 of the keys


def weight_at_offset(call: MeasuredCall, offset: int) -> Tensor:
    """Return each query's weight on the key at an offset from its position: (batch, heads, queries), 0 if hidden."""
    if isinstance(offset, bool) or not isinstance(offset, int):
        raise ArgumentError(f"offset is {offset!r}.", "Give an integer, such as -1 for the key before the query.")
    keys, start = call.positions + offset, call.request.query_start
    if isinstance(start, Tensor) or not call.request.shape.key_length:
        return weight_at_keys(call, keys)
    # The key of query i is key i + start + offset in every sample: a product of shifted rows, which copies no keys.
    shape, shift = call.request.shape, start + offset
    first, stop = (min(max(place - shift, 0), shape.query_length) for place in (0, shape.key_length))
    stop = max(first, stop)
    q, k = _queries_and_keys(call)
    product = torch.linalg.vecdot(q[:, :, :, first:stop], k[:, :, first + shift : stop + shift][:, :, None])
    product = pad(product.flatten(1, 2), (first, shape.query_length - stop))
    return _weights_of_products(call, product[..., None], keys[..., None])[..., 0]


def weight_at_keys(call: MeasuredCall, keys: Tensor) -> Tensor:
    """Return each query's weight on one key, given by (batch, queries) int64: (batch, heads, queries), 0 if hidden."""
    shape = call.request.shape
    if not shape.key_length:
        return torch.zeros_like(call.finite_logsumexp)
    keys = keys[..., None]
    clamped = keys.clamp(0, shape.key_length - 1)
    q, k = _queries_and_keys(call)
    if shape.batch == 1:  # index_select copies whole rows, and is faster than gather
        k = k.index_select(2, clamped.flatten())  # (1, kv_heads, queries, head_dim)
    else:
        k = k.gather(2, clamped[:, None].expand(-1, shape.num_kv_heads, -1, shape.head_dim))
    return _weights_of_products(call, torch.linalg.vecdot(q, k[:, :, None]).flatten(1, 2)[..., None], keys)[..., 0]


def weight_after_dropped_key(call: MeasuredCall, id_before: Tensor) -> Tensor:
    """Return the weight on key 0 of queries with the token `id_before`, 0 for others: (batch, heads, queries)."""
    ids, place = call.context.ids, call.positions.clamp(0, max(call.request.shape.key_length - 1, 0))
    assert ids is not None
    alike = ids.to(place.device).gather(1, place) == id_before.to(place.device)[:, None]
    return weight_at_keys(call, torch.zeros_like(call.positions)).masked_fill(~alike[:, None], 0)


def weight_on_first_keys(call: MeasuredCall, count: int) -> Tensor:
    """Sum each query's weights on the first `count` keys of its sample: (batch, heads, queries)."""
    least, most = (int(edge) for edge in call.first_keys.aminmax()) if len(call.first_keys) else (0, 0)
    # Only offsets at which some sample has a key are looked up.
    places = torch.arange(max(0, -most), max(0, -most, min(count, call.request.shape.key_length - least)))
    return weight_on_keys(call, call.first_keys[:, None] + places.to(call.first_keys.device))


def is_small_set(flags: Tensor) -> bool:
    """Whether a set of keys, (batch, keys) bool, is so small that its weights are faster to compute one by one."""
    return int(flags.sum(-1).max()) * SMALL_SET_RATIO <= flags.shape[1] if flags.numel() else True


def weight_on_set(call: MeasuredCall, flags: Tensor) -> Tensor:
    """Sum each query's weights on a small set of keys, (batch, keys) bool: (batch, heads, queries)."""
    most = int(flags.sum(-1).max()) if flags.numel() else 0
    keys = (~flags).int().argsort(stable=True, dim=-1)[:, :most]  # indices of the set's keys come first
    return weight_on_keys(call, keys.masked_fill(~flags.gather(-1, keys), -1))


def weight_on_keys(call: MeasuredCall, keys: Tensor) -> Tensor:
    """Sum each query's weights on keys (batch, n): (batch, heads, queries); indices outside the keys add 0.

    Memory is KEYS_PER_STEP numbers per query and head.
    """
    shape = call.request.shape
    total = torch.zeros_like(call.finite_logsumexp)
    if not shape.key_length:
        return total
    q, k = _queries_and_keys(call)
    for some in keys.split(KEYS_PER_STEP, 1):
        index = some.clamp(0, shape.key_length - 1)[:, None, :, None]
        chosen = k.gather(2, index.expand(-1, shape.num_kv_heads, -1, shape.head_dim))
        product = (q.flatten(2, 3) @ chosen.mT).view(*total.shape, some.shape[1])  # (batch, heads, queries, n)
        total += _weights_of_products(call, product, some[:, None].expand(-1, shape.query_length, -1)).sum(-1)
    return total


def _queries_and_keys(call: MeasuredCall) -> tuple[Tensor, Tensor]:
    """Return q, (batch, kv_heads, group, queries, head_dim), and k, in the dtype in which weights are computed."""
    request, dtype = call.request_without_nonfinite, working_dtype(call.request.shape.dtype)
    q = request.q.to(dtype).unflatten(1, (call.request.shape.num_kv_heads, -1))
    return q, request.k.to(dtype)


def _weights_of_products(call: MeasuredCall, product: Tensor, keys: Tensor) -> Tensor:
    """Convert q . k, (batch, heads, queries, n), of keys (batch, queries, n) to weights, 0 where hidden."""
    cells = apply_softcap(product * call.request.scale, call.request.softcap)
    bias = call.bias_at(keys.clamp(0, call.request.shape.key_length - 1))
    if bias is not None:
        cells = cells + bias.to(cells.dtype)
    return call.log_weights(cells).exp_().masked_fill_(~call.visible_at_keys(keys), 0)
