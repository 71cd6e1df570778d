"""What a ring computes and sends: the parts of the attention map in which a query of one rank sees a key of another."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from multihead.masks import Full, Mask
from multihead.masks.base import KeyBounds
from multihead.masks.place import Extent, Place
from multihead.parallel.layout import Layout, Range
from multihead.plan.bounds import CACHE_BYTES, PlanCache, key_bounds


@dataclass(frozen=True, eq=False)
class MapBlock(Mask):
    """The mask of a whole sequence for a range of its queries and a range of its keys, both counted from 0.

    Attributes:
        mask: the mask of the whole sequence.
        whole: its bounds.
        rows: the positions of the queries, [first, stop).
        keys: the positions of the keys, [first, stop).
    """

    mask: Mask
    whole: KeyBounds
    rows: Range
    keys: Range

    def tile(self, place: Place) -> Tensor:
        """Evaluate the mask of the whole sequence at the positions of the block."""
        rows = place.rows + self.rows[0]
        return self.mask.tile(Place(rows, rows, place.columns + self.keys[0]))

    def bounds(self, extent: Extent) -> KeyBounds:
        """Cut the intervals of the whole sequence to the block."""
        (first, stop), device = self.keys, extent.positions.device
        edges = (edge[:, slice(*self.rows)].to(device) for edge in (self.whole.start, self.whole.stop))
        start, end = (edge.clamp(first, stop) - first for edge in edges)
        rest = self.whole.remainder
        return KeyBounds(start, end, None if rest is None else MapBlock(rest, self.whole, self.rows, self.keys))


class Piece(NamedTuple):
    """A rectangle of the attention map that one rank computes in one call.

    Attributes:
        rows: the positions of its queries in the sequence, [first, stop).
        keys: the positions of its keys.
        at: where its queries are among those of the rank.
        among: where its keys are among those that the rank received in this step.
        mask: which of its keys each query sees.
    """

    rows: Range
    keys: Range
    at: slice
    among: slice
    mask: Mask


class Step(NamedTuple):
    """What a rank does in one step of a ring. In step 0 it computes with its own keys, and nothing is sent.

    Attributes:
        pieces: what it computes with the keys of the rank `step` before it.
        received: the keys that it needs of that rank, as ranges among that rank's own tokens; in step 0 of its own.
        sent: its keys that the rank `step` after it needs, as ranges among its own tokens.
    """

    pieces: tuple[Piece, ...]
    received: tuple[Range, ...]
    sent: tuple[Range, ...]

    @property
    def keys_received(self) -> int:
        """How many keys are received."""
        return _count(self.received)

    @property
    def keys_sent(self) -> int:
        """How many keys are sent."""
        return _count(self.sent)


@dataclass(frozen=True, eq=False)
class RingPlan:
    """The steps of one rank.

    Attributes:
        length: number of tokens of the whole sequence.
        mask: the mask of the whole sequence.
        bounds: its intervals, 16 bytes per token of the whole sequence.
        steps: what the rank does, step by step; as many as there are ranks.
    """

    length: int
    mask: Mask
    bounds: KeyBounds
    steps: tuple[Step, ...]

    @property
    def keys_sent(self) -> int:
        """How many keys this rank sends in a forward pass."""
        return sum(step.keys_sent for step in self.steps)


_PLANS: PlanCache[RingPlan] = PlanCache(CACHE_BYTES)


def ring_plan(mask: Mask, length: int, layout: Layout, rank: int) -> RingPlan:
    """Plan the ring of one rank, once per mask, length and layout.

    Args:
        mask: the mask of the whole sequence.
        length: number of tokens of the whole sequence.
        layout: which tokens each rank holds.
        rank: the rank.
    """
    of_mask = mask.cache_key()
    key = None if of_mask is None else (of_mask, length, layout, rank)
    known = None if key is None else _PLANS.entries.get(key)
    if known is not None:
        return known
    bounds = key_bounds(mask, queries=length, keys=length)
    found = RingPlan(
        length, mask, bounds, tuple(_step(mask, bounds, length, layout, rank, s) for s in range(layout.ranks))
    )
    if key is not None:
        _PLANS.add(key, found, bounds)
    return found


def _step(mask: Mask, bounds: KeyBounds, length: int, layout: Layout, rank: int, step: int) -> Step:
    before, after = (rank - step) % layout.ranks, (rank + step) % layout.ranks
    size = length // layout.parts
    rectangles, needed = _rectangles(bounds, layout.chunks(rank, length), layout.chunks(before, length))
    _, wanted = _rectangles(bounds, layout.chunks(after, length), layout.chunks(rank, length))
    first_key = [sum(stop - first for first, stop in needed[:index]) for index in range(len(needed))]
    pieces = []
    for (row_chunk, key_chunk), (rows, keys) in rectangles.items():
        at = row_chunk * size + rows[0] - layout.chunks(rank, length)[row_chunk][0]
        among = keys[0] - needed[key_chunk][0] + first_key[key_chunk]
        pieces.append(
            Piece(
                rows,
                keys,
                slice(at, at + rows[1] - rows[0]),
                slice(among, among + keys[1] - keys[0]),
                _mask_of(mask, bounds, rows, keys),
            )
        )
    received = _among_own(needed, layout.chunks(before, length), size)
    sent = _among_own(wanted, layout.chunks(rank, length), size) if step else ()
    return Step(tuple(pieces), received, sent)


def _rectangles(
    bounds: KeyBounds, row_chunks: tuple[Range, ...], key_chunks: tuple[Range, ...]
) -> tuple[dict[tuple[int, int], tuple[Range, Range]], list[Range]]:
    """Return the smallest rectangle of queries and keys of each pair of chunks, and the keys needed of each chunk."""
    found: dict[tuple[int, int], tuple[Range, Range]] = {}
    for i, rows in enumerate(row_chunks):
        for j, keys in enumerate(key_chunks):
            rectangle = visible_rectangle(bounds, rows, keys)
            if rectangle is not None:
                found[i, j] = rectangle
    needed = []
    for j, (first, _) in enumerate(key_chunks):
        of_chunk = [keys for (_, chunk), (_, keys) in found.items() if chunk == j]
        needed.append(
            (min(each[0] for each in of_chunk), max(each[1] for each in of_chunk)) if of_chunk else (first, first)
        )
    return found, needed


def visible_rectangle(bounds: KeyBounds, rows: Range, keys: Range) -> tuple[Range, Range] | None:
    """Return the smallest ranges of queries and keys outside of which no key is visible; None where none is."""
    start, stop = (edge[:, slice(*rows)].clamp(*keys) for edge in (bounds.start, bounds.stop))
    seen = start < stop  # (batch or 1, rows)
    index = seen.any(0).nonzero()
    if not len(index):
        return None
    low = int(start.masked_fill(~seen, keys[1]).min())
    high = int(stop.masked_fill(~seen, keys[0]).max())
    return (rows[0] + int(index[0]), rows[0] + int(index[-1]) + 1), (low, high)


def _mask_of(mask: Mask, bounds: KeyBounds, rows: Range, keys: Range) -> Mask:
    """Return the mask of a rectangle, which is often full."""
    start, stop = bounds.start[:, slice(*rows)], bounds.stop[:, slice(*rows)]
    if bounds.remainder is None and bool((start <= keys[0]).all() & (stop >= keys[1]).all()):
        return Full()
    return MapBlock(mask, bounds, rows, keys)


def _among_own(ranges: list[Range], chunks: tuple[Range, ...], size: int) -> tuple[Range, ...]:
    """Convert positions in the sequence to places among a rank's own tokens, one range per chunk."""
    return tuple(
        (index * size + first - chunk[0], index * size + stop - chunk[0])
        for index, ((first, stop), chunk) in enumerate(zip(ranges, chunks, strict=True))
        if stop > first
    )


def _count(ranges: tuple[Range, ...]) -> int:
    return sum(stop - first for first, stop in ranges)


def work_per_rank(bounds: KeyBounds, layout: Layout) -> list[int]:
    """Return the number of visible cells that each rank computes, over the samples of the bounds."""
    cells = (bounds.stop - bounds.start).clamp(min=0).sum(0)  # (queries,)
    return [
        sum(int(cells[slice(*chunk)].sum()) for chunk in layout.chunks(rank, len(cells)))
        for rank in range(layout.ranks)
    ]


def keys_of_ring(bounds: KeyBounds, layout: Layout) -> int:
    """Return about how many keys all ranks together send in a ring, the same number on every rank.

    The keys of a chunk of queries are counted as one range, from the first to the last key that one of them sees.
    """
    length, parts = bounds.start.shape[1], layout.parts
    size = length // parts
    empty = bounds.sees_nothing
    low = bounds.start.masked_fill(empty, length).view(-1, parts, size).amin((0, 2))
    high = bounds.stop.masked_fill(empty, 0).view(-1, parts, size).amax((0, 2))
    first = torch.arange(parts) * size
    needed = torch.minimum(high[:, None], first + size) - torch.maximum(low[:, None], first)  # (row chunk, key chunk)
    needed = needed.clamp(min=0)
    total = 0
    for rank in range(layout.ranks):
        own = [chunk[0] // size for chunk in layout.chunks(rank, length)]
        of_rank = needed[own].amax(0)
        total += int(of_rank.sum() - of_rank[own].sum())
    return total
