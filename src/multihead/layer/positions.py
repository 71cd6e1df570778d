"""Positions of queries and keys: the first query's, rotation by positions, and the keys that a cache adds."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from multihead import sequence_split
from multihead.cache import KeyValueCache
from multihead.masks import Lengths, Mask
from multihead.packing import Padding, Side
from multihead.quantised import Scales
from multihead.rotary import Rotary
from multihead.sequence_split import SequenceSplit, reject_in_split
from multihead.shapes import AttentionShape, resolved_query_start


def first_position(query_start: int | Tensor | str | None, q: Tensor, keys: int) -> int | Tensor:
    """Return the position of the first query among the keys, where it matters.

    Args:
        query_start: the argument of the call.
        q: (batch, heads, queries, head_dim).
        keys: number of keys.

    Raises:
        ArgumentError: it is missing, or out of range.
    """
    sizes = {"batch": q.shape[0], "queries": q.shape[2], "keys": keys}
    start = resolved_query_start(query_start, uses_positions=True, device=q.device, **sizes)
    if isinstance(start, int) and start < 0:  # the "end" of fewer keys than queries; as an int it would be rejected
        return torch.full((q.shape[0],), start, device=q.device)
    return start


def map_lengths(q: Tensor, k: Tensor, v: Tensor) -> tuple[int, int]:
    """Return how many queries and keys the map of a call has: those of all ranks, where a sequence is split."""
    sequence = sequence_split.active
    if sequence is None:
        return q.shape[2], k.shape[2]
    whole = sequence.whole(AttentionShape.of(q, k, v))
    return whole.query_length, whole.key_length


def padding_of_rank(
    sequence: SequenceSplit, x: Tensor, mask: Mask, lengths: Sequence[int] | Tensor, side: Side
) -> tuple[Tensor, Mask]:
    """Find the padding among the tokens of a rank, where a sequence is split over ranks.

    Args:
        sequence: the split.
        x: (batch, tokens of this rank, features), or (tokens, features).
        mask: the mask of the whole sequence.
        lengths: (batch,) tokens of each whole sample.
        side: on which side the padding is.

    Returns:
        (batch, tokens, 1) bool, which tokens of this rank are padding; and the mask that hides padding on all ranks.
    """
    if side != "right":
        reject_in_split(f"padding_side={side!r}", "Put the padding after the tokens of each sample.")
    count = torch.as_tensor(lengths, device=x.device).view(-1, 1)
    tokens = x.shape[-2]
    whole = torch.arange(tokens * sequence.place[1], device=x.device)
    hidden = sequence.positions(tokens, x.device) >= count  # (batch, tokens)
    shown = Lengths(count * (whole < count))  # (batch, whole tokens): queries of padding see no key
    return (hidden if x.dim() == 3 else hidden[0])[..., None], mask & shown


def normalise(
    norms: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]], q: Tensor, k: Tensor, *, fresh: bool
) -> tuple[Tensor, Tensor]:
    """Normalise queries (batch, heads, queries, head_dim), and keys unless a cache holds them normalised."""
    return norms(q, k) if fresh else (norms(q, k[:, :, :0])[0], k)


def rotate(
    rotary: Rotary, q: Tensor, k: Tensor, start: int | Tensor, positions: Tensor | None, *, same: bool, fresh: bool
) -> tuple[Tensor, Tensor]:
    """Rotate queries and keys by their positions.

    Args:
        rotary: the rotation.
        q: (batch, heads, queries, head_dim).
        k: (batch, kv_heads, keys, head_dim).
        start: position of the first query.
        positions: (1, tokens), of each query, where packed samples have positions of their own.
        same: whether query i and key i have the same position; else the first key has position 0.
        fresh: whether this call projected the keys; those of a cache are rotated already.
    """
    sequence = sequence_split.active
    if sequence is not None:
        positions, same = sequence.positions(q.shape[2], q.device), True
    if positions is None:
        positions_of_queries = start
        if isinstance(start, Tensor):
            positions_of_queries = start[:, None] + torch.arange(q.shape[2], device=start.device)  # (batch, queries)
    else:
        positions_of_queries = positions
    if not fresh:
        return rotary.rotate(q, positions_of_queries), k
    if same or (isinstance(positions_of_queries, int) and positions_of_queries == 0):
        return rotary.rotate_both(q, k, positions_of_queries)
    return rotary.rotate(q, positions_of_queries), rotary.rotate(k, 0)


def extend(
    cache: KeyValueCache,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask,
    start: int | Tensor,
    padding: Padding,
    *,
    within: bool,
) -> tuple[Tensor, Tensor, Scales | None, Mask, int | Tensor]:
    """Append keys and values to a cache, and return all that it holds.

    Args:
        cache: the cache; in cross-attention it keeps the projected memory, and counts the queries.
        q: (batch, heads, queries, head_dim).
        k: (batch, kv_heads, keys, head_dim).
        v: (batch, kv_heads, keys, value_head_dim).
        mask: the mask of the whole sequence.
        start: position of the first query.
        padding: the padding of the call.
        within: whether queries and keys are the same tokens.

    Returns:
        keys and values, their factors where they are int8, the mask for them without padding, and the position of the
        first query among them.
    """
    lengths = None if padding.rows is None else padding.rows.lengths
    if within:
        held = cache.extend(k, v, lengths=lengths)
        mask = padding.hide(mask.after_dropping(held.key_start), held.lengths, held.k.shape[2])
        return held.k, held.v, held.scales, mask, held.query_start
    memory = cache.memory
    if memory is None:
        memory = cache.remember(k, v, None if padding.columns is None else padding.columns.lengths)
    cache.advance(q.shape[2], lengths=lengths)
    mask = padding.hide(mask, memory.lengths, memory.k.shape[2])
    return memory.k, memory.v, memory.scales, mask, start
