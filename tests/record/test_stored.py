"""q and k that stay in their file are read head by head, in bounded memory; a file that is cut is an error."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from multihead import masks
from multihead.errors import InputError
from multihead.observation.record import Record
from multihead.record.stored import StoredRows
from tests.observation.recorded import Tokenizer, asked, ids, read, same


@pytest.fixture
def file(tmp_path: Path) -> Path:
    read(ids(1, 6), ids(1, 4)).save(tmp_path / "run.safetensors")
    return tmp_path / "run.safetensors"


def stored(record: Record) -> list[StoredRows]:
    found = [rows for layer in record.layers for one in layer.samples for rows in (one.q, one.k)]
    assert all(isinstance(rows, StoredRows) for rows in found)
    return found  # type: ignore[return-value]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_a_record_is_the_one_that_was_saved(dtype: torch.dtype, tmp_path: Path) -> None:
    expected = asked(
        dtype=dtype,
        mask=masks.Causal() & masks.Keep(torch.rand(9, 9) < 0.7, "queries keys"),
        bias=torch.randn(1, 1, 9, 9).to(dtype),
    )
    expected.save(tmp_path / "run.safetensors")
    same(Record.load(tmp_path / "run.safetensors", mapped=False), expected)


def test_texts_and_records_of_statistics_alone_open_too(tmp_path: Path) -> None:
    expected = read(ids(2, 6), ids(1, 4))
    expected.name_tokens(Tokenizer())
    for keep in ("all", "statistics"):
        expected.save(file := tmp_path / "run.safetensors", keep=keep)
        found = Record.load(file, mapped=False)
        same(found, expected, weights=keep == "all")
        assert [text.tokens for text in found.texts] == [text.tokens for text in expected.texts]
        again = tmp_path / "again.safetensors"
        found.save(again)
        same(Record.load(again), expected, weights=keep == "all")


def test_only_the_heads_that_are_looked_at_are_read(file: Path) -> None:
    record, expected = Record.load(file, mapped=False), Record.load(file)
    q, k, *others = stored(record)
    one, another = (each.layers[0].sample() for each in (record, expected))
    assert torch.equal(one.weights(3), another.weights(3))
    assert (q._heads, k._heads) == ({3}, {1})
    assert torch.equal(one.weights(-4), another.weights(0))
    assert torch.equal(one.blocks(2, block=2).sums, another.blocks(2, block=2).sums)
    assert (q._heads, k._heads) == ({0, 2, 3}, {0, 1})
    assert not any(rows._heads for rows in others)
    assert torch.equal(one.map(bins=3).nan_to_num(-1), another.map(bins=3).nan_to_num(-1))
    assert q.num_bytes == 4 * 6 * 4 * 4


@pytest.mark.parametrize("most", [0, 100, 200, 500])
def test_what_was_read_longest_ago_makes_room(most: int, file: Path) -> None:
    record, expected = Record.load(file, mapped=False), Record.load(file)
    rows = stored(record)
    held = rows[0].cache
    held.max_bytes = most
    for head in (0, 1, 2, 3, 0):
        for layer, other in zip(record.layers, expected.layers, strict=True):
            for sample in range(2):
                assert torch.equal(layer.weights(head, sample=sample), other.weights(head, sample=sample))
                assert sum(each.num_bytes for each in rows) <= max(most, 6 * 4 * 4)
    assert torch.equal(record.layers[0].weights(), expected.layers[0].weights())


def cut(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def emptied(file: Path) -> None:
    os.truncate(file, 0)


def written_into(file: Path) -> None:
    before = file.stat()
    with file.open("r+b") as opened:
        opened.seek(-1, os.SEEK_END)
        opened.write(b"x")
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns + 10**9))


@pytest.mark.parametrize("harm", [cut, emptied, written_into])
def test_a_file_that_is_changed_while_it_is_open_is_an_error(harm: object, file: Path) -> None:
    record = Record.load(file, mapped=False)
    before = record.layers[0].weights(0)
    harm(file)  # type: ignore[operator]
    with pytest.raises(InputError) as caught:
        record.layers[1].weights(0)
    assert str(caught.value) == f"{str(file)!r} was changed, truncated or removed while it was read. Open it again."
    assert torch.equal(record.layers[0].weights(0), before)  # it is in memory


@pytest.mark.parametrize("replaced", [True, False])
def test_a_record_is_read_on_after_another_one_took_its_name(replaced: bool, file: Path) -> None:
    record, expected = Record.load(file, mapped=False), Record.load(file)
    if replaced:
        asked().save(file)
    else:
        file.unlink()
    same(record, expected)


def test_a_file_whose_header_lies_about_q_is_refused(file: Path, tmp_path: Path) -> None:
    save_file({"0.0.q": torch.zeros(3)}, other := tmp_path / "other.safetensors", {"format": "multihead record"})
    for content in (file.read_bytes()[:-1], other.read_bytes() + b"x"):
        other.write_bytes(content)
        with pytest.raises(InputError) as caught:
            Record.load(other, mapped=False)
        assert str(caught.value) == (
            f"{str(other)!r} is truncated or damaged: it starts as a safetensors file but does not continue as one. "
            "Copy it again, or save the record again."
        )
