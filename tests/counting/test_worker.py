"""A worker prints what it does as lines of JSON, and an error as its two sentences."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from multihead.counting import worker
from multihead.counting.merge import missing_shards
from multihead.counting.plan import read_plan
from tests.counting.tiny import saved_bert


def run(folder: Path, model: str, capfd: pytest.CaptureFixture[str]) -> tuple[int, list[dict[str, Any]]]:
    options = {"folder": str(folder), "model": model, "device": "cpu", "threads": 1}
    before = os.dup(1)
    try:
        status = worker.main(json.dumps(options))
    finally:
        os.dup2(before, 1)
        os.close(before)
    return status, [json.loads(line) for line in capfd.readouterr().out.splitlines()]


def test_each_batch_and_each_shard_is_a_line(
    model: str, folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    plan = read_plan(folder)
    plan.write_or_check(tmp_path)
    status, messages = run(tmp_path, model, capfd)
    assert (status, missing_shards(tmp_path, plan), messages[0]) == (0, [], {"loaded": True})
    assert sum(each.get("texts", 0) for each in messages) == 60
    assert [each["shard"] for each in messages if "shard" in each] == list(range(len(plan.shards)))
    file = plan.shard_file(tmp_path, 0)
    assert file.read_bytes() == plan.shard_file(folder, 0).read_bytes()


def test_an_error_is_a_line(folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    status, messages = run(folder, saved_bert(tmp_path / "other", seed=3), capfd)
    assert status == 2
    assert [each["kind"] for each in messages] == ["ArgumentError"]
    assert messages[0]["mend"] == "Give all processes the same model."
