"""Export masks to nodes of an ONNX graph, for sizes that are unknown at export."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial, reduce
from typing import Literal, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from multihead.errors import MaskError
from multihead.export.onnx.graph import Graph
from multihead.masks import Causal, Documents, Drop, Full, Keep, Lengths, Mask, Prefix, Window
from multihead.masks.base import And, Or
from multihead.masks.leading_keys import LeadingKeys
from multihead.masks.tensor import AXES

QueryStart: TypeAlias = 'int | Tensor | Literal["end", "query_start"]'


@dataclass(frozen=True)
class PositionValues:
    """Names of the int64 graph values that hold the positions of queries and keys.

    Attributes:
        queries: (batch or 1, 1, queries, 1), the position of each query among the keys.
        keys: (1, 1, 1, keys), the key indices.
        leading_keys: number of keys before the key with index 0 (see `LeadingKeys`).
    """

    queries: str
    keys: str
    leading_keys: int = 0

    @staticmethod
    def from_sizes(graph: Graph, num_queries: str, num_keys: str, start: QueryStart) -> PositionValues:
        """Add nodes that compute the positions; `num_queries` and `num_keys` are names of int64 values (1,).

        `start` is the position of the first query: an int, a tensor (batch,), "end", or "query_start", an input
        (batch,).
        """
        rows = graph.add_node("Reshape", graph.range_up_to(num_queries), (1, 1, -1, 1), name="rows")
        columns = graph.add_node("Reshape", graph.range_up_to(num_keys), (1, 1, 1, -1), name="columns")
        if isinstance(start, int) and not start:
            return PositionValues(rows, columns)
        if isinstance(start, Tensor):
            first = graph.add_constant(start.to(torch.int64).reshape(-1, 1, 1, 1), name="query_start")
        elif isinstance(start, int):
            first = graph.add_integers((start,))
        elif start == "end":
            first = graph.add_node("Sub", num_keys, num_queries, name="query_start")
        else:
            first = graph.add_node("Reshape", start, (-1, 1, 1, 1))
        return PositionValues(graph.add_node("Add", rows, first, name="positions"), columns)


def export_mask(graph: Graph, mask: Mask, positions: PositionValues) -> str:
    """Add nodes that compute a mask: bool, broadcasting to (batch, heads, queries, keys), True = visible."""
    if isinstance(mask, (And, Or)):  # their names are those of the operators
        parts = (export_mask(graph, part, positions) for part in mask.parts)
        return reduce(partial(graph.add_node, type(mask).__name__), parts)
    if isinstance(mask, LeadingKeys):
        return _after_leading_keys(graph, mask, positions)
    if isinstance(mask, (Keep, Drop)):
        tensor = mask.visible_cells()
        if tensor.shape[3] > 1:
            tensor = F.pad(tensor, (positions.leading_keys, 0))  # the values of leading keys are never used
        return graph.add_constant(tensor, name="keep")
    if isinstance(mask, Full):
        return graph.add_constant(torch.ones(1, 1, 1, 1, dtype=torch.bool), name="full")
    if isinstance(mask, Causal):
        return graph.add_node("LessOrEqual", positions.keys, positions.queries, name="causal")
    if isinstance(mask, Window):
        low = graph.add_node("Sub", positions.queries, (mask.size,))
        high = graph.add_node("Add", positions.queries, (mask.after,))
        after = graph.add_node("Greater", positions.keys, low)
        before = graph.add_node("LessOrEqual", positions.keys, high)
        return graph.add_node("And", after, before, name="window")
    if isinstance(mask, (Lengths, Prefix)):
        counts = torch.as_tensor(mask.lengths if isinstance(mask, Lengths) else mask.length, dtype=torch.int64)
        shape = (counts.shape[0], 1, -1, 1) if counts.dim() == 2 else (-1, 1, 1, 1)
        return graph.add_node("Less", positions.keys, graph.add_constant(counts.reshape(shape), name="lengths"))
    if isinstance(mask, Documents):
        return _same_document(graph, mask, positions)
    raise MaskError(
        f"{mask!r} cannot be exported to ONNX.",
        "Use the masks of multihead.masks, or masks.Keep with a tensor of the exported sizes.",
    )


def _after_leading_keys(graph: Graph, mask: LeadingKeys, positions: PositionValues) -> str:
    """Add nodes for a LeadingKeys: every query sees the leading keys; the inner mask covers the others."""
    count = graph.add_integers((mask.count,))
    inner = PositionValues(
        graph.add_node("Sub", positions.queries, count, name="positions"),
        graph.add_node("Sub", positions.keys, count, name="columns"),
        positions.leading_keys + mask.count,
    )
    before = graph.add_node("Less", positions.keys, count)
    after = graph.add_node("And", export_mask(graph, mask.mask, inner), graph.add_node("Not", before))
    return graph.add_node("Or", before, after, name="leading_keys")


def _same_document(graph: Graph, mask: Documents, positions: PositionValues) -> str:
    """Add nodes that compare the document indices (the number of ends at or before a position) of queries and keys."""
    ends = torch.as_tensor(mask.lengths, dtype=torch.int64).cumsum(-1)
    count = ends.shape[-1]
    if not count:
        return graph.add_constant(torch.zeros(1, 1, 1, 1, dtype=torch.bool), name="nothing")
    table = graph.add_constant(ends.reshape(-1, 1, 1, count), name="ends")

    def document_of(positions: str) -> str:  # (batch or 1, 1, n, 1) -> the same
        passed = graph.add_cast(graph.add_node("GreaterOrEqual", positions, table), torch.int64)
        return graph.add_node("ReduceSum", passed, (-1,), keepdims=1, name="document")

    of_query = document_of(positions.queries)
    columns = graph.add_node("Reshape", positions.keys, (1, 1, -1, 1))
    of_key = graph.add_node("Transpose", document_of(columns), perm=[0, 1, 3, 2])
    ends_later = graph.add_node("Less", of_query, (count,))
    inside = graph.add_node("And", ends_later, graph.add_node("GreaterOrEqual", positions.queries, (0,)))
    return graph.add_node("And", graph.add_node("Equal", of_query, of_key), inside, name="same_document")


def fixed_sizes(mask: Mask) -> dict[str, int]:
    """Return the sizes of the tensors and lists in a mask, by axis; raise a MaskError if two sizes of one axis differ.

    >>> fixed_sizes(Causal() & Lengths((5, 3)))
    {'batch': 2}
    """
    sizes: dict[str, int] = {}
    for axis, size in _sizes_fixed_by(mask):
        if sizes.setdefault(axis, size) != size:
            raise MaskError(
                f"{mask!r} has parts with {sizes[axis]} {axis} and parts with {size}.",
                "Give its parts the same sizes.",
            )
    return sizes


def _sizes_fixed_by(mask: Mask, leading_keys: int = 0) -> Iterator[tuple[str, int]]:
    """Yield the axes and sizes of the tensors and lists in a mask, except those of size 1, which broadcast."""
    if isinstance(mask, (And, Or)):
        for part in mask.parts:
            yield from _sizes_fixed_by(part, leading_keys)
    elif isinstance(mask, LeadingKeys):
        yield from _sizes_fixed_by(mask.mask, leading_keys + mask.count)
    elif isinstance(mask, (Keep, Drop)):
        for axis, size in zip(AXES, mask.four_dimensional().shape, strict=True):
            if size != 1:
                yield axis, size + (leading_keys if axis == "keys" else 0)
    elif isinstance(mask, (Lengths, Prefix, Documents)):
        shape = torch.as_tensor(mask.length if isinstance(mask, Prefix) else mask.lengths).shape
        fixed = shape[:-1] if isinstance(mask, Documents) else shape  # the last axis of Documents is the document
        for axis, size in zip(("batch", "queries"), fixed, strict=False):
            if size != 1 or axis == "queries":
                yield axis, size


def every_query_sees_key(mask: Mask, *, own_keys: bool) -> bool:
    """Whether every query sees a key at all sizes; `own_keys`: whether there is a key at each query's own position.

    >>> every_query_sees_key(Causal() & Window(3), own_keys=True), every_query_sees_key(Lengths((5, 0)), own_keys=True)
    (True, False)
    """
    if isinstance(mask, And):  # the key at the query's position is visible if every combined mask shows it
        return own_keys and all(isinstance(part, (Full, Causal, Window)) for part in mask.parts)
    if isinstance(mask, Or):
        return any(every_query_sees_key(part, own_keys=own_keys) for part in mask.parts)
    if isinstance(mask, LeadingKeys):
        return mask.count > 0 or every_query_sees_key(mask.mask, own_keys=own_keys)
    if isinstance(mask, Prefix) and isinstance(mask.length, int):
        return mask.length > 0
    return isinstance(mask, Full) or (own_keys and isinstance(mask, (Causal, Window)))
