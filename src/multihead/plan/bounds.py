"""Turn a mask into the interval of keys each query may see."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache, reduce
from threading import Lock

import torch
from torch import Tensor

from multihead.call import AttentionRequest
from multihead.masks.behind import Behind
from multihead.masks.dense import as_tensor
from multihead.masks.values import And, Causal, Documents, Full, Keep, Lengths, Mask, Or, Prefix, Window, _Given
from multihead.reading import intercepted, readable, traced

# Plans that are kept may take so many bytes together: 16 for each query that has bounds of its own.
KEPT_BYTES = 32 << 20


@dataclass(frozen=True, eq=False)
class KeyBounds:
    """The keys each query may see: those of [start, stop) that the remainder, if any, shows too.

    Fields:
        start: (batch or 1, queries), int64, the first key that a query may see.
        stop: (batch or 1, queries), int64, the key behind the last one; equal to start where no key is seen.
        remainder: the part of the mask whose rows are no intervals, or None where the interval says it all.
    """

    start: Tensor
    stop: Tensor
    remainder: Mask | None = None

    @property
    def shared(self) -> bool:
        """Whether all samples have the same bounds."""
        return self.start.shape[0] == 1

    @property
    def sees_nothing(self) -> Tensor:
        """(batch or 1, queries), bool: the queries whose interval is empty."""
        return self.start >= self.stop


_Key = tuple[Mask, int, int, int, torch.device]


@dataclass(frozen=True, eq=False)
class _Extent:
    """Where the call stands: (batch or 1, queries) positions, and the number of keys."""

    positions: Tensor
    keys: int
    readable: bool  # whether values may be read here without waiting for a device or breaking a graph


def key_bounds(
    mask: Mask,
    *,
    queries: int,
    keys: int,
    query_start: int | Tensor = 0,
    device: torch.device | str = "cpu",
) -> KeyBounds:
    """Plan a mask: O(queries) memory for every mask whose rows are intervals.

    Args:
        mask: any mask that fits the call.
        queries: number of queries.
        keys: number of keys.
        query_start: where the first query stands among the keys; a tensor (batch,) has one a sample.
        device: where the bounds are made.

    >>> from multihead import masks
    >>> bounds = key_bounds(masks.Causal() & masks.Window(2), queries=4, keys=4)
    >>> bounds.start.tolist(), bounds.stop.tolist(), bounds.remainder
    ([[0, 0, 1, 2]], [[1, 2, 3, 4]], None)
    """
    return _bounds_in(mask, queries, keys, query_start, torch.device(device))


def bounds_of(request: AttentionRequest) -> KeyBounds:
    """Plan the mask of a request."""
    shape = request.shape
    return _bounds_in(request.mask, shape.query_length, shape.key_length, request.query_start, shape.device)


def _bounds_in(mask: Mask, queries: int, keys: int, query_start: int | Tensor, device: torch.device) -> KeyBounds:
    if isinstance(query_start, Tensor) or intercepted():
        return _planned(mask, queries, keys, query_start, device)
    if queries == 1:  # each step of a decoding is another one: it is planned in numbers
        only = _interval_at(mask, query_start, keys)
        if only is not None:
            first, behind = max(only[0], 0), min(only[1], keys)
            return _only(first, behind, device) if first < behind else _only(0, 0, device)
    if mask.holds_tensors:
        return _planned(mask, queries, keys, query_start, device)
    return _KEPT.plan(mask, queries, keys, query_start, device)


def _interval_at(mask: Mask, position: int, keys: int) -> tuple[int, int] | None:
    """Tell what one query sees, where that is said without tensors; None for the other masks."""
    if isinstance(mask, Full):
        return 0, keys
    if isinstance(mask, Causal):
        return 0, position + 1
    if isinstance(mask, Window):
        return position - mask.size + 1, position + mask.after + 1
    if isinstance(mask, And):
        parts = [_interval_at(part, position, keys) for part in mask.parts]
        known = [part for part in parts if part is not None]
        if len(known) == len(parts):
            return max(first for first, _ in known), min(behind for _, behind in known)
    return None


@lru_cache(maxsize=256)
def _only(first: int, behind: int, device: torch.device) -> KeyBounds:
    """Return the bounds of one query."""
    places = _places(1 << behind.bit_length(), device)
    return KeyBounds(places[:, first : first + 1], places[:, behind : behind + 1])


@lru_cache(maxsize=32)
def _places(count: int, device: torch.device) -> Tensor:
    """Return (1, count): 0, 1, 2 and so on, of which a step cuts what it would have to make."""
    return torch.arange(count, device=device)[None]


class _Kept:
    """Plans of masks without tensors, each made once for its sizes; the oldest go when they take too many bytes."""

    def __init__(self, most: int) -> None:
        self.most, self.held = most, 0
        self._plans: dict[_Key, KeyBounds] = {}
        self._lock = Lock()

    def plan(self, *key: *_Key) -> KeyBounds:
        """Return the plan that `_planned` makes."""
        found = self._plans.get(key)
        return self._made(key) if found is None else found

    def _made(self, key: _Key) -> KeyBounds:
        made = _planned(*key)
        # A mode that replaces what tensors are made of must not reach the calls after it.
        if type(made.start) is not Tensor or type(made.stop) is not Tensor:
            return made
        size = _bytes_of(made)
        with self._lock:
            if size <= self.most and key not in self._plans:
                self._plans[key] = made
                self.held += size
                while self.held > self.most:
                    self.held -= _bytes_of(self._plans.pop(next(iter(self._plans))))
        return made


def _bytes_of(bounds: KeyBounds) -> int:
    """Return the memory of a plan, and what an entry of a table costs at least."""
    return bounds.start.untyped_storage().nbytes() + bounds.stop.untyped_storage().nbytes() + 1024


_KEPT = _Kept(KEPT_BYTES)


def _planned(mask: Mask, queries: int, keys: int, query_start: int | Tensor, device: torch.device) -> KeyBounds:
    row = torch.arange(queries, device=device)[None]
    if not traced() and not keys:  # in a graph their number may be known only as it runs
        return KeyBounds(torch.zeros_like(row), torch.zeros_like(row))
    start = query_start.to(device)[:, None] if isinstance(query_start, Tensor) else query_start
    may_read = readable(device)
    found = _bounds(mask, _Extent(row + start, keys, may_read))
    empty = found.start >= found.stop
    first, behind = found.start.masked_fill(empty, 0), found.stop.masked_fill(empty, 0)
    if may_read and first.shape[0] > 1 and bool((first == first[:1]).all() & (behind == behind[:1]).all()):
        first, behind = first[:1], behind[:1]
    return KeyBounds(first, behind, found.remainder)


def _bounds(mask: Mask, extent: _Extent) -> KeyBounds:
    """Plan one mask; the bounds may be crossed (start > stop) where no key is seen."""
    if isinstance(mask, And):
        return reduce(_both, (_bounds(part, extent) for part in mask.parts))
    if isinstance(mask, Or):
        return _either(mask, [_bounds(part, extent) for part in mask.parts], extent)
    if isinstance(mask, Behind):
        return _behind(mask, extent)
    if isinstance(mask, _Given):
        return _of_tensor(mask, extent)
    first, behind = _INTERVALS[type(mask)](mask, extent)
    within = (each.clamp(0, extent.keys) for each in (first, behind))
    start, stop, _ = torch.broadcast_tensors(*within, extent.positions[:1])  # torch.broadcast_shapes imports sympy
    return KeyBounds(start, stop)


def _both(left: KeyBounds, right: KeyBounds) -> KeyBounds:
    if left.remainder is None or right.remainder is None:
        remainder = left.remainder or right.remainder
    else:
        remainder = left.remainder & right.remainder
    return KeyBounds(torch.maximum(left.start, right.start), torch.minimum(left.stop, right.stop), remainder)


def _either(mask: Or, parts: list[KeyBounds], extent: _Extent) -> KeyBounds:
    """Join intervals; where they leave a gap between them, the hull with the mask itself as remainder."""
    whole = parts[0]
    for part in parts[1:]:
        left_empty, right_empty = whole.sees_nothing, part.sees_nothing
        first = torch.where(left_empty, part.start, torch.where(right_empty, whole.start, whole.start.min(part.start)))
        behind = torch.where(left_empty, part.stop, torch.where(right_empty, whole.stop, whole.stop.max(part.stop)))
        touching = left_empty | right_empty | (torch.maximum(whole.start, part.start) <= whole.stop.min(part.stop))
        # Where values may not be read, two intervals surely join if both begin at the first key.
        joined = bool(touching.all()) if extent.readable else _begin_at_zero(mask)
        clean = joined and whole.remainder is None and part.remainder is None
        whole = KeyBounds(first, behind, None if clean else mask)
    return whole


def _behind(mask: Behind, extent: _Extent) -> KeyBounds:
    """Move intervals behind the keys that all see; what begins further on leaves a gap."""
    keys = extent.keys - mask.count
    if extent.readable and keys <= 0:  # a part of a call may end with the keys that all see
        nothing = torch.zeros_like(extent.positions)
        return KeyBounds(nothing, nothing + extent.keys)
    inner = _bounds(mask.mask, replace(extent, positions=extent.positions - mask.count, keys=keys))
    empty = inner.start >= inner.stop
    behind = inner.stop.masked_fill(empty, 0) + mask.count
    touching = not mask.count or (
        bool((empty | (inner.start == 0)).all()) if extent.readable else _begin_at_zero(mask.mask)
    )
    clean = touching and inner.remainder is None
    start = torch.zeros_like(behind) if mask.count else inner.start
    return KeyBounds(start, behind, None if clean else mask)


def _begin_at_zero(mask: Mask) -> bool:
    """Whether all of a mask's intervals begin at the first key, told from how it is written."""
    if isinstance(mask, (And, Or)):
        return all(_begin_at_zero(part) for part in mask.parts)
    return isinstance(mask, (Full, Causal, Lengths, Prefix))


def _of_tensor(mask: _Given, extent: _Extent) -> KeyBounds:
    """Bound a given tensor by its first and last True a row; it remains where there are gaps between them."""
    given = mask.four_dimensional().to(extent.positions.device)
    kept = given if isinstance(mask, Keep) else ~given
    kept = kept.expand(-1, -1, -1, extent.keys)
    count = kept.sum(-1)  # (batch or 1, heads or 1, queries or 1)
    first = torch.where(count > 0, kept.int().argmax(-1), extent.keys)
    behind = torch.where(count > 0, extent.keys - kept.flip(-1).int().argmax(-1), 0)
    whole = extent.readable and bool((count == (behind - first).clamp(min=0)).all())
    hull_first, hull_behind = first.amin(1), behind.amax(1)
    if whole and first.shape[1] > 1:
        whole = bool((first == hull_first[:, None]).all() & (behind == hull_behind[:, None]).all())
    queries = (-1, extent.positions.shape[1])
    return KeyBounds(hull_first.expand(queries), hull_behind.expand(queries), None if whole else mask)


def _full(mask: Full, extent: _Extent) -> tuple[Tensor, Tensor]:
    nothing = torch.zeros_like(extent.positions[:1])
    return nothing, nothing + extent.keys


def _causal(mask: Causal, extent: _Extent) -> tuple[Tensor, Tensor]:
    return torch.zeros_like(extent.positions), extent.positions + 1


def _window(mask: Window, extent: _Extent) -> tuple[Tensor, Tensor]:
    return extent.positions - mask.size + 1, extent.positions + mask.after + 1


def _lengths(mask: Lengths, extent: _Extent) -> tuple[Tensor, Tensor]:
    lengths = as_tensor(mask.lengths, extent.positions.device)
    lengths = lengths[:, None] if lengths.dim() == 1 else lengths
    return torch.zeros_like(lengths), lengths


def _prefix(mask: Prefix, extent: _Extent) -> tuple[Tensor, Tensor]:
    length = as_tensor(mask.length, extent.positions.device).reshape(-1, 1)
    return torch.zeros_like(length), length


def _documents(mask: Documents, extent: _Extent) -> tuple[Tensor, Tensor]:
    ends = as_tensor(mask.lengths, extent.positions.device).cumsum(-1)
    ends = ends[None] if ends.dim() == 1 else ends
    rows = max(ends.shape[0], extent.positions.shape[0])
    position = extent.positions.expand(rows, -1).contiguous()
    edges = torch.nn.functional.pad(ends, (1, 0)).expand(rows, -1).contiguous()  # document d: [edges[d], edges[d + 1])
    index = torch.searchsorted(edges, position, right=True)
    outside = (index == 0) | (index == edges.shape[1])
    inside = index.masked_fill(outside, 1 if edges.shape[1] > 1 else 0)
    behind = edges.gather(1, inside).masked_fill(outside, 0)
    return edges.gather(1, (inside - 1).clamp(min=0)).masked_fill(outside, 0), behind


_INTERVALS: dict[type[Mask], Callable[..., tuple[Tensor, Tensor]]] = {
    Full: _full,
    Causal: _causal,
    Window: _window,
    Lengths: _lengths,
    Prefix: _prefix,
    Documents: _documents,
}
