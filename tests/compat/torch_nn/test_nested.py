"""Nested tensors in the drop-in: the outputs of their samples alone, the original's weights, and errors."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor

from multihead.compat.torch_nn import MultiheadAttention
from multihead.compat.torch_nn.nested import nested_like, padding_of
from multihead.errors import ArgumentError, MultiheadError, ShapeError
from tests.compat.torch_nn.test_attention import pair


def test_nested_samples_are_attended_one_by_one() -> None:
    theirs, ours = pair()
    samples = [torch.randn(length, 12) for length in (5, 2, 3)]
    nested = torch.nested.as_nested_tensor(samples, layout=torch.jagged)
    output, weights = ours(nested, nested, nested, need_weights=False)
    assert weights is None
    for sample, actual in zip(samples, output.unbind(), strict=True):
        torch.testing.assert_close(actual, theirs(sample, sample, sample)[0], rtol=0, atol=2e-5)


PROTOTYPE = "ignore:The PyTorch API of nested tensors is in prototype stage"


@pytest.mark.filterwarnings(PROTOTYPE)
@pytest.mark.parametrize("average", [True, False])
def test_nested_samples_get_the_originals_padded_weights(*, average: bool) -> None:
    theirs, ours = pair(num_heads=2)  # the original takes nested tensors in its fused path alone
    nested = torch.nested.as_nested_tensor([torch.randn(length, 12) for length in (5, 2, 3)])
    with torch.no_grad():
        expected = theirs.eval()(nested, nested, nested, average_attn_weights=average)
        actual = ours.eval()(nested, nested, nested, average_attn_weights=average)
    torch.testing.assert_close(actual[1], expected[1], rtol=0, atol=2e-6)
    for found, wanted in zip(actual[0].unbind(), expected[0].unbind(), strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=2e-5)


@pytest.mark.filterwarnings(PROTOTYPE)
@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
@pytest.mark.parametrize("options", [{}, {"add_bias_kv": True, "add_zero_attn": True}, {"batch_first": False}], ids=str)
@pytest.mark.parametrize("call", [{}, {"is_causal": True}], ids=str)
@pytest.mark.parametrize("cross", [False, True])
def test_nested_samples_have_the_outputs_of_each_alone_with_gradients(
    layout: torch.layout, options: dict[str, Any], call: dict[str, Any], *, cross: bool
) -> None:
    _, ours = pair(**options)
    of_query = [torch.randn(length, 12, requires_grad=True) for length in (5, 2, 3)]
    of_key = [torch.randn(length, 12, requires_grad=True) for length in (4, 6, 1)] if cross else of_query
    query = torch.nested.as_nested_tensor(of_query, layout=layout)
    key = torch.nested.as_nested_tensor(of_key, layout=layout) if cross else query
    output, weights = ours(query, key, key, **call)
    _ = query + output  # a residual connection: the lengths are known to be the same
    samples, total = output.unbind(), torch.zeros(())
    for place, (one, other) in enumerate(zip(of_query, of_key, strict=True)):
        expected, of_sample = ours(one, other, other, **call)
        torch.testing.assert_close(samples[place], expected, rtol=0, atol=2e-5)
        rows, columns = len(one), len(other)
        torch.testing.assert_close(weights[place, :rows, :columns], of_sample[:, :columns], rtol=0, atol=2e-6)
        added = of_sample.shape[1] - columns
        torch.testing.assert_close(
            weights[place, :rows, weights.shape[2] - added :], of_sample[:, columns:], rtol=0, atol=2e-6
        )
        assert weights[place].count_nonzero() == of_sample.count_nonzero()
        total = total + expected.square().sum()
    leaves = [*of_query, *(of_key if cross else ()), *ours.parameters()]
    found = torch.autograd.grad(sum((sample.square().sum() for sample in samples), torch.zeros(())), leaves)
    torch.testing.assert_close(found, torch.autograd.grad(total, leaves), rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("need_weights", [False, True])
def test_nested_samples_that_lie_apart_stay_where_they_are(*, need_weights: bool) -> None:
    _, ours = pair()
    starts, lengths = torch.tensor([1, 2]), torch.tensor([3, 4])
    apart = torch.nested.narrow(torch.randn(2, 8, 12), 1, starts, lengths, layout=torch.jagged)
    output, _ = ours(apart, apart, apart, need_weights=need_weights)
    for sample, found, added in zip(apart.unbind(), output.unbind(), (apart + output).unbind(), strict=True):
        expected = ours(sample, sample, sample)[0]
        torch.testing.assert_close(found, expected, rtol=0, atol=2e-5)
        torch.testing.assert_close(added, sample + expected, rtol=0, atol=2e-5)


def test_padding_is_marked_and_samples_of_the_same_lengths_can_be_added() -> None:
    jagged = torch.nested.as_nested_tensor([torch.zeros(1, 4), torch.zeros(3, 4)], layout=torch.jagged)
    assert padding_of(jagged).tolist() == [[False, True, True], [False, False, False]]
    ones = [torch.ones(1, 4), torch.ones(3, 4)]
    assert all((sample == 1).all() for sample in (jagged + nested_like(jagged, ones)).unbind())


def nested_of(x: Tensor) -> Tensor:
    return torch.nested.as_nested_tensor(list(x), layout=torch.jagged)


REFUSED: dict[str, tuple[Any, type[MultiheadError], str]] = {
    "nested and a mask": (
        lambda layer, x: layer(*[nested_of(x)] * 3, key_padding_mask=x[..., 0] > 0),
        ArgumentError,
        (
            "query is a nested tensor, and key_padding_mask describes padded tensors. "
            "Remove key_padding_mask, or give query.to_padded_tensor(0.0) and a key_padding_mask."
        ),
    ),
    "nested in part": (
        lambda layer, x: layer(nested_of(x), x, x),
        ShapeError,
        (
            "key is not a nested tensor, and another input is. "
            "Give query, key and value as nested tensors, or none of them."
        ),
    ),
    "nested of another width": (
        lambda layer, x: layer(*[nested_of(x[..., :3])] * 3),
        ShapeError,
        "query is a nested tensor of (5, 3), (5, 3). Give samples of shape (length, features = 12).",
    ),
    "nested without samples": (
        lambda layer, x: layer(*[torch.nested.nested_tensor([])] * 3),
        ShapeError,
        "query is a nested tensor of no samples. Give samples of shape (length, features = 12).",
    ),
    "nested batches": (
        lambda layer, x: layer(nested_of(x), nested_of(x[:1]), nested_of(x[:1])),
        ShapeError,
        "query has 2 samples and key has 1. Give both the same batch size.",
    ),
    "nested values": (
        lambda layer, x: layer(nested_of(x), nested_of(x), nested_of(x[:, :4])),
        ShapeError,
        "key has samples of lengths [5, 5] and value of lengths [4, 4]. Give one value per key.",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_rejected_with_a_whole_sentence(name: str) -> None:
    call, error, sentence = REFUSED[name]
    with pytest.raises(error, match=f"^{re.escape(sentence)}$"):
        call(MultiheadAttention(12, 3, batch_first=True), torch.zeros(2, 5, 12))
