"""Convert a mask to the interval of keys visible to each query, once per mask and size."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from threading import Lock
from typing import Generic, TypeVar

import torch
from torch import Tensor

from multihead.kernels.call import AttentionRequest
from multihead.masks.base import KeyBounds, Mask
from multihead.masks.positions import CallPositions
from multihead.tensors.tracing import can_read_values, is_captured, is_intercepted, is_traced

# Maximum size of all cached plans; each query takes 16 bytes.
CACHE_BYTES = 32 << 20

PlanT = TypeVar("PlanT")


class PlanCache(Generic[PlanT]):
    """A cache of plans, key -> plan, limited to `max_bytes` and `most` plans; the oldest plans are removed first."""

    def __init__(self, max_bytes: int, most: int | None = None) -> None:
        self.max_bytes, self.most, self.nbytes = max_bytes, most, 0
        self.entries: dict[object, PlanT] = {}
        self._sizes: dict[object, int] = {}
        self._lock = Lock()

    def add(self, key: object, value: PlanT, bounds: KeyBounds, others: Iterable[Tensor] = ()) -> None:
        """Add a plan, counting the memory of its bounds and of other tensors that it or the key holds."""
        # Nothing is cached under a torch mode with tensors of its own (FakeTensorMode): later calls must not get those.
        if type(bounds.start) is not Tensor or type(bounds.stop) is not Tensor or is_captured(bounds.start.device):
            return
        # 1024: the approximate size of an entry without its tensors.
        size = sum(each.untyped_storage().nbytes() for each in (bounds.start, bounds.stop, *others)) + 1024
        with self._lock:
            if size > self.max_bytes or key in self.entries:
                return
            self.entries[key], self._sizes[key] = value, size
            self.nbytes += size
            while self.nbytes > self.max_bytes or (self.most is not None and len(self.entries) > self.most):
                self._drop(next(iter(self.entries)))

    def _drop(self, key: object) -> None:
        del self.entries[key]
        self.nbytes -= self._sizes.pop(key)

    @contextmanager
    def drop_added_at_end(self) -> Iterator[None]:
        """Context manager that removes, at its end, the plans added in it."""
        before = set(self.entries)
        try:
            yield
        finally:
            with self._lock:
                for key in self.entries.keys() - before:
                    self._drop(key)


BOUNDS_CACHE: PlanCache[KeyBounds] = PlanCache(CACHE_BYTES)
# Bounds of masks that hold tensors, on CUDA: the layers of a model share the few masks of a pass.
MOST_MASKS_WITH_TENSORS = 8
_BOUNDS_OF_TENSORS: PlanCache[KeyBounds] = PlanCache(CACHE_BYTES, MOST_MASKS_WITH_TENSORS)


def bounds_of(request: AttentionRequest, device: torch.device | str | None = None) -> KeyBounds:
    """Return the interval of keys that each query of a request may see, on the device of the request by default."""
    shape = request.shape
    return key_bounds(
        request.mask,
        queries=shape.query_length,
        keys=shape.key_length,
        query_start=request.query_start,
        device=device or shape.device,
    )


def key_bounds(
    mask: Mask,
    *,
    queries: int,
    keys: int,
    query_start: int | Tensor = 0,
    device: torch.device | str = "cpu",
) -> KeyBounds:
    """Compute the interval of keys visible to each query; the rest of a mask that is not intervals is the remainder.

    `query_start` is the position of the first query among the keys, an int or (batch,).

    >>> from multihead import masks
    >>> bounds = key_bounds(masks.Causal() & masks.Window(2), queries=4, keys=4)
    >>> bounds.start.tolist(), bounds.stop.tolist(), bounds.remainder
    ([[0, 0, 1, 2]], [[1, 2, 3, 4]], None)
    """
    device = torch.device(device)
    if is_intercepted():
        return _compute_bounds(mask, queries, keys, query_start, device)
    if isinstance(query_start, Tensor):
        return _bounds_of_tensors(mask, queries, keys, query_start, device)
    # Not cached: each decoding step has another number of keys, and its bounds are two numbers.
    if queries == 1 and mask.band is not None and mask.band.lengths is None:
        return _bounds_of_one_query(*mask.band.interval_of_query(query_start, keys), device)
    of_mask = mask.cache_key()
    if of_mask is None:
        return _bounds_of_tensors(mask, queries, keys, query_start, device)
    key = of_mask, queries, keys, query_start, device
    bounds = BOUNDS_CACHE.entries.get(key)
    if bounds is None:
        bounds = _compute_bounds(mask, queries, keys, query_start, device)
        BOUNDS_CACHE.add(key, bounds, bounds)
    return bounds


def _bounds_of_tensors(
    mask: Mask, queries: int, keys: int, query_start: int | Tensor, device: torch.device
) -> KeyBounds:
    """Compute the bounds of a mask or positions in tensors; on CUDA once per mask and values of its tensors.

    On the CPU computing them takes less time than finding them.
    """
    tensors = tuple(mask.tensors()) if device.type == "cuda" else ()
    if isinstance(query_start, Tensor) and device.type == "cuda":
        tensors = *tensors, query_start
    if not tensors or any(each.is_inference() for each in tensors):  # such tensors do not count their changes
        return _compute_bounds(mask, queries, keys, query_start, device)
    # Masks are equal if they hold the same tensors, which are alive as long as the key is.
    key = mask, tuple(each._version for each in tensors), queries, keys, query_start, device  # noqa: SLF001
    try:
        bounds = _BOUNDS_OF_TENSORS.entries.get(key)
    except TypeError:  # a field that cannot be hashed
        return _compute_bounds(mask, queries, keys, query_start, device)
    if bounds is None:
        bounds = _compute_bounds(mask, queries, keys, query_start, device)
        _BOUNDS_OF_TENSORS.add(key, bounds, bounds, tensors)
    return bounds


def fraction_within_bounds(bounds: KeyBounds, *, keys: int) -> float:
    """Return the fraction of the score matrix that lies within the bounds, 0 to 1."""
    cells = bounds.start.numel() * keys
    return float((bounds.stop - bounds.start).sum()) / cells if cells else 0.0


@lru_cache(maxsize=256)
def _bounds_of_one_query(start: int, stop: int, device: torch.device) -> KeyBounds:
    """Return the key interval [start, stop) of a single query as KeyBounds with tensors (1, 1)."""
    positions = _range_of_positions(1 << stop.bit_length(), device)
    return KeyBounds(positions[:, start : start + 1], positions[:, stop : stop + 1])


@lru_cache(maxsize=32)
def _range_of_positions(count: int, device: torch.device) -> Tensor:
    """Return 0, 1, ..., count - 1 as (1, count) int64, cached so that decoding steps only slice it."""
    return torch.arange(count, device=device)[None]


def _compute_bounds(mask: Mask, queries: int, keys: int, query_start: int | Tensor, device: torch.device) -> KeyBounds:
    row = torch.arange(queries, device=device)[None]
    if not is_traced() and not keys:  # a graph may know the number of keys only when it runs
        return KeyBounds(torch.zeros_like(row), torch.zeros_like(row))
    first = query_start.to(device)[:, None] if isinstance(query_start, Tensor) else query_start
    may_read = can_read_values(device)
    bounds = mask.bounds(CallPositions(row + first, keys, may_read))
    empty = bounds.start >= bounds.stop
    start, stop = bounds.start.masked_fill(empty, 0), bounds.stop.masked_fill(empty, 0)
    if may_read and start.shape[0] > 1 and bool((start == start[:1]).all() & (stop == stop[:1]).all()):
        start, stop = start[:1], stop[:1]
    return KeyBounds(start, stop, bounds.remainder)
