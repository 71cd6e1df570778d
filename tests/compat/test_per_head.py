"""Independent heads against a loop over them, stacked into one layer and split again."""

from __future__ import annotations

import math
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import multihead as mh
from multihead import masks
from multihead.compat.per_head import PerHeadAttention, concat, split
from multihead.errors import ArgumentError, ShapeError
from tests.compat.originals import BOUNDS, dtypes


def one_by_one(layer: PerHeadAttention, x: Tensor, memory: Tensor, shown: Tensor | None = None) -> list[Tensor]:
    """Compute each head from its own matrices, as in textbooks."""
    found = []
    for i in range(layer.num_heads):
        Q, K, V = x @ layer.W_Q[i], memory @ layer.W_K[i], memory @ layer.W_V[i]
        if layer.b_Q is not None and layer.b_K is not None and layer.b_V is not None:
            Q, K, V = Q + layer.b_Q[i], K + layer.b_K[i], V + layer.b_V[i]
        scores = Q @ K.mT / math.sqrt(K.shape[-1])
        found.append((scores if shown is None else scores.masked_fill(~shown, -torch.inf)).softmax(-1) @ V)
    return found


def drawn(
    heads: int, widths: tuple[int, int], head_dims: tuple[int, int], *, bias: bool, dtype: torch.dtype
) -> PerHeadAttention:
    (features, memory), (head_dim, value_dim) = widths, head_dims

    def some(*size: int) -> list[Tensor]:
        return [torch.randn(*size, dtype=dtype) / math.sqrt(size[0]) for _ in range(heads)]

    biases = {"b_Q": some(head_dim), "b_K": some(head_dim), "b_V": some(value_dim), "b_O": some(3)[0]} if bias else {}
    matrices = (some(features, head_dim), some(memory, head_dim), some(memory, value_dim))
    return PerHeadAttention.of(*matrices, some(heads * value_dim, 3)[0], **biases)  # type: ignore[arg-type]


@given(
    batch=st.sampled_from([None, 1, 3]),
    lengths=st.tuples(st.integers(1, 5), st.integers(1, 6)),
    heads=st.integers(1, 4),
    widths=st.tuples(st.integers(1, 5), st.integers(1, 5)),
    head_dims=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    bias=st.booleans(),
    dtype=dtypes,
)
@settings(max_examples=40)
def test_each_head_attends_alone_and_one_layer_of_all_has_the_same_numbers_and_gradients(
    batch: int | None, lengths: tuple[int, int], heads: int, widths: tuple[int, int], head_dims: tuple[int, int],
    bias: bool, dtype: torch.dtype,
) -> None:  # fmt: skip
    layer, bound = drawn(heads, widths, head_dims, bias=bias, dtype=dtype), BOUNDS[dtype]
    leading = () if batch is None else (batch,)
    x = torch.randn(*leading, lengths[0], widths[0], dtype=dtype)
    memory = torch.randn(*leading, lengths[1], widths[1], dtype=dtype)
    expected = one_by_one(layer, x, memory)
    torch.testing.assert_close(layer.heads(x, memory), expected, rtol=bound, atol=bound)
    assert layer.W_O is not None
    joined = torch.cat(expected, -1) @ layer.W_O + (0 if layer.b_O is None else layer.b_O)
    torch.testing.assert_close(layer(x, memory), joined, rtol=bound, atol=bound)
    stacked = layer.stack()
    rows, columns = (x[None], memory[None]) if batch is None else (x, memory)
    torch.testing.assert_close(stacked(rows, columns).reshape(joined.shape), joined, rtol=bound, atol=bound)
    again = split(stacked)
    torch.testing.assert_close(dict(again.state_dict()), dict(layer.state_dict()), rtol=0, atol=0)
    cotangent = torch.randn_like(joined)
    parameters = list(layer.parameters())
    of_loop = torch.autograd.grad((joined * cotangent).sum(), parameters)
    of_layer = torch.autograd.grad((layer(x, memory) * cotangent).sum(), parameters)
    torch.testing.assert_close(of_layer, of_loop, rtol=bound, atol=bound)


def test_the_textbooks_sequence_of_a_hundred_has_three_columns_per_head() -> None:
    sequence = torch.randn(100, 16)
    layer = PerHeadAttention(embed_dim=16, num_heads=8, head_dim=3, output_projection=False)
    assert layer(sequence).shape == (100, 24)
    Z = layer.heads(sequence[:2])
    assert [tuple(each.shape) for each in Z] == [(2, 3)] * 8
    assert torch.equal(concat(Z)[:, 3:6], Z[1])
    assert concat(Z).shape == (2, 24)
    stacked = layer.stack()
    assert stacked.out_proj is None
    torch.testing.assert_close(stacked(sequence[None])[0], layer(sequence))


def test_a_layers_heads_are_the_columns_of_its_projections() -> None:
    layer = mh.MultiHeadAttention(12, 4, num_kv_heads=2, dropout=0.5).double().eval()
    for projection in (layer.q_proj, layer.k_proj, layer.v_proj):
        torch.nn.init.normal_(projection.bias)
    heads = split(layer)
    assert torch.equal(heads.W_Q[1], layer.q_proj.weight[3:6].mT)
    assert torch.equal(heads.W_K[1], heads.W_K[0])  # two query heads share a key/value head
    assert torch.equal(heads.W_K[2], layer.k_proj.weight[3:6].mT)
    x = torch.randn(2, 5, 12, dtype=torch.float64)
    shown = torch.ones(5, 5, dtype=torch.bool).tril()
    torch.testing.assert_close(heads.heads(x, mask=masks.Causal()), one_by_one(heads, x, x, shown), rtol=0, atol=1e-12)
    torch.testing.assert_close(heads(x, mask=masks.Causal()), layer(x, mask=masks.Causal()), rtol=0, atol=1e-12)
    torch.testing.assert_close(heads.stack()(x), layer(x), rtol=0, atol=1e-12)


def test_a_query_that_sees_no_key_results_in_zero_in_every_head() -> None:
    layer = PerHeadAttention(embed_dim=6, num_heads=2)
    Z = layer.heads(torch.randn(2, 3, 6), mask=masks.Lengths((0, 2)))
    assert all((each[0] == 0).all() and (each[1] != 0).any() for each in Z)


def test_the_matrices_of_the_caller_are_not_changed() -> None:
    W = [torch.zeros(2, 2) for _ in range(3)]
    layer = PerHeadAttention.of(W, W, W)
    torch.nn.init.ones_(layer.W_Q[0])
    assert (W[0] == 0).all()
    stacked = layer.stack()
    torch.nn.init.ones_(layer.W_K[0])
    assert (stacked.k_proj.weight == 0).all()


def test_a_bias_is_drawn_as_zero_and_the_layer_can_be_observed() -> None:
    layer = PerHeadAttention(embed_dim=6, num_heads=3, bias=True)
    assert layer.b_O is not None
    assert sorted(name.split(".")[0] for name in layer.state_dict()) == sorted(
        ["W_O", "b_O", *(name for name in ("W_Q", "W_K", "W_V", "b_Q", "b_K", "b_V") for _ in range(3))]
    )
    with mh.observe(layer) as seen:
        layer(torch.randn(4, 6))
    assert seen["PerHeadAttention"].num_heads == 3
    assert "num_heads=3, head_dim=2" in str(layer)


def test_what_does_not_fit_is_rejected() -> None:
    def refused(error: type[Exception], sentence: str) -> object:
        return pytest.raises(error, match=f"^{re.escape(sentence)}$")

    a, b = torch.zeros(4, 2), torch.zeros(4, 3)
    with refused(ShapeError, "There are 2 W_Q, 1 W_K, 2 W_V. Give one W_Q, W_K and W_V per head."):
        PerHeadAttention.of([a, a], [a], [a, a])
    with refused(ShapeError, "W_K has the shapes [(4, 2), (4, 3)]. Give one (features, head_dim) for all heads."):
        PerHeadAttention.of([a, a], [a, b], [a, a])
    mend = "Give W_Q and W_K the same columns, W_K and W_V the same rows."
    with refused(ShapeError, f"W_Q is (4, 2), W_K (4, 3) and W_V (4, 2) per head. {mend}"):
        PerHeadAttention.of([a], [b], [a])
    with refused(ShapeError, "W_O has shape (3, 5). Give (4, output_dim): one row per column of Z."):
        PerHeadAttention.of([a, a], [a, a], [a, a], torch.zeros(3, 5))
    with refused(ShapeError, "b_V has the shapes [(3,)]. Give 1 of shape (2,), the width of the heads."):
        PerHeadAttention.of([a], [a], [a], b_V=[torch.zeros(3)])
    with refused(ShapeError, "b_O has shape (5,), and there is no W_O. Give one number per column of W_O, or neither."):
        PerHeadAttention.of([a], [a], [a], b_O=torch.zeros(5))
    layer = PerHeadAttention(embed_dim=4, num_heads=2)
    mend = "Give (length, features) or (batch, length, features), with 4 features."
    with refused(ShapeError, f"x has shape (5, 3). {mend}"):
        layer(torch.zeros(5, 3))
    with refused(ShapeError, f"memory has shape (5, 4). {mend}"):
        layer(torch.zeros(1, 5, 4), torch.zeros(5, 4))
    with refused(ShapeError, "Z has the shapes [(2, 3), (3, 3)]. Give one result per head, of the same length."):
        concat([torch.zeros(2, 3), torch.zeros(3, 3)])
    with refused(ArgumentError, "head_dim is 0. Give an integer of at least 1."):
        PerHeadAttention(embed_dim=4, num_heads=2, head_dim=0)
    sentence = "embed_dim is 4, and 3 heads do not divide it. Give 1, 2 or 4 heads, or a width that is a multiple of 3."
    with refused(ArgumentError, sentence):
        PerHeadAttention(embed_dim=4, num_heads=3)
    mend = 'Give one with merge="concat", scale=None and key_dim equal to value_dim.'
    with refused(ArgumentError, f"The layer has merge='mean', scale=None, key_dim=4 and value_dim=4. {mend}"):
        split(mh.MultiHeadAttention(4, 2, merge="mean"))
