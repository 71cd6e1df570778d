"""Biases on the scores: relative ones, what fits a call, and their tiles."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor

from multihead.errors import DtypeError, ShapeError
from multihead.functional import attention
from multihead.scores.bias import RelativeBias, bias_tile, offsets
from multihead.tensors.shapes import AttentionShape

Q = torch.zeros(2, 4, 3, 8)
K = torch.zeros(2, 2, 5, 8)
SHAPE = AttentionShape.from_tensors(Q, K, K)


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


SIZES = [(3, 5), (5, 3), (1, 4), (4, 1), (1, 1), (0, 3), (3, 0), (0, 0)]


def written_down(values: Tensor, queries: int, keys: int) -> Tensor:
    """Cell by cell: (batch, heads, queries, keys)."""
    batch, heads, _ = values.shape
    out = values.new_zeros(batch, heads, queries, keys)
    for i in range(queries):
        for j in range(keys):
            out[:, :, i, j] = values[:, :, j - i + queries - 1]
    return out


@pytest.mark.parametrize(("queries", "keys"), SIZES)
def test_each_cell_has_the_value_of_its_diagonal(queries: int, keys: int) -> None:
    values = torch.randn(2, 3, max(queries + keys - 1, 0))
    assert torch.equal(RelativeBias(values).tile(queries, keys), written_down(values, queries, keys))


@pytest.mark.parametrize(("queries", "keys"), SIZES)
@pytest.mark.parametrize("start", [0, 4, torch.tensor([2, 0, 7])], ids=str)
def test_offsets_are_key_positions_minus_query_positions(queries: int, keys: int, start: int | Tensor) -> None:
    found = offsets(queries, keys, query_start=start)
    assert found.dtype == torch.int64
    starts = start.tolist() if isinstance(start, Tensor) else [start]
    tile = RelativeBias(found[:, None].double()).tile(queries, keys)[:, 0]
    expected = [[[j - (at + i) for j in range(keys)] for i in range(queries)] for at in starts]
    assert torch.equal(tile, torch.tensor(expected, dtype=torch.float64).reshape(len(starts), queries, keys))


def test_a_tile_is_cut_out_of_the_whole() -> None:
    values = torch.randn(1, 2, 10)
    whole = RelativeBias(values).tile(5, 6)
    assert torch.equal(RelativeBias(values).tile(5, 6, rows=slice(1, 4), columns=slice(2, 5)), whole[:, :, 1:4, 2:5])


@pytest.mark.parametrize(("rows", "columns"), [((0, 5), (0, 6)), ((1, 4), (2, 5)), ((4, 5), (0, 1)), ((2, 2), (0, 0))])
def test_a_part_is_the_bias_of_some_queries_and_keys(rows: tuple[int, int], columns: tuple[int, int]) -> None:
    values = torch.randn(1, 2, 10)
    part = RelativeBias(values).slice_ranges(5, rows, columns)
    whole = RelativeBias(values).tile(5, 6)
    found = part.tile(rows[1] - rows[0], columns[1] - columns[0])
    assert torch.equal(found, whole[:, :, rows[0] : rows[1], columns[0] : columns[1]])


def test_attention_with_it_is_attention_with_its_tile() -> None:
    q, k, v = torch.randn(3, 2, 3, 5, 8, dtype=torch.float64).unbind()
    bias = RelativeBias(torch.randn(2, 3, 9, dtype=torch.float64))
    torch.testing.assert_close(attention(q, k, v, bias=bias), attention(q, k, v, bias=bias.tile(5, 5)))


GIVE = "Give a floating point tensor (batch, heads, queries + keys - 1)."


@pytest.mark.parametrize(
    ("values", "kind", "sentence"),
    [
        (
            torch.zeros(1, 2, 3, dtype=torch.int64),
            DtypeError,
            f"RelativeBias was given a torch.int64 tensor, and it is added to floating point scores. {GIVE}",
        ),
        ([1.0], DtypeError, f"RelativeBias was given a list, and it is added to floating point scores. {GIVE}"),
        (
            torch.zeros(2, 3),
            ShapeError,
            (
                "RelativeBias was given a tensor of shape (2, 3). "
                "Give (batch, heads, queries + keys - 1), with 1 for batch and heads where all have the same."
            ),
        ),
    ],
    ids=["integers", "a list", "two axes"],
)
def test_invalid_values_are_rejected(values: Any, kind: type[Exception], sentence: str) -> None:
    with pytest.raises(kind, match=f"^{re.escape(sentence)}$"):
        RelativeBias(values)
