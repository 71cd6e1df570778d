"""What a layer's position bias adds to the scores, in nodes of an ONNX graph."""

from __future__ import annotations

import torch
from torch import Tensor

from multihead.errors import ArgumentError
from multihead.export.onnx.context import Ground
from multihead.scores.alibi import ALiBi
from multihead.scores.learned import LearnedBias
from multihead.scores.relative import RelativeBias
from multihead.scores.t5 import T5Bias, buckets_of


def position_bias(ground: Ground) -> str | None:
    """(batch or 1, heads, queries, keys), in the layer's dtype; None where the layer has no position bias.

    The bias is computed in the graph for any size; of a module that is not ours it is written down as it is for one
    size.

    Raises:
        ArgumentError: the layer's `position_bias` is a module that is not ours, and sizes may change.
    """
    module = ground.layer.position_bias
    if module is None:
        return None
    with torch.no_grad():
        if type(module) is ALiBi:
            return _alibi(ground, module)
        if type(module) is T5Bias:
            return _t5(ground, module)
        if type(module) is LearnedBias:
            return _learned(ground, module)
        return _written_down(ground, module)


def may_hide(ground: Ground) -> bool:
    """Whether the position bias may hold -inf, which hides a key."""
    return type(ground.layer.position_bias) not in (type(None), ALiBi, T5Bias)


def _distance(ground: Ground) -> str:
    """(batch or 1, 1, queries, keys), int64: key - position of the query."""
    return ground.graph.node("Sub", ground.place.columns, ground.place.positions, name="distance")


def _alibi(ground: Ground, module: ALiBi) -> str:
    graph = ground.graph
    distance = graph.cast(graph.node("Abs", _distance(ground)), torch.float32)
    slopes = graph.constant(-module.slopes.float().reshape(1, -1, 1, 1), name="slopes")
    return graph.cast(graph.node("Mul", distance, slopes, name="alibi"), ground.dtype)


def _t5(ground: Ground, module: T5Bias) -> str:
    """Look each distance up in a table that goes as far as there are different buckets."""
    graph, reach = ground.graph, 2 * module.max_distance
    buckets = buckets_of(
        torch.arange(-reach, reach + 1),
        num_buckets=module.num_buckets,
        max_distance=module.max_distance,
        both_ways=module.both_ways,
    )
    table = graph.constant(module.weight.cpu()[buckets].T.to(ground.dtype), name="t5")  # (heads, distances)
    near = graph.node("Max", graph.node("Min", _distance(ground), graph.ints(reach)), graph.ints(-reach))
    index = graph.node("Add", graph.node("Squeeze", near, graph.ints(1)), graph.ints(reach))
    found = graph.node("Gather", table, index, axis=1)  # (heads, batch or 1, queries, keys)
    return graph.node("Transpose", found, perm=[1, 0, 2, 3], name="t5_bias")


def _learned(ground: Ground, module: LearnedBias) -> str:
    graph = ground.graph
    table = graph.constant(module.weight.to(ground.dtype), name="learned")  # (heads, places, key places)
    rows = graph.node("Squeeze", ground.place.positions, graph.ints(1, 3))  # (batch or 1, queries)
    start = ground.wanted.start
    if isinstance(start, Tensor) or start == "query_start":
        # A query may be padding that stands at no place: it takes the nearest. Elsewhere, one too far is an error.
        rows = graph.node("Min", rows, graph.ints(module.queries - 1))
    if not isinstance(start, int):  # so does one that stands before the first key
        rows = graph.node("Max", rows, graph.ints(0))
    found = graph.node("Gather", table, rows, axis=1)  # (heads, batch or 1, queries, key places)
    found = graph.node("Slice", found, graph.ints(0), ground.keys, graph.ints(3))
    return graph.node("Transpose", found, perm=[1, 0, 2, 3], name="learned_bias")


def _written_down(ground: Ground, module: torch.nn.Module) -> str:
    wanted = ground.wanted
    queries, keys, start = wanted.queries, wanted.keys, wanted.start
    if not isinstance(queries, int) or not isinstance(keys, int) or start == "query_start":
        raise ArgumentError(
            f"position_bias is a {type(module).__name__}, whose values are not known for all sizes.",
            "Fix the sizes: give queries=, keys= and no query_start among the inputs.",
        )
    first = keys - queries if start == "end" else start
    bias = module(queries, keys, query_start=first, device=ground.layer.q_proj.weight.device, dtype=ground.dtype)
    found = bias.tile(queries, keys) if isinstance(bias, RelativeBias) else bias
    return ground.graph.constant(found.to(ground.dtype), name="position_bias")
