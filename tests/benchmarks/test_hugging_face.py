"""The cases of models of transformers compute the same as their rivals, before they are timed."""

from __future__ import annotations

import pytest
import torch

from benchmarks import hugging_face
from benchmarks.measure import NotMeasuredError, Ratio
from tests.families import family


@pytest.mark.parametrize("batches", [1, 3])
def test_packed_rows_compute_the_same_at_tokens(batches: int) -> None:
    lengths = hugging_face.lengths_of(4, 20, batches=batches)
    with torch.no_grad():
        duel = hugging_face.packed_rows(family("bert"), lengths, 20 if batches == 1 else None)
        ours, rival = duel.ours(), duel.rival()
    assert ours.shape == (int(lengths.sum()), 32)
    assert duel.check_ours(ours) <= duel.tolerance
    assert duel.check_rival(rival) == 0
    assert duel.check_ours(ours + 1) > duel.tolerance


def test_lengths_are_10_to_90_percent_and_several_batches_are_sorted() -> None:
    lengths = hugging_face.lengths_of(8, 100, batches=2)
    assert (lengths >= 10).all()
    assert (lengths <= 90).all()
    assert (lengths.flatten().diff() >= 0).all()


def test_a_missing_model_is_the_reason_of_its_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hugging_face, "MINILM", "no_such_package_anywhere")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(NotMeasuredError):
        hugging_face.minilm(torch.tensor([[3, 2]]), 4)


def test_a_page_has_one_line_per_case_and_names_what_misses_its_target() -> None:
    rows = [hugging_face.Row(0, Ratio(1.2, 1.1, 1.3, 5), 3.1, 2e-5)]
    rows += [hugging_face.Row(index, note="not measured: no model") for index in range(1, len(hugging_face.CASES))]
    lines = hugging_face.page(rows)
    name = hugging_face.CASES[0].name
    assert f"| {name} | 1.20 x (1.10-1.30) | 1.6 x, not met | 3.1 s | 2.0e-05 |" in lines
    assert sum(line.endswith("not measured: no model |  |  |  |") for line in lines) == len(hugging_face.CASES) - 1
