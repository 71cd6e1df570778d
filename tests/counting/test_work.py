"""Processes share the shards; one that is killed is replaced, and changes no byte of the result."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

import multihead as mh
from multihead.counting import work
from multihead.counting.leases import claim_shard
from multihead.counting.merge import HEADS, missing_shards, write_merged_tables
from multihead.counting.plan import LEASES, read_plan
from multihead.counting.shard import ShardCounter
from multihead.counting.work import Progress, count_on_this_machine, count_shards, load_counter
from multihead.errors import ArgumentError, ModelError
from multihead.models.loading import LoadedModel, load
from tests.counting.tiny import bert, saved_bert


def test_a_process_that_is_killed_is_replaced_and_changes_no_byte(
    model: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    processes: list[int] = []
    start = subprocess.Popen

    def kept(*args: Any, **options: Any) -> Any:
        process = start(*args, **options)
        processes.append(process.pid)
        return process

    def kill_first(progress: Progress) -> None:
        seen.append(progress.processes)
        if progress.shards == 2 and not killed:
            killed.append(processes[0])
            os.kill(processes[0], signal.SIGKILL)

    killed: list[int] = []
    seen: list[int] = []
    monkeypatch.setattr(subprocess, "Popen", kept)
    monkeypatch.setattr(work, "claim_shard", lambda *_: None)  # this process leaves all shards to the other one
    plan = read_plan(folder).write_or_check(tmp_path)
    counter = ShardCounter(load(model), plan, plan.built_in_probes())
    outcome = count_on_this_machine(counter, tmp_path, range(len(plan.shards)), 1, kill_first, others=1)
    assert (killed, outcome.failed, outcome.dead) == (processes[:1], {}, ["Worker 1 was ended by signal 9."])
    assert len(processes) == 2
    assert [number for number, _ in groupby(seen)] == [1, 0, 1, 0, 1, 0]
    write_merged_tables(tmp_path, plan)
    assert (tmp_path / HEADS).read_bytes() == (folder / HEADS).read_bytes()


def test_this_process_counts_while_others_start_and_does_not_wait_for_them(
    started: ShardCounter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, processes = subprocess.Popen, []

    def never_loads(_: object, **options: Any) -> Any:
        processes.append(start([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, **options))
        return processes[-1]

    monkeypatch.setattr(subprocess, "Popen", never_loads)
    seen: list[tuple[int, int]] = []
    shards = range(len(started.plan.shards))
    outcome = count_on_this_machine(
        started, tmp_path, shards, 1, lambda each: seen.append((each.processes, each.shards)), others=2
    )
    assert (outcome.failed, outcome.dead, missing_shards(tmp_path, started.plan)) == ({}, [], [])
    assert (seen[0], seen[-1]) == ((1, 0), (0, len(shards)))
    assert [process.wait() for process in processes] == [-signal.SIGTERM] * 2
    for process in processes:
        process.stdin.close()


def test_a_shard_that_one_process_could_not_count_and_another_did_is_no_problem() -> None:
    outcome = work.Outcome()
    for problem in ("No space left on device", ""):
        outcome.add_shard(3, problem)
    assert outcome.failed == {}


@pytest.fixture
def started(model: str, corpus: str, tmp_path: Path) -> ShardCounter:
    """A census that is planned and not run."""

    class PlannedError(Exception):
        pass

    def stop(progress: Progress) -> None:
        raise PlannedError

    with pytest.raises(PlannedError):
        mh.census(model, corpus, out=tmp_path, shard_bytes=1000, progress=stop)
    plan = read_plan(tmp_path)
    return ShardCounter(load(model), plan, plan.built_in_probes())


def test_a_shard_that_another_process_counts_is_left_to_it(started: ShardCounter, tmp_path: Path) -> None:
    (tmp_path / LEASES / "000001.json").write_text(
        f'{{"host": "{socket.gethostname()}", "process": {os.getppid()}}}', encoding="utf-8"
    )
    found = [index for index, _ in count_shards(started, tmp_path, range(4))]
    assert found == [0, 2, 3]
    assert missing_shards(tmp_path, started.plan)[0] == 1
    assert claim_shard(tmp_path / LEASES, 0) is not None  # its own leases were released


def test_the_lease_is_released_after_an_error(
    started: ShardCounter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise ModelError("It failed.", "Fix it.")

    monkeypatch.setattr(ShardCounter, "write_shard", fails)
    with pytest.raises(ModelError):
        list(count_shards(started, tmp_path, [0]))
    assert list((tmp_path / LEASES).iterdir()) == []


def test_a_process_with_another_model_is_rejected(started: ShardCounter, tmp_path: Path) -> None:
    other = saved_bert(tmp_path / "other", seed=5)
    with pytest.raises(ArgumentError, match=r"has other parameters than the model that the census was planned with\. "):
        load_counter(tmp_path, other, "cpu")


def test_a_model_without_a_tokenizer_is_an_error() -> None:
    with pytest.raises(ModelError, match=r"^tiny reads no text\. Give a model with a tokenizer\.$"):
        work.check_reads_text(LoadedModel("", "tiny", bert(), None))


def test_the_rate_is_in_tokens_per_second() -> None:
    assert Progress(0, 1, tokens=50, seconds=2.0).rate == 25
