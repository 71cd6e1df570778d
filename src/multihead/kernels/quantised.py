"""Keys and values in int8, with one float32 scale per token and head: half the bytes of bfloat16.

A cache in int8 has one scale per token and head, because a token is quantised when it arrives and never again. A
request carries the integers and `scales`. A kernel that cannot read int8 gets the request with dequantised keys and
values (`with_dequantised_keys`), as listeners do. The native kernel multiplies integers with integers: the query is
rounded to 16 bits, an error 256 times smaller than that of the keys, so one instruction multiplies 32 pairs without
converting the keys. The weights of 64 keys are rounded to 16 bits too, where the instruction set multiplies pairs
(AVX-512): with a head_dim of 64 the conversion of values to floats took more time than reading them. Compared with an
unquantised cache the perplexity of SmolLM2 on 1,024 tokens changes by -0.17 % (`python -m benchmarks.int8_cache`).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

MAX_INT8 = 127  # integers are in [-127, 127]; -128 is unused


class Int8Scales(NamedTuple):
    """Dequantisation factors of int8 keys and values: element = scale of the row * integer.

    Attributes:
        k: the scales of the keys, (batch, kv_heads, keys), float32, contiguous in the last dimension; NaN for a key
            with NaN or infinity.
        v: the scales of the values, (batch, kv_heads, keys), like those of the keys.
    """

    k: Tensor
    v: Tensor


def quantise(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise rows (..., dim) to int8, with one float32 scale per row (..., 1).

    The rounding error of an element is at most half its scale, which is the largest absolute value of the row / 127.
    A row with NaN or infinity gets the scale NaN, and is NaN as a whole when it is dequantised.

    >>> quantise(torch.tensor([[0.5, -1.0, 0.0], [0.0, 0.0, 0.0]]))
    (tensor([[  64, -127,    0],
            [   0,    0,    0]], dtype=torch.int8), tensor([[0.0079],
            [0.0000]]))
    """
    rows = rows.float()
    scale = rows.abs().amax(-1, keepdim=True) / MAX_INT8
    # A row of zeros gives 0 / 0 = NaN, and a row with inf or NaN gives NaN: their integers become 0.
    integers = (rows / scale).round_().nan_to_num_(0, 0, 0).clamp_(-MAX_INT8, MAX_INT8).to(torch.int8)
    return integers, scale + scale * 0  # infinity becomes NaN


def dequantise(integers: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return integers (..., dim) times scales (...), in a dtype: (..., dim).

    >>> dequantise(torch.tensor([[64, -127, 0]], dtype=torch.int8), torch.tensor([1 / 127]), torch.float32)
    tensor([[ 0.5039, -1.0000,  0.0000]])
    """
    wide = torch.promote_types(dtype, torch.float32)
    return (integers.to(wide) * scale[..., None].to(wide)).to(dtype)
