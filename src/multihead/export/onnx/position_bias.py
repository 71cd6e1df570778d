"""Export a layer's position bias to nodes of an ONNX graph."""

from __future__ import annotations

import torch
from torch import Tensor

from multihead.errors import ArgumentError
from multihead.export.onnx.context import Context
from multihead.scores.bias import RelativeBias
from multihead.scores.position_biases import ALiBi, LearnedBias, T5Bias, buckets_of


def position_bias(context: Context) -> str | None:
    """Add the position bias, computed in the graph for any size, or stored as a constant if the module is not ours.

    Returns:
        (batch or 1, heads, queries, keys), in the layer's dtype; None where the layer has no position bias.

    Raises:
        ArgumentError: the layer's `position_bias` is a module that is not ours, and sizes may change.
    """
    module = context.layer.position_bias
    if module is None:
        return None
    with torch.no_grad():
        if type(module) is ALiBi:
            return _alibi(context, module)
        if type(module) is T5Bias:
            return _t5(context, module)
        if type(module) is LearnedBias:
            return _learned(context, module)
        return _constant(context, module)


def may_hide(context: Context) -> bool:
    """Whether the position bias may contain -inf, which hides a key."""
    return type(context.layer.position_bias) not in (type(None), ALiBi, T5Bias)


def _distance(context: Context) -> str:
    """Subtract the query's position from the key's: (batch or 1, 1, queries, keys), int64."""
    return context.graph.node("Sub", context.place.columns, context.place.positions, name="distance")


def _alibi(context: Context, module: ALiBi) -> str:
    graph = context.graph
    distance = graph.cast(graph.node("Abs", _distance(context)), torch.float32)
    slopes = graph.constant(-module.slopes.float().reshape(1, -1, 1, 1), name="slopes")
    return graph.cast(graph.node("Mul", distance, slopes, name="alibi"), context.dtype)


def _t5(context: Context, module: T5Bias) -> str:
    """Look each distance up in a table that ends where all further distances share one bucket."""
    graph, reach = context.graph, 2 * module.max_distance
    buckets = buckets_of(
        torch.arange(-reach, reach + 1),
        num_buckets=module.num_buckets,
        max_distance=module.max_distance,
        both_ways=module.both_ways,
    )
    table = graph.constant(module.weight.cpu()[buckets].T.to(context.dtype), name="t5")  # (heads, distances)
    near = graph.node("Max", graph.node("Min", _distance(context), graph.ints(reach)), graph.ints(-reach))
    index = graph.node("Add", graph.node("Squeeze", near, graph.ints(1)), graph.ints(reach))
    bias = graph.node("Gather", table, index, axis=1)  # (heads, batch or 1, queries, keys)
    return graph.node("Transpose", bias, perm=[1, 0, 2, 3], name="t5_bias")


def _learned(context: Context, module: LearnedBias) -> str:
    graph = context.graph
    table = graph.constant(module.weight.to(context.dtype), name="learned")  # (heads, places, key places)
    rows = graph.node("Squeeze", context.place.positions, graph.ints(1, 3))  # (batch or 1, queries)
    start = context.spec.start
    if isinstance(start, Tensor) or start == "query_start":
        # A query may be padding past the table: it takes the last row. Otherwise a position past the table is an error.
        rows = graph.node("Min", rows, graph.ints(module.queries - 1))
    if not isinstance(start, int):  # a query before the first key takes the first row
        rows = graph.node("Max", rows, graph.ints(0))
    bias = graph.node("Gather", table, rows, axis=1)  # (heads, batch or 1, queries, key places)
    bias = graph.node("Slice", bias, graph.ints(0), context.keys, graph.ints(3))
    return graph.node("Transpose", bias, perm=[1, 0, 2, 3], name="learned_bias")


def _constant(context: Context, module: torch.nn.Module) -> str:
    spec = context.spec
    queries, keys, start = spec.queries, spec.keys, spec.start
    if not isinstance(queries, int) or not isinstance(keys, int) or start == "query_start":
        raise ArgumentError(
            f"position_bias is a {type(module).__name__}, which can only be exported for fixed sizes.",
            "Fix the sizes: give queries= and keys=, and remove query_start from the inputs.",
        )
    first = keys - queries if start == "end" else start
    bias = module(queries, keys, query_start=first, device=context.layer.q_proj.weight.device, dtype=context.dtype)
    found = bias.tile(queries, keys) if isinstance(bias, RelativeBias) else bias
    return context.graph.constant(found.to(context.dtype), name="position_bias")
