"""The tables of a run on a GPU, made from its result file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from benchmarks import cuda, pages

ROW = {
    "case": "full, 32 x 512, 16/16, D 64",
    "state": "passed",
    "cells": ["full", "32 x 512", "16/16, D 64", "SDPA"],
    "ratios": {"wall": [0.9, 0.85, 0.95], "device": [1.2, 1.1, 1.3]},
    "host_us": [21.4, 10.2],
    "largest_error": 0.001,
}
STATISTICS = {"case": "default statistics", "state": "passed", "ratio": 12.0, "largest_error": 0.0002}


def written(folder: Path, **measure: Any) -> Path:
    result = {
        "machine": {"card": "A card", "torch": "2.11.0"},
        "commit": "1234567",
        "parts": {"measure": {"state": "passed", "rows": [ROW, STATISTICS], **measure}},
    }
    (folder / "result.json").write_text(json.dumps(result), encoding="utf-8")
    return folder


def test_a_whole_run_is_written_into_both_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "measured.md"
    page.write_text(f"# Page\n\n| a | b | c |\n|---|---|---|\n| old | | |{cuda.MARK}\n", encoding="utf-8")
    monkeypatch.setattr(cuda, "PAGES", [page])
    monkeypatch.setattr(cuda, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(cuda, "today", lambda: "2026-11-28")
    monkeypatch.setattr(pages, "today", lambda: "2026-11-28")
    assert CliRunner().invoke(cuda.main, [str(written(tmp_path))]).exit_code == 0
    assert page.read_text(encoding="utf-8").splitlines()[4:] == [
        "| full, 32 x 512, 16/16, D 64 | SDPA | 0.90 x (0.85-0.95) |",
        "| default statistics, causal, 4 x 4096, 16/16, D 128 | our forward pass | takes 12 times as long |",
        "| measured on | A card, torch 2.11.0 |  |",
        "<!-- made by make cuda -->",
    ]
    assert "| 1.20 x | 21, 10 | 1.0e-03 |" in (tmp_path / "results" / "2026-11-28-cuda.md").read_text(encoding="utf-8")


def test_a_run_that_did_not_end_is_not_shown(tmp_path: Path) -> None:
    done = CliRunner().invoke(cuda.main, [str(written(tmp_path, state="out of time"))])
    assert done.output == (
        f"Error: The part measure ended as 'out of time' in {tmp_path}, and the pages show whole runs only.\n"
    )
