"""The example of heads over the steps of a training runs, here for fewer steps."""

from __future__ import annotations

import pytest

from examples import training


def test_heads_of_the_second_layer_become_induction_heads(capsys: pytest.CaptureFixture[str]) -> None:
    series = training.train(steps=60).series
    assert capsys.readouterr().out.startswith("step 0: loss 4.")
    assert series.steps == [*range(0, 60, 10)]
    gained = [each for each in series.changes("induction") if each.gained]
    assert gained
    assert {each.layer for each in gained} == {1}
