"""Shared state of one export: the graph, its inputs, and the sizes of a call."""

from __future__ import annotations

from functools import cached_property

import torch

from multihead.export.onnx.graph import Graph
from multihead.export.onnx.masks import PositionValues
from multihead.export.onnx.spec import ModelSpec
from multihead.layer import MultiHeadAttention


class ExportContext:
    """A graph under construction, its inputs, and names of values that several nodes use, each added once.

    Args:
        graph: an empty graph.
        layer: the layer to export.
        spec: inputs, mask and sizes of the exported model.

    Attributes:
        dtype: dtype of the layer and of its inputs and outputs.
    """

    def __init__(self, graph: Graph, layer: MultiHeadAttention, spec: ModelSpec) -> None:
        self.graph, self.layer, self.spec = graph, layer, spec
        self.dtype: torch.dtype = layer.q_proj.weight.dtype
        past = spec.keys - spec.queries if isinstance(spec.keys, int) and isinstance(spec.queries, int) else "past"
        inputs: dict[str, tuple[torch.dtype, tuple[int | str | None, ...]]] = {
            "x": (self.dtype, (spec.batch, spec.queries, layer.embed_dim)),
            "memory": (self.dtype, (spec.batch, spec.keys, layer.key_dim)),
            "values": (self.dtype, (spec.batch, spec.keys, layer.value_dim)),
            "past_key": (self.dtype, (spec.batch, layer.num_kv_heads, past, layer.head_dim)),
            "past_value": (self.dtype, (spec.batch, layer.num_kv_heads, past, layer.value_head_dim)),
            "lengths": (torch.int64, (spec.batch,)),
            "memory_lengths": (torch.int64, (spec.batch,)),
            "keep": (torch.bool, (None,) * 4),
            "bias": (self.dtype, (None,) * 4),
            "head_gates": (self.dtype, (None,) * 3),
            "query_start": (torch.int64, (spec.batch,)),
        }
        for name, (dtype, sizes) in inputs.items():
            if name in spec.inputs or (spec.has_past and name in ("past_key", "past_value")):
                graph.add_input(name, dtype, sizes)

    @cached_property
    def batch_size(self) -> str:
        """Name of the value with the number of samples, int64 (1,)."""
        return self.graph.size_of_axis("x", 0)

    @cached_property
    def query_count(self) -> str:
        """Name of the value with the number of queries, int64 (1,)."""
        return self.graph.size_of_axis("x", 1)

    @cached_property
    def key_count(self) -> str:
        """Name of the value with the number of keys, int64 (1,), without keys that the layer adds."""
        if self.spec.has_past:
            return self.graph.add_node("Add", self.graph.size_of_axis("past_key", 2), self.query_count)
        return self.graph.size_of_axis("memory", 1) if self.spec.is_cross_attention else self.query_count

    @cached_property
    def position_values(self) -> PositionValues:
        """The graph values with the positions of queries and keys."""
        return PositionValues.from_sizes(self.graph, self.query_count, self.key_count, self.spec.start)

    @cached_property
    def zero_constant(self) -> str:
        """Name of the constant 0, in the layer's dtype."""
        return self.graph.add_constant(torch.zeros((), dtype=self.dtype), name="nothing")

    @cached_property
    def hidden_bias(self) -> str:
        """Name of the constant -inf, the bias of a hidden key, in the layer's dtype."""
        return self.graph.add_constant(torch.tensor(-torch.inf, dtype=self.dtype), name="hidden")

    @property
    def key_lengths(self) -> str | None:
        """Name of the input with each sample's number of keys, without padding; None if there is no such input."""
        name = "memory_lengths" if self.spec.is_cross_attention else "lengths"
        return name if name in self.spec.inputs else None

    def token_mask(self, lengths: str) -> str:
        """Add nodes that compute which positions are not padding: (batch, length, 1), bool."""
        size = self.query_count if lengths == "lengths" else self.key_count
        tokens = self.graph.add_node("Reshape", self.graph.range_up_to(size), (1, -1, 1))
        counts = self.graph.add_node("Reshape", lengths, (-1, 1, 1))
        return self.graph.add_node("Less", tokens, counts, name="inside")
