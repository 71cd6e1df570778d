"""The experiment with induction heads: which heads are drawn, and what its result must show."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks import heads_off
from benchmarks.heads_off import Result, Row, draw_heads

STRONGEST = ((18, 6), (17, 4), (17, 3))


def result(strongest: float, *draws: float) -> Result:
    """Return a result with some costs, equal for zero and mean."""
    rows = [Row(((18, 0), (17, 0), (17, index)), {"zero": cost, "mean": cost}) for index, cost in enumerate(draws)]
    curves = {name: torch.arange(192.0) for name in ("strongest", "draws", "all heads")}
    return Result(2.0, Row(STRONGEST, {"zero": strongest, "mean": strongest}), rows, curves)


def test_a_draw_has_as_many_heads_per_layer_and_no_induction_head() -> None:
    excluded = {*STRONGEST, (17, 0), (18, 1)}
    draws = [draw_heads(STRONGEST, excluded, 9, seed=seed) for seed in range(200)]
    for heads in draws:
        assert [layer for layer, _ in heads] == [17, 17, 18]
        assert len(set(heads)) == 3
        assert not excluded & {*heads}
    assert {head for heads in draws for head in heads} == {
        (layer, head) for layer in (17, 18) for head in range(9)
    } - excluded
    assert draw_heads(STRONGEST, excluded, 9, seed=3) == draws[3]


@pytest.mark.parametrize(
    ("found", "unmet"),
    [
        (result(3.0, 0.1, 0.5), []),
        (result(3.0, 0.1, 1.9), ["zero: 3.0 times the draws", "mean: 3.0 times the draws"]),
        (result(1.0, -2.0, 1.5, 0.5, 0.1), ["zero: L18 H0, L17 H0, L17 H1", "mean: L18 H0, L17 H0, L17 H1"]),
    ],
    ids=["met", "not five times as much", "less than one draw"],
)
def test_the_strongest_heads_must_cost_five_times_the_draws_and_more_than_each(found: Result, unmet: list[str]) -> None:
    assert [each for each in found.unmet() if each in unmet] == unmet
    assert bool(found.unmet()) == bool(unmet)


def test_the_page_lists_every_draw_and_the_picture_every_line(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    found = result(3.0, 0.1, 0.5)
    lines = heads_off.page(found)
    assert "| the three strongest induction heads: L18 H6, L17 H4, L17 H3 | +3.00 | +3.00 |" in lines
    assert "| L18 H0, L17 H0, L17 H1 | +0.50 | +0.50 |" in lines
    assert "| strongest / mean of the draws | 10.0 | 10.0 |" in lines
    heads_off.draw_picture(found, tmp_path / "picture.svg")
    drawn = (tmp_path / "picture.svg").read_text(encoding="utf-8")
    assert all(name in drawn for name in (*found.curves, "the same tokens again"))
