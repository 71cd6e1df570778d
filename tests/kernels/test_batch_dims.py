"""Calls whose batch has any number of dimensions, or none."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import multihead as mh
from multihead import masks
from multihead.errors import ShapeError
from multihead.kernels.batch_dims import BatchDims
from multihead.scores.bias import RelativeBias

LEADING = [(), (6,), (2, 3), (1, 2, 3)]


def tensors(*sizes: int) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    q, k, v = torch.randn(6, 4, 5, 8), torch.randn(6, 2, 7, 8), torch.randn(6, 2, 7, 3)
    return tuple(each.reshape(*sizes, *each.shape[1:]) if sizes else each[0] for each in (q, k, v))


@pytest.mark.parametrize("sizes", LEADING)
def test_each_function_gives_them_back(sizes: tuple[int, ...]) -> None:
    q, k, v = tensors(*sizes)
    flat = tensors(6)
    lengths = (3, 7, 0, 1, 7, 5)[: 6 if sizes else 1]
    bias = torch.randn(*([1] * len(sizes)), 4, 5, 7)
    options: dict[str, Any] = {"mask": masks.Lengths(lengths), "bias": bias}
    flat_options = {"mask": options["mask"], "bias": bias.reshape(1, 4, 5, 7)}
    if not sizes:
        flat = tuple(each[:1] for each in flat)
    output, logsumexp = mh.attention_with_logsumexp(q, k, v, **options)
    expected, expected_logsumexp = mh.attention_with_logsumexp(*flat, **flat_options)
    assert output.shape == (*sizes, 4, 5, 3)
    assert torch.equal(output.reshape(expected.shape), expected)
    assert torch.equal(mh.attention(q, k, v, **options), output)
    assert logsumexp.shape == (*sizes, 4, 5)
    assert torch.equal(logsumexp.reshape(expected_logsumexp.shape), expected_logsumexp)
    tile = mh.attention_weights(q, k, **options, logsumexp=logsumexp, heads=1)
    assert tile.shape == (*sizes, 1, 5, 7)
    assert torch.equal(tile.reshape(len(expected), 1, 5, 7), mh.attention_weights(*flat[:2], **flat_options, heads=1))
    found = mh.statistics(q, k, **options, probes=("entropy", "received"))
    assert (found["entropy"].shape, found["received"].shape) == ((*sizes, 4, 5), (*sizes, 4, 7))
    assert mh.explain(q, k, v, **options) == mh.explain(*flat, **flat_options)


def test_a_bias_and_positions_may_come_in_the_leading_dimensions() -> None:
    q, k, v = tensors(2, 3)
    bias, start = torch.randn(2, 1, 4, 1, 7), torch.tensor([[0, 1, 2], [2, 1, 0]])
    given = mh.attention(q, k, v, bias=bias, query_start=start, mask=masks.Causal())
    flat_bias = bias.expand(2, 3, 4, 1, 7).reshape(6, 4, 1, 7)
    expected = mh.attention(*tensors(6), bias=flat_bias, query_start=start.flatten(), mask=masks.Causal())
    assert torch.equal(given.reshape(expected.shape), expected)


def test_a_relative_bias_and_one_of_four_dimensions_speak_of_the_batch() -> None:
    q, k, v = tensors(2, 3)
    relative, four = RelativeBias(torch.randn(6, 4, 11)), torch.randn(6, 1, 5, 7)
    for bias in (relative, four):
        expected = mh.attention(*tensors(6), bias=bias)
        assert torch.equal(mh.attention(q, k, v, bias=bias).reshape(expected.shape), expected)


def test_gradients_come_back_in_their_shape() -> None:
    q, k, v = (each.requires_grad_() for each in tensors(2, 3))
    gradients = torch.autograd.grad(mh.attention(q, k, v).sum(), (q, k, v))
    assert [each.shape for each in gradients] == [each.shape for each in (q, k, v)]


def test_with_one_dimension_there_is_nothing_to_do() -> None:
    assert BatchDims.from_query(torch.zeros(1, 1, 1, 1)) is None
    assert BatchDims.from_query(torch.zeros(1, 1)) is None


def test_other_leading_dimensions_are_refused() -> None:
    q, k, v = tensors(2, 3)
    with pytest.raises(ShapeError) as refusal:
        mh.attention(q, k.flatten(0, 1), v)
    assert str(refusal.value) == (
        "q has the leading dimensions (2, 3), and k has shape (6, 2, 7, 8). "
        "Give all tensors the same dimensions before their heads."
    )
