"""The cases compare equal computations, and nothing wrong is timed."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import click
import pytest
import torch

from benchmarks import __main__ as program
from benchmarks import cases, check_then_time, measure
from benchmarks.pages import PAGES, RESULTS, ROOT, replace_table
from multihead import masks


@pytest.mark.parametrize(
    "duel",
    [
        cases.padded_layer(3, 20),
        cases.whole_layer(2, 8),
        cases.masked(masks.Window(4), 32),
        cases.drop_in(2, 8, need_weights=True),
        cases.drop_in_training(2, 8, need_weights=False, dropout=0.1),
    ],
    ids=["padded", "whole", "masked", "drop-in", "drop-in, training"],
)
def test_ours_and_the_rival_compute_the_same(duel: cases.Contest) -> None:
    ours, rival = duel.compared(duel.ours()), duel.compared(duel.rival())
    torch.testing.assert_close(ours, rival, rtol=0, atol=1e-5)


def test_a_wrong_result_is_never_timed() -> None:
    right = cases.masked(masks.Window(4), 32)
    wrong = dataclasses.replace(right, ours=lambda: right.rival() + 1)
    case = cases.Case("a case", "a rival", 1.0, lambda: wrong)
    with pytest.raises(click.ClickException, match=r"^a case: differs from a rival by 1\.0e\+00, more than 1e-05\.$"):
        check_then_time.checked(case, wrong)


def test_ratios_are_those_of_consecutive_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(measure.time, "perf_counter", lambda: clock[0])

    def lasting(seconds: float) -> None:
        clock[0] += seconds

    ratio = measure.paired(lambda: lasting(2.0), lambda: lasting(6.0), pairs=5)
    assert ratio == measure.Ratio(median=3.0, low=3.0, high=3.0, pairs=5)
    assert str(ratio) == "3.00 x (3.00-3.00)"


def test_a_short_function_is_called_several_times_per_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, calls = [0.0], {0.0001: 0, 2.0: 0}
    monkeypatch.setattr(measure.time, "perf_counter", lambda: clock[0])

    def lasting(seconds: float) -> None:
        clock[0] += seconds
        calls[seconds] += 1

    ratio = measure.paired(lambda: lasting(0.0001), lambda: lasting(2.0), pairs=2)
    assert ratio.median == pytest.approx(20_000)
    assert calls == {0.0001: 4 + 2 * 10, 2.0: 4 + 2}


def test_a_name_that_matches_no_case_is_rejected_with_the_list_of_cases() -> None:
    with pytest.raises(
        click.UsageError, match=r"^No case's name contains 'nothing'\. There are: layer, padded, 8 x 512, "
    ):
        program.main.main(["--only", "nothing"], standalone_mode=False)


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_the_page_of_results_shows_the_newest(page: Path) -> None:
    newest = max(RESULTS.glob("*-fp32.md")).read_text(encoding="utf-8").splitlines()
    rows = [line.split(" | ")[:3] for line in newest if line.startswith("| ") and not line.startswith("| case")]
    assert len(rows) == len(cases.CASES)
    shown = page.read_text(encoding="utf-8")
    assert [row for row in rows if " | ".join(row) + " |" not in shown] == []


@pytest.mark.parametrize("name", ["README", "README.zh"])
def test_each_row_of_the_readme_is_a_result(name: str) -> None:
    """A row names the CPU, the case, the rival and the ratio; the case and the ratio are those of docs/measured.md."""
    rows = re.findall(
        r"^\| AVX[^|]+ \| ([^|]+) \| [^|]+ \| ([^|]+) \|$", (ROOT / f"{name}.md").read_text("utf-8"), re.MULTILINE
    )
    assert len(rows) == 6
    shown = PAGES[0].read_text(encoding="utf-8")
    for case, ratio in rows:
        assert re.search(rf"^\| {re.escape(case)} \| .*{re.escape(ratio)}", shown, re.MULTILINE), (
            f"{name}.md shows {ratio} for {case!r}, and docs/measured.md does not. Copy the newest row."
        )


def test_results_replace_the_rows_of_the_table_before_its_mark() -> None:
    row = check_then_time.Row(0, 0.0, measure.Ratio(2.0, 1.5, 2.5, 5), None)
    page = f"|---|---|---|\n| another | table | here |\n\n|---|---|---|\n| old | b | c |{program.MARK}\nrest"
    assert replace_table(page, program.MARK, [program.cells(row)[:3]]) == page.replace(
        "| old | b | c |", "| layer, padded, 8 x 512 | nn.MultiheadAttention | 2.00 x (1.50-2.50) |"
    )
