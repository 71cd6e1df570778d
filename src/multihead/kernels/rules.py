"""Say where PyTorch's fused kernel was measured to be faster than the native one: `python -m benchmarks.rules`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch

from multihead.call import AttentionRequest
from multihead.kernels import sdpa
from multihead.masks import Causal, Full
from multihead.plan.bounds import KeyBounds

FEW, SHORT = 8, 128  # queries; keys
MARGIN = 1.03  # less than that is no reason to change

# The classes of requests, and how a sentence speaks of them; each is there for training too.
CLASSES = {
    "full": "full attention",
    "causal": "causal attention",
    "intervals": "masks that hide all but an interval of keys",
    "cells": "masks that are read cell by cell",
    "bias": "a bias on the scores",
    "few": f"at most {FEW} queries",
    "short": f"at most {SHORT} keys",
    "unequal": "a value dim other than the head dim",
}
TRAINING = ", training"


class Measured(NamedTuple):
    """How many times faster the native kernel was than PyTorch's fused one.

    Fields:
        instruction_set: of the native kernel.
        dtype: of q, k and v, without "torch.".
        where: date, CPU, threads and torch.
        ratios: by class, that of a forward pass; with TRAINING behind it, that of a forward and a backward pass.
    """

    instruction_set: str
    dtype: str
    where: str
    ratios: Mapping[str, float]


# written by python -m benchmarks.rules
MEASURED: tuple[Measured, ...] = ()
# end of what is written


def losses(measured: Iterable[Measured]) -> dict[tuple[str, torch.dtype], dict[str, float]]:
    """Keep what the native kernel lost: for an instruction set and a dtype, how many times faster the other was.

    >>> losses((Measured("scalar", "float32", "", {"full": 0.5, "causal": 0.99, "few": 2.0}),))
    {('scalar', torch.float32): {'full': 2.0}}
    """
    found: dict[tuple[str, torch.dtype], dict[str, float]] = {}
    for each in measured:
        lost = {name: 1 / ratio for name, ratio in each.ratios.items() if ratio * MARGIN < 1}
        if lost:
            found[each.instruction_set, getattr(torch, each.dtype)] = lost
    return found


LOST = losses(MEASURED)


def slower(request: AttentionRequest, bounds: KeyBounds, set_name: str) -> str | None:
    """Say in one sentence that PyTorch's fused kernel was measured to be faster for such a request, or None.

    Args:
        request: the call.
        bounds: its plan.
        set_name: the instruction set that the native kernel would use.
    """
    lost = LOST.get((set_name, request.shape.dtype))  # on every call: where nothing was lost, no more than this
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
    """Name the class of a request, told from how it is written and not from what its tensors hold."""
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
    elif isinstance(mask, Full):
        name = "full"
    else:
        name = "causal" if isinstance(mask, Causal) else "intervals"
    q, k, v = request.q, request.k, request.v
    trains = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    return name + TRAINING if trains else name
