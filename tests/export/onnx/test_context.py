"""The inputs of an exported layer: their names, dtypes and sizes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

pytest.importorskip("onnx", reason="the package onnx is not installed")

from onnx import TensorProto

from multihead import masks
from multihead.export.onnx import to_model
from multihead.export.onnx.spec import INPUTS
from multihead.layer import MultiHeadAttention

if TYPE_CHECKING:
    from onnx import ValueInfoProto


def sizes(value: ValueInfoProto) -> list[int | str | None]:
    return [axis.dim_param or axis.dim_value or None for axis in value.type.tensor_type.shape.dim]


def test_every_input_of_the_call_is_declared_under_its_name_with_its_sizes() -> None:
    layer = MultiHeadAttention(8, 2, key_dim=6, value_dim=4, output_dim=3, dtype=torch.float16).eval()
    taken = tuple(name for name in reversed(INPUTS) if name != "past")
    made = to_model(layer, inputs=taken)
    assert {each.name: sizes(each) for each in made.graph.input} == {
        "x": ["batch", "queries", 8],
        "memory": ["batch", "keys", 6],
        "values": ["batch", "keys", 4],
        "lengths": ["batch"],
        "memory_lengths": ["batch"],
        "keep": [None] * 4,
        "bias": [None] * 4,
        "head_gates": [None] * 3,
        "query_start": ["batch"],
    }
    assert [each.name for each in made.graph.input] == list(reversed(taken))
    (output,) = made.graph.output
    assert (output.name, sizes(output)) == ("output", ["batch", "queries", 3])


@pytest.mark.parametrize(("fixed", "past", "total"), [({}, "past", "keys"), ({"queries": 1, "keys": 9}, 8, 9)])
def test_keys_and_values_of_earlier_calls_are_inputs_and_outputs(
    fixed: dict[str, int], past: int | str, total: int | str
) -> None:
    made = to_model(MultiHeadAttention(8, 2, num_kv_heads=1, value_head_dim=3).eval(), inputs=("x", "past"), **fixed)
    found = {each.name: sizes(each) for each in (*made.graph.input, *made.graph.output)}
    length = fixed.get("queries", "queries")
    assert found == {
        "x": ["batch", length, 8],
        "past_key": ["batch", 1, past, 4],
        "past_value": ["batch", 1, past, 3],
        "output": ["batch", length, 8],
        "present_key": ["batch", 1, total, 4],
        "present_value": ["batch", 1, total, 3],
    }


def test_inputs_have_the_dtype_of_the_layer_where_they_are_numbers() -> None:
    made = to_model(MultiHeadAttention(8, 2, dtype=torch.bfloat16).eval(), inputs=("x", "lengths", "keep", "bias"))
    types = {each.name: each.type.tensor_type.elem_type for each in made.graph.input}
    assert types == {
        "x": TensorProto.BFLOAT16,
        "lengths": TensorProto.INT64,
        "keep": TensorProto.BOOL,
        "bias": TensorProto.BFLOAT16,
    }


def test_each_value_of_the_inputs_is_computed_once() -> None:
    made = to_model(MultiHeadAttention(8, 2).eval(), inputs=("x", "lengths"), mask=masks.Causal())
    assert sum(node.op_type == "Shape" for node in made.graph.node) == 1
    assert sum(node.op_type == "Range" for node in made.graph.node) == 1
