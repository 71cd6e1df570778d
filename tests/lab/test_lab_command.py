"""The command `lab`: what it prints and writes, and how bad input is answered."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from multihead.cli import main
from multihead_lab import run as room
from tests.lab.few import few_answers


def run(*args: str, columns: int = 100) -> Result:
    return CliRunner().invoke(main, ["lab", *args], env={"COLUMNS": str(columns)})


def joined(output: str) -> str:
    return " ".join(output.replace("\u00a0", " ").split())


@pytest.fixture
def _few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "run_lab", lambda **_: few_answers())


@pytest.mark.usefixtures("_few")
@pytest.mark.parametrize(
    ("lang", "title", "row"), [("en", "How many heads?", "2 heads"), ("zh", "要多少个头？", "2 个头")]
)
def test_every_answer_is_printed_and_the_page_is_written(tmp_path: Path, lang: str, title: str, row: str) -> None:
    out = tmp_path / "lab.html"
    result = run("--lang", lang, "--out", str(out))
    assert result.exit_code == 0
    assert result.output.lstrip("\n").startswith(title)
    assert row in joined(result.output)
    assert "(1, 2, 4, 4)" in result.output
    assert out.read_text("utf-8").startswith("<!doctype html>")


@pytest.mark.usefixtures("_few")
@pytest.mark.parametrize("columns", [40, 80, 200])
def test_no_line_is_wider_than_the_terminal(tmp_path: Path, columns: int) -> None:
    result = run("--out", str(tmp_path / "x"), columns=columns)
    assert max(len(line) for line in result.output.splitlines()[:-2]) <= columns


def test_what_can_be_counted_is_counted_for_real(tmp_path: Path) -> None:
    result = run("--only", "parameters", "--out", str(tmp_path / "lab.html"))
    assert result.exit_code == 0
    output = joined(result.output)
    assert "With 1, 2, 4 or 8 heads the layer has the same 4 tensors and the same 1,050,624 parameters." in output
    assert "With 2 heads, q·k is (1, 2, 12, 12)" in output
    assert "Every head reads all 512 features" in output


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (("--heads", "1,x"), ("error: heads is '1,x', and must be whole numbers with commas between them. "
         "Give for example 1,2,4,8.\n")),
        (("--heads", "2,2"), "error: heads is '2,2', and contains a number twice. Give each number once.\n"),
        (("--heads", "3"), "error: embed_dim is 32, and 3 heads do not divide it. "),
        (("--seeds", "0"), "error: The number of seeds is 0. Give at least 1.\n"),
        (("--workers", "0"), "error: The number of workers is 0. Give at least 1.\n"),
        (("--out", "/no/such/folder/x"), ("error: '/no/such/folder/x' cannot be written: there is no folder "
         "'/no/such/folder'. Create it first.\n")),
    ],
)  # fmt: skip
def test_bad_input_is_answered_in_one_line(tmp_path: Path, args: tuple[str, ...], sentence: str) -> None:
    result = run("--out", str(tmp_path / "x"), *args)
    assert result.exit_code == 2
    assert result.stderr.lstrip("\n").startswith(sentence)
    assert not (tmp_path / "x").exists()
