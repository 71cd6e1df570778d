"""Every text of a corpus is in one shard, and a row that is no text is named."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import re
from collections.abc import Callable
from pathlib import Path

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from multihead.counting import corpus
from multihead.counting.corpus import Shard, divide_into_shards, file_sizes, find_files, rows_of_shard
from multihead.errors import InputError
from tests.counting.tiny import jsonl, random_texts

TEXTS = random_texts(60)


def read(file: str, *, shard_bytes: int | None = None) -> tuple[list[Shard], list[str | None]]:
    """Return the shards of a file in the order of its rows, and the texts of all of them."""
    shards = sorted(divide_into_shards(file_sizes([file]), "text", shard_bytes=shard_bytes))
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

    @pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.dictionary(pa.int32(), pa.string())], ids=str)
    def test_columns_of_text_of_any_type_are_read(self, tmp_path: Path, kind: pa.DataType) -> None:
        file = str(tmp_path / "texts.parquet")
        pq.write_table(pa.table({"text": pa.array(TEXTS).cast(kind)}), file)
        assert read(file)[1] == TEXTS

    def test_a_compressed_file_is_one_shard(self, tmp_path: Path) -> None:
        file = tmp_path / "texts.jsonl.gz"
        file.write_bytes(gzip.compress("".join(json.dumps({"text": text}) + "\n" for text in TEXTS).encode()))
        shards, found = read(str(file), shard_bytes=10)
        assert (len(shards), found) == (1, TEXTS)

    def test_texts_are_read_from_an_address(self) -> None:
        with fsspec.open("memory://corpus/a.txt", "w") as file:
            file.write("\n".join(TEXTS))
        files = find_files(["memory://corpus/*.txt"])
        assert [
            row.text for shard in divide_into_shards(file_sizes(files), "text") for row in rows_of_shard(shard, "text")
        ] == TEXTS

    @pytest.mark.parametrize("total", [1 << 16, 1 << 20, 1 << 25, 1 << 30, 1 << 40])
    def test_they_become_smaller_so_that_processes_finish_together(self, total: int) -> None:
        """Processes that take one shard after the other, at equal rates: how much later than the first is the last?"""
        shards = divide_into_shards({"a.txt": total}, "text")
        sizes = [(total if each.stop < 0 else each.stop) - each.start for each in shards]
        assert (sum(sizes), sizes) == (total, sorted(sizes, reverse=True))
        assert sizes[0] <= corpus.LARGEST_SHARD
        assert sizes[-1] <= max(total // corpus.LEAST_PART, corpus.SMALLEST_SHARD)
        assert len(sizes) <= max(400, 2 * total // corpus.LARGEST_SHARD)
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


class TestRowsThatAreNoText:
    @pytest.mark.parametrize(
        ("line", "problem"),
        [
            (b"{", "not JSON"),
            (b"[" * 100_000, "not JSON"),
            (b'{"other": "a"}', "no key 'text'"),
            (b'{"text": 3}', "int, no text"),
            (b'{"text": null}', "NoneType, no text"),
            (b'"\xff"', "not UTF-8"),
            (b'{"text": "\\ud800"}', "half of a surrogate pair, which is no character"),
            (b'{"text": "  "}', "empty"),
            (b"", "empty"),
        ],
    )
    def test_a_broken_line_is_named_and_the_next_one_read(self, tmp_path: Path, line: bytes, problem: str) -> None:
        file = tmp_path / "texts.jsonl"
        file.write_bytes(b'{"text": "first"}\n' + line + b'\n"last"\n')
        found = list(rows_of_shard(Shard(str(file), "jsonl", -1, 0, -1), "text"))
        assert [row.text for row in found] == ["first", None, "last"]
        assert (found[1].place, found[1].problem) == (f"{file} byte 18", problem)

    def test_a_line_that_does_not_end_is_not_held_in_memory(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(corpus, "LONGEST_LINE", 16)
        file = tmp_path / "texts.txt"
        file.write_bytes(b"a" * 100 + b"\nlast\n")
        found = list(rows_of_shard(Shard(str(file), "lines", -1, 0, -1), "text"))
        assert [(row.text, row.problem) for row in found] == [(None, "longer than 16 bytes"), ("last", "")]
        assert found[1].place == f"{file} byte 101"

    def test_a_parquet_value_that_is_not_utf8_is_named(self, tmp_path: Path) -> None:
        file = str(tmp_path / "texts.parquet")
        broken = pa.array([b"first", b"\xff", None], pa.binary())
        pq.write_table(pa.table({"text": broken.view(pa.string())}), file)
        found = list(rows_of_shard(Shard(file, "parquet", 0, 0, -1), "text"))
        assert [(row.text, row.problem) for row in found] == [("first", ""), (None, "not UTF-8"), (None, "no text")]


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
        shards = divide_into_shards(file_sizes(find_files([there, gone])), "text")
        assert [shard.file for shard in shards] == [there, gone]
        with pytest.raises(FileNotFoundError):
            list(rows_of_shard(shards[1], "text"))

    @pytest.mark.parametrize(
        ("suffix", "damaged", "finding"),
        [
            (".gz", lambda text: gzip.compress(text)[:-20], "cannot be read: Compressed file ended before "),
            (
                ".gz",
                lambda text: gzip.compress(text)[:10] + b"\xff" * 90,
                "cannot be read: Error -3 while decompressing",
            ),
            (".bz2", lambda text: bz2.compress(text)[:-20], "cannot be read: Compressed file ended before "),
            (".xz", lambda text: lzma.compress(text)[:-40] + b"\xff" * 40, "cannot be read: Corrupt input data."),
            (".zst", lambda text: text, "is compressed with zstd, which needs a package that is not installed."),
        ],
        ids=["gzip, cut off", "gzip, changed", "bzip2", "xz", "zstd"],
    )
    def test_a_compressed_file_that_is_damaged_is_an_error_that_names_it(
        self,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        suffix: str,
        damaged: Callable[[bytes], bytes],
        finding: str,
    ) -> None:
        monkeypatch.delitem(fsspec.compression.compr, "zstd", raising=False)
        file = tmp_path / f"texts.txt{suffix}"
        file.write_bytes(damaged("\n".join(TEXTS).encode()))
        with pytest.raises(InputError, match=f"^{re.escape(f'{file} {finding}')}"):
            list(rows_of_shard(Shard(str(file), "lines", -1, 0, -1), "text"))

    def test_no_file_at_all_is_an_error(self, tmp_path: Path) -> None:
        with pytest.raises(InputError, match=rf"^There is no file '{tmp_path}/\*\.parquet'\. Check the names\.$"):
            find_files([str(tmp_path / "*.parquet")])

    def test_a_folder_is_an_error(self, tmp_path: Path) -> None:
        sentence = f"'{tmp_path}' is a folder. Give its files, for example '{tmp_path}/*.parquet'."
        with pytest.raises(InputError, match=f"^{re.escape(sentence)}$"):
            find_files([str(tmp_path)])

    def test_a_parquet_file_without_the_column_is_an_error(self, tmp_path: Path) -> None:
        file = str(tmp_path / "texts.parquet")
        pq.write_table(pa.table({"body": TEXTS, "number": range(60)}), file)
        with pytest.raises(InputError, match=r"has no column 'text'\. Give one of its columns: body, number\.$"):
            list(rows_of_shard(Shard(file, "parquet", 0, 0, -1), "text"))
        with pytest.raises(InputError, match=r"holds int64, no text\. Give a column of strings\.$"):
            list(rows_of_shard(Shard(file, "parquet", 0, 0, -1), "number"))

    def test_a_file_that_is_no_parquet_is_an_error_where_it_is_read(self, tmp_path: Path) -> None:
        file = tmp_path / "texts.parquet"
        file.write_bytes(b"PAR1 but not really")
        shards = divide_into_shards(file_sizes([str(file)]), "text")
        assert shards == [Shard(str(file), "parquet", 0, 0, -1)]
        with pytest.raises(InputError, match=r"texts\.parquet cannot be read: .* Write it again\.$"):
            list(rows_of_shard(shards[0], "text"))
