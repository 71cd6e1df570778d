"""The study of important heads measures what it names, continues, and lists what was measured."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import multihead as mh
from benchmarks import important_heads
from benchmarks.heads_off import draw_heads
from benchmarks.important_heads import Row, Study
from multihead.interventions.predictions import token_losses
from tests.word_models import save_word_models

SMALL = {"TOKENS": 10, "TEXTS": 3, "BY_MEAN": 2, "OTHERS": 2, "REFERENCE": 2, "REPEATS": 2, "LENGTH": 6}


@pytest.fixture
def study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Study:
    save_word_models(tmp_path, words=32)
    texts = {f"topic {text}": " ".join(f"w{(7 * text + word**2) % 32}" for word in range(12)) for text in range(7)}
    for name, value in {**SMALL, "SIZES": (1, 2, 6), "topics": texts | {"short": "w1 w2"}}.items():
        monkeypatch.setattr(important_heads, name, value)
    return Study(str(tmp_path / "llama"))


def test_every_row_is_that_of_mh_ablate_and_an_interrupted_run_continues(
    study: Study, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = tmp_path / "journal.jsonl"
    study.run(journal)
    model, ids = study.loaded.model, study.texts[SMALL["TEXTS"]]
    for name, heads in study.ranks.items():
        with torch.no_grad(), mh.ablate(model, heads[:2]):
            without = token_losses(model(ids).logits, ids).mean()
        row = study.kept[study.together, 0]
        assert row.values[name][0][1] == pytest.approx(float(without) - row.baseline, abs=1e-6)
    assert torch.tensor(row.values["draws"]).shape == (10, 3)
    by_mean = mh.importance(model, study.texts[:2], by="mean", reference=study.texts[5:7])
    torch.testing.assert_close(study.numbers("exact by mean").mean(0), by_mean.effects, rtol=0, atol=1e-6)

    again = Study(study.name)
    monkeypatch.setattr(Study, "measure", lambda self, job: pytest.fail(f"{job} was measured again"))
    again.run(journal)
    assert again.page() == study.page()
    *_, patched = again.page()
    assert patched.startswith("| patched: share of the gap that is recovered, % | L")

    pytest.importorskip("matplotlib")
    again.draw_picture(tmp_path / "picture.svg")
    assert "by estimate by gradient" in (tmp_path / "picture.svg").read_text(encoding="utf-8")


def test_only_the_clean_text_of_a_pair_repeats(study: Study, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[torch.Tensor] = []

    def patch(model: object, clean: list[torch.Tensor], corrupted: list[torch.Tensor], measure: mh.Measure) -> None:
        taken.extend((*clean, *corrupted))
        raise StopIteration

    monkeypatch.setattr(mh, "patch", patch)
    with pytest.raises(StopIteration):
        study.measure(("patches", 0))
    clean, corrupted = taken
    assert torch.equal(clean[:, :6], clean[:, 6:])
    assert torch.equal(clean[:, 6:], corrupted[:, 6:])
    assert len({*corrupted[0].tolist()}) == 12


def test_a_partial_run_shows_what_it_has_and_correlations_are_those_of_ranks(study: Study) -> None:
    exact, estimate = [[1.0, 2.0], [3.0, -4.0]], [[0.1, 0.3], [0.2, -9.0]]
    for kind, effects in (("exact by zero", exact), ("gradient by zero", estimate)):
        study.kept[kind, 0] = Row(kind, 0, 1.0, {"effects": effects})
    study.kept["gradient by zero", 1] = Row("gradient by zero", 1, 1.0, {"effects": exact})
    study.kept["exact by zero", 2] = Row("exact by zero", 2, 1.0, {"effects": estimate})
    *_, signed, sensitivity = study.page()
    # ranks 2 3 4 1 and 2 4 3 1; of the sizes 1 2 3 4 and 1 3 2 4
    assert signed == "| signed, by zero | 1 | 0.80 | 0.80 (0.80 to 0.80) | 4 | 0.96 | nan |"
    assert sensitivity == "| sensitivity, by zero | 1 | 0.80 | 0.80 (0.80 to 0.80) | 4 |  |  |"


def test_a_draw_takes_chosen_heads_only_where_a_layer_has_too_few_others() -> None:
    chosen = [(0, 0), (0, 1), (0, 2), (1, 3)]
    for seed in range(20):
        drawn = draw_heads(chosen, chosen, 4, seed=seed)
        assert [layer for layer, _ in drawn] == [0, 0, 0, 1]
        assert len({*drawn}) == 4
        assert drawn[0] == (0, 3)
        assert drawn[3] not in chosen
