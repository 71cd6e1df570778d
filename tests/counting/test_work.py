"""Shards are counted one after the other; what cannot be read is stored, and the others go on."""

from __future__ import annotations

from pathlib import Path

import pytest

from multihead.counting import work
from multihead.counting.plan import read_plan
from multihead.counting.shard import ShardCounter
from multihead.counting.work import Progress, ShardResults, count_in_this_process, load_counter
from multihead.errors import ArgumentError, ModelError
from multihead.models.loading import LoadedModel
from tests.counting.tiny import bert, saved_bert


def test_a_shard_that_cannot_be_counted_is_stored_until_it_is_counted(
    model: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = read_plan(folder).write_or_check(tmp_path)
    counter, seen = load_counter(tmp_path, model, "cpu"), list[int]()
    results = ShardResults(plan, tmp_path, Progress(0, 2), lambda progress: seen.append(progress.shards))
    count_shard = ShardCounter.count_shard

    def fails(counter: ShardCounter, index: int, *rest: object) -> bytes:
        if not index:
            raise OSError(28, "No space left on device")
        return count_shard(counter, index)

    with monkeypatch.context() as context:
        context.setattr(ShardCounter, "count_shard", fails)
        count_in_this_process(counter, [0, 1], 1, results)
    problem = f"{plan.shards[0]}: No space left on device"
    assert (results.failure_of_shard, seen[-1]) == ({0: problem}, 1)
    assert plan.problem_file(tmp_path, 0).read_text(encoding="utf-8") == problem
    count_in_this_process(counter, [0], 1, results)
    assert sorted(file.name for file in (tmp_path / "shards").iterdir()) == ["000000.parquet", "000001.parquet"]


def test_a_process_with_another_model_is_rejected(folder: Path, tmp_path: Path) -> None:
    other = saved_bert(tmp_path / "other", seed=5)
    with pytest.raises(ArgumentError, match=r"has other parameters than the model that the census was planned with\. "):
        load_counter(folder, other, "cpu")


def test_a_model_without_a_tokenizer_is_an_error() -> None:
    with pytest.raises(ModelError, match=r"^tiny has no tokenizer files, or files that transformers cannot read\. "):
        work.check_reads_text(LoadedModel("tiny", "tiny", bert(), None))


def test_the_rate_is_in_tokens_per_second() -> None:
    assert Progress(0, 1, tokens=50, seconds=2.0).rate == 25
