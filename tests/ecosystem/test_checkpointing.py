"""Activation checkpointing: equal gradients, a call heard once, and activations that are really let go."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

import multihead as mh
from multihead.kernels.call import AttentionCall, listen
from tests.ecosystem.ways import WAYS, inputs, layer, results

REENTRANT = pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not reentrant"])


class Checkpointed(nn.Module):
    """A model that keeps nothing of its attention for the backward pass and computes it anew there."""

    def __init__(self, attend: mh.MultiHeadAttention, *, reentrant: bool) -> None:
        super().__init__()
        self.attend = attend
        self.reentrant = reentrant

    def forward(self, *given: Tensor, **options: Any) -> Tensor:
        def run(*tensors: Tensor) -> Tensor:
            return self.attend(*tensors, **options)  # type: ignore[no-any-return]

        return checkpoint(run, *given, use_reentrant=self.reentrant)  # type: ignore[no-any-return]


class Ear:
    """A listener that wants something, and counts what it hears."""

    def __init__(self, *wanted: str) -> None:
        self.requested_statistics = frozenset(wanted)
        self.calls: list[AttentionCall] = []

    def receive(self, call: AttentionCall) -> None:
        self.calls.append(call)


def backward(model: nn.Module, way: str, given: tuple[Tensor, ...]) -> dict[str, Tensor]:
    """Run a model forward and backward by `backward()`, which reentrant checkpointing asks for."""
    given = tuple(each.detach().clone().requires_grad_() for each in given)
    model.zero_grad()
    output = model(*given, **WAYS[way])
    weight = torch.linspace(-1, 1, output.numel(), dtype=output.dtype).view_as(output)
    (output * weight).sum().backward()
    trained = {name.removeprefix("attend."): each for name, each in model.named_parameters()}
    leaves = dict(zip(("x", "memory"), given, strict=False)) | trained
    return {"output": output.detach()} | {
        name: each.grad.clone() for name, each in leaves.items() if each.grad is not None
    }


@REENTRANT
@pytest.mark.parametrize("dropout", [0.0, 0.4])
@pytest.mark.parametrize("way", WAYS)
def test_gradients_are_bit_for_bit_those_without_checkpointing(way: str, dropout: float, *, reentrant: bool) -> None:
    ours, given = layer(dropout=dropout), inputs(way)
    torch.manual_seed(1)
    expected = results(ours, way, given)
    torch.manual_seed(1)
    found = backward(Checkpointed(ours, reentrant=reentrant), way, given)
    assert found.keys() == expected.keys()
    assert [name for name, each in expected.items() if not torch.equal(found[name], each)] == []


@REENTRANT
@pytest.mark.parametrize("wanted", [(), ("entropy", "received")])
def test_a_listener_hears_a_checkpointed_call_once(wanted: tuple[str, ...], *, reentrant: bool) -> None:
    model, ear = Checkpointed(layer(), reentrant=reentrant), Ear(*wanted)
    with listen(ear):
        backward(model, "padded", inputs("padded"))
    assert [call.request.origin.layer for call in ear.calls] == [model.attend]


@REENTRANT
def test_an_observed_model_is_seen_once_a_pass(*, reentrant: bool) -> None:
    model = Checkpointed(layer(), reentrant=reentrant)
    with mh.observe(model) as seen:
        for _ in range(2):
            backward(model, "self-attention", inputs("self-attention"))
    assert seen.layers[0].num_samples == 2 * 3


def test_a_layer_that_runs_between_two_backward_passes_is_heard_each_time() -> None:
    ours, ear = layer(), Ear()
    with listen(ear):
        for _ in range(2):
            backward(ours, "causal", inputs("causal"))
    assert len(ear.calls) == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("way", WAYS)
def test_a_checkpointed_layer_keeps_neither_queries_nor_keys_nor_values(way: str, dtype: torch.dtype) -> None:
    """A kernel that kept its inputs beside what autograd saves would make checkpointing save nothing."""

    class Tag:
        """Notes the memory of what a call was given, without keeping it."""

        requested_statistics: frozenset[str] = frozenset()
        noted: list[weakref.ref[torch.UntypedStorage]] = []  # noqa: RUF012

        def receive(self, call: AttentionCall) -> None:
            given = (call.request.q, call.request.k, call.request.v)
            self.noted += [weakref.ref(each.untyped_storage()) for each in given]

    model, tag = Checkpointed(layer(dtype=dtype), reentrant=False), Tag()
    with listen(tag):
        loss = model(*inputs(way, dtype), **WAYS[way]).sum()
    assert [each() is None for each in tag.noted] == [True] * 3
    loss.backward()


@pytest.mark.parametrize("way", WAYS)
def test_what_is_saved_for_the_backward_pass_can_be_put_elsewhere(way: str) -> None:
    ours, given = layer(), inputs(way)
    expected = results(ours, way, given)
    with save_on_cpu():
        found = results(ours, way, given)
    assert [name for name, each in expected.items() if not torch.equal(found[name], each)] == []
