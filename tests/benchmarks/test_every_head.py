"""The benchmark of every head compares effects with plain code, and fails where a target is missed."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import every_head
from benchmarks.every_head import FLOOR, LENS, NNSIGHT, TOLERANCE, Race, floor_of, losses_of
from benchmarks.measure import NotMeasuredError
from multihead.models.loading import load
from tests.word_models import save_word_models


def test_the_floor_has_the_effects_of_importance_unless_it_has_another_loss(tmp_path: Path) -> None:
    save_word_models(tmp_path, words=32)
    model: Any = load(str(tmp_path / "llama"), head="language", dtype="float32").model
    ids = torch.arange(12)[None] % 9
    with torch.no_grad():
        loss = float(losses_of(model(ids).logits, ids))
    contenders = {FLOOR: floor_of(copy.deepcopy(model), ids)}
    found = every_head.race(model, ids, contenders, {FLOOR: loss})
    assert found.differences[FLOOR] < TOLERANCE < found.effects.abs().max()
    assert len(found.ours) == len(found.others[FLOOR]) == len(found.effects)
    *_, row, _ = every_head.page(found, 12)
    assert row.startswith("| floor | ")

    wrong = every_head.race(model, ids, contenders, {FLOOR: loss + 0.1})
    assert f"an effect differs from that of floor by {wrong.differences[FLOOR]:.1e}" in wrong.unmet()


def test_a_slow_run_is_named() -> None:
    slow = Race([6.0, 6.0], {FLOOR: [5.0, 5.0], NNSIGHT: [9.0, 8.0]}, {FLOOR: 0.0, NNSIGHT: 0.0})
    assert slow.unmet() == ["mh.importance takes 1.200 of its floor"]


def test_missing_tools_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(every_head, "find_spec", lambda name: None)
    with pytest.raises(NotMeasuredError, match=r"^pip install transformer-lens nnsight$"):
        every_head.measure(8, (LENS, NNSIGHT))
