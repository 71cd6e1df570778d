"""Turn a mask into the interval of keys each query may see, planned once per mask and size."""

from __future__ import annotations

from functools import lru_cache
from threading import Lock

import torch
from torch import Tensor

from multihead.call import AttentionRequest
from multihead.masks.base import KeyBounds, Mask
from multihead.masks.place import Extent
from multihead.tracing import intercepted, readable, traced

# Plans that are kept may take so many bytes together: 16 for each query that has bounds of its own.
KEPT_BYTES = 32 << 20

_Key = tuple[Mask, int, int, int, torch.device]


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
        only = mask.interval_at(query_start, keys)
        if only is not None:
            first, behind = max(only[0], 0), min(only[1], keys)
            return _only(first, behind, device) if first < behind else _only(0, 0, device)
    if mask.holds_tensors:
        return _planned(mask, queries, keys, query_start, device)
    return _KEPT.plan(mask, queries, keys, query_start, device)


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
    found = mask.bounds(Extent(row + start, keys, may_read))
    empty = found.start >= found.stop
    first, behind = found.start.masked_fill(empty, 0), found.stop.masked_fill(empty, 0)
    if may_read and first.shape[0] > 1 and bool((first == first[:1]).all() & (behind == behind[:1]).all()):
        first, behind = first[:1], behind[:1]
    return KeyBounds(first, behind, found.remainder)
