"""The cases of models of transformers compute the same as their rivals, before they are timed."""

from __future__ import annotations

import pytest
import torch

from benchmarks import hugging_face
from benchmarks.measure import NotMeasuredError, Ratio
from tests.families import family


@pytest.mark.parametrize(("batches", "packed"), [(1, False), (1, True), (3, True)])
def test_padded_batches_have_the_same_outputs_at_tokens(batches: int, packed: bool) -> None:
    lengths = hugging_face.lengths_of(4, 20, batches=batches)
    with torch.no_grad():
        duel = hugging_face.padded_batches(family("bert"), lengths, 20 if batches == 1 else None, packed=packed)
        ours, rival = duel.ours(), duel.rival()
    assert ours.shape == (int(lengths.sum()), 32)
    assert duel.check_ours(ours) <= duel.tolerance
    assert duel.check_rival(rival) == 0
    assert duel.check_ours(ours + 1) > duel.tolerance


def test_prompts_and_steps_of_decoding_have_the_same_logits() -> None:
    model, ids = family("llama"), torch.arange(3, 23)[None]
    model.set_attn_implementation("sdpa")
    with torch.no_grad():
        for duel, size in ((hugging_face.prefill(model, ids), 1), (hugging_face.decoding(model, ids, 5), 5)):
            for output in (duel.ours(), duel.rival(), duel.ours()):
                assert output.shape == (1, size, 100)
                assert duel.check_ours(output) <= 1e-5
    assert model.config._attn_implementation == "sdpa"


def test_lengths_are_10_to_90_percent_and_several_batches_are_sorted() -> None:
    lengths = hugging_face.lengths_of(8, 100, batches=2)
    assert (lengths >= 10).all()
    assert (lengths <= 90).all()
    assert (lengths.flatten().diff() >= 0).all()


def test_a_missing_model_is_the_reason_of_its_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hugging_face, "MINILM", "no_such_package_anywhere")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(NotMeasuredError):
        hugging_face.minilm(torch.tensor([[3, 2]]), 4, packed=True)


def test_a_page_has_one_line_per_case_and_names_what_misses_its_target() -> None:
    cases = range(len(hugging_face.CASES))
    missed = next(index for index in cases if hugging_face.CASES[index].least == 1.6)
    rows = [hugging_face.Row(index, note="not measured: no model") for index in cases if index != missed]
    rows.append(hugging_face.Row(missed, Ratio(1.2, 1.1, 1.3, 5), 3.1, 2e-5))
    lines = hugging_face.page(rows)
    name = hugging_face.CASES[missed].name
    assert f"| {name} | 1.20 x (1.10-1.30) | 1.6 x, not met | 3.1 s | 2.0e-05 |" in lines
    assert sum(line.endswith("not measured: no model |  |  |  |") for line in lines) == len(cases) - 1
