"""Count shards one after the other in this process, and sum up what a run has counted.

For a shard that cannot be counted, a file with the reason is written. Without this file, the runs of `--shard i/n`
could not distinguish a shard that another run has still to count from a shard that cannot be counted, and a census with
one damaged file would have no table.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from multihead.counting.plan import Plan, model_id, read_plan
from multihead.counting.shard import ReportBatch, ShardCounter
from multihead.errors import ArgumentError, InputError, ModelError
from multihead.files import write_atomically
from multihead.models.loading import LoadedModel, load, no_tokenizer_error
from multihead.tensors.threads import set_torch_threads

SECONDS_BETWEEN_HEAP_TRIMS = 5.0
"""Seconds between two calls of malloc_trim within a shard; a call takes about 30 ms."""


@dataclass
class Progress:
    """How far a run of a census is.

    Attributes:
        shards: number of shards that are finished.
        total: number of all shards of this run.
        texts: number of texts that ran since `census` was called.
        tokens: number of tokens of the texts that ran.
        seconds: seconds since `census` was called, without the time to load the model in this process.
        processes: number of processes that count a shard now.
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


ReportProgress = Callable[[Progress], None]


@dataclass
class ShardResults:
    """What a run has counted so far.

    Attributes:
        plan: the plan of the census.
        folder: the directory of the census.
        progress: how far the run is.
        report: called with the progress after each change.
        failure_of_shard: index of a shard -> why the shard has no result. The directory stores the reasons too, so that
            another process can tell a shard that cannot be counted from one that is not counted yet.
    """

    plan: Plan
    folder: Path
    progress: Progress
    report: ReportProgress
    failure_of_shard: dict[int, str] = field(default_factory=dict)
    _began: float = field(default_factory=time.monotonic)

    def add_batch(self, texts: int, tokens: int) -> None:
        """Count the texts and tokens of a measured batch as done, and report the progress."""
        self.progress.texts += texts
        self.progress.tokens += tokens
        self.report_progress()

    def add_shard(self, index: int, problem: str) -> None:
        """Record that a shard was counted (`problem` is ""), or why it could not be counted."""
        file = self.plan.problem_file(self.folder, index)
        if problem:
            self.failure_of_shard[index] = problem
            with suppress(InputError):  # on a full disk the reason is stored in this process only
                write_atomically(file, problem)
        else:
            self.progress.shards += 1
            file.unlink(missing_ok=True)
        self.report_progress()

    def report_progress(self) -> None:
        """Update the seconds in `progress`, and call `report` with it."""
        self.progress.seconds = time.monotonic() - self._began
        self.report(self.progress)


def count_in_this_process(
    counter: ShardCounter, shards: Iterable[int], threads: int | None, results: ShardResults
) -> None:
    """Count shards one after the other; `threads`: number of threads of torch, None leaves the number unchanged."""
    with set_torch_threads(threads):
        results.progress.processes = 1
        results.report_progress()
        for index in shards:
            results.add_shard(index, count_shard(counter, results.folder, index, results.add_batch))
        results.progress.processes = 0
        results.report_progress()


def count_shard(counter: ShardCounter, folder: Path, index: int, report_batch: ReportBatch) -> str:
    """Count a shard and write its file; return "", or why its texts cannot be read or its file cannot be written."""

    def trim_heap_and_report_batch(texts: int, tokens: int) -> None:
        _HEAP_TRIMMER.trim()
        report_batch(texts, tokens)

    try:
        content = counter.count_shard(index, trim_heap_and_report_batch)
        write_atomically(counter.plan.shard_file(folder, index), content)
    except (OSError, InputError) as error:
        return f"{counter.plan.shards[index]}: {getattr(error, 'strerror', None) or error}"
    finally:
        _HEAP_TRIMMER.trim(every=1.0)  # most of the memory that the shard used is free now
    return ""


class _HeapTrimmer:
    """Returns freed heap memory to the operating system from time to time (malloc_trim).

    Batches have different sizes, so each batch leaves gaps in the heap into which the tensors of the next batch do not
    fit. The GNU C library keeps the pages of these gaps, and a long run would take ever more memory.
    """

    def __init__(self) -> None:
        self._last = time.monotonic()
        self._trim = None
        with suppress(OSError, AttributeError, TypeError):  # C libraries other than GNU's have no malloc_trim
            self._trim = ctypes.CDLL(None).malloc_trim

    def trim(self, *, every: float = SECONDS_BETWEEN_HEAP_TRIMS) -> None:
        """Return freed memory to the operating system, if the last call was at least `every` seconds ago."""
        now = time.monotonic()
        if self._trim is not None and now - self._last > every:
            self._last = now
            self._trim(0)


_HEAP_TRIMMER = _HeapTrimmer()


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
        ModelError: the model has no tokenizer, or reads audio.
    """
    if loaded.tokenizer is None:
        raise no_tokenizer_error(loaded)
    if loaded.feature_extractor is not None:
        raise ModelError(f"{loaded.title} reads no text.", "Give a model with a tokenizer.")
