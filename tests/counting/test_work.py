"""Processes share the shards; one that is killed is replaced, and changes no byte of the result."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

import multihead as mh
from multihead.counting import work
from multihead.counting.leases import claim
from multihead.counting.merge import HEADS, missing_shards
from multihead.counting.plan import LEASES, read_plan
from multihead.counting.shard import Counter
from multihead.counting.work import Progress, count_shards, loaded_for, worker_order
from multihead.errors import ArgumentError, ModelError
from multihead.models import LoadedModel, load
from tests.counting.tiny import bert, saved_bert


def test_processes_one_of_which_is_killed_write_the_same_bytes(
    model: str, corpus: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[int] = []
    start = work.subprocess.Popen

    def kept(*args: Any, **options: Any) -> Any:
        process = start(*args, **options)
        started.append(process.pid)
        return process

    killed: list[int] = []

    def kill_first(progress: Progress) -> None:
        if progress.texts and not killed:
            killed.append(started[0])
            os.kill(started[0], signal.SIGKILL)

    monkeypatch.setattr(work.subprocess, "Popen", kept)
    options: dict[str, Any] = {"shard_bytes": 1000, "workers": 2, "threads": 1}
    found = mh.census(model, corpus, out=tmp_path / "out", **options, progress=kill_first)
    assert (found.texts, found.missing) == (60, [])
    assert found.problems in ([], ["Worker 0 was ended by signal 9."])
    assert killed
    assert (tmp_path / "out" / HEADS).read_bytes() == (folder / HEADS).read_bytes()


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
        f'{{"host": "{work_host()}", "process": {os.getppid()}}}', encoding="utf-8"
    )
    found = [index for index, _ in count_shards(started, tmp_path, range(4))]
    assert found == [0, 2, 3]
    assert missing_shards(tmp_path, started.plan)[0] == 1
    assert claim(tmp_path / LEASES, 0) is not None  # its own leases were released


def work_host() -> str:
    import socket

    return socket.gethostname()


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
