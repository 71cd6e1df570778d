"""Processes share the shards; one that is killed is replaced, and changes no byte of the result."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from functools import partial
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any

import pytest

import multihead as mh
from multihead.counting.merge import HEADS_FILE, SHARDS_FILE
from multihead.counting.plan import read_plan
from multihead.counting.work import Progress, ShardResults
from multihead.counting.workers import MAX_FAILED_LOADS, ProcessWorker, count_in_workers
from multihead.errors import ModelError
from tests.parallel.processes import forking_context


class FakeWorker:
    """A worker that counts at once, and whose process ends as `fates` says: shard, or None for loading -> how often."""

    errors_of_ended_process: tuple[type[Exception], ...] = (BrokenProcessPool,)

    def __init__(self, fates: dict[int | None, int], events: list[str]) -> None:
        self.fates, self.events = fates, events

    def _finished(self, index: int | None, result: object) -> Future[Any]:
        future: Future[Any] = Future()
        if self.fates.get(index, 0):
            self.fates[index] -= 1
            future.set_exception(BrokenProcessPool())
        else:
            future.set_result(result)
        return future

    def load_model(self) -> Future[Any]:
        self.events.append("load")
        return self._finished(None, None)

    def count_shard(self, index: int) -> Future[tuple[str, int, int]]:
        self.events.append(f"count {index}")
        return self._finished(index, ("", 1, 10))

    def counted_batches(self) -> Iterator[tuple[int, int]]:
        return iter(())

    def end_process(self) -> str:
        self.events.append("end")
        return " by signal 9"


Run = Callable[[dict[int | None, int], int], tuple[ShardResults, list[str]]]


@pytest.fixture
def run(folder: Path, tmp_path: Path) -> Run:
    """Count four shards in some fake workers; returns the results and what the workers were asked."""
    plan = read_plan(folder).write_or_check(tmp_path)

    def count(fates: dict[int | None, int], number: int) -> tuple[ShardResults, list[str]]:
        events: list[str] = []
        results = ShardResults(plan, tmp_path, Progress(0, 4), lambda progress: None)
        count_in_workers(partial(FakeWorker, fates, events), range(4), number, results)
        return results, events

    return count


def test_a_shard_whose_process_ended_is_counted_again_after_all_others(run: Run) -> None:
    results, events = run({1: 1}, 1)
    assert events == [
        *("load", "count 0", "count 1", "end"),
        *("load", "count 2", "count 3", "end"),
        *("load", "count 1", "end"),
    ]
    assert (results.failure_of_shard, results.progress.shards, results.progress.texts) == ({}, 4, 4)


def test_a_shard_that_ends_two_processes_is_named_and_the_others_are_counted(run: Run) -> None:
    results, events = run({0: 5, 3: 1}, 2)
    place = results.plan.shards[0]
    assert results.failure_of_shard == {0: f"{place}: two processes that counted it ended by signal 9."}
    assert (results.progress.shards, events.count("count 0"), events.count("count 3")) == (3, 2, 2)
    assert events.count("load") == events.count("end")


def test_processes_that_end_while_they_load_the_model_are_replaced_a_few_times(run: Run) -> None:
    assert run({None: MAX_FAILED_LOADS - 1}, 1)[0].progress.shards == 4
    sentence = r"^3 processes that loaded the model ended by signal 9\. Each process needs memory for the whole model"
    with pytest.raises(ModelError, match=sentence):
        run({None: MAX_FAILED_LOADS}, 2)


class ForkingContext(ForkServerContext):
    """Keeps processes as `SpawningContext` does; theirs fork from one that has imported what takes seconds."""

    def __init__(self) -> None:
        super().__init__()
        forking_context()  # sets what that one imports
        self.processes: list[ForkServerProcess] = []

    def Process(self, *arguments: Any, **options: Any) -> ForkServerProcess:  # type: ignore[override]  # noqa: N802
        self.processes.append(ForkServerProcess(*arguments, **options))
        return self.processes[-1]


def test_a_process_that_is_killed_is_replaced_and_changes_no_byte(
    model: str, corpus: str, damaged: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No process ends because a file is damaged. tests/cli/test_census.py has processes spawned, as users do."""
    workers: list[ProcessWorker] = []
    seen: list[Progress] = []

    class Kept(ProcessWorker):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            workers.append(self)

    def kill_first(progress: Progress) -> None:
        if progress.texts and not any(each.texts for each in seen):
            os.kill(workers[0]._context.processes[0].pid or 0, signal.SIGKILL)
        seen.append(replace(progress))

    monkeypatch.setattr("multihead.counting.run.ProcessWorker", Kept)
    monkeypatch.setattr("multihead.counting.workers.SpawningContext", ForkingContext)
    files, options = [corpus, damaged], {"shard_bytes": 1000, "threads": 1}
    alone = mh.census(model, files, out=tmp_path / "alone", **options)
    found = mh.census(model, files, out=tmp_path / "out", **options, workers=2, progress=kill_first)
    assert (found.missing, found.problems) == (alone.missing, alone.problems)
    assert len(found.problems) == 1
    assert workers[0]._context.processes[0].exitcode == -signal.SIGKILL
    assert (seen[0].processes, seen[-1].processes) == (0, 0)
    assert 1 <= max(each.processes for each in seen) <= 2
    assert seen[-1].texts >= 60
    for name in (HEADS_FILE, SHARDS_FILE):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "alone" / name).read_bytes()


PROGRAM = """
from concurrent.futures import ProcessPoolExecutor
from multihead.counting.spawning import SpawningContext
print("main runs", flush=True)
with ProcessPoolExecutor(2, SpawningContext()) as pool:
    print(list(pool.map(abs, [-1, -2])))
"""


@pytest.mark.parametrize("way", ["script", "command", "standard input", "module"])
def test_the_main_module_runs_once_however_the_program_was_started(way: str, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM, encoding="utf-8")
    given = {"script": ["program.py"], "command": ["-c", PROGRAM], "standard input": [], "module": ["-m", "program"]}
    run = subprocess.run(
        [sys.executable, *given[way]],
        input=PROGRAM if way == "standard input" else "",
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (run.stdout.splitlines(), run.stderr) == (["main runs", "[1, 2]"], "")


def test_an_interrupt_reaches_the_first_process_alone() -> None:
    """A terminal sends Ctrl-C to all processes; those that compute must not print a traceback each."""
    program = """
import signal, time
from concurrent.futures import ProcessPoolExecutor
from multihead.counting.spawning import SpawningContext
context = SpawningContext()
pool = ProcessPoolExecutor(1, context)
pool.submit(time.sleep, 60)
signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job of a shell ignores it
print("started", flush=True)
try:
    time.sleep(60)
finally:
    time.sleep(0.5)
    print(context.processes[0].is_alive())
    context.processes[0].terminate()
"""
    run = subprocess.Popen(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert run.stdout is not None
    assert run.stdout.readline() == "started\n"
    time.sleep(0.2)
    os.killpg(run.pid, signal.SIGINT)
    output, errors = run.communicate(timeout=60)
    assert output == "True\n"
    assert errors.count("KeyboardInterrupt") == 1
