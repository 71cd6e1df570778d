"""Count shards in other processes, each of which loads the model once: on this machine here, on Ray in `on_ray`.

Each process is a pool of its own. `concurrent.futures` fails all calls of a pool when one of its processes ends, ends
the other processes, and does not say which call was at fault. In a pool of one process the call is known, and the other
processes keep the models that they loaded. Actors of Ray have the same methods (`Worker`), so the same loop serves
them.

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
from multihead.counting.spawn import SpawningContext
from multihead.counting.work import Results, count_shard, load_counter
from multihead.errors import ModelError

MAX_FAILED_LOADS = 3
"""How many processes may end while they load the model, before the run ends."""

PROGRESS_INTERVAL = 0.2
"""Seconds between two looks at the progress of the workers."""


class Worker(Protocol):
    """A process that loads the model, and then counts one shard at a time.

    Attributes:
        errors_of_ended_process: the errors of a future whose process has ended.
    """

    errors_of_ended_process: tuple[type[Exception], ...]

    def load(self) -> Future[Any]:
        """Start the process, and load the model in it."""

    def count(self, index: int) -> Future[tuple[str, int, int]]:
        """Count a shard: why it failed, or "", and the texts and tokens that `batches` does not have."""

    def batches(self) -> Iterator[tuple[int, int]]:
        """Return the texts and tokens of each batch that ran since the last call."""

    def end(self) -> str:
        """End the process, whatever it does; return how it ended, for messages: " by signal 9"."""


def count_in_workers(new_worker: Callable[[], Worker], shards: Sequence[int], number: int, results: Results) -> None:
    """Count shards in `number` workers, which are replaced where their processes end.

    A shard whose process ended is counted once more after all others, alone: what ended it may have been the memory
    that the others took. A shard that ends this process too is a failed one.

    Raises:
        MultiheadError: a process rejected the model or the plan, or none could load the model.
    """
    ended = _CountingPass(new_worker, shards, results).run(number)
    for index, how in _CountingPass(new_worker, list(ended), results).run(1).items():
        place = results.plan.shards[index]
        results.add_shard(index, f"{place}: two processes that counted it ended{how}.")


class _CountingPass:
    """Counts each of some shards once.

    Attributes:
        waiting_shards: the shards that no worker has taken yet.
        running: what each worker does now: the shard that it counts, or None while it loads the model.
        ended_shards: the shards whose process ended -> how it ended.
        failed_loads: how many processes ended while they loaded the model.
    """

    def __init__(self, new_worker: Callable[[], Worker], shards: Sequence[int], results: Results) -> None:
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
                done, _ = wait(self.running, PROGRESS_INTERVAL, FIRST_COMPLETED)
                for worker, _ in self.running.values():
                    for batch in worker.batches():
                        self.results.add_batch(*batch)
                for future in done:
                    self._handle_finished(future)
                if not self.waiting_shards:
                    self._end_loading_workers()
                self.results.progress.processes = sum(index is not None for _, index in self.running.values())
                self.results.report_progress()
        finally:
            for worker, _ in self.running.values():
                worker.end()
        return self.ended_shards

    def _start_worker(self) -> None:
        worker = self.new_worker()
        self.running[worker.load()] = worker, None

    def _handle_finished(self, future: Future[Any]) -> None:
        """Add the result of a worker, and let it take the next shard; replace it if its process ended."""
        worker, index = self.running[future]
        try:
            result = future.result()
        except worker.errors_of_ended_process:
            del self.running[future]
            how = worker.end()
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
            self.running[worker.count(index)] = worker, index
        else:
            worker.end()

    def _end_loading_workers(self) -> None:
        """End the workers that still load the model, when no shard is left for them."""
        for future in [each for each, (_, index) in self.running.items() if index is None]:
            self.running.pop(future)[0].end()


class ProcessWorker:
    """A process on this machine, in a pool of its own: a pool that breaks names the shard that was counted."""

    errors_of_ended_process: tuple[type[Exception], ...] = (BrokenProcessPool,)

    def __init__(self, plan: Plan, folder: Path, threads: int) -> None:
        self._plan, self._folder, self._context = plan, folder, SpawningContext()
        self._batches, self._sent = self._context.Pipe(duplex=False)
        self._pool = ProcessPoolExecutor(1, self._context, _prepare_process, (self._sent, threads))

    def load(self) -> Future[None]:
        """See `Worker`."""
        future = self._pool.submit(_load_model, self._folder, self._plan.model, self._plan.device)
        self._sent.close()  # the process has its own copy
        return future

    def count(self, index: int) -> Future[tuple[str, int, int]]:
        """See `Worker`."""
        return self._pool.submit(_count_shard, self._folder, index)

    def batches(self) -> Iterator[tuple[int, int]]:
        """See `Worker`."""
        with suppress(EOFError):
            while self._batches.poll():
                yield self._batches.recv()

    def end(self) -> str:
        """See `Worker`."""
        (process,) = self._context.processes
        process.terminate()
        self._pool.shutdown()
        self._batches.close()
        code = process.exitcode or 0
        return f" by signal {-code}" if code < 0 else f" with status {code}"


class _WorkerState:
    """What a process of `ProcessWorker` keeps: the model, and where it sends the texts and tokens of each batch."""

    counter: ShardCounter
    batches: Connection


def _prepare_process(batches: Connection, threads: int) -> None:
    """Prepare this process, before the model is loaded."""
    _WorkerState.batches = batches
    threading.Thread(target=_end_with_parent, daemon=True).start()
    with suppress(OSError):  # a closed standard error
        os.dup2(2, 1)  # standard output is the caller's: what a model's libraries print goes to standard error
    os.environ["RAYON_NUM_THREADS"] = str(threads)  # of the tokenizer
    torch.set_num_threads(threads)


def _end_with_parent() -> None:
    """End this process when the one that started it has ended, even by a signal that nothing can handle."""
    if (parent := multiprocessing.parent_process()) is not None:
        parent.join()
        os._exit(1)


def _load_model(folder: Path, model: str, device: str) -> None:
    _WorkerState.counter = load_counter(folder, model, device)


def _count_shard(folder: Path, index: int) -> tuple[str, int, int]:
    def send(texts: int, tokens: int) -> None:
        _WorkerState.batches.send((texts, tokens))  # a few bytes, which a pipe takes whole or not at all

    return count_shard(_WorkerState.counter, folder, index, send), 0, 0
