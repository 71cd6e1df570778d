"""Count shards one after the other in this process, or in several processes that this one starts."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from multihead.counting.leases import claim
from multihead.counting.merge import missing_shards
from multihead.counting.plan import LEASES, Plan, model_id, read_plan
from multihead.counting.shard import Counter, Renew
from multihead.errors import ArgumentError, InputError, ModelError, MultiheadError
from multihead.models import LoadedModel, load

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
        seconds: seconds since the start of this call, the loading of the model not counted.
    """

    shards: int
    total: int
    texts: int = 0
    tokens: int = 0
    seconds: float = 0.0

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
                yield index, f"{counter.plan.shards[index]}: {_reason(error)}"
            else:
                counted += 1
                yield index, ""
        # A lease may have expired meanwhile; without progress the shards left are those of other processes.
        if not counted:
            return


def _count_claimed(counter: Counter, folder: Path, index: int, renew: Renew) -> bool:
    """Claim a shard and count it; False if another process has claimed it."""
    lease = claim(folder / LEASES, index)
    if lease is None:
        return False

    def renew_both(texts: int, tokens: int) -> None:
        lease.renew()
        renew(texts, tokens)

    try:
        counter.write(folder, index, renew_both)
    finally:
        lease.release()
    return True


def _reason(error: OSError | InputError) -> str:
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


def count_here(counter: Counter, folder: Path, order: Sequence[int], report: Report) -> Outcome:
    """Count shards in this process."""
    outcome, began = Outcome(), time.monotonic()
    left = len(missing_shards(folder, counter.plan))
    progress = Progress(len(counter.plan.shards) - left, len(counter.plan.shards))

    def renew(texts: int, tokens: int) -> None:
        progress.texts += texts
        progress.tokens += tokens
        progress.seconds = time.monotonic() - began
        report(progress)

    report(progress)
    for index, problem in count_shards(counter, folder, order, renew):
        if problem:
            outcome.failed[index] = problem
        else:
            progress.shards += 1
        progress.seconds = time.monotonic() - began
        report(progress)
    return outcome


def worker_order(total: int, worker: int, workers: int) -> list[int]:
    """Return all shards, beginning with those that no other worker begins with."""
    return [index for first in range(workers) for index in range((worker + first) % workers, total, workers)]


def count_in_processes(plan: Plan, folder: Path, workers: int, threads: int, report: Report) -> Outcome:
    """Count shards in several processes, each with a model of its own; a process that was killed is replaced.

    Raises:
        MultiheadError: a process rejected the model or the plan.
    """
    outcome, began = Outcome(), time.monotonic()
    total = len(plan.shards)
    progress = Progress(total - len(missing_shards(folder, plan)), total)
    messages: queue.Queue[tuple[int, dict[str, Any] | None]] = queue.Queue()
    running = {number: _Worker(number, plan, folder, workers, threads, messages) for number in range(workers)}
    restarts = 0
    report(progress)
    try:
        while running:
            number, message = messages.get()
            progress.seconds = time.monotonic() - began
            if message is None:
                problem = running.pop(number).end()
                if problem and restarts < RESTARTS and missing_shards(folder, plan):
                    restarts += 1
                    running[number] = _Worker(number, plan, folder, workers, threads, messages)
                if problem:
                    outcome.dead.append(problem)
            elif "error" in message:
                raise _rejection(message)
            elif "shard" in message:
                index, problem = int(message["shard"]), str(message["problem"])
                if problem:
                    outcome.failed[index] = problem
                else:
                    progress.shards += 1
            else:
                progress.texts += int(message["texts"])
                progress.tokens += int(message["tokens"])
            report(progress)
    finally:
        for worker in running.values():
            worker.stop()
    return outcome


def _rejection(message: dict[str, Any]) -> MultiheadError:
    kinds = {kind.__name__: kind for kind in (ArgumentError, InputError, ModelError)}
    return kinds.get(str(message["kind"]), ModelError)(message["error"], message["mend"])


class _Worker:
    """A process that counts shards, and the thread that reads its messages."""

    def __init__(
        self, number: int, plan: Plan, folder: Path, workers: int, threads: int, messages: queue.Queue[Any]
    ) -> None:
        options = {
            "folder": str(folder),
            "model": plan.model,
            "device": plan.device,
            "worker": number,
            "workers": workers,
        }
        command = [sys.executable, "-m", "multihead.counting.worker", json.dumps({**options, "threads": threads})]
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "RAYON_NUM_THREADS": str(threads)}
        self.number = number
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
                    self._messages.put((self.number, json.loads(line)))
        self._messages.put((self.number, None))

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


def usable(loaded: LoadedModel) -> None:
    """Reject a model that reads no text.

    Raises:
        ModelError: it has no tokenizer, or reads audio.
    """
    if loaded.tokenizer is None or loaded.feature_extractor is not None:
        raise ModelError(f"{loaded.title} reads no text.", "Give a model with a tokenizer.")
