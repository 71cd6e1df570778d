"""Export masks to nodes of an ONNX graph, for sizes that are unknown at export."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import reduce
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

Start: TypeAlias = 'int | Tensor | Literal["end", "query_start"]'


@dataclass(frozen=True)
class Place:
    """The names of the values with the positions of queries and keys, all int64.

    Attributes:
        positions: (batch or 1, 1, queries, 1), the key index of each query's position.
        columns: (1, 1, 1, keys), the key indices.
        before: number of keys before the one with index 0.
    """

    positions: str
    columns: str
    before: int = 0

    @staticmethod
    def of(graph: Graph, queries: str, keys: str, start: Start) -> Place:
        """Add the nodes of the positions to a graph, given the numbers of queries and keys as lists of one integer.

        The position of the first query is an int, a tensor (batch,), "end", or "query_start", an input (batch,).
        """
        rows = graph.node("Reshape", graph.range(queries), graph.ints(1, 1, -1, 1), name="rows")
        columns = graph.node("Reshape", graph.range(keys), graph.ints(1, 1, 1, -1), name="columns")
        if isinstance(start, int) and not start:
            return Place(rows, columns)
        if isinstance(start, Tensor):
            first = graph.constant(start.to(torch.int64).reshape(-1, 1, 1, 1), name="query_start")
        elif isinstance(start, int):
            first = graph.ints(start)
        elif start == "end":
            first = graph.node("Sub", keys, queries, name="query_start")
        else:
            first = graph.node("Reshape", start, graph.ints(-1, 1, 1, 1))
        return Place(graph.node("Add", rows, first, name="positions"), columns)


def visible(graph: Graph, mask: Mask, place: Place) -> str:
    """Add the nodes of a mask, as `Mask.tile`: bool, broadcasting to (batch, heads, queries, keys), True = visible."""
    if isinstance(mask, And):
        return reduce(lambda one, other: graph.node("And", one, other), (visible(graph, p, place) for p in mask.parts))
    if isinstance(mask, Or):
        return reduce(lambda one, other: graph.node("Or", one, other), (visible(graph, p, place) for p in mask.parts))
    if isinstance(mask, LeadingKeys):
        return _after_leading_keys(graph, mask, place)
    if isinstance(mask, (Keep, Drop)):
        tensor = mask.kept()
        if tensor.shape[3] > 1:
            tensor = F.pad(tensor, (place.before, 0))  # the values of these columns are never used
        return graph.constant(tensor, name="keep")
    if isinstance(mask, Full):
        return graph.constant(torch.ones(1, 1, 1, 1, dtype=torch.bool), name="full")
    if isinstance(mask, Causal):
        return graph.node("LessOrEqual", place.columns, place.positions, name="causal")
    if isinstance(mask, Window):
        low = graph.node("Sub", place.positions, graph.ints(mask.size))
        high = graph.node("Add", place.positions, graph.ints(mask.after))
        after, before = graph.node("Greater", place.columns, low), graph.node("LessOrEqual", place.columns, high)
        return graph.node("And", after, before, name="window")
    if isinstance(mask, (Lengths, Prefix)):
        counts = torch.as_tensor(mask.lengths if isinstance(mask, Lengths) else mask.length, dtype=torch.int64)
        shape = (counts.shape[0], 1, -1, 1) if counts.dim() == 2 else (-1, 1, 1, 1)
        return graph.node("Less", place.columns, graph.constant(counts.reshape(shape), name="lengths"))
    if isinstance(mask, Documents):
        return _same_document(graph, mask, place)
    raise MaskError(
        f"{mask!r} cannot be exported to ONNX.",
        "Use the masks of multihead.masks, or masks.Keep with a tensor of the exported sizes.",
    )


def _after_leading_keys(graph: Graph, mask: LeadingKeys, place: Place) -> str:
    """Shift the inner mask past the leading keys, which every query sees."""
    if not mask.count:
        return visible(graph, mask.mask, place)
    count = graph.ints(mask.count)
    inner = Place(
        graph.node("Sub", place.positions, count, name="positions"),
        graph.node("Sub", place.columns, count, name="columns"),
        place.before + mask.count,
    )
    before = graph.node("Less", place.columns, count)
    after = graph.node("And", visible(graph, mask.mask, inner), graph.node("Not", before))
    return graph.node("Or", before, after, name="leading_keys")


def _same_document(graph: Graph, mask: Documents, place: Place) -> str:
    """Compare the documents of queries and keys; a document's index is the number of ends at or before a position."""
    ends = torch.as_tensor(mask.lengths, dtype=torch.int64).cumsum(-1)
    count = ends.shape[-1]
    if not count:
        return graph.constant(torch.zeros(1, 1, 1, 1, dtype=torch.bool), name="nothing")
    table = graph.constant(ends.reshape(-1, 1, 1, count), name="ends")

    def document_of(positions: str) -> str:  # (batch or 1, 1, n, 1) -> the same
        passed = graph.cast(graph.node("GreaterOrEqual", positions, table), torch.int64)
        return graph.node("ReduceSum", passed, graph.ints(-1), keepdims=1, name="document")

    of_query = document_of(place.positions)
    columns = graph.node("Reshape", place.columns, graph.ints(1, 1, -1, 1))
    of_key = graph.node("Transpose", document_of(columns), perm=[0, 1, 3, 2])
    inside = graph.node(
        "And",
        graph.node("Less", of_query, graph.ints(count)),
        graph.node("GreaterOrEqual", place.positions, graph.ints(0)),
    )
    return graph.node("And", graph.node("Equal", of_query, of_key), inside, name="same_document")


def sizes_of(mask: Mask) -> dict[str, int]:
    """Return the sizes that the tensors and lists of a mask fix, by axis; raise a MaskError where two parts differ.

    >>> sizes_of(Causal() & Lengths((5, 3)))
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


def _sizes_fixed_by(mask: Mask, before: int = 0) -> Iterator[tuple[str, int]]:
    """Yield the axes and sizes of the tensors and lists in a mask, except those of size 1, which broadcast."""
    if isinstance(mask, (And, Or)):
        for part in mask.parts:
            yield from _sizes_fixed_by(part, before)
    elif isinstance(mask, LeadingKeys):
        yield from _sizes_fixed_by(mask.mask, before + mask.count)
    elif isinstance(mask, (Keep, Drop)):
        for axis, size in zip(AXES, mask.four_dimensional().shape, strict=True):
            if size != 1:
                yield axis, size + (before if axis == "keys" else 0)
    elif isinstance(mask, (Lengths, Prefix, Documents)):
        shape = torch.as_tensor(mask.length if isinstance(mask, Prefix) else mask.lengths).shape
        axes = ("batch", "queries") if len(shape) == 2 or not isinstance(mask, Documents) else ()
        for axis, size in zip(axes[: 1 if isinstance(mask, Documents) else 2], shape, strict=False):
            if size != 1 or axis == "queries":
                yield axis, size


def always_sees(mask: Mask, *, own: bool) -> bool:
    """Return whether every query sees a key, for all sizes; `own` = there is a key at each query's own position.

    >>> always_sees(Causal() & Window(3), own=True), always_sees(Lengths((5, 0)), own=True)
    (True, False)
    """
    if isinstance(mask, And):  # the query's own key is visible if every part shows it
        return own and all(isinstance(part, (Full, Causal, Window)) for part in mask.parts)
    if isinstance(mask, Or):
        return any(always_sees(part, own=own) for part in mask.parts)
    if isinstance(mask, LeadingKeys):
        return mask.count > 0 or always_sees(mask.mask, own=own)
    if isinstance(mask, Prefix) and isinstance(mask.length, int):
        return mask.length > 0
    return isinstance(mask, Full) or (own and isinstance(mask, (Causal, Window)))
