"""Count shards one after the other in this process, and in others that it starts."""

from __future__ import annotations

import ctypes
import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from multihead.counting.leases import claim_shard
from multihead.counting.merge import missing_shards
from multihead.counting.plan import LEASES, Plan, model_id, read_plan
from multihead.counting.shard import Renew, ShardCounter
from multihead.errors import ArgumentError, InputError, ModelError, MultiheadError
from multihead.models.loading import LoadedModel, load

RETURN_EVERY = 5.0
"""Seconds between two returns of freed memory to the system within a shard; one takes about 30 ms."""

RESTARTS = 3
"""How many workers that were killed are replaced."""


@dataclass
class Progress:
    """How far a census is.

    Attributes:
        shards: shards that are finished.
        total: all shards.
        texts: texts that ran since the start of this call.
        tokens: tokens of these texts.
        seconds: seconds since the start of this call, the loading of this process's model not counted.
        processes: processes of this call that have loaded the model and have shards left to count.
    """

    shards: int
    total: int
    texts: int = 0
    tokens: int = 0
    seconds: float = 0.0
    processes: int = 0

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.tokens / max(self.seconds, 1e-9)


Report = Callable[[Progress], None]


@dataclass
class Outcome:
    """The failures of the processes of a census.

    Attributes:
        failed: shard -> why it has no result.
        dead: why workers ended before their work was done, a sentence each.
    """

    failed: dict[int, str] = field(default_factory=dict)
    dead: list[str] = field(default_factory=list)

    def add_shard(self, shard: int, problem: str) -> None:
        """Add a shard's result: why it failed, or "" if it was counted, perhaps after another process failed."""
        self.failed.pop(shard, None)
        if problem:
            self.failed[shard] = problem


def count_shards(
    counter: ShardCounter, folder: Path, order: Sequence[int], renew: Renew = lambda texts, tokens: None
) -> Iterator[tuple[int, str]]:
    """Count the shards that have no result and that no other process is counting.

    A shard that cannot be read or written is left out, and the next one is counted.

    Args:
        counter: the model.
        folder: the directory of the census.
        order: the shards.
        renew: called after each batch with the numbers of its texts and tokens.

    Yields:
        (shard, problem): the problem is "" if the shard was counted, else why it failed.
    """
    failed: set[int] = set()
    while True:
        missing = set(missing_shards(folder, counter.plan)) - failed
        counted = 0
        for index in order:
            if index not in missing or counter.plan.shard_file(folder, index).exists():
                continue
            try:
                if not _claim_and_count(counter, folder, index, renew):
                    continue
            except (OSError, InputError) as error:
                failed.add(index)
                yield index, f"{counter.plan.shards[index]}: {_reason_of_failure(error)}"
            else:
                counted += 1
                yield index, ""
        # Repeat, as leases may have expired; if nothing was counted, other processes hold the remaining shards.
        if not counted:
            return


def _claim_and_count(counter: ShardCounter, folder: Path, index: int, renew: Renew) -> bool:
    """Claim a shard and count it; False if another process has claimed it."""
    lease = claim_shard(folder / LEASES, index)
    if lease is None:
        return False

    def renew_lease_and_report(texts: int, tokens: int) -> None:
        lease.renew()
        _HEAP.trim()
        renew(texts, tokens)

    try:
        counter.write_shard(folder, index, renew_lease_and_report)
    finally:
        lease.release()
        _HEAP.trim(every=1.0)  # most of the shard's memory is free now
    return True


class _HeapTrimmer:
    """Returns freed heap memory to the operating system from time to time (malloc_trim).

    Batches differ in their lengths, so each leaves holes in the heap that the tensors of the next batch do not fit
    into. The GNU C library keeps these pages, and a long run would take ever more memory.
    """

    def __init__(self) -> None:
        self._last = time.monotonic()
        self._trim = None
        with suppress(OSError, AttributeError, TypeError):  # another C library than that of GNU has no malloc_trim
            self._trim = ctypes.CDLL(None).malloc_trim

    def trim(self, *, every: float = RETURN_EVERY) -> None:
        """Return freed memory, if `every` seconds have passed since the last time."""
        now = time.monotonic()
        if self._trim is not None and now - self._last > every:
            self._last = now
            self._trim(0)


_HEAP = _HeapTrimmer()


def _reason_of_failure(error: OSError | InputError) -> str:
    if isinstance(error, MultiheadError):
        return str(error)
    return str(error.strerror or error)


@contextmanager
def set_torch_threads(count: int | None) -> Iterator[None]:
    """Let torch use a number of threads in this context; None leaves it as it is."""
    before = torch.get_num_threads()
    if count is not None:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def count_on_this_machine(
    counter: ShardCounter, folder: Path, order: Sequence[int], threads: int | None, report: Report, *, others: int = 0
) -> Outcome:
    """Count shards in this process, and in others that it starts.

    Args:
        counter: the model and the plan.
        folder: the directory of the census.
        order: the shards that this process counts.
        threads: threads of torch in each process; None leaves those of this one as they are.
        report: called after each batch.
        others: how many other processes count all shards; each loads the model, and one that is killed is replaced.

    Raises:
        MultiheadError: a process rejected the model or the plan.
    """
    plan, began = counter.plan, time.monotonic()
    missing = missing_shards(folder, plan)
    outcome, progress = Outcome(), Progress(len(plan.shards) - len(missing), len(plan.shards))
    workers = _WorkerPool(plan, folder, threads or 1)

    def add_message(message: dict[str, Any]) -> None:
        """Add the progress or the result that this process or a worker reports."""
        if "shard" in message:
            outcome.add_shard(message["shard"], message["problem"])
            progress.shards += not message["problem"]
        progress.texts += message.get("texts", 0)
        progress.tokens += message.get("tokens", 0)
        progress.processes = this + workers.num_counting
        progress.seconds = time.monotonic() - began
        report(progress)

    def report_batch(texts: int, tokens: int) -> None:
        add_message({"texts": texts, "tokens": tokens})
        for message in workers.read_messages(wait=False):
            add_message(message)

    with workers.start_workers(min(others, len(missing) - 1)), set_torch_threads(threads):
        this = 1
        add_message({})
        for index, problem in count_shards(counter, folder, order, report_batch):
            add_message({"shard": index, "problem": problem})
        this = 0
        add_message({})
        for message in workers.read_messages(wait=True):
            add_message(message)
    outcome.dead += workers.dead
    return outcome


class _WorkerPool:
    """Processes that count shards of one census; one that is killed is replaced."""

    def __init__(self, plan: Plan, folder: Path, threads: int) -> None:
        options = {"folder": str(folder), "model": plan.model, "device": plan.device, "threads": threads}
        self._command = [sys.executable, "-m", "multihead.counting.worker", json.dumps(options)]
        self._environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "RAYON_NUM_THREADS": str(threads)}
        self._queue: queue.Queue[tuple[_WorkerProcess, dict[str, Any] | None]] = queue.Queue()
        self._running: set[_WorkerProcess] = set()
        self._plan, self._folder = plan, folder
        self.dead: list[str] = []

    @property
    def num_counting(self) -> int:
        """Number of running workers that have loaded the model."""
        return sum(worker.has_loaded for worker in self._running)

    @contextmanager
    def start_workers(self, count: int) -> Iterator[None]:
        """Start `count` processes, and terminate those that still run when the context ends."""
        try:
            for number in range(1, count + 1):
                self._start_worker(number)
            yield
        finally:
            self._stop_workers(list(self._running))

    def _stop_workers(self, workers: Sequence[_WorkerProcess]) -> None:
        for worker in workers:
            self._running.remove(worker)
            worker.terminate()

    def _start_worker(self, number: int) -> None:
        self._running.add(_WorkerProcess(number, self._command, self._environment, self._queue))

    def read_messages(self, *, wait: bool) -> Iterator[dict[str, Any]]:
        """Yield the messages of the workers, and replace workers that were killed.

        Args:
            wait: whether to wait until all workers have ended; otherwise only messages that have arrived are read.

        Raises:
            MultiheadError: a process rejected the model or the plan.
        """
        if wait and not missing_shards(self._folder, self._plan):
            # No shard is left for workers that still load the model.
            self._stop_workers([worker for worker in self._running if not worker.has_loaded])
        while self._running and (wait or not self._queue.empty()):
            worker, message = self._queue.get()
            if worker not in self._running:
                continue
            if message is None:
                self._handle_ended_worker(worker)
            elif "error" in message:
                raise _error_of_message(message)
            else:
                worker.has_loaded |= "loaded" in message
            yield message or {}

    def _handle_ended_worker(self, worker: _WorkerProcess) -> None:
        self._running.remove(worker)
        if problem := worker.wait_for_end():
            self.dead.append(problem)
            if len(self.dead) <= RESTARTS and missing_shards(self._folder, self._plan):
                self._start_worker(worker.number)


def _error_of_message(message: dict[str, Any]) -> MultiheadError:
    kinds = {kind.__name__: kind for kind in (ArgumentError, InputError, ModelError)}
    return kinds.get(str(message["kind"]), ModelError)(message["error"], message["mend"])


class _WorkerProcess:
    """A process that counts shards, and the threads that read its messages into a queue.

    Args:
        number: its number, for messages.
        command: what starts it.
        environment: the variables of its environment.
        messages: the queue, which receives None when the process has ended.
    """

    def __init__(
        self, number: int, command: Sequence[str], environment: Mapping[str, str], messages: queue.Queue[Any]
    ) -> None:
        self.number = number
        self.has_loaded = False
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment)
        self._errors: list[bytes] = []
        self._messages = messages
        self._threads = [
            threading.Thread(target=each, daemon=True) for each in (self._read_messages, self._read_errors)
        ]
        for thread in self._threads:
            thread.start()

    def _read_messages(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                with suppress(ValueError):  # the process was killed while it wrote this line
                    self._messages.put((self, json.loads(line)))
        self._messages.put((self, None))

    def _read_errors(self) -> None:
        assert self._process.stderr is not None
        with self._process.stderr as lines:
            for line in lines:
                self._errors = [*self._errors[-20:], line]

    def wait_for_end(self) -> str:
        """Wait until the process has ended, and return why it failed, or ""."""
        status = self._process.wait()
        self._join_threads()
        if not status:
            return ""
        if status < 0:
            return f"Worker {self.number} was ended by signal {-status}."
        last = self._errors[-1].decode("utf-8", "replace").strip() if self._errors else ""
        return f"Worker {self.number} failed with status {status}: {last}"

    def terminate(self) -> None:
        """Terminate the process and wait until it has ended."""
        self._process.terminate()
        self._process.wait()
        self._join_threads()

    def _join_threads(self) -> None:
        """Wait until the pipes of the ended process are read and closed."""
        for thread in self._threads:
            thread.join()


def load_counter(folder: Path, model: str, device: str) -> ShardCounter:
    """Load the model of the census in `folder`, and return its counter, in a process that has only the plan.

    Raises:
        ArgumentError: the model differs from that of the plan, or a probe is defined in a script.
    """
    plan = read_plan(folder)
    loaded = load(model, device=device, dtype=plan.dtype.removeprefix("torch."))
    if model_id(loaded) != plan.model_id:
        raise ArgumentError(
            f"{model} has other parameters than the model that the census was planned with.",
            "Give all processes the same model.",
        )
    return ShardCounter(loaded, plan, plan.built_in_probes())


def check_reads_text(loaded: LoadedModel) -> None:
    """Reject a model that reads no text.

    Raises:
        ModelError: it has no tokenizer, or reads audio.
    """
    if loaded.tokenizer is None or loaded.feature_extractor is not None:
        raise ModelError(f"{loaded.title} reads no text.", "Give a model with a tokenizer.")
