"""Eager attention of transformers with heads changed by hand, in float64: what an intervention must be equal to."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import eager_mask

NAME = "eager_with_changed_heads"
Change = Callable[[Tensor], Tensor]
"""Function that changes the output of a call: (batch, queries, heads, value_dim) -> the same shape."""
_changes: list[ChangedEager] = []


class ChangedEager:
    """The changes to the calls of a model, by the number of the call in its forward pass."""

    def __init__(self, changes: Mapping[int, Change]) -> None:
        self.changes, self.calls = changes, 0
        self.outputs: list[Tensor] = []  # of the newest forward pass, before the change
        self.weights: list[Tensor] = []  # the same

    def begin_pass(self, start: int, *_: object) -> None:
        self.calls = start
        del self.outputs[start:], self.weights[start:]

    def change(self, output: Tensor, weights: Tensor) -> Tensor:
        number, self.calls = self.calls, self.calls + 1
        self.outputs.append(output.detach())
        self.weights.append(weights.detach())
        return self.changes[number](output) if number in self.changes else output


def _attend(module: Any, *args: Any, **kwargs: Any) -> tuple[Tensor, Any]:
    family: Any = sys.modules[type(module).__module__]
    output, weights = family.eager_attention_forward(module, *args, **kwargs)
    return _changes[-1].change(output, weights), weights


AttentionInterface.register(NAME, _attend)
AttentionMaskInterface.register(NAME, eager_mask)


@contextmanager
def changed_eager(model: Any, changes: Mapping[int, Change]) -> Iterator[ChangedEager]:
    """Run the eager attention of a model with changes: number of a call in a forward pass -> what becomes of it."""
    before = model.config._attn_implementation
    changed = ChangedEager(changes)
    starts = {model: 0}
    if model.config.is_encoder_decoder:  # generation runs the encoder once, outside of the model's forward
        starts = {model.get_encoder(): 0, model.get_decoder(): 2}
    hooks = [each.register_forward_pre_hook(partial(changed.begin_pass, start)) for each, start in starts.items()]
    model.set_attn_implementation(NAME)
    _changes.append(changed)
    try:
        yield changed
    finally:
        _changes.remove(changed)
        for hook in hooks:
            hook.remove()
        model.set_attn_implementation(before)


def scaled(factors: Mapping[int, float], where: Tensor | None = None) -> Change:
    """Multiply heads by factors, where (batch, queries) is True."""

    def change(output: Tensor) -> Tensor:
        whole = torch.ones(output.shape[:3], dtype=output.dtype)
        for head, factor in factors.items():
            whole[:, :, head] = factor if where is None else torch.where(where, factor, 1.0)
        return output * whole[..., None]

    return change


def replaced(head: int, vectors: Tensor, where: Tensor | None = None) -> Change:
    """Replace a head by vectors, (batch or 1, queries, value_dim), where (batch, queries) is True."""

    def change(output: Tensor) -> Tensor:
        new = output.clone()
        own = output[:, :, head]
        new[:, :, head] = (
            vectors.to(output) if where is None else torch.where(where[..., None], vectors.to(output), own)
        )
        return new

    return change


class _TorchInFloat64(ModuleType):
    """The module `torch` in which float32 is float64."""

    float32 = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def compute_in_float64(model: Any, patch: pytest.MonkeyPatch) -> Any:
    """Convert a model to float64, and keep its code from converting norms and softmax to float32."""
    for kind in {type(module) for module in model.modules()}:
        if kind.__module__.startswith("transformers.models."):
            patch.setattr(sys.modules[kind.__module__], "torch", _TorchInFloat64("torch"))
        if kind.__name__ == "Gemma2RMSNorm":
            patch.setattr(kind, "forward", lambda self, x: self._norm(x) * (1 + self.weight))
    return model.double().eval()
