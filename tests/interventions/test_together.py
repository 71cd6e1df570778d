"""The most important heads off together equal `mh.ablate`, and heads that do nothing are not beyond random draws."""

from __future__ import annotations

import math
import re
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import multihead as mh
from multihead.errors import ArgumentError
from tests.interventions.test_importance import losses_by_hand
from tests.interventions.tiny_models import batch, double


def losses(
    model: Any, batches: list[dict[str, Tensor]], heads: list[tuple[int, int]] | None = None, **by: Any
) -> Tensor:
    """The mean loss of the next token of each text, (texts,), with some heads switched off by `mh.ablate`."""
    with torch.no_grad(), nullcontext() if heads is None else mh.ablate(model, heads, **by):
        return torch.cat([losses_by_hand(model(**inputs), inputs) for inputs in batches])


def batches_of(*sizes: int, length: int = 9) -> list[dict[str, Tensor]]:
    """Batches of random texts, as many as `sizes` says."""
    generator = torch.Generator().manual_seed(3)
    ids = [torch.randint(3, 50, (size, length), generator=generator) for size in sizes]
    return [{"input_ids": each, "attention_mask": torch.ones_like(each)} for each in ids]


@pytest.mark.parametrize("by", ["zero", "mean", "resample"])
def test_heads_off_together_equal_ablate_on_the_texts_that_did_not_choose_them(
    by: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = double("llama", monkeypatch)
    texts = [*batches_of(3), batch("llama", padding="left")] if by == "mean" else batches_of(3, 2, 4)
    options: dict[str, Any] = {"by": by} | ({"reference": mh.head_means(model, texts)} if by == "mean" else {})
    found = mh.importance(model, texts, **options)
    done: list[tuple[int, int | None]] = []
    together = mh.off_together(model, texts, found, 3, draws=4, progress=lambda *step: done.append(step))

    ranked = torch.stack([found.effects_of_texts[layer.name][::2].mean(0) for layer in found.layers])
    best = ranked.flatten().argsort(descending=True)[:3].tolist()
    assert [(each.layer, each.head) for each in together.heads] == [divmod(each, 4) for each in best]
    before = losses(model, texts)

    def effects(heads: Any) -> Tensor:
        return (losses(model, texts, list(heads), **options) - before)[1::2]

    expected = effects(divmod(each, 4) for each in best)
    torch.testing.assert_close(together.effects, expected, rtol=0, atol=1e-12)
    assert together.effect == pytest.approx(float(expected.mean()), abs=1e-12)
    assert together.standard_error == pytest.approx(float(expected.std()) / math.sqrt(len(expected)), abs=1e-12)
    singles = sum(effects([divmod(each, 4)]) for each in best)
    assert together.sum_of_single_effects == pytest.approx(float(singles.mean()), abs=1e-9)
    chosen = {divmod(each, 4) for each in best}
    for draw in together.draws:
        assert sorted(layer for layer, _ in draw.heads) == sorted(layer for layer, _ in chosen)
        others = len({*draw.heads} - chosen)
        assert 3 - others == together.shared == max(0, 2 * max(best_in(chosen)) - 4)
        torch.testing.assert_close(draw.effects, effects(draw.heads), rtol=0, atol=1e-12)
    drawn = torch.tensor([draw.effect for draw in together.draws], dtype=torch.float64)
    assert together.mean_of_draws == pytest.approx(float(drawn.mean()))
    assert together.spread_of_draws == pytest.approx(float(drawn.std()))
    assert together.draws_beyond == int((drawn >= together.effect).sum())
    assert done == [(index + 1, len(texts)) for index in range(len(texts))]
    assert [row["set"] for row in together.rows()] == ["together", "sum of single effects", *["draw"] * 4]


def best_in(chosen: set[tuple[int, int]]) -> list[int]:
    """How many heads of each layer are chosen."""
    return [sum(layer == each for each, _ in chosen) for layer in (0, 1)]


def test_heads_that_do_nothing_are_not_beyond_the_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    model, texts = double("llama", monkeypatch), batches_of(1, 1, 1, 1)
    for layer in model.model.layers:
        nn.init.zeros_(layer.self_attn.o_proj.weight)
    together = mh.off_together(model, texts, mh.importance(model, texts), 3)
    assert together.effects.tolist() == [0, 0]
    assert (together.mean_of_draws, together.spread_of_draws, together.draws_beyond) == (0, 0, 10)
    assert together.sum_of_single_effects == pytest.approx(0, abs=1e-12)
    assert "10 of them reach 0." in together.describe()


def test_heads_shared_with_the_draws_and_all_numbers_are_in_the_sentences() -> None:
    torch.manual_seed(0)
    layer, x = mh.MultiHeadAttention(embed_dim=16, num_heads=4).double(), torch.randn(4, 5, 16).double()
    size = mh.Measure(lambda output, _: output.norm(dim=(1, 2)), "size", "units", more_is_better=True)
    found = mh.importance(layer, x, size)
    together = mh.off_together(layer, x, found, 3)
    assert together.shared == 2  # of three, one other is left
    assert together.effect < 0
    assert together.draws_beyond == sum(draw.effect <= together.effect for draw in together.draws)  # more is better
    names = ", ".join(f"L0\u00a0H{each.head}" for each in together.heads)

    def shown(value: float) -> str:
        return found.statistic.number(value)

    assert together.describe() == (
        f"Off together (3): {names}, the most important on 2 of the texts. The mean effect on the other 2 is "
        f"{shown(together.effect)} ± {shown(together.standard_error)} units. 10 random draws of as many heads of the "
        f"same layers have {shown(together.mean_of_draws)} on average, with a standard deviation of "
        f"{shown(together.spread_of_draws)}; {together.draws_beyond} of them reach {shown(together.effect)}. 2 of "
        "the heads of each draw are among the chosen ones, because their layers have too few others. The "
        f"single effects of the chosen heads on these texts add up to {shown(together.sum_of_single_effects)}: "
        "heads hide each other, so single effects do not add."
    )
    assert together.describe("zh").startswith(
        f"同时关闭 3 个头：{names.replace(', ', '、')}，它们在其中 2 段文本上最重要。"
    )
    assert "single effects" not in mh.off_together(layer, x, found, 1).describe()
    for number, texts, sentence in (
        (
            4,
            x,
            "4 heads cannot be switched off together: the model has 4. Give at most 3, so that one stays on.",
        ),
        (0, x, "number is 0. Give an integer of at least 1."),
        (2, x[:3], "The batches do not have the 4 texts on which the importance was measured. Give the same batches."),
        (
            2,
            [x, x],
            "The batches do not have the 4 texts on which the importance was measured. Give the same batches.",
        ),
    ):
        with pytest.raises(ArgumentError, match=f"^{re.escape(sentence)}$"):
            mh.off_together(layer, texts, found, number)
    with torch.no_grad(), mh.observe(layer) as seen:
        layer(x)
    for each in (found, together):
        seen.add(each)
    of_page = seen.statistics["effect_size_zero"].together  # type: ignore[attr-defined]
    assert of_page.heads == tuple((0, each.head) for each in together.heads)
    assert of_page.effects == tuple(together.effects.tolist())
    assert sum(of_page.singles) / 2 == pytest.approx(together.sum_of_single_effects)
    assert of_page.draws == tuple(draw.effect for draw in together.draws)
    assert seen.layers[0].numbers["effect_size_zero"].equal(found.effects_of_texts[found.layers[0].name])

    estimated = mh.importance(layer, x, size, method="gradient")
    guessed = mh.off_together(layer, x, estimated, 3)
    assert [each.head for each in guessed.heads] == [
        each.head for each in mh.importance(layer, x[::2], size, method="gradient").heads(3)
    ]
    assert "The single estimates of the chosen heads on these texts add up to" in guessed.describe()
    only = mh.importance(layer, x, size, heads=["L0 H1", "L0 H2"])
    with pytest.raises(
        ArgumentError, match=r"^3 heads .*: the model has 4, of which 2 are measured\. Give at most 2\.$"
    ):
        mh.off_together(layer, x, only, 3)
    with pytest.raises(ArgumentError, match=r"^There is one text, and heads that it chooses are switched off together"):
        mh.off_together(layer, x[:1], mh.importance(layer, x[:1], size), 2)
    with pytest.raises(ArgumentError, match=r"^importance is a tensor of shape .* Measure the importance first\.$"):
        mh.off_together(layer, x, x, 2)  # type: ignore[arg-type]
