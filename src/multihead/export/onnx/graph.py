"""Build an ONNX graph: most methods add a node, a constant or an input, and return the name of its value."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

from multihead.errors.optional import require

if TYPE_CHECKING:
    from onnx import ModelProto, TensorProto, ValueInfoProto

# The names of onnx.TensorProto for the dtypes that a layer and its inputs can have.
_ONNX_TYPES = {
    torch.float32: "FLOAT",
    torch.float16: "FLOAT16",
    torch.bfloat16: "BFLOAT16",
    torch.float64: "DOUBLE",
    torch.int64: "INT64",
    torch.bool: "BOOL",
}

# An input of a node: the name of a value, "" for an omitted one, or an integer or integers that become a constant.
Input: TypeAlias = "str | int | tuple[int, ...]"


class Graph:
    """An ONNX graph that is built step by step; its nodes are in the order in which they were added.

    Raises:
        MissingPackageError: the package onnx is not installed.

    >>> graph = Graph()
    >>> x = graph.add_input("x", torch.float32, ("batch", 3))
    >>> graph.add_output(graph.add_node("Add", x, graph.add_constant(torch.ones(3))), "y", torch.float32, ("batch", 3))
    >>> [node.op_type for node in graph.build_model(opset=23, name="add one").graph.node]
    ['Add']
    """

    def __init__(self) -> None:
        require("onnx", purpose="Writing a layer as ONNX", extra="onnx")
        import onnx

        self._onnx: ModuleType = onnx
        self._nodes: list[Any] = []
        self._constants: list[TensorProto] = []
        self._inputs: list[ValueInfoProto] = []
        self._outputs: list[ValueInfoProto] = []
        self._used_names: set[str] = set()
        self._integer_constants: dict[int | tuple[int, ...], str] = {}
        self._range_values: dict[str, str] = {}

    def add_input(self, name: str, dtype: torch.dtype, sizes: Sequence[str | int | None]) -> str:
        """Declare an input; each size is a number, the name of a dynamic size, or None."""
        self._inputs.append(self._value_info(self._unique_name(name), dtype, sizes))
        return name

    def add_output(self, value: str, name: str, dtype: torch.dtype, sizes: Sequence[str | int | None]) -> None:
        """Declare a value as an output; only the value of the last node can get another name."""
        if value != name:
            assert self._nodes[-1].output[0] == value
            self._nodes[-1].output[0] = self._unique_name(name)
        self._outputs.append(self._value_info(name, dtype, sizes))

    def add_constant(self, value: Tensor, *, name: str = "constant") -> str:
        """Add a tensor of any dtype and device as a constant with the same bits, and return its name."""
        name = self._unique_name(name)
        raw = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        constant = self._onnx.helper.make_tensor(
            name, self._tensor_type(value.dtype), tuple(value.shape), raw, raw=True
        )
        self._constants.append(constant)
        return name

    def add_integers(self, values: int | tuple[int, ...]) -> str:
        """Add an integer or a list of integers, such as a shape; equal ones share one constant."""
        if values not in self._integer_constants:
            self._integer_constants[values] = self.add_constant(torch.tensor(values, dtype=torch.int64), name="ints")
        return self._integer_constants[values]

    def add_node(self, operator: str, *inputs: Input, name: str | None = None, **attributes: Any) -> str:
        """Add a node with one output and return the output's name."""
        return self.add_multi_output_node(operator, *inputs, names=[name or operator.lower()], **attributes)[0]

    def add_multi_output_node(
        self, operator: str, *inputs: Input, names: Sequence[str], **attributes: Any
    ) -> list[str]:
        """Add a node with several outputs, which have these names."""
        values = [each if isinstance(each, str) else self.add_integers(each) for each in inputs]
        outputs = [self._unique_name(name) for name in names]
        self._nodes.append(self._onnx.helper.make_node(operator, values, outputs, **attributes))
        return outputs

    def add_cast(self, value: str, dtype: torch.dtype) -> str:
        """Add a node that converts a value to a dtype."""
        return self.add_node("Cast", value, to=self._tensor_type(dtype))

    def size_of_axis(self, value: str, axis: int) -> str:
        """Add a node that returns the size of one axis of a value, int64 (1,)."""
        return self.add_node("Shape", value, start=axis, end=axis + 1, name="size")

    def range_up_to(self, count: str) -> str:
        """Add a node that returns 0, 1, 2, ... count - 1, where count is int64 (1,)."""
        if count not in self._range_values:
            self._range_values[count] = self.add_node("Range", 0, self.add_node("Squeeze", count), 1)
        return self._range_values[count]

    def build_model(
        self, *, opset: int, name: str, metadata: Mapping[str, str] | None = None, version: str = ""
    ) -> ModelProto:
        """Build a model from the graph; `version` is the version of this package."""
        helper = self._onnx.helper
        graph = helper.make_graph(self._nodes, name, self._inputs, self._outputs, self._constants)
        opsets = [helper.make_opsetid("", opset)]
        # The oldest file format with these operators, so that older runtimes can read the model.
        oldest = helper.find_min_ir_version_for(opsets)
        model: ModelProto = helper.make_model(graph, opset_imports=opsets, ir_version=oldest)
        model.producer_name, model.producer_version = "multihead", version
        helper.set_model_props(model, dict(metadata or {}))
        return model

    def _value_info(self, name: str, dtype: torch.dtype, sizes: Sequence[str | int | None]) -> ValueInfoProto:
        declared: ValueInfoProto = self._onnx.helper.make_tensor_value_info(name, self._tensor_type(dtype), list(sizes))
        return declared

    def _tensor_type(self, dtype: torch.dtype) -> int:
        return int(getattr(self._onnx.TensorProto, _ONNX_TYPES[dtype]))

    def _unique_name(self, name: str) -> str:
        """Return `name`, with a number appended if the graph already has a value of that name."""
        own, number = name, 1
        while own in self._used_names:
            number += 1
            own = f"{name}_{number}"
        self._used_names.add(own)
        return own
