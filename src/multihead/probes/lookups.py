"""Compute single attention weights per query, exp(s_ij - L_i): at an offset, or on a few keys; O(queries) memory."""

from __future__ import annotations

from collections.abc import Sequence

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
    return weights_at_offsets(call, (offset,))[0]


def weights_at_offsets(call: MeasuredCall, offsets: Sequence[int]) -> Tensor:
    """Return the weights of `weight_at_offset` for several offsets: (offsets, batch, heads, queries)."""
    keys = torch.stack([call.positions + offset for offset in offsets], -1)  # (batch, queries, offsets)
    product = torch.stack([_product_at_offset(call, offset) for offset in offsets], -1)
    return _weights_of_products(call, product, keys).movedim(-1, 0).contiguous()


def _product_at_offset(call: MeasuredCall, offset: int) -> Tensor:
    """Return q . k of each query and the key at an offset, (batch, heads, queries); any number if there is no key."""
    shape, start = call.request.shape, call.request.query_start
    if isinstance(start, Tensor) or not shape.key_length:
        return _product_with_keys(call, call.positions + offset)
    # The key of query i is key i + start + offset in every sample: a product of shifted rows, which copies no keys.
    shift = start + offset
    first, stop = (min(max(place - shift, 0), shape.query_length) for place in (0, shape.key_length))
    stop = max(first, stop)
    q, k = _queries_and_keys(call)
    product = torch.linalg.vecdot(q[:, :, :, first:stop], k[:, :, first + shift : stop + shift][:, :, None])
    return pad(product.flatten(1, 2), (first, shape.query_length - stop))


def _product_with_keys(call: MeasuredCall, keys: Tensor) -> Tensor:
    """Return q . k of each query and one key, given by (batch, queries) int64; any number if there is no key."""
    shape = call.request.shape
    if not shape.key_length:
        return torch.zeros_like(call.finite_logsumexp)
    clamped = keys.clamp(0, shape.key_length - 1)[..., None]
    q, k = _queries_and_keys(call)
    if shape.batch == 1:  # index_select copies whole rows, and is faster than gather
        k = k.index_select(2, clamped.flatten())  # (1, kv_heads, queries, head_dim)
    else:
        k = k.gather(2, clamped[:, None].expand(-1, shape.num_kv_heads, -1, shape.head_dim))
    product: Tensor = torch.linalg.vecdot(q, k[:, :, None]).flatten(1, 2)
    return product


def weight_at_keys(call: MeasuredCall, keys: Tensor) -> Tensor:
    """Return each query's weight on one key, given by (batch, queries) int64: (batch, heads, queries), 0 if hidden."""
    return _weights_of_products(call, _product_with_keys(call, keys)[..., None], keys[..., None])[..., 0]


def weight_after_dropped_key(call: MeasuredCall, id_before: Tensor) -> Tensor:
    """Return the weight on key 0 of queries with the token `id_before`, 0 for others: (batch, heads, queries)."""
    ids, place = call.context.ids, call.positions.clamp(0, max(call.request.shape.key_length - 1, 0))
    assert ids is not None
    alike = ids.to(place.device).gather(1, place) == id_before.to(place.device)[:, None]
    return weight_at_keys(call, torch.zeros_like(call.positions)).masked_fill(~alike[:, None], 0)


def weight_on_first_keys(call: MeasuredCall, count: int) -> Tensor:
    """Sum each query's weights on the first `count` keys of its text: (batch, heads, queries)."""
    texts = call.request.mask.row_texts
    if texts is not None and call.context.first_key is None:
        first, total = call.first_keys_of_queries, torch.zeros_like(call.finite_logsumexp)
        for place in range(min(count, texts.longest)):
            total += weight_at_keys(call, first + place)  # 0 after the end of the text, which the mask hides
        return total
    least, most = (int(edge) for edge in call.first_keys.aminmax()) if len(call.first_keys) else (0, 0)
    # Only offsets at which some sample has a key are looked up.
    places = torch.arange(max(0, -most), max(0, -most, min(count, call.request.shape.key_length - least)))
    return weight_on_keys(call, call.first_keys[:, None] + places.to(call.first_keys.device))


def weight_on_first_key_in_set(call: MeasuredCall, flags: Tensor, on_first_key: Tensor | None = None) -> Tensor:
    """Return the weight on the first key of a query's text if it is in a set, else 0: (batch, heads, queries).

    Args:
        call: the call.
        flags: the set, (batch, keys) bool.
        on_first_key: the weight on the first key, (batch, heads, queries); None if it was not measured.
    """
    first = call.first_keys_of_queries  # (batch, 1 or queries)
    if on_first_key is None:
        on_first_key = weight_on_keys(call, first) if first.shape[1] == 1 else weight_at_keys(call, first)
    inside = pad(flags, (1, 1)).gather(1, first.clamp(-1, flags.shape[1]) + 1)  # no key before or after the call's
    return on_first_key.masked_fill(~inside[:, None], 0)


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
    rows = q.flatten(2, 3)
    for some in keys.split(KEYS_PER_STEP, 1):
        index = some.clamp(0, shape.key_length - 1)[:, None, :, None]
        chosen = k.gather(2, index.expand(-1, shape.num_kv_heads, -1, shape.head_dim))
        product = (rows @ chosen.mT).view(*total.shape, some.shape[1])  # (batch, heads, queries, n)
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
