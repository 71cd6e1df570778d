"""The command `compare`: what it prints and writes about two records, and how bad input is answered."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from rich.cells import cell_len

from multihead import masks
from multihead.cli import main
from multihead.observation.record import Record
from tests.record.analysis.test_changes import two_runs
from tests.viewer.watching import watch


def run(*args: str, columns: int | None = None) -> Result:
    """Run the command in a terminal of `columns`, or into a pipe."""
    environment = {"COLUMNS": None if columns is None else str(columns), "NO_COLOR": "1"}
    return CliRunner().invoke(main, ["compare", *args], prog_name="multihead", env=environment)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    folder = tmp_path_factory.mktemp("runs")
    for name, record in zip(("before", "after"), two_runs(), strict=True):
        record.save(folder / f"{name}.safetensors")
    return str(folder / "before.safetensors"), str(folder / "after.safetensors")


def test_the_head_that_changed_is_the_first_of_the_table(files: tuple[str, str]) -> None:
    result = run(*files, "--top", "2")
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    found = Record.load(files[0]).changed(Record.load(files[1]))
    most = found[0]
    mean = f"{most.divergence / 8:.3f}"
    assert lines[0] == (
        f"before.safetensors → after.safetensors: 8 heads, mean divergence {mean} nats "
        "(0 is the same attention, 0.693 no key in common)."
    )
    assert lines[2].split()[:2] == ["head", "divergence"]
    assert lines[4].split()[:3] == ["L1", "H2", f"{most.divergence:.3f}"]
    assert " % → " in lines[4]
    assert len([line for line in lines if line.startswith("L")]) == 2
    changed = sum(
        each.kinds_before != each.kinds_after for each in Record.load(files[0]).changed(Record.load(files[1]))
    )
    assert lines[-1] == f"{changed} of 8 heads changed their kinds."


def test_everything_printed_is_in_the_language_asked_for(files: tuple[str, str]) -> None:
    lines = run(*files, "--lang", "zh").stdout.splitlines()
    assert lines[0].startswith("before.safetensors → after.safetensors：8 个头，平均散度 ")
    assert lines[2].split()[:2] == ["头", "散度"]


@pytest.mark.parametrize("lang", ["en", "zh"])
def test_no_line_is_wider_than_a_narrow_terminal(files: tuple[str, str], lang: str) -> None:
    for columns in (40, 60):
        output = run(*files, "--lang", lang, columns=columns).stdout
        assert max(map(cell_len, output.splitlines()[1:])) <= columns  # the names of the files are not cut
        assert "…" not in output


def test_csv_and_json_have_every_head_and_every_statistic(files: tuple[str, str], tmp_path: Path) -> None:
    result = run(*files, "--json", "-", "--csv", str(tmp_path / "changed.csv"))
    rows = json.loads(result.stdout)
    assert len(rows) == 8
    assert (rows[0]["layer"], rows[0]["head"]) == (1, 2)
    assert rows[0]["entropy_difference"] == pytest.approx(rows[0]["entropy_after"] - rows[0]["entropy_before"])
    with (tmp_path / "changed.csv").open(encoding="utf-8", newline="") as file:
        written = list(csv.DictReader(file))
    assert [float(row["divergence"]) for row in written] == [row["divergence"] for row in rows]
    assert set(written[0]) == set(rows[0])


def test_some_queries_are_compared_on_request(files: tuple[str, str]) -> None:
    assert json.loads(run(*files, "--queries", "4", "--json", "-").stdout)[0]["queries"] == 4


def test_records_of_two_texts_are_compared_beyond_chance(files: tuple[str, str], tmp_path: Path) -> None:
    after = two_runs(text=1)[1]
    after.save(tmp_path / "text.safetensors")
    result = run(files[0], str(tmp_path / "text.safetensors"), "--json", str(tmp_path / "all.json"))
    assert result.exit_code == 0, result.output
    found = Record.load(files[0]).changed(after)
    clear = [one for one in found if one.is_clear]
    lines = result.stdout.splitlines()
    assert lines[0] == (
        f"before.safetensors → text.safetensors: different texts, so weights are not compared. {len(clear)} of 8 heads "
        "changed beyond chance by 10 points and three standard errors."
    )
    assert [line.split()[:2] for line in lines if line.startswith("L")] == [
        [f"L{one.layer}", f"H{one.head}"] for one in clear
    ]
    assert len(json.loads((tmp_path / "all.json").read_text())) == 8
    same = run(files[0], files[0], "--sample", "0", "--after-sample", "0", "--lang", "zh")
    assert same.stdout.startswith("before.safetensors → before.safetensors：8 个头，平均散度 0.000 奈特")


def test_records_of_two_models_are_compared_kind_by_kind(files: tuple[str, str], tmp_path: Path) -> None:
    watch(30, heads=4, layers=3, mask=masks.Causal()).save(tmp_path / "other.safetensors")
    for lang, sentence, heads in (
        ("en", "different numbers of layers and heads, so heads are compared kind by kind.", "0 of 8 heads"),
        ("zh", "层数或头数不同，因此按种类比较。", "8 个头中有 0 个"),
    ):
        result = run(
            files[0], str(tmp_path / "other.safetensors"), "--lang", lang, "--csv", str(tmp_path / "kinds.csv")
        )
        assert result.exit_code == 0, result.output
        assert sentence in result.stdout.splitlines()[0]
        assert heads in result.stdout
    with (tmp_path / "kinds.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    expected = Record.load(files[0]).compared_kinds(Record.load(tmp_path / "other.safetensors"))
    assert [(row["kind"], int(row["number_before"]), int(row["heads_after"])) for row in rows] == [
        (one.kind, one.number_before, 12) for one in expected
    ]


def test_bad_input_is_one_line(files: tuple[str, str], tmp_path: Path) -> None:
    result = run(files[0], str(tmp_path / "none.safetensors"))
    assert result.stderr == f"error: There is no file {str(tmp_path / 'none.safetensors')!r}. Check its name.\n"
    result = run(*files, "--sample", "3")
    assert result.stderr == "error: There is no sample 3; layers.0 has 1. Give 0.\n"
    result = run(*files, "--json", "-", "--csv", "-")
    assert result.stderr.startswith("error: --json - and --csv - both print to standard output, ")
    result = run(files[0], files[1], "--import", "no_such_masks")
    assert result.stderr.startswith("error: There is no module 'no_such_masks': ")


def test_the_help_has_examples() -> None:
    output = run("--help").output
    assert "multihead compare before.safetensors after.safetensors\n" in output
