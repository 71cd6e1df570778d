"""In every kind of model, changed heads give the outputs of eager attention that is changed by hand, in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import multihead as mh
from tests.interventions.changed_eager import changed_eager, replaced, scaled
from tests.interventions.tiny_models import FAMILIES, IMAGES, PADDED, batch, double, real_queries

CASES = [(name, "none") for name in FAMILIES] + [(name, side) for name in PADDED for side in ("right", "left")]
PACKED = ("bert", "modernbert", "llama", "mistral", "qwen3", "t5")


def run(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    with torch.no_grad():
        return model(**inputs)[0]


def assert_equal(found: Tensor, expected: Tensor, name: str, inputs: dict[str, Tensor]) -> None:
    """Compare what is not padding."""
    last = 5 if "decoder_input_ids" in inputs else 0
    rows = ... if name in IMAGES else real_queries(name, inputs, last, expected)
    torch.testing.assert_close(found[rows], expected[rows], atol=1e-9, rtol=0)


def means_by_hand(
    name: str, model: Any, batches: list[dict[str, Tensor]], call: int, head: int
) -> tuple[Tensor, Tensor]:
    """The mean output of a head at the first tokens of the texts, and at all others: (value_dim,) each."""
    first, others = [], []
    for inputs in batches:
        with changed_eager(model, {}) as plain:
            run(model, inputs)
        output = plain.outputs[call]
        real = real_queries(name, inputs, call, output)
        for sample, tokens in zip(output[:, :, head], real, strict=True):
            first.append(sample[tokens][0])
            others.extend(sample[tokens][1:])
    return torch.stack(first).mean(0), torch.stack(others).mean(0)


@pytest.mark.parametrize(("name", "padding"), CASES)
def test_scaled_heads(name: str, padding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = double(name, monkeypatch), batch(name, padding=padding)
    with changed_eager(model, {0: scaled({1: 0}), 1: scaled({0: 0.5, 1: -2})}):
        expected = run(model, inputs)
    with mh.scale_heads(model, {"L0 H1": 0, "L1 H0": 0.5, (1, 1): -2}):
        found = run(model, inputs)
    assert_equal(found, expected, name, inputs)


@pytest.mark.parametrize(("name", "padding"), [case for case in CASES if case[0] != "swin"])
def test_a_head_replaced_by_its_mean(name: str, padding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = double(name, monkeypatch), batch(name, padding=padding)
    reference = [inputs, {key: each.flip(0) if each.is_floating_point() else each for key, each in batch(name).items()}]
    first, others = means_by_hand(name, model, reference, 1, 0)
    with changed_eager(model, {}) as plain:
        unchanged = run(model, inputs)
    real = real_queries(name, inputs, 1, plain.outputs[1])
    vectors = torch.where((real.cumsum(1) == 1)[..., None], first, others)
    with changed_eager(model, {1: replaced(0, vectors, real)}):
        expected = run(model, inputs)
    with mh.ablate(model, "L1 H0", by="mean", reference=reference):
        found = run(model, inputs)
    assert not torch.allclose(expected, unchanged)
    assert_equal(found, expected, name, inputs)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_head_replaced_by_that_of_the_other_text(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = double(name, monkeypatch), batch(name)
    windows = 16 if name == "swin" else 1

    def other(output: Tensor) -> Tensor:
        new = output.clone()
        new[:, :, 1] = output[:, :, 1].unflatten(0, (2, windows)).flip(0).flatten(0, 1)
        return new

    with changed_eager(model, {1: other}):
        expected = run(model, inputs)
    with mh.ablate(model, "L1 H1", by="resample"):
        found = run(model, inputs)
    assert_equal(found, expected, name, inputs)


@pytest.mark.parametrize("padding", ["right", "left"])
@pytest.mark.parametrize("name", PACKED)
def test_without_padding_in_any_layer(name: str, padding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = double(name, monkeypatch), batch(name, padding=padding)
    first, others = means_by_hand(name, model, [inputs], 1, 0)
    real = real_queries(name, inputs, 1, inputs["input_ids"])
    vectors = torch.where((real.cumsum(1) == 1)[..., None], first, others)
    with changed_eager(model, {0: scaled({1: 0}), 1: replaced(0, vectors, real)}):
        expected = run(model, inputs)
    with mh.use(model, packed=True):
        means = mh.head_means(model, [inputs])
        with mh.ablate(model, "L1 H0", by="mean", reference=means), mh.ablate(model, "L0 H1"):
            found = run(model, inputs)
    assert_equal(found, expected, name, inputs)


@pytest.mark.parametrize(
    ("name", "padding", "packed"),
    [(*case, False) for case in CASES if case[0] not in IMAGES]
    + [(name, side, True) for name in PACKED for side in ("right", "left")],
)
def test_positions_and_samples(name: str, padding: str, monkeypatch: pytest.MonkeyPatch, *, packed: bool) -> None:
    model, inputs = double(name, monkeypatch), batch(name, padding=padding)
    with changed_eager(model, {}) as plain:
        run(model, inputs)
    changes, calls = {}, {"L0 H1": 0.0, f"L{len(plain.outputs) - 1} H2": -2.0}  # the last of a decoder is crossing
    for (_, factor), call in zip(calls.items(), (0, len(plain.outputs) - 1), strict=True):
        real = real_queries(name, inputs, call, plain.outputs[call])
        position = real.cumsum(1) - 1
        where = real & ((position == 0) | (position == 3)) & torch.tensor([[False], [True]])
        changes[call] = scaled({1 if call == 0 else 2: factor}, where)
    with changed_eager(model, changes):
        expected = run(model, inputs)
    with mh.use(model, packed=packed), mh.scale_heads(model, calls, positions=[0, 3], samples=[1]):
        found = run(model, inputs)
    assert not torch.allclose(expected, run(model, inputs))
    assert_equal(found, expected, name, inputs)
