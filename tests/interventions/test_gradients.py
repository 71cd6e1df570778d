"""Gradients flow through changed heads as through eager attention that is changed by hand, with checkpointing too."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointError, checkpoint

import multihead as mh
from multihead.errors import ModelError
from tests.interventions.changed_eager import changed_eager, scaled
from tests.interventions.tiny_models import batch, double

REENTRANT = (
    "A layer whose heads are switched off runs under activation checkpointing with use_reentrant=True, which could "
    "recompute it with other heads. Use use_reentrant=False; for Hugging Face models "
    'gradient_checkpointing_kwargs={"use_reentrant": False}.'
)


def loss(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    return model(**inputs)[0].square().mean()  # type: ignore[no-any-return]


def gradients(model: Any, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    model.zero_grad()
    loss(model, inputs).backward()
    return {name: each.grad for name, each in model.named_parameters() if each.grad is not None}


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, each in expected.items():
        torch.testing.assert_close(found[name], each, atol=1e-9, rtol=1e-9)


FAMILIES = ["bert", "albert", "gpt2", "llama", "gemma2", "gpt_oss", "deepseek_v3", "phi3", "t5"]


@pytest.mark.parametrize(
    ("name", "checkpointed"),
    [(name, False) for name in FAMILIES]
    + [(name, True) for name in FAMILIES if name != "albert"],  # transformers does not checkpoint it
)
def test_gradients_of_all_parameters(name: str, *, checkpointed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = double(name, monkeypatch), batch(name)
    with changed_eager(model, {0: scaled({1: 0.0}), 1: scaled({0: -2.0})}):
        expected = gradients(model, inputs)
    if checkpointed:
        model.train()
        for each in model.modules():
            if isinstance(each, nn.Dropout):
                each.p = 0.0
            for rate in ("dropout", "attention_dropout", "dropout_prob"):
                if isinstance(getattr(each, rate, None), float):
                    setattr(each, rate, 0.0)
        model.activation_checkpointing_enable({"use_reentrant": False})
    with mh.scale_heads(model, {"L0 H1": 0.0, "L1 H0": -2.0}):
        found = gradients(model, inputs)
    assert_same(found, expected)


class Twice(nn.Module):
    """Two layers, checkpointed."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(mh.MultiHeadAttention(8, num_heads=2).double() for _ in range(2))
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=self.reentrant)
        return x


def checkpointed_layers(*, reentrant: bool = False) -> tuple[Twice, Tensor]:
    return Twice(reentrant=reentrant), torch.randn(2, 4, 8, dtype=torch.float64, requires_grad=True)


def test_a_layer_recomputed_after_the_context_ended_is_an_error() -> None:
    model, x = checkpointed_layers()
    with mh.ablate(model, "L1 H0"):
        output = model(x)
    with pytest.raises(CheckpointError):
        output.sum().backward()


def test_a_layer_recomputed_under_another_intervention_is_an_error() -> None:
    model, x = checkpointed_layers()
    with mh.ablate(model, "L1 H0"):
        output = model(x)
    with mh.ablate(model, "L1 H1"):
        model(x)
        with pytest.raises(CheckpointError):
            output.sum().backward()


def test_a_layer_recomputed_under_one_more_intervention_is_an_error() -> None:
    model, x = checkpointed_layers()
    with mh.ablate(model, "L1 H0"):
        output = model(x)
        with pytest.raises(CheckpointError), mh.ablate(model, "L0 H1"):
            output.sum().backward()


def test_a_layer_that_ran_unchanged_and_is_recomputed_in_a_context_is_an_error() -> None:
    model, x = checkpointed_layers()
    output = model(x)
    with pytest.raises(CheckpointError), mh.ablate(model, "L1 H0"):
        output.sum().backward()


@pytest.mark.parametrize("chosen", [{"positions": 2}, {"samples": [1]}, {"by": "resample"}])
def test_a_backward_pass_of_an_earlier_forward_pass_is_right_or_an_error(chosen: dict[str, Any]) -> None:
    model, x = checkpointed_layers()
    with mh.ablate(model, "L1 H0", **chosen):
        earlier = model(x)
        model(x[:, :3])
        with pytest.raises(CheckpointError):
            earlier.sum().backward()
        expected = torch.autograd.grad(plain(model, x).sum(), x)
        torch.testing.assert_close(torch.autograd.grad(model(x).sum(), x), expected, atol=1e-12, rtol=0)


def plain(model: Twice, x: Tensor) -> Tensor:
    model.layers.train()
    for layer in model.layers:
        x = layer(x)
    return x


def test_reentrant_checkpointing_is_rejected() -> None:
    model, x = checkpointed_layers(reentrant=True)
    with pytest.raises(ModelError) as caught, mh.ablate(model, "L1 H0"):
        model(x)
    assert str(caught.value) == REENTRANT
    assert model(x).sum().backward() is None
