"""Texts are read from every format, compressed or not, and a row or a file that is no text is named."""

from __future__ import annotations

import gzip
import json
import re
import struct
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow import csv, feather

from multihead.counting import formats
from multihead.counting.corpus import divide_into_shards, find_files, sizes_and_versions
from multihead.counting.formats import Row, Shard, rows_of_shard
from multihead.errors import InputError
from tests.counting.tiny import random_texts
from tests.counting.written import COMPRESSED, FORMATS, jsonl_of, parquet_of

TEXTS = random_texts(60)
TRICKY = ["plain", 'a "quoted" word', "comma, comma", "naïve 注意力 🙂", "  spaces  ", "\u2028", "\x00"]


def read(file: str, *, shard_bytes: int | None = None) -> list[Row]:
    """Return the rows of a file, shard by shard in the order of its rows."""
    shards = sorted(divide_into_shards(sizes_and_versions([file])[0], "text", shard_bytes=shard_bytes))
    return [row for shard in shards for row in rows_of_shard(shard, "text")]


@pytest.fixture(params=FORMATS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


class TestEveryFormat:
    @pytest.mark.parametrize("size", [1, 700, None])
    def test_each_text_is_in_one_shard(self, tmp_path: Path, name: str, size: int | None) -> None:
        file = tmp_path / name
        file.write_bytes(FORMATS[name](TEXTS, "text"))
        assert [row.text for row in read(str(file), shard_bytes=size)] == TEXTS

    def test_suffixes_may_be_in_upper_case(self, tmp_path: Path, name: str) -> None:
        file = tmp_path / name.upper()
        file.write_bytes(FORMATS[name](TEXTS, "text"))
        assert [row.text for row in read(str(file))] == TEXTS

    def test_texts_are_what_was_written(self, tmp_path: Path, name: str) -> None:
        texts = [text for text in TRICKY if text.strip()]
        if ".txt" not in name:
            texts.append("two\nlines")
        file = tmp_path / name
        file.write_bytes(FORMATS[name](texts, "text"))
        assert [row.text for row in read(str(file))] == texts

    def test_texts_are_read_from_an_address(self, name: str) -> None:
        with fsspec.open(f"memory://formats/{name}", "wb") as file:
            file.write(FORMATS[name](TEXTS, "text"))
        (found,) = find_files([f"memory://formats/{name[:-1]}[{name[-1]}]"])
        assert [row.text for row in read(found, shard_bytes=700)] == TEXTS

    def test_a_broken_row_is_named_and_the_others_are_read(self, tmp_path: Path, name: str) -> None:
        file = tmp_path / name
        file.write_bytes(FORMATS[name](["first", b"\xff", None, "", "  ", "last"], "text"))
        found = read(str(file))
        no_text = {".jsonl": "NoneType, no text", ".csv": "empty", ".txt": "empty"}
        problem = next((each for suffix, each in no_text.items() if suffix in name), "no text")
        assert [row.text for row in found] == ["first", None, None, None, None, "last"]
        assert [row.problem for row in found] == ["", "not UTF-8", problem, "empty", "empty", ""]
        places = {
            ".parquet": "row group 0 row 1", ".arrow": "record batch 0 row 1", ".feather": "record batch 0 row 1",
            ".csv": "row 3", ".jsonl": "byte 18", ".txt": "byte 6",
        }  # fmt: skip
        assert found[1].place_in_file == f"{file} {next(each for suffix, each in places.items() if suffix in name)}"

    def test_a_file_without_rows_has_none(self, tmp_path: Path, name: str) -> None:
        file = tmp_path / name
        file.write_bytes(FORMATS[name]([], "text"))
        assert read(str(file)) == []

    def test_a_file_without_the_column_is_an_error_that_names_its_columns(self, tmp_path: Path, name: str) -> None:
        file = tmp_path / name
        file.write_bytes(FORMATS[name](["w1"], "body"))
        if ".txt" in name:
            assert read(str(file))[0].text == "w1"
        elif ".jsonl" in name:
            assert read(str(file))[0].problem == "no key 'text'; its keys are 'body'"
        else:
            sentence = f"{file} has no column 'text'. Give one of its columns: number, body."
            with pytest.raises(InputError, match=f"^{re.escape(sentence)}$"):
                read(str(file))

    @pytest.mark.parametrize("cut", [0.25, 0.75, 0.999])
    def test_a_file_that_was_cut_off_is_named(self, tmp_path: Path, name: str, cut: float) -> None:
        content = FORMATS[name](TEXTS, "text")
        file = tmp_path / name
        file.write_bytes(content[: int(len(content) * cut)])
        if name in ("a.csv", "a.jsonl", "a.txt"):  # the rows before are whole
            found = [row.text for row in read(str(file))]
            assert found[:-1] == TEXTS[: len(found) - 1]
        else:
            with pytest.raises(InputError, match=rf"^{file} (cannot be read: .*\. Write it again|is neither an arrow)"):
                read(str(file))


PEAKS = """
import os, sys, tracemalloc
from pathlib import Path
from multihead.counting import formats
from multihead.counting.corpus import divide_into_shards, sizes_and_versions
from tests.counting.written import FORMATS

formats.CSV_BLOCK_BYTES = 1 << 12
tracemalloc.start()
for name in FORMATS:
    for number in (100, 400):
        file = Path(sys.argv[1], f"{number}-{name}")
        file.write_bytes(FORMATS[name](["w1 " * 1000] * number, "text"))
        shards = divide_into_shards(sizes_and_versions([str(file)])[0], "text")
        tracemalloc.reset_peak()
        before, _ = tracemalloc.get_traced_memory()
        assert sum(row.text is not None for shard in shards for row in formats.rows_of_shard(shard, "text")) == number
        print(name, tracemalloc.get_traced_memory()[1] - before, flush=True)
os._exit(0)
"""


def test_memory_does_not_grow_with_the_number_of_texts(tmp_path: Path) -> None:
    """In a process that ends without `tracemalloc.stop()`.

    Until Python 3.12.9, stopping crashes if another thread asks for memory meanwhile, as those in which pyarrow reads
    do: github.com/python/cpython/issues/128679.
    """
    root = Path(__file__).resolve().parents[2]
    command = [sys.executable, "-c", PEAKS, str(tmp_path)]
    found = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    peaks: dict[str, list[int]] = {}
    for line in found.stdout.splitlines():
        name, peak = line.split()
        peaks.setdefault(name, []).append(int(peak))
    assert peaks.keys() == FORMATS.keys()
    further = 300 * 3000  # bytes of the further texts
    assert {name: (few, many) for name, (few, many) in peaks.items() if many - few >= 0.2 * further} == {}


class TestHints:
    """One hint per symptom, in files whose rows are not what the reader expects."""

    @pytest.mark.parametrize(("sign", "label"), [(";", "semicolons"), ("\t", "tabs"), ("|", "vertical bars")])
    def test_csv_with_another_separator(self, tmp_path: Path, sign: str, label: str) -> None:
        file = tmp_path / "a.csv"
        file.write_text(f"\ufeffid{sign}text\n0{sign}The cat, and the dog, sat.\n", encoding="utf-8")
        sentence = (
            f"{file} has no column 'text': {label} seem to separate its values, not commas. Write it with commas: "
            f"pandas.read_csv({str(file)!r}, sep={sign!r}).to_csv({str(file)!r}, index=False)."
        )
        with pytest.raises(InputError, match=f"^{re.escape(sentence)}$"):
            read(str(file))

    @pytest.mark.parametrize(
        ("value", "layout", "found", "query"),
        [
            ([{"text": "a"}, {"text": "b"}], {"indent": 1}, "one JSON array", ".[]"),
            ([{"text": "a"}, {"text": "b"}], {}, "one JSON array", ".[]"),
            ([{"text": "a"}, {"text": "b"}], {"separators": (",\n", ":")}, "one JSON array", ".[]"),
            (["a", "b"], {}, "one JSON array", ".[]"),
            ({"text": "a", "id": 0}, {"indent": 2}, "JSON on several lines", "."),
        ],
    )
    def test_json_that_is_not_a_value_per_line(
        self, tmp_path: Path, value: object, layout: dict[str, Any], found: str, query: str
    ) -> None:
        file = tmp_path / "a.json"
        file.write_text(json.dumps(value, **layout), encoding="utf-8")
        (shard,) = divide_into_shards(sizes_and_versions([str(file)])[0], "text", shard_bytes=4)
        sentence = (
            f"{file} is {found}, and a value per line is expected. Convert it with jq -c '{query}' {file} > a.jsonl."
        )
        with pytest.raises(InputError, match=f"^{re.escape(sentence)}$"):
            list(rows_of_shard(shard, "text"))

    @pytest.mark.parametrize(
        ("row", "problem"),
        [
            ({"data": {"text": "a"}}, "no key 'text'; its keys are 'data'"),
            ({"text": {"en": "a"}}, "dict, no text; its keys are 'en'; a text is read from the top of a row"),
            (
                {"text": [{"role": "user", "content": "Hi"}]},
                "list, no text, but chat messages; write each chat as one text (tokenizer.apply_chat_template)",
            ),
            (
                {str(number): "" for number in range(10)},
                f"no key 'text'; its keys are {str(list('01234567'))[1:-1]} ...",
            ),
        ],
    )
    def test_a_row_whose_text_is_elsewhere_says_what_it_has(
        self, tmp_path: Path, row: dict[str, Any], problem: str
    ) -> None:
        file = tmp_path / "a.jsonl"
        file.write_text(json.dumps(row) + '\n"last"\n', encoding="utf-8")
        assert [each.problem for each in read(str(file))] == [problem, ""]

    def test_a_workbook_is_not_csv(self, tmp_path: Path) -> None:
        file = tmp_path / "a.csv"
        with zipfile.ZipFile(file, "w") as book:
            book.writestr("xl/workbook.xml", "")
        with pytest.raises(InputError, match=f"^{file} is not text but an Excel workbook. Save it as CSV UTF-8.$"):
            read(str(file))

    def test_a_nul_is_a_character_in_every_shard(self, tmp_path: Path) -> None:
        file = tmp_path / "a.txt"
        texts = ["The cat\x00sat.", *TEXTS, "\x00"]
        file.write_text("\n".join(texts), encoding="utf-8")
        assert [row.text for row in read(str(file), shard_bytes=400)] == texts

    def test_no_shard_of_utf_16_is_read_as_utf_8(self, tmp_path: Path) -> None:
        file = tmp_path / "a.txt"
        content = "\n".join(TEXTS).encode("utf-16-le")
        file.write_bytes(content)
        for start in range(1, 40):
            with pytest.raises(InputError, match=r"it seems to be UTF-16LE\. Convert"):
                list(rows_of_shard(Shard(str(file), "lines", -1, start, start + 100), "text"))


class TestColumns:
    TYPES = (
        pa.string(), pa.large_string(), pa.string_view(), pa.binary(), pa.binary_view(),
        pa.dictionary(pa.int32(), pa.string()),
    )  # fmt: skip

    @pytest.mark.parametrize("kind", TYPES, ids=str)
    @pytest.mark.parametrize("suffix", [".parquet", ".arrow"])
    def test_those_of_text_of_any_type_are_read(self, tmp_path: Path, suffix: str, kind: pa.DataType) -> None:
        table = pa.table({"text": pa.array(TEXTS).cast(kind)})
        file = str(tmp_path / f"texts{suffix}")
        pq.write_table(table, file) if suffix == ".parquet" else feather.write_feather(table, file)
        assert [row.text for row in read(file)] == TEXTS

    @pytest.mark.parametrize("suffix", [".parquet", ".arrow"])
    def test_another_type_is_an_error(self, tmp_path: Path, suffix: str) -> None:
        table = pa.table({"text": range(60)})
        file = str(tmp_path / f"texts{suffix}")
        pq.write_table(table, file) if suffix == ".parquet" else feather.write_feather(table, file)
        sentence = f"The column 'text' of {file} holds int64, no text. Write its texts to a column of strings."
        with pytest.raises(InputError, match=f"^{re.escape(sentence)}$"):
            read(file)


class TestLines:
    @pytest.mark.parametrize(
        ("line", "problem"),
        [
            (b"{", "not JSON"),
            (b"[" * 100_000, "not JSON"),
            (b'{"text": 3}', "int, no text"),
            (b'{"text": "\\ud800"}', "half of a surrogate pair, which is no character"),
        ],
    )
    def test_a_line_that_is_no_text_in_json_is_named(self, tmp_path: Path, line: bytes, problem: str) -> None:
        file = tmp_path / "texts.jsonl"
        file.write_bytes(b'{"text": "first"}\n' + line + b'\n"last"\n')
        found = read(str(file))
        assert [row.text for row in found] == ["first", None, "last"]
        assert found[1].problem == problem

    def test_one_that_does_not_end_is_not_held_in_memory(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(formats, "MAX_LINE_BYTES", 16)
        file = tmp_path / "texts.txt"
        file.write_bytes(b"a" * 100 + b"\nlast\n")
        found = read(str(file))
        assert [(row.text, row.problem) for row in found] == [(None, "longer than 16 bytes"), ("last", "")]
        assert found[1].place_in_file == f"{file} byte 101"

    @pytest.mark.parametrize("name", ["a.jsonl", "a.txt", "a.csv"])
    def test_a_byte_order_mark_is_no_part_of_a_text(self, tmp_path: Path, name: str) -> None:
        file = tmp_path / name
        file.write_bytes(b"\xef\xbb\xbf" + FORMATS[name](TEXTS, "text"))
        assert [row.text for row in read(str(file))] == TEXTS


class TestCsv:
    def test_a_row_with_another_number_of_columns_is_named(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """In the order of the rows, whatever the blocks."""
        file = tmp_path / "texts.csv"
        file.write_bytes(b'n,text\n1\n2,"w1\nw2"\n\n3,w3,x\n4,w4\n5,w5,x,y\n')
        found = {}
        for block in (24, 1 << 20):
            monkeypatch.setattr(formats, "CSV_BLOCK_BYTES", block)
            found[block] = [tuple(row) for row in read(str(file))]
        assert found[24] == found[1 << 20]
        assert found[24] == [
            (f"{file} row 2", None, "1 columns, not 2"),
            (f"{file} row 3", "w1\nw2", ""),
            (f"{file} row 4", None, "3 columns, not 2"),
            (f"{file} row 5", "w4", ""),
            (f"{file} row 6", None, "4 columns, not 2"),
        ]

    def test_a_row_longer_than_a_block_is_an_error(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(formats, "CSV_BLOCK_BYTES", 64)
        file = tmp_path / "texts.csv"
        file.write_bytes(b'text\n"' + b"w1\n" * 100)
        sentence = f"{file} has a row of more than 64 bytes. Close its quotes, or write it as jsonl."
        with pytest.raises(InputError, match=f"^{re.escape(sentence)}$"):
            read(str(file))

    def test_broken_rows_without_end_are_an_error(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(formats, "MAX_BROKEN_CSV_ROWS", 50)
        file = tmp_path / "texts.csv"
        file.write_bytes(b"text\n" + b"w1,w2\n" * 100)
        with pytest.raises(InputError, match=r"texts\.csv cannot be read: CSV parse error: .* Write it again\.$"):
            read(str(file))

    def test_values_of_other_columns_do_not_matter(self, tmp_path: Path) -> None:
        file = tmp_path / "texts.csv"
        csv.write_csv(pa.table({"other": ["1"] * 30 + ["no number"] * 30, "text": TEXTS}), file)
        assert [row.text for row in read(str(file))] == TEXTS


class TestFilesThatAreRefused:
    @pytest.mark.parametrize("name", ["page.html", "book.PDF", "a.tar.gz", "notes.md.zst", "a.tsv"])
    def test_a_suffix_that_no_format_has(self, tmp_path: Path, name: str) -> None:
        (tmp_path / name).write_text("w1\n", encoding="utf-8")
        suffix = Path(name.removesuffix(".gz").removesuffix(".zst")).suffix.lower()
        sentence = (
            f"{tmp_path / name} has the suffix '{suffix}', which no format of texts has. Give files that end in "
            ".parquet .pq .arrow .feather .csv .jsonl .ndjson .json .txt .text; one with a text in each line may be "
            "renamed to .txt."
        )
        with pytest.raises(InputError, match=f"^{re.escape(sentence)}$"):
            find_files([str(tmp_path / name)])

    @pytest.mark.parametrize("name", ["a.parquet", "a.arrow"])
    def test_a_compressed_file_of_a_format_that_is_read_from_several_places(self, tmp_path: Path, name: str) -> None:
        file = tmp_path / f"{name}.gz"
        file.write_bytes(gzip.compress(FORMATS[name](TEXTS, "text")))
        kind = name.removeprefix("a.")
        sentence = (
            f"{file} is compressed as a whole, and {kind} is read from several places. "
            f"Decompress it; {kind} compresses its columns itself."
        )
        with pytest.raises(InputError, match=f"^{re.escape(sentence)}$"):
            find_files([str(file)])

    @pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.csv", "a.txt.gz"])
    @pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-32", "gbk"])
    def test_text_in_another_encoding(self, tmp_path: Path, name: str, encoding: str) -> None:
        texts = ["今天天气很好，我们去公园散步。", "猫坐在垫子上。"] * 3 if encoding == "gbk" else TEXTS
        lines = [json.dumps({"text": each}, ensure_ascii=False) if "json" in name else each for each in texts]
        content = "\n".join(["text", *lines] if "csv" in name else lines).encode(encoding)
        file = tmp_path / name
        file.write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
        sizes, _ = sizes_and_versions([str(file)])
        (shard,) = divide_into_shards(sizes, "text", shard_bytes=100)  # one that fails, not each
        label = {"utf-16": "UTF-16", "utf-16-le": "UTF-16LE", "utf-32": "UTF-32", "gbk": "GBK"}[encoding]
        sentence = f"{file} is not UTF-8 text: it seems to be {label}. Convert it with iconv -f {label} -t UTF-8."
        with pytest.raises(InputError, match=f"^{re.escape(sentence)}$"):
            list(rows_of_shard(shard, "text"))

    @pytest.mark.parametrize("name", ["a.parquet", "a.arrow", "a.jsonl.gz", "a.txt.bz2", "a.csv.xz", "a.txt.zst"])
    def test_another_format_than_the_suffix_says(self, tmp_path: Path, name: str) -> None:
        file = tmp_path / "texts.txt"
        file.write_bytes(FORMATS[name](TEXTS, "text"))
        (shard,) = divide_into_shards(sizes_and_versions([str(file)])[0], "text", shard_bytes=100)
        suffix = Path(name).suffix
        sentence = f"{file} begins as files with the suffix {suffix} do. Add {suffix} to its name."
        with pytest.raises(InputError, match=f"^{re.escape(sentence)}$"):
            list(rows_of_shard(shard, "text"))

    def test_an_arrow_file_that_is_none(self, tmp_path: Path) -> None:
        file = tmp_path / "texts.arrow"
        file.write_bytes(jsonl_of(TEXTS, "text"))
        sentence = f"{file} is neither an arrow file nor a stream of record batches. Write it again."
        with pytest.raises(InputError, match=f"^{re.escape(sentence)}$"):
            read(str(file))

    @pytest.mark.parametrize("name", ["a.arrow", "stream.arrow"])
    def test_an_arrow_file_whose_texts_begin_nowhere(self, tmp_path: Path, name: str) -> None:
        """The process would end where pyarrow reads such a text."""
        content = FORMATS[name](["first", "second"], "text")
        offsets = struct.pack("<3i", 0, 5, 11)
        assert content.count(offsets) == 1
        file = tmp_path / name
        file.write_bytes(content.replace(offsets, struct.pack("<3i", 0, 1 << 20, 11)))
        with pytest.raises(InputError, match=rf"^{file} cannot be read: .*\. Write it again\.$"):
            read(str(file))

    def test_a_parquet_file_that_is_none(self, tmp_path: Path) -> None:
        file = tmp_path / "texts.parquet"
        file.write_bytes(b"PAR1 but not really")
        with pytest.raises(InputError, match=r"texts\.parquet cannot be read: .*[^.]\. Write it again\.$"):
            read(str(file))

    @pytest.mark.parametrize("suffix", COMPRESSED)
    def test_a_compressed_file_in_which_a_byte_was_changed(self, tmp_path: Path, suffix: str) -> None:
        content = bytearray(COMPRESSED[suffix]("\n".join(TEXTS).encode()))
        content[len(content) // 2] ^= 0xFF
        file = tmp_path / f"texts.txt{suffix}"
        file.write_bytes(content)
        with pytest.raises(InputError, match=rf"^{file} cannot be read: .*\. Write it again\.$"):
            read(str(file))


def test_a_parquet_file_that_was_missing_from_the_plan_is_read_whole(tmp_path: Path) -> None:
    file = tmp_path / "texts.parquet"
    (shard,) = divide_into_shards({str(file): None}, "text")
    file.write_bytes(parquet_of(TEXTS, "text"))
    assert [row.text for row in rows_of_shard(shard, "text")] == TEXTS


def test_a_file_in_an_archive_is_read_by_its_own_suffix(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "all.zip", "w") as archive:
        archive.writestr("texts.jsonl", jsonl_of(TEXTS, "text"))
    (file,) = find_files([f"zip://texts.jsonl::{tmp_path}/all.zip"])
    assert [row.text for row in read(file)] == TEXTS


def test_a_shard_is_named_by_its_place_in_the_file() -> None:
    shards = [
        Shard("a.jsonl", "jsonl", -1, 0, -1), Shard("a.jsonl", "jsonl", -1, 512, -1),
        Shard("a.parquet", "parquet", 3, 20, 40), Shard("a.arrow", "arrow", -1, 2, 4),
    ]  # fmt: skip
    assert [str(shard) for shard in shards] == [
        "a.jsonl", "a.jsonl bytes from 512",
        "a.parquet row group 3, rows from 20", "a.arrow record batches from 2",
    ]  # fmt: skip
