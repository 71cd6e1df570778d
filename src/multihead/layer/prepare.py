"""From what a layer was given to what is asked of the attention: leave padding out, project, split, place."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from multihead.cache import KeyValueCache
from multihead.call import AttentionRequest
from multihead.functional import request_of
from multihead.heads import split_heads
from multihead.layer.checks import (
    Widths,
    batched,
    child,
    dtype_of,
    refuse_unless_as_long,
    refuse_unless_cache_fits,
    refuse_unless_fitting,
    refuse_unless_packing_fits,
)
from multihead.layer.gates import in_front
from multihead.layer.sharding import LocalHeads, local_heads
from multihead.masks import Full, Mask
from multihead.masks.base import check_is_mask
from multihead.masks.leading_keys import LeadingKeys
from multihead.packing import Packing, Padding, Side
from multihead.scores.bias import Bias, added, shifted
from multihead.shapes import resolved_query_start

if TYPE_CHECKING:
    from multihead.layer.attention import MultiHeadAttention

_FULL = Full()


class Asked(NamedTuple):
    """What a layer asks of the attention, and how its output is put back.

    Fields:
        request: the attention.
        padding: where the input's padding stood.
        single: whether the input had no batch.
        local: the heads that this process computes; None where it computes all.
    """

    request: AttentionRequest
    padding: Padding
    single: bool
    local: LocalHeads | None


class _Placed(NamedTuple):
    """Queries, keys and values with their heads apart, the position of the first query, and what may be seen."""

    q: Tensor
    k: Tensor
    v: Tensor
    start: int | Tensor
    mask: Mask
    local: LocalHeads | None


def asked(
    layer: MultiHeadAttention,
    x: Tensor,
    memory: Tensor | None,
    values: Tensor | None,
    *,
    mask: Mask = _FULL,
    bias: Bias | None = None,
    lengths: Sequence[int] | Tensor | None = None,
    memory_lengths: Sequence[int] | Tensor | None = None,
    padding_side: Side = "right",
    packing: Packing | None = None,
    cache: KeyValueCache | None = None,
    head_gates: Tensor | None = None,
    query_start: int | Tensor | str | None = None,
) -> Asked:
    """Take what `MultiHeadAttention.forward` takes; a cache grows by it."""
    check_is_mask(mask)
    x, memory, values, single = batched(x, memory, values)
    widths = Widths(layer.embed_dim, layer.key_dim, layer.value_dim, dtype_of(child(layer, "q_proj")))
    refuse_unless_fitting(widths, x, memory, values, lengths, memory_lengths)
    within = memory is None or memory is x
    of_distance = getattr(layer.position_bias, "of_distance", True)
    if packing is not None:
        refuse_unless_packing_fits(packing, x, memory, lengths, cache)
    if cache is not None:
        refuse_unless_cache_fits(cache, query_start, absolute_bias=not of_distance, within=within)
        if within:
            cache.refuse_unless_remembered(mask)
        elif memory is not None:
            cache.refuse_unless_same_memory(memory)
    memory = x if memory is None else memory
    values = memory if values is None else values
    # Where only differences of positions matter, all samples stay in one row of tokens, as documents.
    together = (
        (lengths is not None or memory_lengths is not None or packing is not None)
        and within
        and bias is None
        and cache is None
        and (query_start is None or (isinstance(query_start, int) and query_start == 0))
        and (head_gates is None or head_gates.dim() == 1)
        and layer.bias_k is None
        and of_distance
        and mask.translation_invariant
    )
    if packing is None:
        padding = Padding.of(x, memory, lengths, memory_lengths, together=together, side=padding_side)
    else:
        padding = Padding.of_packed(packing, together=together)
    tokens = padding.without(x, memory, values)
    if within:
        placed = _self_attention(layer, tokens, padding, mask, cache, query_start)
    else:
        placed = _cross_attention(layer, tokens, padding, mask, cache, query_start)
    return Asked(_request(layer, placed, bias, padding.packed_lengths, cache), padding, single, placed.local)


def _self_attention(
    layer: MultiHeadAttention,
    tokens: tuple[Tensor, Tensor, Tensor],
    padding: Padding,
    mask: Mask,
    cache: KeyValueCache | None,
    query_start: int | Tensor | str | None,
) -> _Placed:
    """Place tokens (batch, length, features) that look at each other, and at those that a cache keeps."""
    x, memory, values = tokens
    q_proj, k_proj, v_proj = child(layer, "q_proj"), child(layer, "k_proj"), child(layer, "v_proj")
    q, k, v = q_proj(x), k_proj(memory), v_proj(values)
    refuse_unless_as_long("q_proj", x, q, padding.rows)
    q, k, v = padding.placed(q, k, v)
    local = None if _holds_all(layer, q, k, v) else local_heads(layer, q, k, v)
    if local is None:
        q = split_heads(q, layer.num_heads)  # (batch, heads, queries, head_dim)
        k = split_heads(k, layer.num_kv_heads)  # (batch, kv_heads, keys, head_dim)
        v = split_heads(v, layer.num_kv_heads)  # (batch, kv_heads, keys, value_head_dim)
    else:
        q, k, v = local.split(q, k, v, layer)
        mask = local.of_mask(mask)
    if layer.qk_norm is not None:
        q, k = layer.qk_norm(q, k) if local is None else local.normed(layer.qk_norm, q, k)
    start = _start(layer, mask, query_start, q, k) if cache is None else cache.query_start
    if layer.rotary is not None:
        within_samples = padding.positions
        place = _positions(start, q.shape[2]) if within_samples is None else within_samples
        if cache is None and within_samples is None and (isinstance(place, Tensor) or place):
            q, k = layer.rotary.rotate(q, place), layer.rotary.rotate(k, 0)  # keys stand from the first place on
        else:
            q, k = layer.rotary.rotate_both(q, k, place)
    if cache is None:
        return _Placed(q, k, v, start, padding.hiding(mask), local)
    held = cache.extend(k, v, lengths=None if padding.rows is None else padding.rows.lengths)
    mask = padding.hiding(mask.after_dropping(held.key_start), held.lengths, held.k.shape[2])
    return _Placed(q, held.k, held.v, held.query_start, mask, local)


def _cross_attention(
    layer: MultiHeadAttention,
    tokens: tuple[Tensor, Tensor, Tensor],
    padding: Padding,
    mask: Mask,
    cache: KeyValueCache | None,
    query_start: int | Tensor | str | None,
) -> _Placed:
    """Place tokens (batch, length, features) that look at a memory, which a cache keeps projected."""
    x, memory, values = tokens
    remembered = None if cache is None else cache.memory
    q = layer.q_proj(x)
    refuse_unless_as_long("q_proj", x, q, padding.rows)
    q = padding.placed_queries(q)
    if remembered is None:
        k, v = layer.k_proj(memory), layer.v_proj(values)
        refuse_unless_as_long("k_proj", memory, k, padding.columns)
        k, v = padding.placed_keys(k), padding.placed_keys(v)
        local = None if _holds_all(layer, q, k, v) else local_heads(layer, q, k, v)
    else:
        k, v = remembered.k, remembered.v
        local = None if _holds_all(layer, q) else local_heads(layer, q)
    if local is not None:
        mask = local.of_mask(mask)
    if remembered is None and local is not None:
        q, k, v = local.split(q, k, v, layer)
    else:
        q = split_heads(q, layer.num_heads) if local is None else local.split_queries(q)  # (batch, heads, queries, dim)
    if remembered is None and local is None:
        k = split_heads(k, layer.num_kv_heads)  # (batch, kv_heads, keys, head_dim)
        v = split_heads(v, layer.num_kv_heads)  # (batch, kv_heads, keys, value_head_dim)
    if layer.qk_norm is not None:
        norms = layer.qk_norm if local is None else partial(local.normed, layer.qk_norm)
        q, normed = norms(q, k if remembered is None else k[:, :, :0])  # what is remembered is normed already
        k = normed if remembered is None else k
    if cache is not None and query_start is None and _uses_positions(layer, mask):
        start = cache.query_start
    else:
        start = _start(layer, mask, query_start, q, k)
    if layer.rotary is not None:
        q = layer.rotary.rotate(q, _positions(start, q.shape[2]))
        k = layer.rotary.rotate(k, 0) if remembered is None else k
    if cache is None:
        return _Placed(q, k, v, start, padding.hiding(mask), local)
    if remembered is None:
        remembered = cache.remember(k, v, None if padding.columns is None else padding.columns.lengths)
    cache.advance(q.shape[2], lengths=None if padding.rows is None else padding.rows.lengths)
    mask = padding.hiding(mask, remembered.lengths, remembered.k.shape[2])
    return _Placed(q, remembered.k, remembered.v, start, mask, local)


def _holds_all(layer: MultiHeadAttention, q: Tensor, k: Tensor | None = None, v: Tensor | None = None) -> bool:
    """Whether projections (batch, length, width) hold all heads of the layer, as they do in one process."""
    return (
        type(q) is Tensor
        and q.shape[2] == layer.num_heads * layer.head_dim
        and (k is None or k.shape[2] == layer.num_kv_heads * layer.head_dim)
        and (v is None or v.shape[2] == layer.num_kv_heads * layer.value_head_dim)
    )


def _uses_positions(layer: MultiHeadAttention, mask: Mask) -> bool:
    """Whether it matters where the queries stand among the keys."""
    return mask.uses_positions or layer.rotary is not None or layer.position_bias is not None


def _start(
    layer: MultiHeadAttention, mask: Mask, query_start: int | Tensor | str | None, q: Tensor, k: Tensor
) -> int | Tensor:
    speaks = _uses_positions(layer, mask)
    if query_start is None and not speaks:
        return 0
    start = resolved_query_start(
        query_start, uses_positions=speaks, batch=q.shape[0], queries=q.shape[2], keys=k.shape[2]
    )
    if isinstance(start, int) and start < 0:  # the "end" of fewer keys than queries; as a number nobody may give it
        return torch.full((q.shape[0],), start, device=q.device)
    return start


def _positions(start: int | Tensor, queries: int) -> int | Tensor:
    """Say where queries stand that follow one another: the place of the first, or (batch, queries)."""
    return start[:, None] + torch.arange(queries, device=start.device) if isinstance(start, Tensor) else start


def _request(
    layer: MultiHeadAttention,
    placed: _Placed,
    bias: Bias | None,
    packed_lengths: Tensor | None,
    cache: KeyValueCache | None,
) -> AttentionRequest:
    """Say what is asked of the attention: the keys that are added, the biases and all that is done to scores."""
    q, k, v, start, mask, local = placed
    if local is not None and bias is not None:
        bias = local.of_bias(bias, "bias")
    if layer.position_bias is not None:
        given = layer.position_bias(q.shape[2], k.shape[2], query_start=start, device=q.device, dtype=q.dtype)
        if local is not None:
            given = local.of_bias(given, "position_bias")
        bias = given if bias is None else added(bias, given, q.shape[2], k.shape[2])
    if layer.bias_k is not None and layer.bias_v is not None:
        bias_k: Tensor = layer.bias_k
        bias_v: Tensor = layer.bias_v
        if local is not None:
            bias_k, bias_v = local.own_keys(bias_k), local.own_keys(bias_v)
        k, v = in_front(bias_k, k), in_front(bias_v, v)
        mask, start = LeadingKeys(1, mask), start + 1
        bias = None if bias is None else shifted(bias, q.shape[2], k.shape[2] - 1)
    sinks: Tensor | None = layer.sinks
    if local is not None and sinks is not None:
        sinks = local.own(sinks, name="sinks")
    if layer.add_zero_attn:
        # A key of 0 has the score 0 and gives no value: that is a sink.
        zero = q.new_zeros(q.shape[1])
        sinks = zero if sinks is None else torch.logaddexp(sinks, zero.to(sinks.dtype))
    dropout = layer.dropout if layer.training else 0.0
    terms = (bias, layer.softcap, sinks, layer.scale, dropout, start)
    grows, continued = cache is not None, None if cache is None else cache.continued
    return request_of(
        q, k, v, mask, *terms, to_come=grows, owner=layer, packed_lengths=packed_lengths, continued=continued
    )
