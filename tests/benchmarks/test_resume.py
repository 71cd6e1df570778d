"""An interrupted run is resumed: results are reused, and everything else is measured again."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from benchmarks.resume import append_row, measure_missing, read_rows


@dataclass(frozen=True)
class Row:
    name: str
    value: float = 0.0
    note: str = ""

    @staticmethod
    def from_dict(written: dict[str, Any]) -> Row:
        return Row(**written)


class StatisticsMeasurer:
    """Measures a job by listing its name."""

    def __init__(self, journal: Path | None = None) -> None:
        self.names: list[str] = []
        self.journal = journal

    def __call__(self, name: str) -> Row:
        self.names.append(name)
        return Row(name, 1.0)

    def run(self, *names: str, kept: tuple[Row, ...] = (), resume: bool = True) -> list[Row]:
        jobs = {name: name for name in names}
        return measure_missing(jobs, self, kept={row.name: row for row in kept}, resume=resume, journal=self.journal)


@pytest.mark.parametrize("note", ["", "stops: no memory within 12 GiB"])
def test_a_result_is_reused(note: str) -> None:
    measuring, before = StatisticsMeasurer(), Row("a", 2.0, note)
    assert measuring.run("a", "b", kept=(before,)) == [before, Row("b", 1.0)]
    assert measuring.names == ["b"]


@pytest.mark.parametrize("note", ["failed: RuntimeError: no", "not measured: no model"])
def test_a_row_without_a_result_is_measured_again(note: str) -> None:
    measuring = StatisticsMeasurer()
    assert measuring.run("a", kept=(Row("a", note=note),)) == [Row("a", 1.0)]


def test_without_resuming_everything_is_measured() -> None:
    measuring = StatisticsMeasurer()
    assert measuring.run("a", kept=(Row("a", 2.0),), resume=False) == [Row("a", 1.0)]


def test_every_row_is_stored_before_the_next_one_is_measured(tmp_path: Path) -> None:
    journal = tmp_path / "folder" / "rows.jsonl"

    def measure(name: str) -> Row:
        if name == "c":
            raise KeyboardInterrupt
        return Row(name)

    with pytest.raises(KeyboardInterrupt):
        measure_missing({name: name for name in "abc"}, measure, kept={}, resume=False, journal=journal)
    assert read_rows(journal, Row.from_dict) == [Row("a"), Row("b")]


def test_a_line_that_was_cut_off_is_skipped(tmp_path: Path) -> None:
    journal = tmp_path / "rows.jsonl"
    append_row(journal, Row("a"))
    with journal.open("a", encoding="utf-8") as file:
        file.write('{"name": "b", "va')
    assert read_rows(journal, Row.from_dict) == [Row("a")]
    assert read_rows(tmp_path / "missing.jsonl", Row.from_dict) == []
