"""Count shards in other processes of this machine, each of which loads the model once; `on_ray.py` does so on Ray.

Each worker process is in a separate pool. When one process of a pool ends, `concurrent.futures` fails all calls of the
pool, ends its other processes, and does not report which call was at fault. In a pool of one process the call is known,
and the other processes keep the models that they loaded. Actors of Ray have the same methods (`Worker`), so the same
loop runs them.

The process that starts workers does not count, because a text that ends the counting process would end the run. A
worker ends itself when the process that started it has ended, which a process of `concurrent.futures` would not notice.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

import torch

from multihead.counting.plan import Plan
from multihead.counting.shard import ShardCounter
from multihead.counting.spawning import SpawningContext
from multihead.counting.work import ShardResults, count_shard, load_counter
from multihead.errors import ModelError

MAX_FAILED_LOADS = 3
"""Number of processes that end while they load the model, after which the run fails."""

SECONDS_BETWEEN_PROGRESS_REPORTS = 0.2
"""Seconds between two queries of the progress of the workers."""


class Worker(Protocol):
    """A process that loads the model, and then counts one shard at a time.

    Attributes:
        errors_of_ended_process: classes of the errors that a future raises if the worker's process has ended.
    """

    errors_of_ended_process: tuple[type[Exception], ...]

    def load_model(self) -> Future[Any]:
        """Start the process, and load the model in it."""

    def count_shard(self, index: int) -> Future[tuple[str, int, int]]:
        """Count a shard; the future returns why it failed (or ""), and the texts and tokens not in `batches`."""

    def counted_batches(self) -> Iterator[tuple[int, int]]:
        """Yield the numbers of texts and tokens of each batch that ran since the last call."""

    def end_process(self) -> str:
        """End the process even while it computes; return how it ended, such as " by signal 9", for messages."""


def count_in_workers(
    new_worker: Callable[[], Worker], shards: Sequence[int], number: int, results: ShardResults
) -> None:
    """Count shards in `number` workers, which are replaced where their processes end.

    A shard whose process ended is counted once more, alone, after all other shards, because the other processes may
    have used up the memory. A shard whose second process ends too has failed.

    Raises:
        MultiheadError: a process rejected the model or the plan, or no process could load the model.
    """
    ended = _CountingPass(new_worker, shards, results).run(number)
    for index, how in _CountingPass(new_worker, list(ended), results).run(1).items():
        place = results.plan.shards[index]
        results.add_shard(index, f"{place}: two processes that counted it ended{how}.")


class _CountingPass:
    """Counts each of the given shards once, in several workers.

    Attributes:
        waiting_shards: indices of the shards that no worker has started yet.
        running: future -> its worker, and the index of the shard that the worker counts, or None while it loads the
            model.
        ended_shards: index of a shard whose process ended -> how the process ended, such as " by signal 9".
        failed_loads: number of processes that ended while they loaded the model.
    """

    def __init__(self, new_worker: Callable[[], Worker], shards: Sequence[int], results: ShardResults) -> None:
        self.new_worker, self.results = new_worker, results
        self.waiting_shards = deque(shards)
        self.running: dict[Future[Any], tuple[Worker, int | None]] = {}
        self.ended_shards: dict[int, str] = {}
        self.failed_loads = 0

    def run(self, number: int) -> dict[int, str]:
        """Count the shards in at most `number` workers, and return `ended_shards`."""
        try:
            for _ in range(min(number, len(self.waiting_shards))):
                self._start_worker()
            while self.running:
                done, _ = wait(self.running, SECONDS_BETWEEN_PROGRESS_REPORTS, FIRST_COMPLETED)
                for worker, _ in self.running.values():
                    for batch in worker.counted_batches():
                        self.results.add_batch(*batch)
                for future in done:
                    self._handle_finished(future)
                if not self.waiting_shards:
                    self._end_loading_workers()
                self.results.progress.processes = sum(index is not None for _, index in self.running.values())
                self.results.report_progress()
        finally:
            for worker, _ in self.running.values():
                worker.end_process()
        return self.ended_shards

    def _start_worker(self) -> None:
        worker = self.new_worker()
        self.running[worker.load_model()] = worker, None

    def _handle_finished(self, future: Future[Any]) -> None:
        """Store the result of a worker, and start the next shard in it; replace the worker if its process ended."""
        worker, index = self.running[future]
        try:
            result = future.result()
        except worker.errors_of_ended_process:
            del self.running[future]
            how = worker.end_process()
            if index is not None:
                self.ended_shards[index] = how
            else:
                self.failed_loads += 1
                if self.failed_loads == MAX_FAILED_LOADS:
                    raise ModelError(
                        f"{MAX_FAILED_LOADS} processes that loaded the model ended{how}.",
                        "Each process needs memory for the whole model: use fewer workers.",
                    ) from None
            if self.waiting_shards:
                self._start_worker()
            return
        if index is not None:
            problem, texts, tokens = result
            self.results.add_batch(texts, tokens)
            self.results.add_shard(index, problem)
        del self.running[future]
        if self.waiting_shards:
            index = self.waiting_shards.popleft()
            self.running[worker.count_shard(index)] = worker, index
        else:
            worker.end_process()

    def _end_loading_workers(self) -> None:
        """End the workers that still load the model when no shard is left to count."""
        for future in [each for each, (_, index) in self.running.items() if index is None]:
            self.running.pop(future)[0].end_process()


class ProcessWorker:
    """A process on this machine in a pool of one, so that a broken pool identifies the shard that was counted."""

    errors_of_ended_process: tuple[type[Exception], ...] = (BrokenProcessPool,)

    def __init__(self, plan: Plan, folder: Path, threads: int) -> None:
        self._plan, self._folder, self._context = plan, folder, SpawningContext()
        self._batches, self._sent = self._context.Pipe(duplex=False)
        self._pool = ProcessPoolExecutor(1, self._context, _prepare_process, (self._sent, threads))

    def load_model(self) -> Future[None]:
        """See `Worker`."""
        future = self._pool.submit(_load_model, self._folder, self._plan.model, self._plan.device)
        self._sent.close()  # the worker process has its own copy of this end of the pipe
        return future

    def count_shard(self, index: int) -> Future[tuple[str, int, int]]:
        """See `Worker`."""
        return self._pool.submit(_count_shard, self._folder, index)

    def counted_batches(self) -> Iterator[tuple[int, int]]:
        """See `Worker`."""
        with suppress(EOFError):
            while self._batches.poll():
                yield self._batches.recv()

    def end_process(self) -> str:
        """See `Worker`."""
        (process,) = self._context.processes
        process.terminate()
        self._pool.shutdown()
        self._batches.close()
        code = process.exitcode or 0
        return f" by signal {-code}" if code < 0 else f" with status {code}"


class _WorkerState:
    """Global state of a worker process: the model, and the pipe for the numbers of texts and tokens of each batch."""

    counter: ShardCounter
    batches: Connection


def _prepare_process(batches: Connection, threads: int) -> None:
    """Prepare this worker process before it loads the model: standard output, threads and the pipe for batches."""
    _WorkerState.batches = batches
    threading.Thread(target=_end_with_parent, daemon=True).start()
    with suppress(OSError):  # a closed standard error
        os.dup2(2, 1)  # standard output belongs to the caller, so what a model's libraries print goes to standard error
    os.environ["RAYON_NUM_THREADS"] = str(threads)  # number of threads of the tokenizer
    torch.set_num_threads(threads)


def _end_with_parent() -> None:
    """End this process when the process that started it has ended, even by a signal that cannot be handled."""
    if (parent := multiprocessing.parent_process()) is not None:
        parent.join()
        os._exit(1)


def _load_model(folder: Path, model: str, device: str) -> None:
    _WorkerState.counter = load_counter(folder, model, device)


def _count_shard(folder: Path, index: int) -> tuple[str, int, int]:
    def send(texts: int, tokens: int) -> None:
        _WorkerState.batches.send((texts, tokens))  # a few bytes, which a pipe writes completely or not at all

    return count_shard(_WorkerState.counter, folder, index, send), 0, 0
