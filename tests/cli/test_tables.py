"""Tables as files and as output: the same text in both, and nothing for a form that was not chosen."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from multihead.cli.tables import write_tables

ROWS = [{"layer": 0, "name": "=1+1", "entropy": 0.5}, {"layer": 1, "name": "é", "entropy": float("nan")}]
CSV = "layer,name,entropy\n0,'=1+1,0.5\n1,é,nan\n"


def test_each_form_is_written_to_its_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = tmp_path / "heads.json", tmp_path / "heads.csv"
    write_tables(ROWS, json_file=str(files[0]), csv_file=str(files[1]))
    assert json.loads(files[0].read_text("utf-8")) == [ROWS[0], ROWS[1] | {"entropy": None}]
    assert files[1].read_bytes().decode() == CSV
    assert capsys.readouterr().out == ""


def test_a_dash_prints_a_form_and_none_leaves_it_out(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    write_tables(ROWS, json_file=None, csv_file="-")
    assert capfdbinary.readouterr().out.decode() == CSV
