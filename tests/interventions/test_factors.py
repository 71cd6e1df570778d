"""Factors that are tensors: per head, per text, or both, with gradients as in eager attention changed by hand."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import DynamicCache

import multihead as mh
from multihead.errors import ArgumentError, ModelError
from tests.interventions.changed_eager import changed_eager
from tests.interventions.tiny_models import batch, double

FAMILIES = ["bert", "gpt2", "llama", "gemma2", "gpt_oss", "t5"]  # grouped heads, a softcap, sinks and cross-attention


def times(factors: Tensor) -> Callable[[Tensor], Tensor]:
    """Multiply an output, (batch, queries, heads, value_dim), by factors, (batch, 1, heads, 1)."""
    return lambda output: output * factors


def loss(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    output = model(**inputs)[0]
    real = inputs.get("attention_mask", torch.ones(output.shape[:2])).bool()
    return output[real].square().mean()  # type: ignore[no-any-return]


@pytest.mark.parametrize("padding", ["none", "left", "right"])
@pytest.mark.parametrize("name", FAMILIES)
def test_outputs_and_gradients_are_those_of_eager_attention(
    name: str, padding: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, inputs = double(name, monkeypatch), batch(name, padding="none" if name == "t5" else padding)
    with torch.no_grad(), changed_eager(model, {}) as plain:
        model(**inputs)
    heads = plain.outputs[0].shape[2]
    given = {"L0": torch.randn(2, heads).double(), "L1": torch.randn(heads).double()}
    given["L0"][0, 1] = given["L0"][1, 0] = given["L1"][1] = 0  # the gradient passes to a head that is off
    parameters = list(model.parameters())

    def gradients(run: Callable[[dict[str, Tensor]], Tensor]) -> tuple[Tensor, ...]:
        factors = {key: each.clone().requires_grad_() for key, each in given.items()}
        value = run(factors)
        every = [*factors.values(), *parameters]
        return value.detach(), *torch.autograd.grad(value, every, allow_unused=True, materialize_grads=True)

    def eager(factors: dict[str, Tensor]) -> Tensor:
        changes = {0: times(factors["L0"][:, None, :, None]), 1: times(factors["L1"][:, None])}
        with changed_eager(model, changes):
            return loss(model, inputs)

    def ours(factors: dict[str, Tensor]) -> Tensor:
        with mh.scale_heads(model, factors):
            return loss(model, inputs)

    for found, expected in zip(gradients(ours), gradients(eager), strict=True):
        torch.testing.assert_close(found, expected, atol=1e-9, rtol=1e-9)


def test_gradients_of_gates_are_central_differences(monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = double("gemma2", monkeypatch), batch("gemma2", padding="left")
    gate = torch.tensor([[1.0, 0.0, 0.3, -2.0], [0.0, 1.0, 1.0, 0.5]], dtype=torch.float64)

    def value(given: Tensor) -> Tensor:
        with mh.scale_heads(model, {"L1": given}):
            return loss(model, inputs)

    leaf = gate.clone().requires_grad_()
    value(leaf).backward()
    for place in ((0, 0), (0, 1), (1, 0), (1, 3)):
        step = torch.zeros_like(gate)
        step[place] = 1e-5
        with torch.no_grad():
            slope = (value(gate + step) - value(gate - step)) / 2e-5
        assert leaf.grad is not None
        torch.testing.assert_close(leaf.grad[place], slope, rtol=1e-6, atol=1e-12)


def layer_of(values: float = 1.0) -> tuple[mh.MultiHeadAttention, Tensor]:
    layer = mh.MultiHeadAttention(8, num_heads=2, bias=False).double()
    with torch.no_grad():
        layer.v_proj.weight[:4] *= values
    return layer, torch.randn(2, 5, 8, dtype=torch.float64)


def test_a_factor_of_zero_gives_zero_also_where_the_output_is_infinite() -> None:
    layer, x = layer_of(float("inf"))
    gate = torch.tensor([0.0, 1.0], dtype=torch.float64, requires_grad=True)
    with mh.scale_heads(layer, {"L0": gate}):
        found = layer(x)
    assert found.isfinite().all()
    found.sum().backward()
    assert gate.grad is not None
    assert gate.grad.isfinite().all()
    with torch.no_grad(), mh.ablate(layer, "L0 H0"):
        assert torch.equal(layer(x), found)


def test_an_optimiser_may_change_the_factors_between_two_calls() -> None:
    layer, x = layer_of()
    gate = nn.Parameter(torch.ones(2, dtype=torch.float64))
    optimiser = torch.optim.SGD([gate], lr=0.5)
    losses = []
    with mh.scale_heads(layer, {"L0": gate}):
        for _ in range(3):
            value = layer(x).square().sum()
            optimiser.zero_grad()
            value.backward()
            optimiser.step()
            losses.append(value.item())
        with torch.no_grad():
            last = layer(x)
    with torch.no_grad(), mh.scale_heads(layer, {"L0 H0": gate[0].item(), "L0 H1": gate[1].item()}):
        torch.testing.assert_close(layer(x), last, rtol=1e-12, atol=1e-12)
    assert len(set(losses)) == 3


def test_a_record_has_the_norms_of_the_scaled_outputs() -> None:
    layer, x = layer_of()
    factors = torch.tensor([[0.0, 2.0], [1.0, -1.0]], dtype=torch.float64)
    norms = []
    for given in (factors, torch.ones(2, 2, dtype=torch.float64)):
        with torch.no_grad(), mh.observe(layer, probes=("output_norm",)) as seen, mh.scale_heads(layer, {"L0": given}):
            layer(x)
        norms.append(torch.stack([seen[0].sample(i).statistics["output_norm"].double() for i in range(2)]))
    torch.testing.assert_close(norms[0], norms[1] * factors.abs()[..., None], rtol=1e-5, atol=1e-7)


def test_a_cache_is_continued_with_factors_of_equal_numbers_and_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = double("llama", monkeypatch), batch("llama")["input_ids"]
    one, same, other = torch.ones(4) / 2, torch.ones(4) / 2, torch.ones(4)

    def run(first: Tensor, then: Tensor) -> Tensor:
        cache = DynamicCache(config=model.config)
        with torch.no_grad(), mh.scale_heads(model, {"L0": first}):
            model(input_ids=inputs[:, :5], past_key_values=cache, use_cache=True)
        with torch.no_grad(), mh.scale_heads(model, {"L0": then}):
            return model(input_ids=inputs[:, 5:], past_key_values=cache, use_cache=True).logits  # type: ignore[no-any-return]

    with torch.no_grad(), mh.scale_heads(model, {"L0": one}):
        whole = model(input_ids=inputs).logits[:, 5:]
    torch.testing.assert_close(run(one, same), whole, rtol=0, atol=1e-9)
    with pytest.raises(ModelError, match=r"^The key/value cache was filled with heads switched off, and is continued "):
        run(one, other)


BAD: dict[str, tuple[Any, str]] = {
    "a number per head for one head": (
        {"L0 H1": torch.ones(2, 2)},
        (
            "The factor of L0 H1 is a torch.float32 tensor of shape (2, 2). Give a number, or a tensor of "
            "floating-point numbers of shape (texts,)."
        ),
    ),
    "integers": (
        {"L0": torch.ones(2, dtype=torch.int64)},
        (
            "The factor of L0 is a torch.int64 tensor of shape (2,). Give a number, or a tensor of floating-point "
            "numbers of shape (heads,) or (texts, heads)."
        ),
    ),
    "NaN": (
        {"L0": torch.tensor([1.0, float("nan")])},
        "The factor of L0 has numbers that are not finite. Give finite numbers.",
    ),
    "too many heads": (
        {"L0": torch.ones(3)},
        "The factor of L0 has 3 heads, and the layer has 2. Give a number per head.",
    ),
    "too few texts": (
        {"L0 H0": torch.ones(1)},
        "The factor of L0 H0 has 1 texts, and the call has 2. Give a number per text of the batch.",
    ),
    "two factors": (
        {"L0": torch.ones(2), "L0 H0": torch.ones(2)},
        "L0 H0 has the factors a tensor of shape (2,) and a tensor of shape (2,). Give it one.",
    ),
}


@pytest.mark.parametrize("bad", BAD)
def test_factors_that_do_not_fit(bad: str) -> None:
    factors, sentence = BAD[bad]
    layer, x = layer_of()
    with pytest.raises(ArgumentError, match=f"^{re.escape(sentence)}$"), mh.scale_heads(layer, factors):
        layer(x)
