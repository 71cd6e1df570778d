"""Shared state of one export: the graph, its inputs, and the sizes of a call."""

from __future__ import annotations

from functools import cached_property

import torch

from multihead.export.onnx.graph import Graph
from multihead.export.onnx.masks import Place
from multihead.export.onnx.spec import INPUTS, Spec
from multihead.layer import MultiHeadAttention


class Context:
    """A graph with the inputs of a layer's call, and the names of values computed from them, each computed once.

    Args:
        graph: an empty graph.
        layer: the layer to export.
        spec: the specification of the model.

    Attributes:
        dtype: dtype of the layer and of its inputs and outputs.
        inputs: the names of the inputs.
    """

    def __init__(self, graph: Graph, layer: MultiHeadAttention, spec: Spec) -> None:
        self.graph, self.layer, self.spec = graph, layer, spec
        self.dtype: torch.dtype = layer.q_proj.weight.dtype
        self.inputs = tuple(name for name in INPUTS if name in spec.inputs)
        for name in self.inputs:
            self._declare_input(name)

    def _declare_input(self, name: str) -> None:
        spec, layer = self.spec, self.layer
        rows: dict[str, tuple[int | str, int]] = {
            "x": (spec.queries, layer.embed_dim),
            "memory": (spec.keys, layer.key_dim),
            "values": (spec.keys, layer.value_dim),
        }
        if name in rows:
            self.graph.input(name, self.dtype, (spec.batch, *rows[name]))
        elif name == "past":
            fixed = isinstance(spec.keys, int) and isinstance(spec.queries, int)
            past = int(spec.keys) - int(spec.queries) if fixed else "past"
            for part, width in (("past_key", layer.head_dim), ("past_value", layer.value_head_dim)):
                self.graph.input(part, self.dtype, (spec.batch, layer.num_kv_heads, past, width))
        elif name in ("keep", "bias", "head_gates"):
            axes = 3 if name == "head_gates" else 4
            self.graph.input(name, torch.bool if name == "keep" else self.dtype, (None,) * axes)
        else:
            self.graph.input(name, torch.int64, (spec.batch,))

    @cached_property
    def batch(self) -> str:
        """The number of samples, a list of one integer."""
        return self.graph.size("x", 0)

    @cached_property
    def queries(self) -> str:
        """The number of queries, a list of one integer."""
        return self.graph.size("x", 1)

    @cached_property
    def keys(self) -> str:
        """The number of keys without those that the layer adds, a list of one integer."""
        if self.spec.has_past:
            return self.graph.node("Add", self.graph.size("past_key", 2), self.queries)
        return self.graph.size("memory", 1) if self.spec.crosses else self.queries

    @cached_property
    def place(self) -> Place:
        """The positions of queries and keys."""
        return Place.of(self.graph, self.queries, self.keys, self.spec.start)

    @cached_property
    def nothing(self) -> str:
        """The number 0, in the layer's dtype."""
        return self.graph.constant(torch.zeros((), dtype=self.dtype), name="nothing")

    @cached_property
    def hidden(self) -> str:
        """The bias of a hidden key, -inf, in the layer's dtype."""
        return self.graph.constant(torch.tensor(-torch.inf, dtype=self.dtype), name="hidden")

    @property
    def key_lengths(self) -> str | None:
        """The input with the number of keys of each sample that are tokens, if there is one."""
        name = "memory_lengths" if self.spec.crosses else "lengths"
        return name if name in self.inputs else None

    def inside(self, lengths: str) -> str:
        """Return where there are tokens, and not padding: (batch, length, 1), bool."""
        size = self.queries if lengths == "lengths" else self.keys
        tokens = self.graph.node("Reshape", self.graph.range(size), self.graph.ints(1, -1, 1))
        counts = self.graph.node("Reshape", lengths, self.graph.ints(-1, 1, 1))
        return self.graph.node("Less", tokens, counts, name="inside")
