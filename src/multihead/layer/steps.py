"""Steps of a layer's call before and after attention: positions, rotation, cache, gates, learned key."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from multihead.errors import DtypeError, ShapeError
from multihead.kernels import sequence_split
from multihead.layer.arguments import LayerCall
from multihead.layer.cache import KeyValueCache
from multihead.rotary import Rotary
from multihead.tensors.shapes import AttentionShape, resolve_query_start


def find_query_start(call: LayerCall, q: Tensor, k: Tensor, *, layer_uses_positions: bool) -> None:
    """Set `call.start`, the position of the first query, if the layer or the mask depends on it."""
    matters = layer_uses_positions or call.mask.uses_positions
    if call.cache is not None and call.query_start is None and (call.is_self_attention or matters):
        call.first_query_position = call.cache.query_start
    elif matters or call.query_start is not None:
        call.first_query_position = position_of_first_query(call.query_start, q, k.shape[2])


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


def rotate(rotary: Rotary, call: LayerCall, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate queries (batch, heads, queries, head_dim) and keys (batch, kv_heads, keys, head_dim) by their positions.

    In cross-attention the first key has position 0. Keys of a cached memory are already rotated.
    """
    positions: int | Tensor | None = call.padding.positions  # (1, tokens) for packed samples
    same = positions is not None or (call.is_self_attention and call.cache is not None)
    sequence = sequence_split.active_split
    if sequence is not None:
        positions, same = sequence.positions_of_rank(q.shape[2], q.device), True
    if positions is None:
        positions = call.first_query_position
        if isinstance(positions, Tensor):
            positions = positions[:, None] + torch.arange(q.shape[2], device=positions.device)  # (batch, queries)
    if call.cached_memory is not None:
        return rotary.rotate(q, positions), k
    if same or (isinstance(positions, int) and positions == 0):
        return rotary.rotate_both(q, k, positions)
    return rotary.rotate(q, positions), rotary.rotate(k, 0)


def extend_cache(cache: KeyValueCache, call: LayerCall, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Append k and v of a call to its cache, and return all cached k and v, (batch, kv_heads, keys, dim).

    Sets `call.mask`, `call.start` (the position of the first query), and `call.scales` if keys and values are int8. In
    cross-attention the cache stores the projected memory, and counts the queries (batch, heads, queries, head_dim).
    """
    padding = call.padding
    lengths = None if padding.query_packing is None else padding.query_packing.lengths
    if call.is_self_attention:
        held = cache.extend(k, v, lengths=lengths)
        call.mask = padding.hide_in_mask(call.mask.after_dropping_keys(held.key_start), held.lengths, held.k.shape[2])
        call.int8_scales, call.first_query_position = held.scales, held.query_start
        return held.k, held.v
    memory = call.cached_memory
    if memory is None:
        memory = cache.store_memory(k, v, None if padding.key_packing is None else padding.key_packing.lengths)
    cache.advance(q.shape[2], lengths=lengths)
    call.mask = padding.hide_in_mask(call.mask, memory.lengths, memory.k.shape[2])
    call.int8_scales = memory.scales
    return memory.k, memory.v


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


def prepend_learned_keys(key: Tensor, x_heads: Tensor) -> Tensor:
    """Prepend a learned row `key` (kv_heads, dim) to each sample: (batch, kv_heads, 1 + keys, dim)."""
    row = key[None, :, None].expand(x_heads.shape[0], -1, -1, -1)
    return torch.cat([row.to(x_heads.dtype), x_heads], 2)
