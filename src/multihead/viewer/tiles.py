"""Compute tiles of an attention map on request: newest request first, shared between requests, cancellable, cached.

Tiles with cells of up to 32 x 32 weights are computed on request: their 256 x 256 cells cover at most 2^26 scores.
Coarser levels are stored (`levels.py`).
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from multihead.probes.blocks import CancelledError
from multihead.viewer.levels import TILE_SIDE, Array, cells_per_side

if TYPE_CHECKING:
    from multihead.record.sample import SampleRecord

MAX_CACHE_BYTES = 128 << 20
"""Size of the tile cache in bytes: about 500 full tiles."""

_CLOSE_TIMEOUT = 2.0  # seconds to wait for the threads to end

IsCancelled = Callable[[], bool]
"""Function that returns whether no request waits for the result of a computation any more."""


def raise_if_cancelled(is_cancelled: IsCancelled) -> None:
    """Raise CancelledError if no request waits for the result of a computation any more."""
    if is_cancelled():
        raise CancelledError


def as_float32(values: Tensor) -> Array:
    """Return the numbers of a tensor as a float32 array of the same shape."""
    array: Array = values.float().numpy()
    return array


def fine_tile(
    sample: SampleRecord,
    head: int,
    level: int,
    *,
    row: int,
    column: int,
    sink: bool = True,
    cancelled: IsCancelled | None = None,
) -> Array:
    """Compute a tile from q, k and the logsumexp: (rows, columns) float32, at most `TILE_SIDE` a side, NaN = masked.

    Args:
        sample: one text in one layer, which kept q and k.
        head: index of the head.
        level: the level; each of its cells is the mean of the visible weights in a 2^level x 2^level block.
        row: index of the tile, down.
        column: index of the tile, across.
        sink: whether to include the first key.
        cancelled: called between strips; when it returns True, CancelledError is raised.
    """
    block, width = 1 << level, TILE_SIDE << level
    found = sample.blocks(
        head,
        queries=slice(row * width, min((row + 1) * width, sample.num_queries)),
        keys=slice(column * width, min((column + 1) * width, sample.num_keys)),
        block=block,
        without_first_key=not sink,
        cancelled=cancelled,
    )
    return as_float32(found.means()[0])


def maps_of_all_heads(sample: SampleRecord, level: int, *, cancelled: IsCancelled | None = None) -> Array:
    """Compute the maps of all heads at a level: (heads, rows, columns) float32, NaN for a masked cell."""
    return as_float32(sample.blocks(None, block=1 << level, cancelled=cancelled).means())


def weights_of_queries(sample: SampleRecord, head: int, queries: slice) -> Array:
    """Compute the weights of some queries: (queries, keys) float32, NaN = masked."""
    return as_float32(visible_weights(sample, head, queries=queries))


def visible_weights(
    sample: SampleRecord, head: int | None = None, *, queries: slice = slice(None), keys: slice = slice(None)
) -> Tensor:
    """Compute the weights of some queries on some keys, NaN = masked.

    Returns:
        (queries, keys), or (heads, queries, keys) if head is None; float32 (float64 for float64).
    """
    seen = sample.visible(queries=queries, keys=keys)
    seen = seen if seen.dim() == 2 or head is None else seen[head]
    return torch.where(seen, sample.weights(head, queries=queries, keys=keys), torch.nan)


def tiles_per_side(length: int, level: int) -> int:
    """Count the tiles of a level along a side of the given length.

    >>> tiles_per_side(100, 0), tiles_per_side(8192, 0), tiles_per_side(8192, 5)
    (1, 32, 1)
    """
    return -(-cells_per_side(length, level) // TILE_SIDE)


class ArrayCache:
    """A least recently used cache of arrays, limited in bytes."""

    def __init__(self, max_bytes: int = MAX_CACHE_BYTES) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._arrays: OrderedDict[Hashable, Array] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: Hashable) -> Array | None:
        """Return the cached array of a key, or None if it is not cached."""
        with self._lock:
            if key in self._arrays:
                self._arrays.move_to_end(key)
            return self._arrays.get(key)

    def put(self, key: Hashable, value: Array) -> None:
        """Store an array, unless it is larger than the whole cache."""
        if value.nbytes > self.max_bytes:
            return
        with self._lock:
            before = self._arrays.pop(key, None)
            self.num_bytes += value.nbytes - (0 if before is None else before.nbytes)
            self._arrays[key] = value
            while self.num_bytes > self.max_bytes:
                self.num_bytes -= self._arrays.popitem(last=False)[1].nbytes


@dataclass(eq=False)
class ComputationJob:
    """A computation shared by all requests that wait for it.

    Attributes:
        key: identifies the computation; requests with the same key share one job.
        compute: the function; its argument is a function that returns whether the job was cancelled.
        result: future that is completed when the computation ends.
        num_waiting_requests: number of requests that wait.
    """

    key: Hashable
    compute: Callable[[IsCancelled], object]
    result: Future[object] = field(default_factory=Future)
    num_waiting_requests: int = 0

    def __post_init__(self) -> None:
        """Mark the result as running, because a running future cannot be cancelled by one request for the others."""
        self.result.set_running_or_notify_cancel()

    def is_cancelled(self) -> bool:
        """Return whether no request waits any more."""
        return self.num_waiting_requests == 0


class WorkerThreads:
    """Threads that run the newest job first, and background work when there is no job.

    A computation uses all the threads that PyTorch is set to, so there are (cores / PyTorch's threads) workers: with
    PyTorch's default setting, one.

    Args:
        num_threads: number of threads; None: the number of cores divided by PyTorch's threads.
        run_background_step: a function that does one step of background work, and returns whether more work is left.
    """

    def __init__(
        self, num_threads: int | None = None, *, run_background_step: Callable[[], bool] = lambda: False
    ) -> None:
        self._run_background_step = run_background_step
        self._has_background_work = False
        self._is_closed = False
        self._waiting_jobs: dict[Hashable, ComputationJob] = {}  # the next one is the last
        self._running_jobs: dict[Hashable, ComputationJob] = {}
        self._jobs_changed = threading.Condition()
        self._background_lock = threading.Lock()
        fitting = max(1, (os.cpu_count() or 1) // max(1, torch.get_num_threads()))
        self._threads = [
            threading.Thread(target=self._run_jobs, name=f"multihead viewer {index}", daemon=True)
            for index in range(num_threads or fitting)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, key: Hashable, compute: Callable[[IsCancelled], object]) -> ComputationJob:
        """Queue a computation before all earlier ones, or join the job that has the same key."""
        with self._jobs_changed:
            job = self._running_jobs.get(key)
            if job is None:
                job = self._waiting_jobs.pop(key, None) or ComputationJob(key, compute)
                self._waiting_jobs[key] = job
            job.num_waiting_requests += 1
            self._jobs_changed.notify()
        return job

    def stop_waiting(self, job: ComputationJob) -> None:
        """Stop waiting for a job; a job without waiting requests is cancelled."""
        with self._jobs_changed:
            job.num_waiting_requests -= 1
            if job.is_cancelled():
                self._forget(job)

    def announce_background_work(self) -> None:
        """Wake the threads for new background work."""
        with self._jobs_changed:
            self._has_background_work = True
            self._jobs_changed.notify()

    def close(self) -> None:
        """Cancel all jobs, and wait some seconds for the threads to end."""
        with self._jobs_changed:
            self._is_closed = True
            for job in (*self._waiting_jobs.values(), *self._running_jobs.values()):
                job.num_waiting_requests = 0
            for job in self._waiting_jobs.values():
                job.result.set_exception(CancelledError())
            self._waiting_jobs.clear()
            self._jobs_changed.notify_all()
        for thread in self._threads:
            thread.join(_CLOSE_TIMEOUT)  # a job that cannot be cancelled ends with the process

    def _run_jobs(self) -> None:
        while True:
            with self._jobs_changed:
                self._jobs_changed.wait_for(lambda: self._is_closed or self._waiting_jobs or self._has_background_work)
                if self._is_closed:
                    return
                job = self._waiting_jobs.popitem()[1] if self._waiting_jobs else None
                if job is None:
                    self._has_background_work = False
                else:
                    self._running_jobs[job.key] = job
            if job is not None:
                self._run_job(job)
            elif self._background_lock.acquire(blocking=False):  # one background step at a time over all threads
                try:
                    more = self._run_background_step()
                finally:
                    self._background_lock.release()
                if more:
                    self.announce_background_work()

    def _run_job(self, job: ComputationJob) -> None:
        try:
            job.result.set_result(job.compute(job.is_cancelled))
        except BaseException as error:  # noqa: BLE001 - passed on to the waiting requests
            job.result.set_exception(error)
        finally:
            with self._jobs_changed:
                self._forget(job)

    def _forget(self, job: ComputationJob) -> None:
        """Let no further request join a job, and do not start it if it waits."""
        for jobs in (self._waiting_jobs, self._running_jobs):
            if jobs.get(job.key) is job:
                del jobs[job.key]
