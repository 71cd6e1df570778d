"""The file of a shard has a row per head and statistic, and examples with the text of their tokens."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch

from multihead.counting import shard
from multihead.counting.heads_table import heads_schema, read_metadata, table_to_parquet
from multihead.counting.plan import read_plan
from multihead.counting.shard import ShardCounter
from multihead.models.loading import load
from multihead.tensors.threads import set_torch_threads


@pytest.fixture(scope="module")
def counter(model: str, folder: Path) -> ShardCounter:
    plan = read_plan(folder)
    return ShardCounter(load(model), plan, plan.built_in_probes())


def table_of(content: bytes) -> Any:
    return pq.read_table(io.BytesIO(content))


def test_the_same_shard_is_the_same_bytes(counter: ShardCounter, folder: Path) -> None:
    assert counter.count_shard(2) == counter.count_shard(2) == counter.plan.shard_file(folder, 2).read_bytes()


def test_another_number_of_threads_agrees_within_rounding(counter: ShardCounter) -> None:
    found = []
    for threads in (1, 2):
        with set_torch_threads(threads):
            found.append(table_of(counter.count_shard(1)))
    for name in ("mean", "squares"):
        one, two = (torch.tensor(each[name].to_pylist()) for each in found)
        assert torch.allclose(one, two, rtol=1e-5, atol=1e-5)


def test_texts_in_groups_have_the_sums_and_examples_of_all_at_once(
    counter: ShardCounter, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = {}
    for group in (shard.MAX_CHARACTERS_PER_GROUP, 1000):
        monkeypatch.setattr(shard, "MAX_CHARACTERS_PER_GROUP", group)
        found[group] = table_of(counter.count_shard(0))
    one, other = found.values()
    for name in ("layer", "head", "statistic", "count", "texts"):
        assert one[name].to_pylist() == other[name].to_pylist()
    for name in ("mean", "squares", "chance", "excess", "excess_squares", "minimum", "maximum"):
        assert torch.allclose(*(torch.tensor(each[name].to_pylist()) for each in (one, other)), rtol=1e-5, atol=1e-6)
    places = [
        [[(each["text"], each["position"], each["tokens"]) for each in row] for row in table["examples"].to_pylist()]
        for table in (one, other)
    ]
    assert places[0] == places[1]
    assert read_metadata(one.schema) == read_metadata(other.schema)


def test_a_group_has_the_texts_that_follow_each_other_up_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard, "MAX_CHARACTERS_PER_GROUP", 1000)
    texts = [(2 * number, "w" * 50) for number in range(10)] + [(30, "w" * 5000), (31, "w")]
    found = list(shard.group_texts(texts))
    assert [list(group) for group in found] == [[0, 2, 4, 6], [8, 10, 12, 14], [16, 18, 30], [31]]
    assert {index: text for group in found for index, text in group.items()} == dict(texts)


def test_its_metadata_is_what_was_read(counter: ShardCounter) -> None:
    found = read_metadata(table_of(counter.count_shard(0)).schema)
    assert (found["plan"], found["shard"], found["broken"], found["problems"]) == (counter.plan.id, 0, 0, [])
    assert found["texts"] == found["rows"] > 5


def test_progress_adds_up_to_what_was_read(counter: ShardCounter) -> None:
    seen: list[tuple[int, int]] = []
    small = replace(counter, plan=replace(counter.plan, batch_tokens=64))
    found = read_metadata(table_of(small.count_shard(0, lambda *counts: seen.append(counts))).schema)
    assert len(seen) > 2
    assert [sum(each) for each in zip(*seen, strict=True)] == [found["texts"], found["tokens"]]


def test_the_tokens_around_an_example_are_those_of_its_text(counter: ShardCounter) -> None:
    table = table_of(counter.count_shard(0))
    assert table.schema.remove_metadata() == heads_schema()
    for examples in table["examples"].to_pylist():
        assert len(examples) == 5
        for each in examples:
            place = each["position"] - each["start"]
            assert len(each["tokens"]) == len(each["values"])
            assert each["tokens"][place].strip() == each["token"]
            assert each["values"][place] == pytest.approx(each["value"], rel=1e-6)
            assert each["key_token"] in {"[CLS]", "[SEP]"} or each["key_token"].startswith("w")


def test_examples_have_the_text_between_their_tokens(counter: ShardCounter) -> None:
    example = table_of(counter.count_shard(0))["examples"][0].as_py()[0]
    assert " w" in "".join(example["tokens"])


def test_equal_tables_are_equal_bytes(counter: ShardCounter) -> None:
    table = table_of(counter.count_shard(1))
    assert table_to_parquet(table, {"b": 1, "a": 2}) == table_to_parquet(table.combine_chunks(), {"a": 2, "b": 1})
