"""Every text of a corpus is in one shard, and a file that changed is noticed."""

from __future__ import annotations

import os
import re
from pathlib import Path

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow import feather

from multihead.counting import corpus
from multihead.counting.corpus import FileVersion, divide_into_shards, find_files, sizes_and_versions
from multihead.counting.formats import Shard, rows_of_shard
from multihead.errors import InputError
from tests.counting.tiny import jsonl, random_texts

TEXTS = random_texts(60)


def read(file: str, *, shard_bytes: int | None = None) -> tuple[list[Shard], list[str | None]]:
    """Return the shards of a file in the order of its rows, and the texts of all of them."""
    shards = sorted(divide_into_shards(sizes_and_versions([file])[0], "text", shard_bytes=shard_bytes))
    return shards, [row.text for shard in shards for row in rows_of_shard(shard, "text")]


class TestShards:
    @pytest.mark.parametrize("size", [1, 7, 64, 100_000])
    def test_each_line_is_in_the_shard_in_which_it_begins(self, tmp_path: Path, size: int) -> None:
        file = tmp_path / "texts.txt"
        file.write_text("\r\n".join(TEXTS), encoding="utf-8")  # no end of line after the last one
        shards, found = read(str(file), shard_bytes=size)
        assert found == TEXTS
        assert len(shards) == -(-file.stat().st_size // size)

    def test_rows_of_a_large_row_group_are_divided(self, tmp_path: Path) -> None:
        file = str(tmp_path / "texts.parquet")
        pq.write_table(pa.table({"number": range(60), "text": TEXTS}), file, row_group_size=25)
        shards, found = read(file, shard_bytes=200)
        assert found == TEXTS
        assert {shard.group for shard in shards} == {0, 1, 2}
        assert len(shards) > 6
        assert len(read(file)[0]) == 3

    def test_record_batches_are_not_divided(self, tmp_path: Path) -> None:
        file = str(tmp_path / "texts.arrow")
        feather.write_feather(pa.table({"text": TEXTS}), file, chunksize=10)
        size = sizes_and_versions([file])[0][file]
        assert size is not None
        for shard_bytes, batches in ((1, [1] * 6), (-(-size // 3), [2, 2, 2]), (size // 2 + 1, [3, 3]), (None, [6])):
            shards, found = read(file, shard_bytes=shard_bytes)
            assert found == TEXTS
            assert [shard.stop - shard.start for shard in shards] == batches

    @pytest.mark.parametrize("name", ["texts.csv", "texts.jsonl.gz", "texts.txt.zst"])
    def test_a_file_in_which_no_other_text_can_be_found_than_the_first_is_one_shard(self, name: str) -> None:
        assert divide_into_shards({name: 1 << 30}, "text") == [
            Shard(name, name.split(".")[1].replace("txt", "lines"), -1, 0, -1)
        ]

    @pytest.mark.parametrize("total", [1 << 16, 1 << 20, 1 << 25, 1 << 30, 1 << 40])
    def test_they_become_smaller_so_that_processes_finish_together(self, total: int) -> None:
        """Processes that take one shard after the other, at equal rates: how much later than the first is the last?"""
        shards = divide_into_shards({"a.txt": total}, "text")
        sizes = [(total if each.stop < 0 else each.stop) - each.start for each in shards]
        assert (sum(sizes), sizes) == (total, sorted(sizes, reverse=True))
        assert sizes[0] <= corpus.MAX_SHARD_BYTES
        assert sizes[-1] <= max(total // corpus.MIN_SHARD_DIVISOR, corpus.MIN_SHARD_BYTES)
        assert len(sizes) <= max(400, 2 * total // corpus.MAX_SHARD_BYTES)
        for workers in (2, 4, 24):
            ends = [0] * workers
            for size in sizes:
                ends[ends.index(min(ends))] += size
            assert max(ends) - min(ends) <= max(sizes[-len(sizes) // 2 :])

    def test_the_largest_come_first_whatever_the_order_of_the_files(self) -> None:
        shards = divide_into_shards(
            {"small.txt": 10, "b.txt.gz": 20_000, "large.txt": 50_000, "gone.txt": None}, "text"
        )
        assert [(each.file, each.start) for each in shards] == [
            ("b.txt.gz", 0), ("large.txt", 0), ("large.txt", 16384), ("large.txt", 32768), ("large.txt", 49152),
            ("small.txt", 0), ("gone.txt", 0),
        ]  # fmt: skip


class TestFiles:
    def test_they_are_in_the_order_of_the_patterns_and_then_of_names(self, tmp_path: Path) -> None:
        for name in ("b.txt", "a.txt", "c.jsonl"):
            (tmp_path / name).touch()
        found = find_files([str(tmp_path / "*.jsonl"), str(tmp_path / "*.txt"), str(tmp_path / "a.txt")])
        assert [Path(file).name for file in found] == ["c.jsonl", "a.txt", "b.txt"]

    def test_relative_names_stay_relative(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "texts").mkdir()
        jsonl(tmp_path / "texts" / "a.jsonl", TEXTS)
        monkeypatch.chdir(tmp_path)
        assert find_files(["texts/*.jsonl"]) == ["texts/a.jsonl"]

    def test_a_missing_file_is_one_shard_that_cannot_be_read(self, tmp_path: Path) -> None:
        there, gone = jsonl(tmp_path / "a.jsonl", TEXTS), str(tmp_path / "gone.parquet")
        shards = divide_into_shards(sizes_and_versions(find_files([there, gone]))[0], "text")
        assert [shard.file for shard in shards] == [there, gone]
        with pytest.raises(FileNotFoundError):
            list(rows_of_shard(shards[1], "text"))

    def test_no_file_at_all_is_an_error(self, tmp_path: Path) -> None:
        with pytest.raises(InputError, match=rf"^There is no file '{tmp_path}/\*\.parquet'\. Check the names\.$"):
            find_files([str(tmp_path / "*.parquet")])

    def test_a_folder_is_an_error(self, tmp_path: Path) -> None:
        sentence = f"'{tmp_path}' is a folder. Give its files, for example '{tmp_path}/*.parquet'."
        with pytest.raises(InputError, match=f"^{re.escape(sentence)}$"):
            find_files([str(tmp_path)])


def version_of(file: str) -> FileVersion:
    return sizes_and_versions([file])[1][file]


class TestVersions:
    def test_a_file_that_is_not_touched_keeps_its_own(self, tmp_path: Path) -> None:
        file = jsonl(tmp_path / "texts.jsonl", TEXTS)
        assert version_of(file) == version_of(file)

    @pytest.mark.parametrize("place", [0, -1])
    def test_the_first_and_the_last_byte_count_if_the_time_is_the_same(self, tmp_path: Path, place: int) -> None:
        file = Path(jsonl(tmp_path / "texts.jsonl", TEXTS * 20))
        before, content = version_of(str(file)), bytearray(file.read_bytes())
        time = file.stat().st_mtime_ns
        content[place] ^= 1
        file.write_bytes(content)
        os.utime(file, ns=(time, time))
        after = version_of(str(file))
        assert after.last_written == before.last_written
        assert after.hash_of_ends != before.hash_of_ends

    def test_the_time_counts_if_the_ends_are_the_same(self, tmp_path: Path) -> None:
        file = jsonl(tmp_path / "texts.jsonl", TEXTS)
        before = version_of(file)
        os.utime(file, (1, 1))
        after = version_of(file)
        assert (after.last_written, after.hash_of_ends) == ("1970-01-01T00:00:01+00:00", before.hash_of_ends)
        assert before.last_written != after.last_written

    def test_a_file_at_an_address_has_what_its_server_knows(self) -> None:
        name = "memory://versions/a.txt"
        found = []
        for _ in range(2):
            with fsspec.open(name, "w") as file:
                file.write("w1")
            found.append(version_of(name))
        assert found[0].hash_of_ends == found[1].hash_of_ends
        assert found[0].last_written != found[1].last_written

    def test_a_file_that_cannot_be_read_has_none_and_no_size(self, tmp_path: Path) -> None:
        gone = str(tmp_path / "gone.txt")
        assert sizes_and_versions([gone]) == ({gone: None}, {})

    def test_a_file_whose_server_does_not_know_its_size_has_none(self, monkeypatch: pytest.MonkeyPatch) -> None:
        name = "memory://versions/unknown.txt"
        with fsspec.open(name, "w") as file:
            file.write("w1")
        monkeypatch.setattr(type(fsspec.filesystem("memory")), "info", lambda _, path: {"name": path, "size": None})
        assert sizes_and_versions([name]) == ({name: None}, {})
