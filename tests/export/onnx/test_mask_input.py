"""The operator gets the mask by the cheapest of its inputs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from onnx import helper
from torch import Tensor, nn

pytest.importorskip("onnx", reason="the package onnx is not installed")
pytest.importorskip("onnxruntime", reason="the package onnxruntime is not installed")

from multihead import masks
from multihead.errors import ArgumentError
from multihead.export.onnx import to_model
from multihead.export.onnx.context import ExportContext
from multihead.export.onnx.graph import Graph
from multihead.export.onnx.mask_input import choose_mask_inputs, sink_logits
from multihead.export.onnx.spec import check_spec
from multihead.layer import MultiHeadAttention
from multihead.scores.bias import RelativeBias, offsets
from multihead.scores.position_biases import ALiBi, LearnedBias, T5Bias
from tests.export.running import assert_same, ran

SELF, CROSS = ("x",), ("x", "memory")


def used(inputs: tuple[str, ...], mask: masks.Mask, *, opset: int = 23, start: Any = None, **options: Any) -> set[str]:
    """Return the mask inputs of the operator that are used."""
    layer = MultiHeadAttention(8, 2, **options).eval()
    free = {"batch": None, "queries": None, "keys": None}
    found = choose_mask_inputs(ExportContext(Graph(), layer, check_spec(layer, inputs, mask, start, opset, free)))
    return {name for name in ("is_causal", "attn_mask", "lengths", "queries_with_keys") if getattr(found, name)}


@pytest.mark.parametrize(
    ("inputs", "mask", "options", "ways"),
    [
        (SELF, masks.Full(), {}, set()),
        (CROSS, masks.Full(), {"add_bias_kv": True}, set()),
        (SELF, masks.Causal(), {}, {"is_causal"}),
        (CROSS, masks.Causal(), {"start": 0}, {"is_causal"}),
        (CROSS, masks.Causal(), {"start": "end"}, {"attn_mask", "queries_with_keys"}),
        (SELF, masks.Causal() & masks.Window(3), {}, {"attn_mask"}),
        (SELF, masks.Causal(), {"add_bias_kv": True}, {"attn_mask"}),
        (SELF, masks.Documents((3, 2)), {}, {"attn_mask", "queries_with_keys"}),
        (SELF, masks.Documents((3, 2)), {"sinks": True}, {"attn_mask"}),
        ((*SELF, "lengths"), masks.Full(), {}, {"attn_mask"}),
        ((*SELF, "lengths"), masks.Full(), {"opset": 24}, {"lengths"}),
        ((*CROSS, "memory_lengths"), masks.Full(), {"opset": 24}, {"lengths", "queries_with_keys"}),
        ((*CROSS, "memory_lengths"), masks.Full(), {}, {"attn_mask", "queries_with_keys"}),
        ((*CROSS, "lengths"), masks.Full(), {}, set()),
        ((*SELF, "bias"), masks.Full(), {}, {"attn_mask", "queries_with_keys"}),
    ],
)
def test_the_operator_gets_the_inputs_that_it_needs(
    inputs: tuple[str, ...], mask: masks.Mask, options: dict[str, Any], ways: set[str]
) -> None:
    assert used(inputs, mask, **options) == ways


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
def test_a_query_that_sees_no_key_results_in_0_in_every_dtype(dtype: torch.dtype) -> None:
    layer, x = MultiHeadAttention(8, 2, dtype=dtype, output_projection=False).eval(), torch.randn(2, 4, 8).to(dtype)
    mask = masks.Lengths(((0, 1, 2, 3), (4, 0, 4, 0)))
    found = ran(to_model(layer, mask=mask), x=x)
    assert_same(found, layer, x=x, mask=mask)
    assert found[0, 0].eq(0).all()
    assert found[1, 1::2].eq(0).all()


def test_a_bias_of_minus_infinity_hides_a_key_as_a_mask_does() -> None:
    layer, x = MultiHeadAttention(8, 2, output_projection=False).eval(), torch.randn(1, 3, 8)
    bias = torch.zeros(1, 2, 3, 3)
    bias[:, 0, 1] = -torch.inf
    found = ran(to_model(layer, inputs=("x", "bias")), x=x, bias=bias)
    assert found[0, 1, :4].eq(0).all()
    assert_same(found, layer, x=x, bias=bias)


@pytest.mark.parametrize("opset", [23, 24])
def test_nan_in_padding_reaches_no_output(opset: int) -> None:
    layer, x = MultiHeadAttention(8, 2).eval(), torch.randn(2, 5, 8)
    x[0, 3:], x[1, :] = torch.nan, torch.inf
    lengths = torch.tensor([3, 0])
    found = ran(to_model(layer, inputs=("x", "lengths"), opset=opset), x=x, lengths=lengths)
    assert found[0, 3:].eq(0).all()
    assert found[1].eq(0).all()
    assert_same(found, layer, x=x, lengths=lengths)


def test_a_key_of_0_is_a_sink_whose_logit_is_0() -> None:
    layer = MultiHeadAttention(8, 2, sinks=True, add_zero_attn=True).eval()
    assert layer.sinks is not None
    torch.nn.init.constant_(layer.sinks, 1.0)
    context = ExportContext(
        Graph(), layer, check_spec(layer, SELF, masks.Full(), None, 23, dict.fromkeys(("batch", "queries", "keys")))
    )
    assert torch.allclose(sink_logits(context), torch.tensor(1.0).exp().add(1).log().double())


def test_a_causal_layer_is_one_operator_between_projections() -> None:
    made = to_model(MultiHeadAttention(8, 2, num_kv_heads=1, softcap=5.0).eval(), mask=masks.Causal())
    (node,) = [node for node in made.graph.node if node.op_type == "Attention"]
    assert {each.name: helper.get_attribute_value(each) for each in node.attribute} == {
        "q_num_heads": 2,
        "kv_num_heads": 1,
        "scale": 0.5,
        "softcap": 5.0,
        "is_causal": 1,
    }


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
