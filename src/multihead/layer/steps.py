"""Steps of a layer's call before and after attention: positions, rotation, cache, gates, learned key."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from multihead.errors import DtypeError, ShapeError
from multihead.kernels import sequence_split
from multihead.kernels.quantised import dequantise
from multihead.layer.arguments import KeysOfCall, LayerCall
from multihead.layer.cache import KeyValueCache
from multihead.layer.packing import Padding
from multihead.masks import Mask
from multihead.masks.leading_keys import LeadingKeys
from multihead.rotary import Rotary
from multihead.tensors.shapes import AttentionShape, resolve_query_start


def find_query_start(call: LayerCall, q: Tensor, k: Tensor, *, is_self_attention: bool, matters: bool) -> int | Tensor:
    """Return the position of the first query of q (batch, heads, queries, head_dim); 0 if nothing depends on it.

    `matters`: whether the layer or the mask depends on positions.
    """
    if call.cache is not None and call.query_start is None and (is_self_attention or matters):
        return call.cache.query_start
    if not matters and call.query_start is None:
        return 0
    return position_of_first_query(call.query_start, q, k.shape[2])


def position_of_first_query(query_start: int | Tensor | str | None, q: Tensor, keys: int) -> int | Tensor:
    """Return the position of the first query of q (batch, heads, queries, head_dim) among the keys."""
    start = resolve_query_start(query_start, q, q.shape[2], keys, uses_positions=True)
    if isinstance(start, int) and start < 0:  # "end" with fewer keys than queries; a negative int would be rejected
        return torch.full((q.shape[0],), start, device=q.device)
    return start


def attention_map_size(q: Tensor, k: Tensor, v: Tensor) -> tuple[int, int]:
    """Return the numbers of queries and keys of the attention map, of all ranks if the sequence is split."""
    sequence = sequence_split.active_split
    if sequence is None:
        return q.shape[2], k.shape[2]
    whole = sequence.whole_shape(AttentionShape.from_tensors(q, k, v))
    return whole.query_length, whole.key_length


def normalise_qk(
    norms: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]], q: Tensor, k: Tensor, *, keys_are_new: bool
) -> tuple[Tensor, Tensor]:
    """Normalise queries (batch, heads, queries, head_dim), and keys unless they come from a cache."""
    return norms(q, k) if keys_are_new else (norms(q, k[:, :, :0])[0], k)


def rotate(
    rotary: Rotary, q: Tensor, k: Tensor, positions: int | Tensor, *, same_tokens: bool, keys_are_new: bool
) -> tuple[Tensor, Tensor]:
    """Rotate queries (batch, heads, queries, head_dim) and keys (batch, kv_heads, keys, head_dim) by their positions.

    Args:
        rotary: the rotary embedding.
        q: the queries.
        k: the keys, which are already rotated if they are not new.
        positions: those of the queries: of the first one, an int or (batch,); or of all, (1 or batch, queries).
        same_tokens: whether keys and queries have the same positions; else the first key has position 0.
        keys_are_new: whether the keys were projected in this call.
    """
    sequence = sequence_split.active_split
    if sequence is not None:
        positions, same_tokens = sequence.positions_of_rank(q.shape[2], q.device), True
    elif isinstance(positions, Tensor) and positions.dim() == 1:
        positions = positions[:, None] + torch.arange(q.shape[2], device=positions.device)  # (batch, queries)
    if not keys_are_new:
        return rotary.rotate(q, positions), k
    if same_tokens or (isinstance(positions, int) and positions == 0):
        return rotary.rotate_both(q, k, positions)
    return rotary.rotate(q, positions), rotary.rotate(k, 0)


def extend_cache(cache: KeyValueCache, k: Tensor, v: Tensor, mask: Mask, padding: Padding) -> KeysOfCall:
    """Append k and v (batch, kv_heads, tokens, dim) of a self-attention, and return all that the cache holds."""
    lengths = None if padding.query_packing is None else padding.query_packing.lengths
    held = cache.extend(k, v, lengths=lengths)
    mask = padding.hide_in_mask(mask.after_dropping_keys(held.key_start), held.lengths, held.k.shape[2])
    return KeysOfCall(held.k, held.v, mask, held.query_start, held.scales)


def hold_memory(cache: KeyValueCache, q: Tensor, keys: KeysOfCall, padding: Padding) -> KeysOfCall:
    """Store the keys of a cross-attention unless the cache holds them, and return them with the padding hidden.

    The cache counts the queries (batch, heads, queries, head_dim).
    """
    memory = cache.memory
    if memory is None:
        lengths = None if padding.key_packing is None else padding.key_packing.lengths
        memory = cache.store_memory(keys.k, keys.v, lengths)
    cache.advance(q.shape[2], lengths=None if padding.query_packing is None else padding.query_packing.lengths)
    mask = padding.hide_in_mask(keys.mask, memory.lengths, memory.k.shape[2])
    return KeysOfCall(memory.k, memory.v, mask, keys.query_start, memory.scales)


def apply_gates(output: Tensor, gates: Tensor) -> Tensor:
    """Multiply the output of each head, (batch, heads, queries, value_dim), by its gate.

    Gates are (heads,), or broadcast to (batch, heads, queries). Source: arXiv:1905.09418 and arXiv:1905.10650.

    >>> apply_gates(torch.ones(1, 2, 1, 3), torch.tensor([1.0, 0.0]))[0, :, 0]
    tensor([[1., 1., 1.],
            [0., 0., 0.]])
    """
    heads = output.shape[1]
    if not isinstance(gates, Tensor):
        raise DtypeError(
            f"head_gates is a {type(gates).__name__}.", f"Give a tensor with one factor per head: ({heads},)."
        )
    if gates.dim() == 1 and gates.shape[0] == heads:
        return output * gates[:, None, None].to(output.dtype)
    sizes = tuple(output.shape[:3])
    if gates.dim() != 3 or any(given not in (1, size) for given, size in zip(gates.shape, sizes, strict=True)):
        raise ShapeError(
            f"head_gates has shape {tuple(gates.shape)}, and there are {heads} heads.",
            f"Give one factor per head: shape ({heads},), or one that broadcasts to (batch, heads, queries) = {sizes}.",
        )
    return output * gates[..., None].to(output.dtype)


def add_learned_key(keys: KeysOfCall, key: Tensor, value: Tensor, dtype: torch.dtype) -> KeysOfCall:
    """Prepend a learned key and value, (kv_heads, dim) each, which every query sees; int8 keys become `dtype`."""
    k, v, mask, start, scales = keys
    if scales is not None:
        k, v = dequantise(k, scales.k, dtype), dequantise(v, scales.v, dtype)
    k, v = prepend_learned_keys(key, k), prepend_learned_keys(value, v)  # (batch, kv_heads, 1 + keys, dim)
    return KeysOfCall(k, v, LeadingKeys(1, mask), start + 1)


def prepend_learned_keys(key: Tensor, x_heads: Tensor) -> Tensor:
    """Prepend a learned row `key` (kv_heads, dim) to each sample: (batch, kv_heads, 1 + keys, dim)."""
    row = key[None, :, None].expand(x_heads.shape[0], -1, -1, -1)
    return torch.cat([row.to(x_heads.dtype), x_heads], 2)
