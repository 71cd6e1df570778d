"""Position biases are computed in the graph for every size, or stored as a constant for one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("onnx", reason="the package onnx is not installed")
pytest.importorskip("onnxruntime", reason="the package onnxruntime is not installed")

from multihead import masks
from multihead.errors import ArgumentError
from multihead.export.onnx import to_model
from multihead.layer import MultiHeadAttention
from multihead.scores.bias import RelativeBias, offsets
from multihead.scores.position_biases import ALiBi, LearnedBias, T5Bias
from tests.export.running import assert_same, ran

BIASES = [
    ALiBi(3),
    T5Bias(3),
    T5Bias(3, num_buckets=8, max_distance=5, both_ways=False),
    LearnedBias(3, 60, 60),
]


def layer_with(bias: nn.Module, *, dtype: torch.dtype = torch.float32) -> MultiHeadAttention:
    for parameter in bias.parameters():
        nn.init.normal_(parameter)
    return MultiHeadAttention(12, 3, position_bias=bias, dtype=dtype).eval()


@pytest.mark.parametrize("bias", BIASES, ids=repr)
def test_one_model_adds_what_the_layer_adds_for_every_length(bias: nn.Module) -> None:
    layer = layer_with(bias)
    made = to_model(layer, mask=masks.Causal())
    for batch, length in ((1, 1), (2, 7), (1, 60)):
        x = torch.randn(batch, length, 12)
        assert_same(ran(made, x=x), layer, x=x, mask=masks.Causal())


@pytest.mark.parametrize("bias", BIASES, ids=repr)
@pytest.mark.parametrize("start", [3, "end", torch.tensor([0, 5])], ids=str)
def test_it_is_added_at_the_positions_of_the_queries(bias: nn.Module, start: Any) -> None:
    layer, x, memory = layer_with(bias), torch.randn(2, 4, 12), torch.randn(2, 30, 12)
    found = ran(to_model(layer, inputs=("x", "memory"), query_start=start), x=x, memory=memory)
    assert_same(found, layer, x=x, memory=memory, query_start=start)


def test_buckets_are_the_same_as_far_as_texts_go() -> None:
    layer = layer_with(T5Bias(3))
    x, memory = torch.randn(1, 1, 12), torch.randn(1, 2000, 12)
    for start in (0, 1000, 1999):
        found = ran(to_model(layer, inputs=("x", "memory"), query_start=start), x=x, memory=memory)
        assert_same(found, layer, x=x, memory=memory, query_start=start)


class Nearest(nn.Module):
    """Hide all keys further than one token away."""

    def forward(self, queries: int, keys: int, *, query_start: int | Tensor = 0, **made: Any) -> RelativeBias:
        far = offsets(queries, keys, query_start=query_start).abs() > 1
        return RelativeBias(torch.where(far, -torch.inf, 0.0)[:, None].to(**made))


def test_a_bias_that_is_not_ours_is_a_constant_for_one_size() -> None:
    layer, x, memory = layer_with(Nearest()), torch.randn(2, 4, 12), torch.randn(2, 5, 12)
    made = to_model(layer, inputs=("x", "memory"), query_start=3, queries=4, keys=5)
    assert_same(ran(made, x=x, memory=memory), layer, x=x, memory=memory, query_start=3)


def test_a_query_whose_bias_hides_all_keys_results_in_0() -> None:
    layer, x, memory = layer_with(Nearest(), dtype=torch.float64), torch.randn(2, 4, 12), torch.randn(2, 3, 12)
    made = to_model(layer, inputs=("x", "memory"), query_start=2, queries=4, keys=3)
    found = ran(made, x=x.double(), memory=memory.double())
    assert_same(found, layer, x=x.double(), memory=memory.double(), query_start=2)


def test_a_query_before_all_rows_of_a_learned_bias_takes_the_first() -> None:
    layer, x, memory = layer_with(LearnedBias(3, 9, 9)), torch.randn(2, 4, 12), torch.randn(2, 9, 12)
    start = torch.tensor([-2, 5])
    found = ran(to_model(layer, inputs=("x", "memory", "query_start")), x=x, memory=memory, query_start=start)
    assert_same(found, layer, x=x, memory=memory, query_start=start)


def test_with_more_queries_than_keys_the_first_are_before_all_rows() -> None:
    layer, x, memory = layer_with(LearnedBias(3, 9, 9)), torch.randn(2, 4, 12), torch.randn(2, 2, 12)
    found = ran(to_model(layer, inputs=("x", "memory"), query_start="end"), x=x, memory=memory)
    assert_same(found, layer, x=x, memory=memory, query_start="end")


def test_a_bias_that_is_not_ours_is_refused_where_sizes_may_change() -> None:
    with pytest.raises(ArgumentError) as refusal:
        to_model(layer_with(Nearest()), queries=None)
    assert str(refusal.value) == (
        "position_bias is a Nearest, which can only be exported for fixed sizes. "
        "Fix the sizes: give queries= and keys=, and remove query_start from the inputs."
    )
