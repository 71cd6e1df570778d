"""Where PyTorch's fused kernel was measured to be faster: `python -m benchmarks.native.kernel_choice`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch

from multihead.call import AttentionRequest
from multihead.kernels import sdpa
from multihead.masks import Causal
from multihead.masks.base import KeyBounds

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


# written by python -m benchmarks.native.kernel_choice
MEASURED: tuple[Measured, ...] = (
    Measured(
        "scalar",
        "bfloat16",
        "2026-11-21, AMD EPYC, 2 threads, torch 2.13.0+cpu",
        {
            "full": 0.46,
            "full, training": 0.4,
            "causal": 0.77,
            "causal, training": 0.67,
            "intervals": 1.03,
            "intervals, training": 0.99,
            "cells": 0.86,
            "cells, training": 0.75,
            "bias": 1.02,
            "bias, training": 0.88,
            "few": 2.35,
            "few, training": 2.34,
            "short": 0.9,
            "short, training": 1.65,
            "unequal": 0.83,
            "unequal, training": 0.71,
        },
    ),
    Measured(
        "scalar",
        "float32",
        "2026-11-21, AMD EPYC, 2 threads, torch 2.13.0+cpu",
        {
            "full": 0.43,
            "full, training": 0.47,
            "causal": 0.72,
            "causal, training": 0.76,
            "intervals": 0.97,
            "intervals, training": 0.92,
            "cells": 0.84,
            "cells, training": 0.69,
            "bias": 0.99,
            "bias, training": 0.78,
            "few": 1.39,
            "few, training": 1.56,
            "short": 0.69,
            "short, training": 0.8,
            "unequal": 0.8,
            "unequal, training": 0.86,
        },
    ),
    Measured(
        "avx2",
        "bfloat16",
        "2026-11-21, AMD EPYC, 2 threads, torch 2.13.0+cpu",
        {
            "full": 1.19,
            "full, training": 5.73,
            "causal": 1.92,
            "causal, training": 9.04,
            "intervals": 2.28,
            "intervals, training": 7.18,
            "cells": 2.02,
            "cells, training": 5.48,
            "bias": 2.28,
            "bias, training": 5.81,
            "few": 5.15,
            "few, training": 4.26,
            "short": 1.73,
            "short, training": 4.36,
            "unequal": 2.01,
            "unequal, training": 9.41,
        },
    ),
    Measured(
        "avx2",
        "float32",
        "2026-11-21, AMD EPYC, 2 threads, torch 2.13.0+cpu",
        {
            "full": 1.19,
            "full, training": 1.28,
            "causal": 1.89,
            "causal, training": 1.99,
            "intervals": 2.1,
            "intervals, training": 2.06,
            "cells": 1.8,
            "cells, training": 1.51,
            "bias": 2.45,
            "bias, training": 1.96,
            "few": 1.93,
            "few, training": 2.03,
            "short": 1.38,
            "short, training": 1.56,
            "unequal": 2.0,
            "unequal, training": 2.22,
        },
    ),
    Measured(
        "avx512",
        "bfloat16",
        "2026-11-21, AMD EPYC, 2 threads, torch 2.13.0+cpu",
        {
            "full": 2.12,
            "full, training": 2.68,
            "causal": 3.24,
            "causal, training": 4.07,
            "intervals": 3.36,
            "intervals, training": 4.37,
            "cells": 3.04,
            "cells, training": 3.4,
            "bias": 3.74,
            "bias, training": 3.89,
            "few": 7.93,
            "few, training": 4.52,
            "short": 2.36,
            "short, training": 4.27,
            "unequal": 3.05,
            "unequal, training": 4.17,
        },
    ),
    Measured(
        "avx512",
        "float32",
        "2026-11-21, AMD EPYC, 2 threads, torch 2.13.0+cpu",
        {
            "full": 2.17,
            "full, training": 2.18,
            "causal": 3.12,
            "causal, training": 3.12,
            "intervals": 3.16,
            "intervals, training": 2.95,
            "cells": 2.75,
            "cells, training": 2.49,
            "bias": 3.68,
            "bias, training": 2.96,
            "few": 2.61,
            "few, training": 1.8,
            "short": 1.72,
            "short, training": 1.9,
            "unequal": 3.04,
            "unequal, training": 3.67,
        },
    ),
    Measured(
        "avx512_bf16",
        "bfloat16",
        "2026-11-21, AMD EPYC, 2 threads, torch 2.13.0+cpu",
        {
            "full": 3.89,
            "full, training": 2.09,
            "causal": 5.22,
            "causal, training": 3.04,
            "intervals": 4.8,
            "intervals, training": 3.86,
            "cells": 4.21,
            "cells, training": 3.02,
            "bias": 4.8,
            "bias, training": 3.54,
            "few": 8.34,
            "few, training": 4.33,
            "short": 3.19,
            "short, training": 4.28,
            "unequal": 5.47,
            "unequal, training": 3.3,
        },
    ),
    Measured(
        "avx512_bf16",
        "float32",
        "2026-11-21, AMD EPYC, 2 threads, torch 2.13.0+cpu",
        {
            "full": 1.96,
            "full, training": 2.11,
            "causal": 2.82,
            "causal, training": 3.16,
            "intervals": 3.1,
            "intervals, training": 2.83,
            "cells": 2.91,
            "cells, training": 2.56,
            "bias": 3.37,
            "bias, training": 2.91,
            "few": 2.5,
            "few, training": 1.74,
            "short": 1.8,
            "short, training": 1.95,
            "unequal": 2.91,
            "unequal, training": 3.21,
        },
    ),
)
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
_CAUSAL = Causal()


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
    elif mask.hides_nothing:
        name = "full"
    else:
        name = "causal" if mask == _CAUSAL else "intervals"
    q, k, v = request.q, request.k, request.v
    trains = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    return name + TRAINING if trains else name
