"""Plan the steps of ring attention, and compute how many bytes each strategy of sequence parallelism sends.

The keys of another rank travel in two messages. In training a rank holds the keys that it computes with, those that
arrive, and the gradients of both: with two messages of half the keys, the peak memory of one of four ranks is 0.43 of
the peak of unsplit attention in one process, instead of 0.52 with one message. The keys are divided by their number and
not by chunk, so that in a causal ring all ranks still have equal work with every message.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, pairwise
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from multihead.kernels.call import AttentionRequest
from multihead.kernels.dense_tile import first_key_of_samples, working_dtype
from multihead.kernels.plan.bounds import CACHE_BYTES, PlanCache, key_bounds
from multihead.masks import Full, Mask
from multihead.masks.base import KeyBounds
from multihead.masks.positions import CallPositions, TilePositions
from multihead.parallel.exchange import comparable_value
from multihead.parallel.layout import Layout, TokenRange
from multihead.tensors.shapes import AttentionShape


@dataclass(frozen=True, eq=False)
class MapBlockMask(Mask):
    """The mask of a rectangle of the attention map: queries `rows` and keys `keys` of a mask, numbered from 0.

    `bounds_of_whole_map` holds the key intervals of all queries of `mask`.
    """

    mask: Mask
    bounds_of_whole_map: KeyBounds
    rows: TokenRange
    keys: TokenRange

    def tile(self, place: TilePositions) -> Tensor:
        """Evaluate the mask of the whole sequence at positions that are relative to the block."""
        rows = place.rows + self.rows[0]
        return self.mask.tile(TilePositions(rows, rows, place.columns + self.keys[0]))

    def bounds(self, extent: CallPositions) -> KeyBounds:
        """Clip the whole mask's intervals of visible keys to the block."""
        whole, device = self.bounds_of_whole_map, extent.positions.device
        edges = (edge[:, slice(*self.rows)].to(device) for edge in (whole.start, whole.stop))
        start, end = (edge.clamp(*self.keys) - self.keys[0] for edge in edges)
        rest = None if whole.remainder is None else replace(self, mask=whole.remainder)
        return KeyBounds(start, end, rest)


class MapPiece(NamedTuple):
    """A rectangle of the attention map that one rank computes in one attention call.

    Attributes:
        rows: positions of the queries in the sequence, [first, stop).
        keys: positions of the keys in the sequence, [first, stop).
        query_slice: slice of the queries in the rank's own queries.
        key_slice: slice of the keys in the keys that the rank has in this step.
        mask: mask between these queries and keys.
    """

    rows: TokenRange
    keys: TokenRange
    query_slice: slice
    key_slice: slice
    mask: Mask


class RingStep(NamedTuple):
    """The work of a rank in one step of ring attention: what it computes, receives and sends.

    Attributes:
        distance: in this step rank r uses the keys of rank r - distance; 0 in the first step, which sends nothing.
        pieces: rectangles of the attention map that the rank computes with these keys.
        received_ranges: keys that the rank uses, as ranges of the tokens of rank r - distance.
        sent_ranges: keys that are sent to rank r + distance, as ranges of this rank's tokens.
    """

    distance: int
    pieces: tuple[MapPiece, ...]
    received_ranges: tuple[TokenRange, ...]
    sent_ranges: tuple[TokenRange, ...]

    @property
    def keys_received(self) -> int:
        """Number of keys that are received in this step."""
        return _count_positions(self.received_ranges)

    @property
    def keys_sent(self) -> int:
        """Number of keys that are sent in this step."""
        return _count_positions(self.sent_ranges)


@dataclass(frozen=True, eq=False)
class RingPlan:
    """The steps of one rank in ring attention.

    Attributes:
        length: number of tokens of the whole sequence.
        mask: mask of the whole sequence.
        bounds: interval of visible keys of each query, 16 bytes per token of the whole sequence.
        steps: the steps in order; every rank has the same number of steps, so that their messages match.
    """

    length: int
    mask: Mask
    bounds: KeyBounds
    steps: tuple[RingStep, ...]

    @cached_property
    def checksum(self) -> str:
        """Checksum of the visible keys of all queries, equal on all ranks with equal masks."""
        bounds = self.bounds
        return f"{zlib.crc32(repr(comparable_value((bounds.start, bounds.stop, bounds.remainder))).encode()):08x}"

    @property
    def keys_sent(self) -> int:
        """Number of keys that this rank sends in a forward pass."""
        return sum(step.keys_sent for step in self.steps)

    def first_keys(self, request: AttentionRequest) -> Tensor:
        """Return the first key of each sample that any query sees, (batch or 1,); -1 if there is none.

        `request` has q, k and v of some tokens, and the bias of the whole sequence.
        """
        shape = request.shape._replace(query_length=self.length, key_length=self.length)
        return first_key_of_samples(replace(request, shape=shape, mask=self.mask, query_start=0), self.bounds)


_RING_PLANS: PlanCache[RingPlan] = PlanCache(CACHE_BYTES)


def plan_ring(mask: Mask, length: int, layout: Layout, rank: int) -> RingPlan:
    """Plan ring attention for one rank, given the mask and the length of the whole sequence; plans are cached."""
    of_mask = mask.cache_key()
    key = None if of_mask is None else (of_mask, length, layout, rank)
    found = _RING_PLANS.entries.get(key)
    if found is None:
        bounds = key_bounds(mask, queries=length, keys=length)
        steps = [_steps_of_rank(mask, bounds, length, layout, rank, distance) for distance in range(layout.ranks)]
        found = RingPlan(length, mask, bounds, tuple(chain.from_iterable(steps)))
        if key is not None:
            _RING_PLANS.add(key, found, bounds)
    return found


def _steps_of_rank(
    mask: Mask, bounds: KeyBounds, length: int, layout: Layout, rank: int, distance: int
) -> list[RingStep]:
    """Plan the steps with the keys of rank - distance: two for distances > 0, so that sending overlaps computing."""
    ranks = ((rank + offset) % layout.ranks for offset in (0, -distance, distance))
    own, theirs, following = (layout.chunks(each, length) for each in ranks)
    received, sent = _visible_key_ranges(bounds, own, theirs), _visible_key_ranges(bounds, following, own)
    halves: list[tuple[list[TokenRange], list[TokenRange]]] = [(received, [])]  # own keys are neither split nor sent
    if distance:
        most = length // layout.ranks // 4
        halves = list(zip(_split_ranges_in_halves(received, most), _split_ranges_in_halves(sent, most), strict=True))
    return [
        RingStep(
            distance,
            _rectangles_of_chunks(mask, bounds, own, arriving),
            _to_indices_on_rank(arriving, theirs),
            _to_indices_on_rank(leaving, own),
        )
        for arriving, leaving in halves
    ]


def _visible_key_ranges(
    bounds: KeyBounds, row_chunks: tuple[TokenRange, ...], key_chunks: tuple[TokenRange, ...]
) -> list[TokenRange]:
    """Return, for each chunk of keys, the range from the first to the last key that a row sees; skip empty ranges."""
    found = []
    for keys in key_chunks:
        rectangles = [visible_rectangle(bounds, rows, keys) for rows in row_chunks]
        seen = [each[1] for each in rectangles if each is not None]
        if seen:
            found.append((min(first for first, _ in seen), max(stop for _, stop in seen)))
    return found


def _split_ranges_in_halves(ranges: list[TokenRange], most: int) -> tuple[list[TokenRange], list[TokenRange]]:
    """Split ranges of keys into two halves; the second half is empty if there are at most `most` keys.

    A rank stores the keys that it computes with, the keys being received, and the gradients of both. With half of the
    keys at a time this memory is halved. All ranks split alike, so that their work stays equal.
    """
    total = _count_positions(tuple(ranges))
    left = total if total <= most else -(-total // 2)
    first, second = [], []
    for start, stop in ranges:
        cut = min(start + left, stop)
        left -= cut - start
        if start < cut:
            first.append((start, cut))
        if cut < stop:
            second.append((cut, stop))
    return first, second


def _rectangles_of_chunks(
    mask: Mask, bounds: KeyBounds, row_chunks: tuple[TokenRange, ...], ranges: list[TokenRange]
) -> tuple[MapPiece, ...]:
    """Return one rectangle per chunk of queries and range of keys with visible cells; key ranges are concatenated."""
    found = []
    first_row = 0
    for chunk in row_chunks:
        first_key = 0
        for each in ranges:
            rectangle = visible_rectangle(bounds, chunk, each)
            if rectangle is not None:
                rows, keys = rectangle
                at, among = first_row + rows[0] - chunk[0], first_key + keys[0] - each[0]
                at_rows, at_keys = slice(at, at + rows[1] - rows[0]), slice(among, among + keys[1] - keys[0])
                found.append(MapPiece(rows, keys, at_rows, at_keys, _mask_of_rectangle(mask, bounds, rows, keys)))
            first_key += each[1] - each[0]
        first_row += chunk[1] - chunk[0]
    return tuple(found)


def _to_indices_on_rank(ranges: list[TokenRange], chunks: tuple[TokenRange, ...]) -> tuple[TokenRange, ...]:
    """Convert ranges of positions in the sequence to ranges of indices in a rank's tokens, given its chunks."""
    found = []
    before = 0
    for first, stop in chunks:
        found += [(before + a - first, before + b - first) for a, b in ranges if first <= a < stop]
        before += stop - first
    return tuple(found)


def visible_rectangle(bounds: KeyBounds, rows: TokenRange, keys: TokenRange) -> tuple[TokenRange, TokenRange] | None:
    """Return the smallest rectangle of queries and keys that has all visible cells of `rows` x `keys`; None if none."""
    start, stop = (edge[:, slice(*rows)].clamp(*keys) for edge in (bounds.start, bounds.stop))
    seen = start < stop  # (batch or 1, rows)
    index = seen.any(0).nonzero()
    if not len(index):
        return None
    low = int(start.masked_fill(~seen, keys[1]).min())
    high = int(stop.masked_fill(~seen, keys[0]).max())
    return (rows[0] + int(index[0]), rows[0] + int(index[-1]) + 1), (low, high)


def _mask_of_rectangle(mask: Mask, bounds: KeyBounds, rows: TokenRange, keys: TokenRange) -> Mask:
    """Return the mask of a rectangle of the attention map; `Full` if every query sees every key in it."""
    start, stop = bounds.start[:, slice(*rows)], bounds.stop[:, slice(*rows)]
    if bounds.remainder is None and bool((start <= keys[0]).all() & (stop >= keys[1]).all()):
        return Full()
    return MapBlockMask(mask, bounds, rows, keys)


def _count_positions(ranges: tuple[TokenRange, ...]) -> int:
    return sum(stop - first for first, stop in ranges)


def work_per_rank(bounds: KeyBounds, layout: Layout) -> list[int]:
    """Return the number of visible cells of the attention map that each rank computes, summed over samples."""
    cells = (bounds.stop - bounds.start).clamp(min=0).sum(0)  # (queries,)
    return [
        sum(int(cells[slice(*chunk)].sum()) for chunk in layout.chunks(rank, len(cells)))
        for rank in range(layout.ranks)
    ]


def count_keys_sent(bounds: KeyBounds, layout: Layout) -> int:
    """Estimate how many keys all ranks together send in ring attention; every rank computes the same number.

    Each chunk of queries counts the range from the first to the last key that any of its queries sees.
    """
    length, parts = bounds.start.shape[1], layout.chunk_count
    size = length // parts
    empty = bounds.sees_nothing
    low = bounds.start.masked_fill(empty, length).view(-1, parts, size).amin((0, 2))
    high = bounds.stop.masked_fill(empty, 0).view(-1, parts, size).amax((0, 2))
    first = torch.arange(parts) * size
    # (row chunk, key chunk)
    needed = (torch.minimum(high[:, None], first + size) - torch.maximum(low[:, None], first)).clamp(min=0)
    total = 0
    for rank in range(layout.ranks):
        own = [chunk[0] // size for chunk in layout.chunks(rank, length)]
        of_rank = needed[own].amax(0)
        total += int(of_rank.sum() - of_rank[own].sum())
    return total


Strategy = Literal["gather", "ulysses", "ring"]


class Traffic(NamedTuple):
    """Bytes that one rank sends to other ranks in an attention call, and stores of their tensors.

    The message of 16 bytes per rank that compares the calls of all ranks is not counted.

    Attributes:
        forward_bytes: bytes sent in the forward pass.
        backward_bytes: bytes sent in the backward pass.
        stored_bytes: largest number of bytes of other ranks' tensors that the rank stores in the forward pass.
    """

    forward_bytes: int
    backward_bytes: int
    stored_bytes: int


def compute_traffic(strategy: Strategy, shape: AttentionShape, ring_plan: RingPlan, ranks: int) -> Traffic:
    """Compute how many bytes a rank sends and stores with a strategy, from the shape of its call and its ring plan."""
    own = bytes_of_keys(shape, shape.key_length)
    others = ranks - 1
    if strategy == "gather":  # a rank sends its keys and values to all others, and gradients back
        return Traffic(own * others, own * others, own * others)
    if strategy == "ulysses":
        copies = copies_for_ulysses(shape, ranks) or 1
        features = shape.num_heads * (shape.head_dim + shape.value_dim)  # features of q and of the output
        of_logsumexp = shape.batch * shape.num_heads * shape.query_length * working_dtype(shape.dtype).itemsize
        inputs = shape.batch * shape.query_length * features * shape.dtype.itemsize + copies * own
        heads = inputs * others // ranks  # the heads of the rank itself are not sent
        return Traffic(heads + of_logsumexp * others // ranks, heads, heads)
    sent, received = ring_plan.keys_sent, [step.keys_received for step in ring_plan.steps[1:]]
    # A rank stores the keys of a step and of the next step.
    at_once = max((sum(pair) for pair in pairwise([0, *received, 0])), default=0)
    # The backward pass sends keys and values again, and the gradients of those that the rank received.
    return Traffic(
        bytes_of_keys(shape, sent), bytes_of_keys(shape, sent + sum(received)), bytes_of_keys(shape, at_once)
    )


def bytes_of_keys(shape: AttentionShape, keys: int) -> int:
    """Return the size in bytes of `keys` keys and their values, over all samples and key/value heads."""
    return shape.batch * shape.num_kv_heads * keys * (shape.head_dim + shape.value_dim) * shape.dtype.itemsize


def copies_for_ulysses(shape: AttentionShape, ranks: int) -> int | None:
    """Return how often Ulysses must copy each key/value head; None if the heads cannot be divided by the ranks.

    >>> import torch
    >>> q, k = torch.zeros(1, 8, 4, 2), torch.zeros(1, 2, 4, 2)
    >>> copies_for_ulysses(AttentionShape.from_tensors(q, k, k), 4)
    2
    """
    if shape.num_heads % ranks:
        return None
    divisors = (each for each in range(1, shape.heads_per_kv_head + 1) if shape.heads_per_kv_head % each == 0)
    return next(copies for copies in divisors if shape.num_kv_heads * copies % ranks == 0)
