"""The inputs of a written layer: their names, dtypes and sizes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

pytest.importorskip("onnx", reason="the package onnx is not installed")

from onnx import TensorProto

from multihead import masks
from multihead.export.asked import INPUTS
from multihead.export.onnx import model
from multihead.layer import MultiHeadAttention

if TYPE_CHECKING:
    from onnx import ValueInfoProto


def sizes(value: ValueInfoProto) -> list[int | str | None]:
    return [axis.dim_param or axis.dim_value or None for axis in value.type.tensor_type.shape.dim]


def test_every_input_of_the_call_is_declared_under_its_name_with_its_sizes() -> None:
    layer = MultiHeadAttention(8, 2, key_dim=6, value_dim=4, output_dim=3, dtype=torch.float16).eval()
    made = model(layer, inputs=tuple(reversed(INPUTS)))
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
    assert [each.name for each in made.graph.input] == list(INPUTS)
    (output,) = made.graph.output
    assert (output.name, sizes(output)) == ("output", ["batch", "queries", 3])


def test_inputs_have_the_dtype_of_the_layer_where_they_are_numbers() -> None:
    made = model(MultiHeadAttention(8, 2, dtype=torch.bfloat16).eval(), inputs=("x", "lengths", "keep", "bias"))
    types = {each.name: each.type.tensor_type.elem_type for each in made.graph.input}
    assert types == {
        "x": TensorProto.BFLOAT16,
        "lengths": TensorProto.INT64,
        "keep": TensorProto.BOOL,
        "bias": TensorProto.BFLOAT16,
    }


def test_what_is_read_off_the_inputs_is_read_once() -> None:
    made = model(MultiHeadAttention(8, 2).eval(), inputs=("x", "lengths"), mask=masks.Causal())
    assert sum(node.op_type == "Shape" for node in made.graph.node) == 1
    assert sum(node.op_type == "Range" for node in made.graph.node) == 1
