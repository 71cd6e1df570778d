"""Choose PyTorch's fused kernel where it was measured to be faster than the native one.

The measurements are in `measured.json`, which `python -m benchmarks.rules` writes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from importlib.resources import files
from typing import NamedTuple

import torch

from multihead.kernels import sdpa
from multihead.kernels.call import AttentionRequest
from multihead.masks import Causal
from multihead.masks.base import KeyBounds

FEW, SHORT = 8, 128  # queries; keys
MARGIN = 1.03  # a smaller advantage is within the noise of the measurement

# The classes of requests, as they are called in a sentence. Each was also measured in training.
CLASSES = {
    "full": "full attention",
    "causal": "causal attention",
    "intervals": "masks that are one interval of keys per query",
    "cells": "masks that are not intervals",
    "bias": "a bias on the scores",
    "few": f"at most {FEW} queries",
    "short": f"at most {SHORT} keys",
    "unequal": "a value dim other than the head dim",
}
TRAINING = ", training"


class Measured(NamedTuple):
    """The speed of the native kernel relative to PyTorch's fused one, for one instruction set and dtype.

    Attributes:
        instruction_set: of the native kernel.
        dtype: of q, k and v, without "torch.".
        where: date, CPU, threads and torch version.
        ratios: time of PyTorch's kernel divided by that of the native one, per class: of a forward pass, and with the
            suffix TRAINING of a forward and a backward pass.
    """

    instruction_set: str
    dtype: str
    where: str
    ratios: Mapping[str, float]


def losses(measured: Iterable[Measured]) -> dict[tuple[str, torch.dtype], dict[str, float]]:
    """Return how many times faster PyTorch's kernel was, per instruction set and dtype, for the classes it won.

    >>> losses((Measured("scalar", "float32", "", {"full": 0.5, "causal": 0.99, "few": 2.0}),))
    {('scalar', torch.float32): {'full': 2.0}}
    """
    result: dict[tuple[str, torch.dtype], dict[str, float]] = {}
    for each in measured:
        lost = {name: 1 / ratio for name, ratio in each.ratios.items() if ratio * MARGIN < 1}
        if lost:
            result[each.instruction_set, getattr(torch, each.dtype)] = lost
    return result


_TABLE = files("multihead.kernels").joinpath("measured.json").read_text(encoding="utf-8")
MEASURED = tuple(Measured(**row) for row in json.loads(_TABLE))
LOST = losses(MEASURED)
_CAUSAL = Causal()


def slower(request: AttentionRequest, bounds: KeyBounds, set_name: str) -> str | None:
    """Return in one sentence that PyTorch's kernel was measured to be faster for such a request, or None.

    Args:
        request: the call.
        bounds: its plan.
        set_name: the instruction set that the native kernel would use.
    """
    lost = LOST.get((set_name, request.shape.dtype))  # the only cost per call where the native kernel always won
    if lost is None:
        return None
    name = class_of(request, bounds)
    if name not in lost or sdpa.refusal(request, bounds) is not None:
        return None
    plain = name.removesuffix(TRAINING)
    training = "" if plain == name else "training with "
    dtype = str(request.shape.dtype).removeprefix("torch.")
    return (
        f"PyTorch's fused kernel was measured {lost[name]:.2f} times faster for {training}{CLASSES[plain]} in {dtype} "
        f"with the instruction set {set_name}"
    )


def class_of(request: AttentionRequest, bounds: KeyBounds) -> str:
    """Return the class of a request, which depends on its shapes, mask and options, not on the values of tensors."""
    shape, mask = request.shape, request.mask
    if shape.value_dim != shape.head_dim:
        name = "unequal"
    elif request.bias is not None:
        name = "bias"
    elif bounds.remainder is not None:
        name = "cells"
    elif shape.query_length <= FEW:
        name = "few"
    elif shape.key_length <= SHORT:
        name = "short"
    elif mask.hides_nothing:
        name = "full"
    else:
        name = "causal" if mask == _CAUSAL else "intervals"
    q, k, v = request.q, request.k, request.v
    trains = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    return name + TRAINING if trains else name
