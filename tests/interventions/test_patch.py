"""Patches of heads equal patching by hand in eager attention, in float64; shares of the gap are those of their sums."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import multihead as mh
from multihead.errors import ArgumentError
from multihead.interventions.patch import PatchStep
from multihead.record.head_numbers import NumbersOverTexts
from tests.interventions.changed_eager import changed_eager, replaced
from tests.interventions.test_importance import losses_by_hand, small
from tests.interventions.tiny_models import double

LENGTHS = (9, 5, 7)  # tokens of three pairs


def padded(side: str, seed: int) -> dict[str, Tensor]:
    """A batch of three texts of unequal lengths."""
    ids = torch.randint(3, 100, (3, max(LENGTHS)), generator=torch.Generator().manual_seed(seed))
    mask = torch.zeros_like(ids)
    for row, length in enumerate(LENGTHS):
        mask[row, slice(length) if side == "right" else slice(max(LENGTHS) - length, None)] = 1
    return {"input_ids": ids * mask, "attention_mask": mask}


def by_hand(
    model: Any, source: dict[str, Tensor], target: dict[str, Tensor], positions: list[list[int]]
) -> tuple[Tensor, Tensor, Tensor]:
    """The losses of source and target, and with each head patched: (pairs, layers, heads, groups of positions)."""

    def run(inputs: dict[str, Tensor], changes: Any) -> tuple[Tensor, list[Tensor]]:
        with torch.no_grad(), changed_eager(model, changes) as ran:
            return losses_by_hand(model(**inputs), inputs), ran.outputs

    before, outputs = run(source, {})
    unpatched, _ = run(target, {})
    places = [inputs["attention_mask"].cumsum(1) - 1 for inputs in (source, target)]
    found = []
    for call, output in enumerate(outputs):
        for head in range(output.shape[2]):
            for group in positions:
                vectors, where = torch.zeros_like(output[:, :, head]), torch.zeros(3, max(LENGTHS), dtype=torch.bool)
                for pair, length in enumerate(LENGTHS):
                    for token in [each for each in group if each < length]:
                        at = [
                            int(((place[pair] == token) & mask[pair].bool()).nonzero()[0, 0])
                            for place, mask in zip(
                                places, (source["attention_mask"], target["attention_mask"]), strict=True
                            )
                        ]
                        vectors[pair, at[1]], where[pair, at[1]] = output[pair, at[0], head], True
                found.append(run(target, {call: replaced(head, vectors, where)})[0])
    shape = (len(outputs), outputs[0].shape[2], len(positions))
    return before, unpatched, torch.stack(found, 1).unflatten(1, shape)


@pytest.mark.parametrize("direction", ["clean into corrupted", "corrupted into clean"])
@pytest.mark.parametrize("name", ["llama", "gpt_oss"])
def test_a_patch_is_that_by_hand(name: str, direction: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = double(name, monkeypatch)
    clean, corrupted = padded("right", 1), padded("left", 2)
    pair = (clean, corrupted) if direction == "clean into corrupted" else (corrupted, clean)
    of_source, of_target, expected = by_hand(model, *pair, [[*range(9)]])
    found = mh.patch(model, clean, corrupted, None, direction=direction)
    measured = (found.clean, found.corrupted) if direction == "clean into corrupted" else (found.corrupted, found.clean)
    for one, other in zip(measured, (of_source, of_target), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)
    for row, layer in enumerate(found.layers):
        torch.testing.assert_close(found.patched[layer.name], expected[:, row, :, 0], rtol=0, atol=1e-12)
    assert found.replayed
    before = found.corrupted if direction == "clean into corrupted" else found.clean
    torch.testing.assert_close(found.changes, (expected[..., 0] - before[:, None, None]).mean(0), rtol=0, atol=1e-12)


def test_patches_of_single_tokens_in_several_batches_are_those_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    model, steps = double("llama", monkeypatch), list[PatchStep]()
    clean, corrupted = padded("left", 1), padded("right", 2)
    short = [{"input_ids": torch.arange(3)[None] + start} for start in (3, 30)]
    _, _, expected = by_hand(model, clean, corrupted, [[2], [6]])
    found = mh.patch(
        model,
        [clean, short[0]],
        [corrupted, short[1]],
        None,
        "heads x positions",
        positions=[2, 6],
        progress=steps.append,
    )
    assert (found.pairs, found.positions, found.recovered.shape) == (4, (2, 6), (2, 4, 2))
    for row, layer in enumerate(found.layers):
        values = found.patched[layer.name]
        missing = torch.tensor([[False, False], [False, True], [False, False], [False, True]])  # 5 and 3 tokens
        assert torch.equal(values.isnan(), missing[:, None].expand(4, 4, 2))
        torch.testing.assert_close(
            values[:3].nan_to_num(), expected[:, row].masked_fill(missing[:3, None], 0), rtol=0, atol=1e-12
        )
    assert [(step.layer, step.position) for step in steps[:4]] == [(0, 2), (0, 6), (1, 2), (1, 6)]
    assert steps[0].seconds_left > 0 == steps[-1].seconds_left
    assert len(found.table().rows) == len(found.heads()) == 16


def test_shares_are_those_of_the_sums_and_their_errors_those_of_leaving_one_pair_out() -> None:
    layer, x, _ = small()
    first = mh.Measure(lambda output, _: output[:, 0].square().sum(1), "first", "units", more_is_better=True)
    clean, corrupted = 3 * x, x.flip(0)
    found = mh.patch(layer, clean, corrupted, first)
    assert found.has_gap
    change = found.patched["MultiHeadAttention"] - found.corrupted[:, None]
    gap = (found.clean - found.corrupted)[:, None]
    shares = change.sum(0) / gap.sum(0)
    torch.testing.assert_close(found.recovered[0], shares)
    others = [[pair for pair in range(4) if pair != left] for left in range(4)]
    without = torch.stack([change[pairs].sum(0) / gap[pairs].sum(0) for pairs in others])
    torch.testing.assert_close(found.standard_errors[0], (3 / 4 * (without - without.mean(0)).square().sum(0)).sqrt())
    assert found.heads(1)[0].head == int(shares.argmax())
    noised = mh.patch(layer, clean, corrupted, first, direction="corrupted into clean")
    assert noised.heads(1)[0].head == int(noised.recovered[0].argmin())
    with torch.no_grad(), mh.observe(layer) as seen:
        layer(x)
    for one in (found, noised):
        seen.add(one)
    assert [row["recovered_first_patch"] for row in seen.table().rows] == pytest.approx(shares.tolist())
    lost = 1 - noised.recovered[0]  # 0 is a head without an effect
    assert [row["lost_first_patch"] for row in seen.table().rows] == pytest.approx(lost.tolist())
    for name, one in (("recovered_first_patch", found), ("lost_first_patch", noised)):
        numbers = NumbersOverTexts([seen.layers[0].numbers[name]])
        torch.testing.assert_close(numbers.errors[0], one.standard_errors[0])


def test_without_a_gap_there_is_no_share_and_a_sentence_says_so() -> None:
    layer, x, size = small()
    found = mh.patch(layer, x, x.flip(0), size)
    assert found.recovered.isnan().all()
    assert not found.changes.isnan().any()
    assert " is within two standard errors of 0, so there is no share of it to recover." in found.describe()
    one = mh.patch(layer, 2 * x[:1], x[:1], size)
    assert one.has_gap
    assert one.recovered.isfinite().all()
    assert one.standard_errors.isnan().all()
    assert math.isnan(one.gap_error)


WRONG: dict[str, tuple[Callable[[], object], str]] = {
    "lengths": (
        lambda: mh.patch(
            mh.MultiHeadAttention(embed_dim=8, num_heads=2), torch.zeros(2, 4, 8), torch.zeros(2, 5, 8), small()[2]
        ),
        (
            "Pair 0 has 4 tokens in clean and 5 in corrupted, in MultiHeadAttention. "
            "Give pairs of equal numbers of tokens, so that each token has one to be replaced by."
        ),
    ),
    "texts": (
        lambda: mh.patch(
            mh.MultiHeadAttention(embed_dim=8, num_heads=2), torch.zeros(2, 4, 8), torch.zeros(3, 4, 8), small()[2]
        ),
        "clean has 2 texts, and corrupted 3, in MultiHeadAttention. Give texts in pairs.",
    ),
    "batches": (
        lambda: mh.patch(small()[0], [small()[1]] * 2, [small()[1]], small()[2]),
        "clean has 2 batches, and corrupted 1. Give texts in pairs, batch by batch.",
    ),
    "direction": (
        lambda: mh.patch(*small()[:2], *small()[1:], direction="both"),  # type: ignore[arg-type]
        'direction is \'both\'. Give "clean into corrupted" or "corrupted into clean".',
    ),
    "position": (
        lambda: mh.patch(*small()[:2], *small()[1:], "heads x positions", positions=[7]),
        "No text has a token at the positions (7,). Give some from 0 to 4.",
    ),
    "column": (
        lambda: mh.Record().add(mh.patch(*small()[:2], *small()[1:], "heads x positions")),
        'A record has numbers of heads, and these are of heads x positions. Give patches over="heads".',
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_does_not_fit_is_one_sentence(wrong: str) -> None:
    call, sentence = WRONG[wrong]
    with pytest.raises(ArgumentError, match=f"^{re.escape(sentence)}$"):
        call()
