"""Choose the mask inputs of the operator Attention: none, `is_causal`, lengths, or a tensor of mask and biases."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, reduce
from types import NoneType
from typing import Any

import torch
from torch import Tensor

from multihead.errors import ArgumentError
from multihead.export.onnx.context import ExportContext
from multihead.export.onnx.masks import every_query_sees_key, export_mask
from multihead.masks import Causal, Full
from multihead.scores.bias import RelativeBias
from multihead.scores.position_biases import ALiBi, LearnedBias, T5Bias, distance_buckets


@dataclass(frozen=True)
class MaskInputs:
    """The mask inputs of the operator Attention; "" is an input that is not used.

    Attributes:
        is_causal: the value of the attribute is_causal of Attention.
        attn_mask: the input attn_mask, (batch or 1, heads or 1, queries, keys), bool or added to the scores.
        lengths: the input nonpad_kv_seqlen, (batch,).
        queries_with_keys: which queries see a key, (batch or 1, heads or 1, queries or 1, 1), bool; "" if all do.
    """

    is_causal: bool = False
    attn_mask: str = ""
    lengths: str = ""
    queries_with_keys: str = ""


def choose_mask_inputs(context: ExportContext) -> MaskInputs:
    """Choose the cheapest mask inputs of Attention: none, the attribute `is_causal`, lengths, or a mask tensor."""
    layer, mask, spec, lengths = context.layer, context.spec.mask, context.spec, context.key_lengths
    given, own = "bias" if "bias" in spec.inputs else None, position_bias(context)
    bias = context.graph.add_node("Add", own, given) if own and given else own or given
    added = layer.bias_k is not None
    sinks = layer.sinks is not None or layer.add_zero_attn
    plain = bias is None and not sinks and "keep" not in spec.inputs
    if plain and lengths is None and isinstance(mask, Full):
        return MaskInputs()
    if plain and not added and lengths is None and isinstance(mask, Causal) and spec.starts_at_zero:
        return MaskInputs(is_causal=True)
    if plain and not added and lengths is not None and isinstance(mask, Full) and spec.opset >= 24:
        counts = context.graph.add_node("Min", lengths, context.key_count)
        if not spec.is_cross_attention:
            return MaskInputs(lengths=counts)
        by_sample = context.graph.add_node("Reshape", counts, (-1, 1, 1, 1))
        positive = context.graph.add_node("Greater", by_sample, (0,), name="some")
        return MaskInputs(lengths=counts, queries_with_keys=positive)
    table, boolean = _mask_or_bias_table(context, _visible_cells(context), bias)
    # Whether some query may see no key. In a padded sample each token sees itself or the first key, and results of
    # padding are discarded. Every query sees added keys and sinks.
    may_hide_key = (
        type(layer.position_bias) not in (NoneType, ALiBi, T5Bias)
        or not spec.inputs.isdisjoint(("bias", "keep"))
        or not every_query_sees_key(mask, own_keys=spec.has_own_keys)
        or (lengths is not None and spec.is_cross_attention)
    )
    queries_with_keys = ""
    if may_hide_key and not added and not sinks:
        queries_with_keys = _queries_seeing_a_key(context, table, boolean=boolean)
    if added:
        table = _prepend_column(context, table, torch.ones((), dtype=torch.bool) if boolean else torch.zeros(()))
    if sinks:
        if boolean:
            table = context.graph.add_node("Where", table, context.zero_constant, context.hidden_bias)
        table = _prepend_column(context, table, sink_logits(context))
    return MaskInputs(attn_mask=table, queries_with_keys=queries_with_keys)


def sink_logits(context: ExportContext) -> torch.Tensor:
    """Return the logits of the sinks, (1, heads, 1, 1); the key of `add_zero_attn` is a sink whose logit is 0."""
    layer = context.layer
    zero = torch.zeros(layer.num_heads)
    sinks = zero if layer.sinks is None else layer.sinks.detach().cpu().double()
    if layer.sinks is not None and layer.add_zero_attn:
        sinks = torch.logaddexp(sinks, zero.double())
    return sinks.reshape(1, -1, 1, 1)


def _visible_cells(context: ExportContext) -> str | None:
    """Combine mask, lengths and `keep`: bool, broadcasting to (batch, heads, queries, keys); None if all are True."""
    graph, mask = context.graph, context.spec.mask
    parts = [] if isinstance(mask, Full) else [export_mask(graph, mask, context.position_values)]
    if context.key_lengths is not None:
        counts = graph.add_node("Reshape", context.key_lengths, (-1, 1, 1, 1))
        parts.append(graph.add_node("Less", context.position_values.keys, counts, name="real"))
    parts += ["keep"] if "keep" in context.spec.inputs else []
    return reduce(partial(graph.add_node, "And"), parts) if parts else None


def _mask_or_bias_table(context: ExportContext, seen: str | None, bias: str | None) -> tuple[str, bool]:
    """Merge mask and bias to one tensor, (batch or 1, heads or 1, queries, keys), and return whether it is bool."""
    graph = context.graph
    if seen and bias:
        table = graph.add_node("Where", seen, bias, context.hidden_bias)
    else:
        table = bias or seen or graph.add_constant(torch.ones(1, 1, 1, 1, dtype=torch.bool), name="full")
    # Runtimes broadcast a mask over batch and heads only, so queries and keys are expanded here.
    sizes = graph.add_node("Concat", (1, 1), context.query_count, context.key_count, axis=0)
    return graph.add_node("Expand", table, sizes, name="table"), bias is None


def _prepend_column(context: ExportContext, table: str, column: torch.Tensor) -> str:
    """Prepend the column of an added key to a mask or a bias; the column is one value, or (1, heads, 1, 1)."""
    graph = context.graph
    if column.dim():  # the added column differs between heads, so the mask or bias gets a head axis
        table = graph.add_node("Expand", table, column.shape)
    sizes = graph.add_node("Concat", graph.add_node("Shape", table, start=0, end=3), (1,), axis=0)
    column = column if column.dtype == torch.bool else column.to(context.dtype)
    first = graph.add_node("Expand", graph.add_constant(column, name="column"), sizes)
    return graph.add_node("Concat", first, table, axis=-1, name="table")


def _queries_seeing_a_key(context: ExportContext, table: str, *, boolean: bool) -> str:
    graph = context.graph
    best = graph.add_node("ReduceMax", table, (-1,), keepdims=1)
    return best if boolean else graph.add_node("Not", graph.add_node("Equal", best, context.hidden_bias), name="some")


def position_bias(context: ExportContext) -> str | None:
    """Return the position bias, (batch or 1, heads, queries, keys) in the layer's dtype, or None.

    The graph computes the bias of ALiBi, T5Bias and LearnedBias for any size. The bias of another module is stored as a
    constant, and an ArgumentError is raised if its sizes may change.
    """
    module = context.layer.position_bias
    if module is None:
        return None
    functions: dict[type, Callable[[ExportContext, Any], str]]
    functions = {ALiBi: _alibi_bias, T5Bias: _t5_bias, LearnedBias: _learned_bias}
    with torch.no_grad():
        return functions.get(type(module), _constant_bias)(context, module)


def _distance_to_keys(context: ExportContext) -> str:
    """Subtract the query's position from the key's: (batch or 1, 1, queries, keys), int64."""
    return context.graph.add_node("Sub", context.position_values.keys, context.position_values.queries, name="distance")


def _alibi_bias(context: ExportContext, module: ALiBi) -> str:
    graph = context.graph
    distance = graph.add_cast(graph.add_node("Abs", _distance_to_keys(context)), torch.float32)
    slopes = graph.add_constant(-module.slopes.float().reshape(1, -1, 1, 1), name="slopes")
    return graph.add_cast(graph.add_node("Mul", distance, slopes, name="alibi"), context.dtype)


def _t5_bias(context: ExportContext, module: T5Bias) -> str:
    """Look up the bias of each distance in a table up to 2 * max_distance, where larger distances share one bucket."""
    graph, reach = context.graph, 2 * module.max_distance
    buckets = distance_buckets(
        torch.arange(-reach, reach + 1),
        num_buckets=module.num_buckets,
        max_distance=module.max_distance,
        both_ways=module.both_ways,
    )
    table = graph.add_constant(module.weight.cpu()[buckets].T.to(context.dtype), name="t5")  # (heads, distances)
    near = graph.add_node("Max", graph.add_node("Min", _distance_to_keys(context), (reach,)), (-reach,))
    index = graph.add_node("Add", graph.add_node("Squeeze", near, (1,)), (reach,))
    bias = graph.add_node("Gather", table, index, axis=1)  # (heads, batch or 1, queries, keys)
    return graph.add_node("Transpose", bias, perm=[1, 0, 2, 3], name="t5_bias")


def _learned_bias(context: ExportContext, module: LearnedBias) -> str:
    graph = context.graph
    # (heads, query positions, key positions).
    table = graph.add_constant(module.weight.to(context.dtype), name="learned")
    # rows are (batch or 1, queries).
    rows = graph.add_node("Squeeze", context.position_values.queries, (1, 3))
    start = context.spec.start
    if isinstance(start, Tensor) or start == "query_start":
        # Queries past the learned positions use the last row here, because they may be padding; for a fixed start they
        # are an error.
        rows = graph.add_node("Min", rows, (module.queries - 1,))
    if not isinstance(start, int):  # a query before the first key takes the first row
        rows = graph.add_node("Max", rows, (0,))
    bias = graph.add_node("Gather", table, rows, axis=1)  # (heads, batch or 1, queries, key positions)
    bias = graph.add_node("Slice", bias, (0,), context.key_count, (3,))
    return graph.add_node("Transpose", bias, perm=[1, 0, 2, 3], name="learned_bias")


def _constant_bias(context: ExportContext, module: torch.nn.Module) -> str:
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
    return context.graph.add_constant(found.to(context.dtype), name="position_bias")
