"""The mask and the bias of the operator Attention: none, an attribute, lengths or a table, with the position bias."""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor

from multihead.errors import ArgumentError
from multihead.export.onnx.context import Context
from multihead.export.onnx.masks import always_sees, visible
from multihead.masks import Causal, Full
from multihead.scores.bias import RelativeBias
from multihead.scores.position_biases import ALiBi, LearnedBias, T5Bias, distance_buckets


@dataclass(frozen=True)
class MaskInputs:
    """The mask inputs of the operator; an empty name is an input that is not used.

    Attributes:
        is_causal: the attribute of that name.
        table: the input attn_mask, (batch or 1, heads or 1, queries, keys), bool or added to the scores.
        lengths: the input nonpad_kv_seqlen, (batch,).
        some: (batch or 1, heads or 1, queries or 1, 1), bool: the queries that see a key; "" where all do.
    """

    is_causal: bool = False
    table: str = ""
    lengths: str = ""
    some: str = ""


def mask_inputs(context: Context) -> MaskInputs:
    """Choose the cheapest mask inputs: none, the attribute, lengths, or a table."""
    layer, mask, spec, lengths = context.layer, context.spec.mask, context.spec, context.key_lengths
    bias = _sum_of_biases(context)
    added = layer.bias_k is not None
    sinks = layer.sinks is not None or layer.add_zero_attn
    plain = bias is None and not sinks and "keep" not in context.inputs
    if plain and lengths is None and isinstance(mask, Full):
        return MaskInputs()
    if plain and not added and lengths is None and isinstance(mask, Causal) and spec.from_zero:
        return MaskInputs(is_causal=True)
    if plain and not added and lengths is not None and isinstance(mask, Full) and spec.opset >= 24:
        counts = context.graph.node("Min", lengths, context.keys)
        return MaskInputs(lengths=counts, some=_lengths_show_some_key(context, counts) if spec.crosses else "")
    table, boolean = _mask_or_bias_table(context, _visible_cells(context), bias)
    # A token of a padded sample sees itself, or the first key; the results of padding are discarded. Every query sees a
    # key that the layer adds, and a sink takes all of the weight where no key is visible.
    hides = may_hide(context) or "bias" in context.inputs or "keep" in context.inputs
    all_see = not hides and always_sees(mask, own=spec.own) and not (lengths is not None and spec.crosses)
    some = "" if all_see or added or sinks else _see_some_key(context, table, boolean=boolean)
    if added:
        table = _with_column(context, table, torch.ones((), dtype=torch.bool) if boolean else torch.zeros(()))
    if sinks:
        table = _with_column(context, _bias_of_bool_table(context, table, boolean=boolean), sinks_of(context))
    return MaskInputs(table=table, some=some)


def sinks_of(context: Context) -> torch.Tensor:
    """Return the logits of the sinks, (1, heads, 1, 1); the key of `add_zero_attn` is a sink whose logit is 0."""
    layer = context.layer
    zero = torch.zeros(layer.num_heads)
    sinks = zero if layer.sinks is None else layer.sinks.detach().cpu().double()
    if layer.sinks is not None and layer.add_zero_attn:
        sinks = torch.logaddexp(sinks, zero.double())
    return sinks.reshape(1, -1, 1, 1)


def _sum_of_biases(context: Context) -> str | None:
    """Add the input bias and the position bias, broadcasting to (batch, heads, queries, keys); None without either."""
    bias, own = "bias" if "bias" in context.inputs else None, position_bias(context)
    return context.graph.node("Add", own, bias) if own and bias else own or bias


def _visible_cells(context: Context) -> str | None:
    """Combine mask, lengths and `keep`: bool, broadcasting to (batch, heads, queries, keys); None if all are True."""
    graph, mask = context.graph, context.spec.mask
    parts = [] if isinstance(mask, Full) else [visible(graph, mask, context.place)]
    if context.key_lengths is not None:
        counts = graph.node("Reshape", context.key_lengths, graph.ints(-1, 1, 1, 1))
        parts.append(graph.node("Less", context.place.columns, counts, name="real"))
    parts += ["keep"] if "keep" in context.inputs else []
    return reduce(lambda one, other: graph.node("And", one, other), parts) if parts else None


def _mask_or_bias_table(context: Context, seen: str | None, bias: str | None) -> tuple[str, bool]:
    """Build the table of visible keys or biases, (batch or 1, heads or 1, queries, keys); and whether it is bool."""
    graph = context.graph
    if seen is None and bias is None:
        seen = graph.constant(torch.ones(1, 1, 1, 1, dtype=torch.bool), name="full")
    table = str(bias or seen) if seen is None or bias is None else graph.node("Where", seen, bias, context.hidden)
    # Runtimes broadcast the first two dimensions only.
    sizes = graph.node("Concat", graph.ints(1, 1), context.queries, context.keys, axis=0)
    return graph.node("Expand", table, sizes, name="table"), bias is None


def _bias_of_bool_table(context: Context, table: str, *, boolean: bool) -> str:
    return context.graph.node("Where", table, context.nothing, context.hidden) if boolean else table


def _with_column(context: Context, table: str, column: torch.Tensor) -> str:
    """Prepend the column of an added key to a mask or a bias; it has one value, or one per head (1, heads, 1, 1)."""
    graph = context.graph
    if column.dim():  # the column differs per head, so each head needs its own table
        table = graph.node("Expand", table, graph.ints(*column.shape))
    sizes = graph.node("Concat", graph.node("Shape", table, start=0, end=3), graph.ints(1), axis=0)
    column = column if column.dtype == torch.bool else column.to(context.dtype)
    first = graph.node("Expand", graph.constant(column, name="column"), sizes)
    return graph.node("Concat", first, table, axis=-1, name="table")


def _see_some_key(context: Context, table: str, *, boolean: bool) -> str:
    graph = context.graph
    best = graph.node("ReduceMax", table, graph.ints(-1), keepdims=1)
    return best if boolean else graph.node("Not", graph.node("Equal", best, context.hidden), name="some")


def _lengths_show_some_key(context: Context, counts: str) -> str:
    graph = context.graph
    shaped = graph.node("Reshape", counts, graph.ints(-1, 1, 1, 1))
    return graph.node("Greater", shaped, graph.ints(0), name="some")


def position_bias(context: Context) -> str | None:
    """Return the position bias, (batch or 1, heads, queries, keys) in the layer's dtype, or None.

    It is computed in the graph for any size, or stored as a constant if the module is not ours; then an ArgumentError
    is raised if sizes may change.
    """
    module = context.layer.position_bias
    if module is None:
        return None
    with torch.no_grad():
        if type(module) is ALiBi:
            return _alibi_bias(context, module)
        if type(module) is T5Bias:
            return _t5_bias(context, module)
        if type(module) is LearnedBias:
            return _learned_bias(context, module)
        return _tensor_bias(context, module)


def may_hide(context: Context) -> bool:
    """Whether the position bias may contain -inf, which hides a key."""
    return type(context.layer.position_bias) not in (type(None), ALiBi, T5Bias)


def _distance_to_keys(context: Context) -> str:
    """Subtract the query's position from the key's: (batch or 1, 1, queries, keys), int64."""
    return context.graph.node("Sub", context.place.columns, context.place.positions, name="distance")


def _alibi_bias(context: Context, module: ALiBi) -> str:
    graph = context.graph
    distance = graph.cast(graph.node("Abs", _distance_to_keys(context)), torch.float32)
    slopes = graph.constant(-module.slopes.float().reshape(1, -1, 1, 1), name="slopes")
    return graph.cast(graph.node("Mul", distance, slopes, name="alibi"), context.dtype)


def _t5_bias(context: Context, module: T5Bias) -> str:
    """Look each distance up in a table that ends where all further distances share one bucket."""
    graph, reach = context.graph, 2 * module.max_distance
    buckets = distance_buckets(
        torch.arange(-reach, reach + 1),
        num_buckets=module.num_buckets,
        max_distance=module.max_distance,
        both_ways=module.both_ways,
    )
    table = graph.constant(module.weight.cpu()[buckets].T.to(context.dtype), name="t5")  # (heads, distances)
    near = graph.node("Max", graph.node("Min", _distance_to_keys(context), graph.ints(reach)), graph.ints(-reach))
    index = graph.node("Add", graph.node("Squeeze", near, graph.ints(1)), graph.ints(reach))
    bias = graph.node("Gather", table, index, axis=1)  # (heads, batch or 1, queries, keys)
    return graph.node("Transpose", bias, perm=[1, 0, 2, 3], name="t5_bias")


def _learned_bias(context: Context, module: LearnedBias) -> str:
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


def _tensor_bias(context: Context, module: torch.nn.Module) -> str:
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
