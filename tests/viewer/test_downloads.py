"""What is taken along: every digit of a weight, hidden cells without one, and tokens no spreadsheet runs."""

from __future__ import annotations

import csv
import io
import json
from typing import Any

import numpy as np
import pytest

from multihead import masks
from multihead.errors import ArgumentError
from multihead.locale.escaping import escape_controls
from multihead.record.sample import SampleRecord
from multihead.record.texts import Text
from multihead.viewer import downloads
from tests.viewer.watching import watch

HOSTILE = [
    '=HYPERLINK("http://x")',
    "+1",
    "-1",
    "@SUM(A1)",
    "\t=1",
    "\r=1",
    "  =1",
    "＝1",
    'a,"b"',
    "two\nlines",
    "\ud800",
]


def watch_tokens(tokens: list[str], **given: Any) -> SampleRecord:
    record = watch(len(tokens), **given)
    record.set_text(Text(tokens=tokens))
    return record.layers[0].sample()


def read(parts: object) -> list[dict[str, str]]:
    text = b"".join(parts).decode("utf-8")  # type: ignore[arg-type]
    return list(csv.DictReader(io.StringIO(text, newline="")))


def test_a_weight_has_all_its_digits_and_a_hidden_one_has_none() -> None:
    sample = watch(5, mask=masks.Causal()).layers[0].sample()
    whole = sample.weights(1).numpy()
    rows = read(downloads.weights_csv(sample, 1, queries=slice(1, 4), keys=slice(0, 5)))
    assert len(rows) == 15
    for row in rows:
        query, key = int(row["query"]), int(row["key"])
        assert row["weight"] == "" if key > query else np.float32(row["weight"]) == whole[query, key]


def test_json_holds_the_same_weights_row_by_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(downloads, "_WEIGHTS_PER_WRITE", 7)
    sample = watch_tokens(list("abcde"), mask=masks.Causal())
    parts = list(downloads.weights_json(sample, 0, queries=slice(1, 4), keys=slice(0, 3)))
    assert len(parts) > 4
    body = json.loads(b"".join(parts))
    assert body["query_tokens"] == ["b", "c", "d"]
    assert body["key_tokens"] == ["a", "b", "c"]
    assert body["weights"][0][2] is None
    whole = sample.weights(0).numpy()
    assert np.float32(body["weights"][2][1]) == whole[3, 1]


def test_no_token_becomes_a_formula() -> None:
    place = slice(0, len(HOSTILE))
    rows = read(downloads.weights_csv(watch_tokens(HOSTILE), 0, queries=place, keys=place))
    tokens = [row["key_token"] for row in rows[: len(HOSTILE)]]
    in_words = {"\t=1": "\\t=1", "\r=1": "\\r=1"}  # what begins with a backslash is no formula
    assert tokens[:8] == [in_words.get(token, f"'{token}") for token in HOSTILE[:8]]
    assert tokens[8:10] == ['a,"b"', "two\\nlines"]
    assert {row["query_token"] for row in rows} == set(tokens)


def test_no_name_in_the_table_becomes_a_formula_and_numbers_stay_numbers() -> None:
    rows = [{"layer": 0, "name": "=1+1", "entropy": -0.5}, {"layer": 1, "name": "b", "first_mass": float("nan")}]
    found = read(downloads.table_csv(rows))
    assert found[0] == {"layer": "0", "name": "'=1+1", "entropy": "-0.5", "first_mass": ""}
    assert found[1]["first_mass"] == "nan"
    body = json.loads(b"".join(downloads.table_json(rows)))
    assert body[0]["name"] == "=1+1"
    assert body[1]["first_mass"] is None


def test_more_weights_than_a_file_should_hold_are_refused() -> None:
    downloads.check_download_size(slice(0, 1024), slice(0, 1024))
    with pytest.raises(ArgumentError) as refused:
        downloads.check_download_size(slice(0, 1025), slice(10, 1034))
    assert str(refused.value) == (
        "1,025 queries x 1,024 keys are 1,049,600 weights; a download holds at most 1,048,576. "
        "Choose a smaller part; `seen[layer].weights(...)` in Python is limited only by memory."
    )


def test_a_heading_opens_no_formula() -> None:
    found = b"".join(downloads.table_csv([{"layer": 0, "=cmd()": 1.0}])).decode()
    assert found == "layer,'=cmd()\n0,1.0\n"


def test_names_act_neither_on_a_terminal_nor_on_a_spreadsheet() -> None:
    rows = [{"name": "=1+1", "@x": 0.5, "kind": "\x1b[31m\u202e"}, {"name": "two\nlines", "@x": -1.0, "kind": "+"}]
    written = b"".join(downloads.table_csv(rows)).decode()
    assert written == "name,'@x,kind\n'=1+1,0.5,\\x1b[31m\\u202e\ntwo\\nlines,-1.0,'+\n"
    written = b"".join(downloads.table_json(rows)).decode()
    assert json.loads(written) == rows
    assert escape_controls(written.replace("\n", "")) == written.replace("\n", "")
