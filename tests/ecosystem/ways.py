"""The ways a layer is called, for every test of this folder to try: with itself, with a memory, masked and padded."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import multihead as mh
from multihead import masks

EMBED, HEADS, BATCH, QUERIES, KEYS = 24, 4, 3, 7, 9
LENGTHS = (7, 4, 0)
MEMORY_LENGTHS = (5, 9, 2)
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "out_proj")
WAYS: dict[str, dict[str, Any]] = {
    "self-attention": {},
    "causal": {"mask": masks.Causal()},
    "padded": {"lengths": LENGTHS},
    "padded, window": {"lengths": LENGTHS, "mask": masks.Causal() & masks.Window(3)},
    "padded, cells": {"lengths": LENGTHS, "mask": masks.Keep(torch.arange(QUERIES) % 3 != 1, "keys")},
    "cross-attention": {},
    "padded cross-attention": {"lengths": LENGTHS, "memory_lengths": MEMORY_LENGTHS},
}


def layer(**options: Any) -> mh.MultiHeadAttention:
    """Make a layer whose biases are not zero: one that is lost somewhere should be missed."""
    made = mh.MultiHeadAttention(EMBED, HEADS, **options)
    for name, parameter in made.named_parameters():
        if name.endswith("bias") and not parameter.is_meta:
            nn.init.normal_(parameter)
    return made


def inputs(way: str, dtype: torch.dtype | None = None) -> tuple[Tensor, ...]:
    """Draw x, and memory for cross-attention."""
    x = torch.randn(BATCH, QUERIES, EMBED, dtype=dtype)
    return (x, torch.randn(BATCH, KEYS, EMBED, dtype=dtype)) if "cross" in way else (x,)


def results(model: nn.Module, way: str, given: tuple[Tensor, ...], **options: Any) -> dict[str, Tensor]:
    """Run a model forward and backward: its output, and the gradients of its inputs and of what it trains."""
    given = tuple(each.detach().clone().requires_grad_() for each in given)
    trained = {name: each for name, each in model.named_parameters() if each.requires_grad}
    output = model(*given, **WAYS[way], **options)
    weight = torch.linspace(-1, 1, output.numel(), dtype=output.dtype).view_as(output)
    grads = torch.autograd.grad((output * weight).sum(), [*given, *trained.values()])
    names = [*("x", "memory")[: len(given)], *trained]
    return {"output": output.detach()} | dict(zip(names, grads, strict=True))
