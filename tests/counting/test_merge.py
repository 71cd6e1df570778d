"""Shards are merged in the order of the plan, and only those of the same census."""

from __future__ import annotations

import io
import os
import random
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import multihead as mh
from multihead.counting.heads_table import (
    CHANCE_COLUMNS,
    add_missing_columns,
    heads_schema,
    read_metadata,
    table_from_parquet,
    table_to_parquet,
)
from multihead.counting.merge import (
    HEADS_FILE,
    SHARDS_FILE,
    MergedSums,
    merge_shards,
    missing_shards,
    read_merged_tables,
)
from multihead.counting.plan import read_plan
from tests.counting.written import flip_a_bit


def one_row(
    value: float, *, shard: int, layer: int = 0, count: int = 1, chance: float | None = 0.25, texts: int | None = 1
) -> pa.Table:
    """Return the table of a shard with one head, whose queries all have one value and one chance."""
    excess = None if chance is None else value - chance
    example = {"value": value, "shard": shard, "text": 0, "position": 0, "token": "", "key": -1, "key_token": ""}
    row = {
        "layer": layer, "name": f"layer{layer}", "head": 0, "statistic": "one", "count": count, "nonfinite": 0,
        "mean": value, "squares": 0.0, "chance": chance, "texts": texts, "excess": excess,
        "excess_squares": None if chance is None else 0.0, "minimum": value, "maximum": value,
        "bin_value": [value], "bin_count": [count],
        "examples": [{**example, "start": 0, "tokens": [""], "values": [value]}],
    }  # fmt: skip
    table = pa.Table.from_pylist([row], schema=heads_schema())
    return table.replace_schema_metadata({b"multihead": b"{}"})


def test_rows_of_two_shards_are_summed() -> None:
    found = MergedSums(1)
    for shard, (value, count) in enumerate([(1.0, 2), (4.0, 1)]):
        found.add_shard(one_row(value, shard=shard, count=count))
    row = found.heads_table().to_pylist()[0]
    assert (row["count"], row["mean"], row["squares"]) == (3, 2.0, 6.0)
    assert (row["minimum"], row["maximum"]) == (1.0, 4.0)
    assert (row["bin_value"], row["bin_count"]) == ([1.0, 4.0], [2, 1])
    assert [each["value"] for each in row["examples"]] == [4.0]


def test_chance_is_weighted_by_queries_and_the_excess_by_texts() -> None:
    found = MergedSums(1)
    found.add_shard(one_row(0.5, shard=0, count=3, chance=0.1, texts=3))
    found.add_shard(one_row(0.9, shard=1, count=1, chance=0.3, texts=1))
    row = found.heads_table().to_pylist()[0]
    assert row["chance"] == pytest.approx((3 * 0.1 + 0.3) / 4)
    assert (row["texts"], row["excess"]) == (4, pytest.approx((3 * 0.4 + 0.6) / 4))
    assert row["excess_squares"] == pytest.approx(3 * 0.05**2 + 0.15**2)


def test_a_shard_of_an_earlier_version_makes_chance_unknown_and_nothing_else() -> None:
    old = one_row(4.0, shard=1).drop_columns(list(CHANCE_COLUMNS))
    for tables in ([one_row(1.0, shard=0), old], [old, one_row(1.0, shard=0)]):
        found = MergedSums(1)
        for table in tables:
            found.add_shard(add_missing_columns(table))
        row = found.heads_table().to_pylist()[0]
        assert (row["count"], row["mean"]) == (2, 2.5)
        assert [row[name] for name in CHANCE_COLUMNS] == [None] * 4


def test_a_shard_without_a_query_that_counts_leaves_chance_known() -> None:
    found = MergedSums(1)
    found.add_shard(one_row(1.0, shard=0))
    found.add_shard(one_row(0.0, shard=1, count=0, chance=None, texts=None))
    assert found.heads_table()["chance"].to_pylist() == [0.25]


def test_ties_go_to_the_earlier_shard() -> None:
    found = MergedSums(2)
    for shard in (0, 1, 2):
        found.add_shard(one_row(1.0, shard=shard))
    assert [each["shard"] for each in found.heads_table()["examples"][0].as_py()] == [0, 1]


def test_a_layer_that_a_shard_lacks_is_kept() -> None:
    found = MergedSums(1)
    found.add_shard(one_row(1.0, shard=0, layer=1))
    found.add_shard(one_row(2.0, shard=1, layer=0))
    assert found.heads_table()["layer"].to_pylist() == [0, 1]
    assert found.heads_table()["mean"].to_pylist() == [2.0, 1.0]


def test_a_table_in_which_a_bit_was_flipped_is_damaged_or_equal() -> None:
    draw, table = random.Random(0), one_row(1.0, shard=0)
    content = table_to_parquet(table, {"plan": "a", "shard": 0, "texts": 3})
    written = table_from_parquet(content)
    assert (written, read_metadata(written.schema)) == (table, {"plan": "a", "shard": 0, "texts": 3})
    for _ in range(600):
        found = table_from_parquet(flip_a_bit(content, draw))
        assert found is None or (found, read_metadata(found.schema)) == (table, read_metadata(written.schema))


def test_a_table_without_a_hash_is_read() -> None:
    """Censuses of earlier versions have none."""
    written, table = io.BytesIO(), one_row(1.0, shard=0)
    pq.write_table(table, written)
    assert table_from_parquet(written.getvalue()) == table
    broken = table.replace_schema_metadata({b"multihead": b"{"})
    pq.write_table(broken, written := io.BytesIO())
    assert table_from_parquet(written.getvalue()) is None


class TestAFolder:
    @pytest.fixture
    def copy(self, folder: Path, tmp_path: Path) -> Path:
        return Path(shutil.copytree(folder, tmp_path / "out"))

    def test_the_tables_are_written_once_with_the_same_bytes(self, copy: Path, folder: Path) -> None:
        (copy / HEADS_FILE).unlink()
        assert mh.Census.load(copy).write_tables()
        assert (copy / HEADS_FILE).read_bytes() == (folder / HEADS_FILE).read_bytes()
        os.utime(copy / HEADS_FILE, ns=(0, 0))
        assert mh.Census.load(copy).write_tables()
        assert (copy / HEADS_FILE).stat().st_mtime_ns == 0

    def test_the_tables_of_all_shards_need_no_shard(self, copy: Path) -> None:
        shutil.rmtree(copy / "shards")
        found = mh.Census.load(copy)
        assert (found.texts, found.missing, found.write_tables()) == (60, [], True)
        assert missing_shards(copy, found.plan, [0, 1]) == []

    def test_shards_of_an_earlier_version_are_merged_with_those_of_this_one(self, copy: Path, folder: Path) -> None:
        plan = read_plan(copy)
        file = plan.shard_file(copy, 1)
        table = pq.read_table(file)
        file.write_bytes(table_to_parquet(table.drop_columns(list(CHANCE_COLUMNS)), read_metadata(table.schema)))
        found, expected = merge_shards(copy, plan).heads, pq.read_table(folder / HEADS_FILE)
        others = [name for name in expected.column_names if name not in (*CHANCE_COLUMNS, "examples")]  # which hold NaN
        assert found.schema == expected.schema.remove_metadata()
        assert found.select(others) == expected.select(others)
        assert {found[name].null_count for name in CHANCE_COLUMNS} == {len(found)}

    def test_no_table_is_written_while_a_shard_is_missing_that_may_still_be_counted(self, copy: Path) -> None:
        plan = read_plan(copy)
        for file in (copy / HEADS_FILE, copy / SHARDS_FILE, plan.shard_file(copy, 1)):
            file.unlink()
        assert not mh.Census.load(copy).write_tables()
        assert not (copy / HEADS_FILE).exists()
        plan.problem_file(copy, 1).write_text("It cannot be read.", encoding="utf-8")
        found = mh.Census.load(copy)
        assert (found.missing, found.problems, found.write_tables()) == ([1], ["It cannot be read."], True)
        assert pq.read_table(copy / HEADS_FILE).num_rows == len(found.heads)

    def test_a_table_without_a_shard_that_is_counted_later_is_replaced(self, copy: Path, folder: Path) -> None:
        plan = read_plan(copy)
        for file in (copy / HEADS_FILE, copy / SHARDS_FILE, plan.shard_file(copy, 1)):
            file.unlink()
        plan.problem_file(copy, 1).write_text("It cannot be read.", encoding="utf-8")
        mh.Census.load(copy).write_tables()
        assert (read_merged_tables(copy, plan) or merge_shards(copy, plan)).missing == [1]
        shutil.copy(plan.shard_file(folder, 1), plan.shard_file(copy, 1))
        assert read_merged_tables(copy, plan) is None
        mh.Census.load(copy).write_tables()
        for file in (HEADS_FILE, SHARDS_FILE):
            assert (copy / file).read_bytes() == (folder / file).read_bytes()

    @pytest.mark.parametrize("damage", ["absent", "empty", "cut off", "another census", "another shard"])
    def test_a_shard_without_a_file_of_its_own_that_can_be_read_is_missing(self, copy: Path, damage: str) -> None:
        plan = read_plan(copy)
        file, content = plan.shard_file(copy, 1), plan.shard_file(copy, 1).read_bytes()
        (copy / HEADS_FILE).unlink()
        if damage == "absent":
            file.unlink()
        elif damage == "another shard":
            shutil.copy(plan.shard_file(copy, 2), file)
        elif damage == "another census":
            file.write_bytes(table_to_parquet(pq.read_table(file), {"plan": "other", "shard": 1}))
        else:
            file.write_bytes(content[: 100 if damage == "cut off" else 0])
        assert missing_shards(copy, plan, [0, 1, 2]) == [1]
        found = mh.Census.load(copy)
        assert (found.missing, found.write_tables(), (copy / HEADS_FILE).exists()) == ([1], False, False)

    def test_the_table_of_shards_says_where_each_is(self, counted: mh.Census) -> None:
        assert counted.shards["shard"].to_pylist() == list(range(len(counted.plan.shards)))
        assert counted.shards["place"].to_pylist()[1].endswith("texts.jsonl bytes from 1000")
        assert sum(counted.shards["texts"].to_pylist()) == 60
