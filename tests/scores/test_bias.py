"""Biases that fit, and those that do not."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from multihead.errors import DtypeError, ShapeError
from multihead.functional import attention
from multihead.scores.bias import bias_tile
from multihead.tensors.shapes import AttentionShape

Q = torch.zeros(2, 4, 3, 8)
K = torch.zeros(2, 2, 5, 8)
SHAPE = AttentionShape.of(Q, K, K)


@pytest.mark.parametrize(
    ("bias", "kind", "sentence"),
    [
        (
            torch.zeros(3, 5),
            ShapeError,
            (
                "bias has shape (3, 5), and it is added to (batch, heads, queries, keys) = (2, 4, 3, 5). "
                "Give four dimensions, each of that size or 1."
            ),
        ),
        (
            torch.zeros(2, 4, 3, 6),
            ShapeError,
            (
                "bias has shape (2, 4, 3, 6), and it is added to (batch, heads, queries, keys) = (2, 4, 3, 5). "
                "Give four dimensions, each of that size or 1."
            ),
        ),
        (
            torch.ones(2, 1, 3, 5, dtype=torch.bool),
            DtypeError,
            (
                "bias is a torch.bool tensor, and it is added to floating point scores. "
                "Give a floating point tensor; to hide keys, give a mask, for example mask=masks.Keep(t)."
            ),
        ),
        (
            0.5,
            DtypeError,
            (
                "bias is a float, and it is added to floating point scores. "
                "Give a floating point tensor; to hide keys, give a mask, for example mask=masks.Keep(t)."
            ),
        ),
        (
            torch.zeros(2, 4, 3, 5, device="meta"),
            DtypeError,
            "bias is on meta and q is on cpu. Move it: bias.to(q.device).",
        ),
    ],
    ids=["two axes", "another length", "bool", "no tensor", "another device"],
)
def test_a_bias_that_does_not_fit_is_refused(bias: Any, kind: type[Exception], sentence: str) -> None:
    with pytest.raises(kind) as refusal:
        attention(Q, K, K, bias=bias)
    assert str(refusal.value) == sentence


def test_a_tile_keeps_axes_of_size_one() -> None:
    whole, a_key = torch.randn(2, 4, 6, 5), torch.randn(1, 1, 1, 5)
    assert torch.equal(bias_tile(whole, SHAPE, slice(1, 3), slice(2, 5)), whole[:, :, 1:3, 2:5])
    assert torch.equal(bias_tile(a_key, SHAPE, slice(1, 3), slice(2, 5)), a_key[..., 2:5])
    assert bias_tile(torch.zeros(1, 1, 1, 1), SHAPE, slice(1, 3), slice(2, 5)).shape == (1, 1, 1, 1)
