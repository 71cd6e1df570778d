"""What all parts of an exported layer stand on: its graph, its inputs, and the sizes of the call."""

from __future__ import annotations

from functools import cached_property

import torch

from multihead.export.onnx.graph import Graph
from multihead.export.onnx.masks import Place
from multihead.export.onnx.spec import INPUTS, Asked
from multihead.layer import MultiHeadAttention


class Ground:
    """A graph with the inputs of a layer's call, and the names of what is read off them, each read once.

    Args:
        graph: an empty one.
        layer: what is written.
        wanted: what the model takes.

    Fields:
        dtype: of the layer and of all that flows through it.
        inputs: the names of the inputs there are.
    """

    def __init__(self, graph: Graph, layer: MultiHeadAttention, wanted: Asked) -> None:
        self.graph, self.layer, self.wanted = graph, layer, wanted
        self.dtype: torch.dtype = layer.q_proj.weight.dtype
        self.inputs = tuple(name for name in INPUTS if name in wanted.inputs)
        for name in self.inputs:
            self._declare(name)

    def _declare(self, name: str) -> None:
        wanted, layer = self.wanted, self.layer
        rows: dict[str, tuple[int | str, int]] = {
            "x": (wanted.queries, layer.embed_dim),
            "memory": (wanted.keys, layer.key_dim),
            "values": (wanted.keys, layer.value_dim),
        }
        if name in rows:
            self.graph.input(name, self.dtype, (wanted.batch, *rows[name]))
        elif name == "past":
            fixed = isinstance(wanted.keys, int) and isinstance(wanted.queries, int)
            past = int(wanted.keys) - int(wanted.queries) if fixed else "past"
            for part, width in (("past_key", layer.head_dim), ("past_value", layer.value_head_dim)):
                self.graph.input(part, self.dtype, (wanted.batch, layer.num_kv_heads, past, width))
        elif name in ("keep", "bias", "head_gates"):
            axes = 3 if name == "head_gates" else 4
            self.graph.input(name, torch.bool if name == "keep" else self.dtype, (None,) * axes)
        else:
            self.graph.input(name, torch.int64, (wanted.batch,))

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
        """The number of keys, a list of one integer; those that the layer adds are not counted."""
        if self.wanted.goes_on:
            return self.graph.node("Add", self.graph.size("past_key", 2), self.queries)
        return self.graph.size("memory", 1) if self.wanted.crosses else self.queries

    @cached_property
    def place(self) -> Place:
        """Where queries and keys stand."""
        return Place.of(self.graph, self.queries, self.keys, self.wanted.start)

    @cached_property
    def nothing(self) -> str:
        """The number 0, in the layer's dtype."""
        return self.graph.constant(torch.zeros((), dtype=self.dtype), name="nothing")

    @cached_property
    def hidden(self) -> str:
        """What is added to the score of a key that is hidden: -inf."""
        return self.graph.constant(torch.tensor(-torch.inf, dtype=self.dtype), name="hidden")

    @property
    def key_lengths(self) -> str | None:
        """The input that says how many keys of a sample are tokens, if there is one."""
        name = "memory_lengths" if self.wanted.crosses else "lengths"
        return name if name in self.inputs else None

    def inside(self, lengths: str) -> str:
        """(batch, length, 1), bool: True = a token, False = padding."""
        size = self.queries if lengths == "lengths" else self.keys
        tokens = self.graph.node("Reshape", self.graph.range(size), self.graph.ints(1, -1, 1))
        counts = self.graph.node("Reshape", lengths, self.graph.ints(-1, 1, 1))
        return self.graph.node("Less", tokens, counts, name="inside")
