"""Results become Markdown tables, in dated pages and in pages that have a mark for them."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import pages


def test_a_table_has_its_head_and_one_line_per_row() -> None:
    assert pages.table(("case", "ratio"), [("layer", "2.0 x"), ("mask", "3.0 x")]) == [
        "| case | ratio |",
        "|---|---|",
        "| layer | 2.0 x |",
        "| mask | 3.0 x |",
    ]


def test_only_the_table_before_the_mark_is_replaced() -> None:
    page = "|---|---|---|\n| a | b | c |\n\n|---|---|---|\n| d | e | f |\n<!-- mark -->\nrest"
    replaced = pages.replace_table(page, "\n<!-- mark -->", [("1", "2", "3"), ("4", "5", "6")])
    assert replaced == page.replace("| d | e | f |", "| 1 | 2 | 3 |\n| 4 | 5 | 6 |")


def test_a_page_is_named_by_its_date_and_its_path_is_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(pages, "today", lambda: "2026-01-31")
    monkeypatch.chdir(tmp_path)
    pages.write_page(tmp_path / "results", "peers", ["# Title", "", "text"])
    assert (tmp_path / "results" / "2026-01-31-peers.md").read_text(encoding="utf-8") == "# Title\n\ntext\n"
    assert capsys.readouterr().out == "written to results/2026-01-31-peers.md\n"
