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
from multihead.counting.shard import Counter, Renew
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
        tokens: their tokens.
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
    """What processes could not do.

    Attributes:
        failed: shard -> why it has no result.
        dead: what ended workers.
    """

    failed: dict[int, str] = field(default_factory=dict)
    dead: list[str] = field(default_factory=list)

    def add(self, shard: int, problem: str) -> None:
        """Add what happened to a shard; "" if it was counted, perhaps after another process had failed."""
        self.failed.pop(shard, None)
        if problem:
            self.failed[shard] = problem


def count_shards(
    counter: Counter, folder: Path, order: Sequence[int], renew: Renew = lambda texts, tokens: None
) -> Iterator[tuple[int, str]]:
    """Count the shards that have no result and that no other process is counting.

    A shard that cannot be read or written is left out, and the next one is counted.

    Args:
        counter: the model.
        folder: the directory of the census.
        order: the shards.
        renew: called after each batch with the numbers of its texts and tokens.

    Yields:
        each shard that was counted, with "", and each that failed, with the reason.
    """
    failed: set[int] = set()
    while True:
        missing = set(missing_shards(folder, counter.plan)) - failed
        counted = 0
        for index in order:
            if index not in missing or counter.plan.shard_file(folder, index).exists():
                continue
            try:
                if not _count_claimed(counter, folder, index, renew):
                    continue
            except (OSError, InputError) as error:
                failed.add(index)
                yield index, f"{counter.plan.shards[index]}: {_reason_of_failure(error)}"
            else:
                counted += 1
                yield index, ""
        # A lease may have expired meanwhile; without progress the shards left are those of other processes.
        if not counted:
            return


def _count_claimed(counter: Counter, folder: Path, index: int, renew: Renew) -> bool:
    """Claim a shard and count it; False if another process has claimed it."""
    lease = claim_shard(folder / LEASES, index)
    if lease is None:
        return False

    def renew_both(texts: int, tokens: int) -> None:
        lease.renew()
        _FREED.give_back()
        renew(texts, tokens)

    try:
        counter.write(folder, index, renew_both)
    finally:
        lease.release()
        _FREED.give_back(every=1.0)  # most of it is free now
    return True


class _FreedMemory:
    """Returns memory that is freed to the system from time to time.

    Batches differ in their lengths, so that each leaves holes in the heap that the tensors of the next one do not fit
    into. The C library of GNU keeps their pages, and a long run would take ever more memory.
    """

    def __init__(self) -> None:
        self._last = time.monotonic()
        self._trim = None
        with suppress(OSError, AttributeError, TypeError):  # another C library, which has no such function
            self._trim = ctypes.CDLL(None).malloc_trim

    def give_back(self, *, every: float = RETURN_EVERY) -> None:
        """Return it, if some seconds have passed since the last time."""
        now = time.monotonic()
        if self._trim is not None and now - self._last > every:
            self._last = now
            self._trim(0)


_FREED = _FreedMemory()


def _reason_of_failure(error: OSError | InputError) -> str:
    if isinstance(error, MultiheadError):
        return str(error)
    return str(error.strerror or error)


@contextmanager
def threads_of_torch(count: int | None) -> Iterator[None]:
    """Let torch use a number of threads in this context; None leaves it as it is."""
    before = torch.get_num_threads()
    if count is not None:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def count_here(
    counter: Counter, folder: Path, order: Sequence[int], threads: int | None, report: Report, *, others: int = 0
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
    workers = _Workers(plan, folder, threads or 1)

    def add(message: dict[str, Any]) -> None:
        """Add what this process or another one has done."""
        if "shard" in message:
            outcome.add(message["shard"], message["problem"])
            progress.shards += not message["problem"]
        progress.texts += message.get("texts", 0)
        progress.tokens += message.get("tokens", 0)
        progress.processes = this + workers.counting
        progress.seconds = time.monotonic() - began
        report(progress)

    def renew(texts: int, tokens: int) -> None:
        add({"texts": texts, "tokens": tokens})
        for message in workers.messages(wait=False):
            add(message)

    with workers.started(min(others, len(missing) - 1)), threads_of_torch(threads):
        this = 1
        add({})
        for index, problem in count_shards(counter, folder, order, renew):
            add({"shard": index, "problem": problem})
        this = 0
        add({})
        for message in workers.messages(wait=True):
            add(message)
    outcome.dead += workers.dead
    return outcome


class _Workers:
    """Processes that count shards of one census; one that is killed is replaced."""

    def __init__(self, plan: Plan, folder: Path, threads: int) -> None:
        options = {"folder": str(folder), "model": plan.model, "device": plan.device, "threads": threads}
        self._command = [sys.executable, "-m", "multihead.counting.worker", json.dumps(options)]
        self._environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "RAYON_NUM_THREADS": str(threads)}
        self._queue: queue.Queue[tuple[_Worker, dict[str, Any] | None]] = queue.Queue()
        self._running: set[_Worker] = set()
        self._plan, self._folder = plan, folder
        self.dead: list[str] = []

    @property
    def counting(self) -> int:
        """How many have loaded the model and have not ended."""
        return sum(worker.has_loaded for worker in self._running)

    @contextmanager
    def started(self, count: int) -> Iterator[None]:
        """Start some processes, and end those that are left after this context."""
        try:
            for number in range(1, count + 1):
                self._start(number)
            yield
        finally:
            self._stop(list(self._running))

    def _stop(self, workers: Sequence[_Worker]) -> None:
        for worker in workers:
            self._running.remove(worker)
            worker.stop()

    def _start(self, number: int) -> None:
        self._running.add(_Worker(number, self._command, self._environment, self._queue))

    def messages(self, *, wait: bool) -> Iterator[dict[str, Any]]:
        """Yield what they report.

        Args:
            wait: until all have ended; otherwise only what has arrived.

        Raises:
            MultiheadError: a process rejected the model or the plan.
        """
        if wait and not missing_shards(self._folder, self._plan):
            self._stop([worker for worker in self._running if not worker.has_loaded])  # nothing is left for these
        while self._running and (wait or not self._queue.empty()):
            worker, message = self._queue.get()
            if worker not in self._running:
                continue
            if message is None:
                self._end(worker)
            elif "error" in message:
                raise _error_of_message(message)
            else:
                worker.has_loaded |= "loaded" in message
            yield message or {}

    def _end(self, worker: _Worker) -> None:
        self._running.remove(worker)
        if problem := worker.end():
            self.dead.append(problem)
            if len(self.dead) <= RESTARTS and missing_shards(self._folder, self._plan):
                self._start(worker.number)


def _error_of_message(message: dict[str, Any]) -> MultiheadError:
    kinds = {kind.__name__: kind for kind in (ArgumentError, InputError, ModelError)}
    return kinds.get(str(message["kind"]), ModelError)(message["error"], message["mend"])


class _Worker:
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
        self._threads = [threading.Thread(target=each, daemon=True) for each in (self._read, self._read_errors)]
        for thread in self._threads:
            thread.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                with suppress(ValueError):  # the process was ended within a line
                    self._messages.put((self, json.loads(line)))
        self._messages.put((self, None))

    def _read_errors(self) -> None:
        assert self._process.stderr is not None
        with self._process.stderr as lines:
            for line in lines:
                self._errors = [*self._errors[-20:], line]

    def end(self) -> str:
        """Wait for the process, and return why it failed; "" if it did not."""
        status = self._process.wait()
        self._join()
        if not status:
            return ""
        if status < 0:
            return f"Worker {self.number} was ended by signal {-status}."
        last = self._errors[-1].decode("utf-8", "replace").strip() if self._errors else ""
        return f"Worker {self.number} failed with status {status}: {last}"

    def stop(self) -> None:
        """End the process."""
        self._process.terminate()
        self._process.wait()
        self._join()

    def _join(self) -> None:
        """Wait until the pipes of the ended process are read and closed."""
        for thread in self._threads:
            thread.join()


def loaded_for(folder: Path, model: str, device: str) -> Counter:
    """Load the model of a planned census in a process that has only the directory.

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
    return Counter(loaded, plan, plan.built_in_probes())


def check_reads_text(loaded: LoadedModel) -> None:
    """Reject a model that reads no text.

    Raises:
        ModelError: it has no tokenizer, or reads audio.
    """
    if loaded.tokenizer is None or loaded.feature_extractor is not None:
        raise ModelError(f"{loaded.title} reads no text.", "Give a model with a tokenizer.")
