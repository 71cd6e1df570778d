"""Which kernels a test goes over, and which dtypes each of them takes."""

from __future__ import annotations

import pytest
import torch

from multihead.kernels.choose import KERNELS
from multihead.kernels.native import library
from tests.drawing import DTYPES

needs_native = pytest.mark.skipif(
    library.reason_of_absence() is not None, reason=f"no native kernel here: {library.reason_of_absence()}"
)
# These run on CUDA alone; tests/kernels/test_flex.py and test_ragged.py test what of them can be tested without.
ON_CUDA = ("flex", "ragged")
EACH = [pytest.param(name, marks=needs_native if name == "native" else ()) for name in KERNELS if name not in ON_CUDA]
NATIVE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def dtypes_of(kernel: str) -> tuple[torch.dtype, ...]:
    """The dtypes that a kernel takes, the exactest first."""
    return NATIVE_DTYPES if kernel == "native" else tuple(DTYPES.values())


def exactest(kernel: str) -> torch.dtype:
    return dtypes_of(kernel)[0]


def rounding(kernel: str) -> float:
    """What a few roundings of numbers around 1 come to, in the exactest dtype of a kernel."""
    return 64 * torch.finfo(exactest(kernel)).eps
