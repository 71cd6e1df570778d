"""Gradients of gates are central differences of eager attention that is changed by hand, and estimate exact effects."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import multihead as mh
from multihead.errors import ArgumentError
from tests.interventions.changed_eager import Change, changed_eager
from tests.interventions.test_importance import losses_by_hand, small
from tests.interventions.tiny_models import batch, double, real_queries

CASES = [
    ("llama", "right", "zero", False),  # grouped heads
    ("llama", "left", "mean", True),  # checkpointed
    ("gemma2", "left", "zero", False),  # softcap
    ("gpt_oss", "right", "mean", False),  # sinks
]


def mixed(gates: Tensor, other: Tensor | float) -> Change:
    """Multiply an output, (batch, queries, heads, value_dim), by gates (batch, heads), and add the rest of another."""
    return lambda output: output * gates[:, None, :, None] + (1 - gates[:, None, :, None]) * other


@pytest.mark.parametrize(("name", "padding", "by", "checkpointed"), CASES)
def test_gradients_of_gates_are_central_differences(
    name: str, padding: str, by: Any, checkpointed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, inputs = double(name, monkeypatch), batch(name, padding=padding)
    if checkpointed:
        model.activation_checkpointing_enable({"use_reentrant": False})
        model.train()
    means = mh.head_means(model, [inputs])
    with mh.use(model):
        options = {"reference": means} if by == "mean" else {}
        found = mh.importance(model, [inputs], by=by, method="gradient", **options)
    assert all(each.grad is None and each.requires_grad for each in model.parameters())
    model.eval()
    with torch.no_grad(), changed_eager(model, {}) as plain:
        model(**inputs)
    for call, layer in enumerate(found.layers):
        output = plain.outputs[call]
        other: Tensor | float = 0.0
        if by == "mean":
            real = real_queries(name, inputs, call, output)
            rows = means.vectors[layer.name].transpose(1, 2).mT  # (first token and others, heads, value_dim)
            other = rows[((real.cumsum(1) > 1) & real).long()]
            other = torch.where(real[..., None, None], other, output)  # padding stays as it is

        def losses(gates: Tensor, call: int = call, other: Tensor | float = other) -> Tensor:
            with torch.no_grad(), changed_eager(model, {call: mixed(gates, other)}):
                return losses_by_hand(model(**inputs), inputs)

        for head in (0, 3):
            step = torch.zeros(output.shape[0], output.shape[2], dtype=torch.float64)
            step[:, head] = 1e-5
            slope = (losses(1 + step) - losses(1 - step)) / 2e-5
            torch.testing.assert_close(found.effects_of_texts[layer.name][:, head], -slope, rtol=1e-6, atol=1e-9)


def test_the_estimate_of_a_linear_model_is_exact_and_has_a_sensitivity() -> None:
    layer, x, _ = small()
    linear = mh.Measure(lambda output, _: output.sum((1, 2)), "sum", "units")
    for options in ({"positions": [1, 2]}, {"heads": (0, 1)}, {"by": "mean", "reference": [x]}):
        exact = mh.importance(layer, x, linear, **options)
        estimate = mh.importance(layer, x, linear, method="gradient", **options)
        torch.testing.assert_close(estimate.effects, exact.effects, rtol=0, atol=1e-12, equal_nan=True)
        sizes = estimate.effects_of_texts["MultiHeadAttention"].abs().mean(0)[None]
        torch.testing.assert_close(estimate.sensitivities, sizes, equal_nan=True)
    assert repr(estimate) == "<Importance of 2 heads for sum over 4 texts, by mean, gradient>"
    assert estimate.describe().endswith(
        "first-order estimates from one forward and backward pass per batch, not the effects themselves."
    )
    assert estimate.table().rows[0]["sensitivity"] == float(estimate.sensitivities[0, 0])
    with torch.no_grad(), mh.observe(layer) as seen:
        layer(x)
    seen.add(exact)
    seen.add(estimate)
    row = seen.table().rows[0]
    assert row["effect_sum_mean"] == pytest.approx(row["estimate_sum_mean"])
    assert row["sensitivity_sum_mean"] == float(estimate.sensitivities[0, 0])


WRONG: dict[str, tuple[Callable[[], object], str]] = {
    "by": (
        lambda: mh.importance(*small(), by="resample", method="gradient"),
        'method="gradient" estimates the effect by "zero" or "mean". Give one of them as by=.',
    ),
    "no gradient": (
        lambda: mh.importance(
            *small()[:2], mh.Measure(lambda output, _: output.detach().sum((1, 2)), "fixed"), method="gradient"
        ),
        (
            "The measure fixed has no gradient for the outputs of heads, as with quantised weights. "
            'Give method="exact", or a measure and weights through which gradients pass.'
        ),
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_has_no_gradient_is_one_sentence(wrong: str) -> None:
    call, sentence = WRONG[wrong]
    with pytest.raises(ArgumentError, match=f"^{re.escape(sentence)}$"):
        call()
