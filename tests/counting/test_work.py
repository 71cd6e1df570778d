"""Processes share the shards; one that is killed is replaced, and changes no byte of the result."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest

import multihead as mh
from multihead.counting import work
from multihead.counting.leases import claim
from multihead.counting.merge import HEADS, missing_shards, write_merged
from multihead.counting.plan import LEASES, read_plan
from multihead.counting.shard import Counter
from multihead.counting.work import Progress, count_in_processes, count_shards, loaded_for, worker_order
from multihead.errors import ArgumentError, ModelError
from multihead.models import LoadedModel, load
from tests.counting.tiny import bert, saved_bert


def test_a_process_that_is_killed_is_replaced_and_changes_no_byte(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    processes: list[int] = []
    start = subprocess.Popen

    def kept(*args: Any, **options: Any) -> Any:
        process = start(*args, **options)
        processes.append(process.pid)
        return process

    def kill_first(progress: Progress) -> None:
        if progress.shards == 2 and len(processes) == 1 and not killed:
            killed.append(processes[0])
            os.kill(processes[0], signal.SIGKILL)

    killed: list[int] = []
    monkeypatch.setattr(subprocess, "Popen", kept)
    plan = read_plan(folder).write(tmp_path)
    outcome = count_in_processes(plan, tmp_path, 1, 1, kill_first)
    assert (killed, outcome.failed, outcome.dead) == (processes[:1], {}, ["Worker 0 was ended by signal 9."])
    assert len(processes) == 2
    write_merged(tmp_path, plan)
    assert (tmp_path / HEADS).read_bytes() == (folder / HEADS).read_bytes()


@pytest.fixture
def started(model: str, corpus: str, tmp_path: Path) -> Counter:
    """A census that is planned and not run."""

    class PlannedError(Exception):
        pass

    def stop(progress: Progress) -> None:
        raise PlannedError

    with pytest.raises(PlannedError):
        mh.census(model, corpus, out=tmp_path, shard_bytes=1000, progress=stop)
    plan = read_plan(tmp_path)
    return Counter(load(model), plan, plan.built_in_probes())


def test_a_shard_that_another_process_counts_is_left_to_it(started: Counter, tmp_path: Path) -> None:
    (tmp_path / LEASES / "000001.json").write_text(
        f'{{"host": "{socket.gethostname()}", "process": {os.getppid()}}}', encoding="utf-8"
    )
    found = [index for index, _ in count_shards(started, tmp_path, range(4))]
    assert found == [0, 2, 3]
    assert missing_shards(tmp_path, started.plan)[0] == 1
    assert claim(tmp_path / LEASES, 0) is not None  # its own leases were released


def test_the_lease_is_released_after_an_error(
    started: Counter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise ModelError("It failed.", "Fix it.")

    monkeypatch.setattr(Counter, "write", fails)
    with pytest.raises(ModelError):
        list(count_shards(started, tmp_path, [0]))
    assert list((tmp_path / LEASES).iterdir()) == []


def test_each_worker_begins_with_shards_of_its_own() -> None:
    orders = [worker_order(7, worker, 3) for worker in range(3)]
    assert orders[1] == [1, 4, 2, 5, 0, 3, 6]
    assert all(sorted(order) == list(range(7)) for order in orders)


def test_a_process_with_another_model_is_rejected(started: Counter, tmp_path: Path) -> None:
    other = saved_bert(tmp_path / "other", seed=5)
    with pytest.raises(ArgumentError, match=r"has other parameters than the model that the census was planned with\. "):
        loaded_for(tmp_path, other, "cpu")


def test_a_model_without_a_tokenizer_is_an_error() -> None:
    with pytest.raises(ModelError, match=r"^tiny reads no text\. Give a model with a tokenizer\.$"):
        work.usable(LoadedModel("", "tiny", bert(), None))


def test_the_rate_is_in_tokens_per_second() -> None:
    assert Progress(0, 1, tokens=50, seconds=2.0).rate == 25
