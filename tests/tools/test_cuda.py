"""The command that asks a GPU: parts that die, hang or run out of time are rows of a result that is always written."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tools import cuda
from tools.cuda import Part

MACHINE = {"problem": None, "missing": [], "card": "A card", "torch": "2.11.0", "triton": "3.6.0"}
GOOD = Part("good", "tests.tools.gpu_stub_good", 30)
MIXED = Part("mixed", "tests.tools.gpu_stub", 1e4, case_seconds=1e3, table_lines=4)
MANY = Part("many", "tests.tools.gpu_stub_many", 1e3)


@pytest.fixture(autouse=True)
def _a_card_and_no_reserve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "examine_machine", lambda: MACHINE)
    monkeypatch.setattr(cuda, "commit", lambda: "1234567")
    for name in ("RESERVE", "LEAST", "GRACE"):
        monkeypatch.setattr(cuda, name, 0.2)


class Clock:
    """A clock that is set forward when a line of a file appears, so that no test waits."""

    def __init__(self, file: Path, line: str, seconds: float) -> None:
        self.file, self.line, self.seconds, self.readings = file, line, seconds, 0

    def __call__(self) -> float:
        if self.file.exists() and self.line in self.file.read_text(encoding="utf-8"):
            self.readings += 1
        return time.perf_counter() + (self.seconds if self.readings > 4 else 0.0)


def result_of(folder: Path) -> Any:
    return json.loads((folder / "result.json").read_text(encoding="utf-8"))


def test_a_case_that_fails_dies_or_hangs_is_a_row_and_the_cases_after_it_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(tmp_path / "mixed.0.jsonl", '{"case": "hangs", "state": "begun"}', 2e3)
    monkeypatch.setattr(cuda.time, "monotonic", clock)
    assert cuda.main(["--out", str(tmp_path), "--seconds", "1e4"], [MIXED]) == 1
    result = result_of(tmp_path)
    assert result["machine"] == MACHINE
    part = result["parts"]["mixed"]
    states = {row["case"]: row["state"] for row in part["rows"]}
    assert states == {
        "passes": "passed",
        "fails": "failed",
        "dies": "died",
        "hangs": "hung",
        "is not here": "not here",
        "answers": "passed",
    }
    errors = {row["case"]: row["error"] for row in part["rows"] if "error" in row}
    assert errors["fails"] == "RuntimeError: it is wrong"
    assert errors["dies"].startswith("The process ended by SIGSEGV.")
    assert errors["hangs"].startswith("It took over 200")
    assert (part["state"], part["left"]) == ("failed", [])
    lines = (tmp_path / "table.txt").read_text(encoding="utf-8").splitlines()
    assert lines[0].startswith("A card; torch 2.11.0, triton 3.6.0; commit 1234567; ")
    counted = "2 passed, 1 failed, 1 died, 1 hung, 1 not here"
    assert " ".join(lines[1].split()) == f"mixed failed {part['seconds']} s {counted}"
    assert lines[2:] == [
        "  fails: failed: RuntimeError: it is wrong",
        "  dies: died: The process ended by SIGSEGV.",
        f"  hangs: hung: {errors['hangs']}",
        "  and 3 more lines in result.json",
    ]
    assert cuda.state_of([{"state": "not here"}], []) == "not here"
    assert cuda.state_of([{"state": "passed"}, {"state": "not here"}], ["left"]) == "out of time"


def test_a_part_that_runs_out_of_time_names_the_cases_that_are_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(tmp_path / "many.0.jsonl", '{"case": "waits", "state": "begun"}', 2e3)
    monkeypatch.setattr(cuda.time, "monotonic", clock)
    assert cuda.main(["--out", str(tmp_path), "--seconds", "1e3"], [MANY]) == 1
    part = result_of(tmp_path)["parts"]["many"]
    assert part["state"] == "out of time"
    assert [(row["case"], row["state"]) for row in part["rows"]] == [("passes", "passed"), ("waits", "out of time")]
    assert part["left"] == ["is left", "is left too"]


def test_the_result_is_complete_after_every_part_and_a_part_without_time_is_not_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = []
    write = cuda.write
    monkeypatch.setattr(
        cuda, "write", lambda *given: (write(*given), written.append(list(result_of(tmp_path)["parts"])))
    )
    shared = Part("shared", "tests.tools.gpu_stub_good", 30, processes=2)
    assert cuda.main(["--out", str(tmp_path), "--seconds", "30", "--parts", "good,shared"], [GOOD, shared, MANY]) == 0
    assert written == [["good"], ["good", "shared"]]
    assert [row["case"] for row in result_of(tmp_path)["parts"]["shared"]["rows"]] == ["one", "three", "two"]
    assert cuda.main(["--out", str(tmp_path), "--seconds", "0"], [GOOD]) == 1
    assert result_of(tmp_path)["parts"]["good"]["state"] == "not started"


def test_a_module_that_cannot_be_imported_is_a_row(tmp_path: Path) -> None:
    assert cuda.main(["--out", str(tmp_path), "--seconds", "30"], [Part("none", "tests.tools.no_such_part", 30)]) == 1
    (row,) = result_of(tmp_path)["parts"]["none"]["rows"]
    assert (row["case"], row["state"]) == ("starting", "died")
    assert row["error"].endswith("ModuleNotFoundError: No module named 'tests.tools.no_such_part'")


def test_a_kernel_that_passed_every_call_of_the_contract_gets_a_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another kernel lacks a call, a third one failed, and the row of an earlier state of the code is replaced."""
    proven = tmp_path / "tree" / "proven.json"
    proven.parent.mkdir()
    before = {"card": "An old card", "torch": "2.10.0", "triton": None, "date": "2026-01-01"}
    other = {"path": "other", "code": "0123", **before}
    proven.write_text(json.dumps([{"path": "right", "code": "4567", **before}, other]), encoding="utf-8")
    monkeypatch.setattr(cuda, "PROVEN", proven)
    part = Part("contract", "tests.tools.gpu_stub_contract", 30, processes=2)
    assert cuda.main(["--out", str(tmp_path), "--seconds", "30"], [part]) == 1
    date = result_of(tmp_path)["date"][:10]
    expected = {"path": "right", "code": "89ab", "card": "A card", "torch": "2.11.0", "triton": "3.6.0", "date": date}
    for written in (proven, tmp_path / "proven.json"):
        assert json.loads(written.read_text(encoding="utf-8")) == [other, expected]
    result = result_of(tmp_path)
    result["parts"]["contract"]["left"] = ["right: a call that was not reached"]
    assert cuda.rows_of_kernels(result) == []


def test_without_a_gpu_it_says_so_writes_the_result_and_ends_with_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cuda, "examine_machine", lambda: {"problem": "torch 2.13.0 finds no GPU.", "torch": "2.13.0"})
    assert cuda.main(["--out", str(tmp_path)]) == 2
    sentence = "Nothing was run, because a CUDA GPU is needed: torch 2.13.0 finds no GPU.\n"
    assert capsys.readouterr().err == sentence
    assert result_of(tmp_path)["parts"] == {}
    lines = (tmp_path / "table.txt").read_text(encoding="utf-8").splitlines()
    assert lines[1:] == ["nothing was run: torch 2.13.0 finds no GPU."]


@pytest.mark.skipif(torch.cuda.is_available(), reason="it would run every part")
def test_the_command_itself_needs_no_package(tmp_path: Path) -> None:
    """A Python outside of the environment, which has no torch either."""
    python = getattr(sys, "_base_executable", sys.executable)
    command = [python, "tools/cuda.py", "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=cuda.ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("Nothing was run, because a CUDA GPU is needed: ")
    assert result_of(tmp_path)["machine"]["problem"] in done.stderr


def test_an_unknown_part_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cuda.main(["--out", str(tmp_path), "--parts", "question"])
    assert ended.value.code == 2
    sentence = "There is no part question. The parts are questions, compile, contract, fuzz, measure.\n"
    assert capsys.readouterr().err.endswith(sentence)
