"""Rotaries of every kind, random heads, and the rotation by complex numbers as the oracle."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from multihead.layer.heads import split_heads
from multihead.rotary import Linear, Llama3, Rotary, Yarn

ROTARIES = {
    "halves": Rotary(),
    "neighbours": Rotary(interleaved=True),
    "a part in halves": Rotary(dim=4, base=100.0),
    "a part as neighbours": Rotary(dim=4, interleaved=True),
    "linear": Rotary(scaling=Linear(2.0)),
    "llama3": Rotary(scaling=Llama3(8.0, original_length=32)),
    "yarn": Rotary(scaling=Yarn(4.0, 32), interleaved=True),
}
each = pytest.mark.parametrize("rotary", ROTARIES.values(), ids=ROTARIES.keys())
few = pytest.mark.parametrize("name", ["halves", "a part as neighbours", "yarn"])
both_forms = pytest.mark.parametrize("interleaved", [False, True])
BATCH, HEADS, LENGTH, HEAD_DIM = 2, 3, 5, 8
POSITIONS = torch.tensor([[0, 1, 2, 3, 4], [7, 9, 8, 0, 70]])


def drawn(dtype: torch.dtype = torch.float64, length: int = LENGTH) -> Tensor:
    """As a projection lays it out: (batch, heads, length, head_dim), heads side by side."""
    return split_heads(torch.randn(BATCH, length, HEADS * HEAD_DIM, dtype=dtype), HEADS)


def oracle(rotary: Rotary, x: Tensor, positions: int | Tensor) -> Tensor:
    """Pair by pair, each a complex number times another."""
    batch, heads, length, head_dim = x.shape
    found = x.double().tolist()
    dim = rotary.dim or head_dim
    gain = rotary.scaling.gain if rotary.scaling else 1.0
    for b in range(batch):
        for i in range(length):
            at = positions + i if isinstance(positions, int) else int(positions[min(b, len(positions) - 1), i])
            for pair, frequency in enumerate(rotary.frequencies(head_dim)):
                one, other = (2 * pair, 2 * pair + 1) if rotary.interleaved else (pair, pair + dim // 2)
                for h in range(heads):
                    column = found[b][h][i]
                    number = torch.polar(
                        torch.tensor(gain, dtype=torch.float64), torch.tensor(at * frequency, dtype=torch.float64)
                    ).item() * complex(column[one], column[other])
                    column[one], column[other] = number.real, number.imag
    return torch.tensor(found, dtype=torch.float64).reshape(x.shape)
