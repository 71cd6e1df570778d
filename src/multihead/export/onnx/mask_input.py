"""Choose how the operator Attention receives the mask and the bias: not at all, an attribute, lengths, or a table."""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce

import torch

from multihead.export.onnx.context import Context
from multihead.export.onnx.masks import always_sees, visible
from multihead.export.onnx.position_bias import may_hide, position_bias
from multihead.masks import Causal, Full


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
    bias = _bias(context)
    added = layer.bias_k is not None
    sinks = layer.sinks is not None or layer.add_zero_attn
    plain = bias is None and not sinks and "keep" not in context.inputs
    if plain and lengths is None and isinstance(mask, Full):
        return MaskInputs()
    if plain and not added and lengths is None and isinstance(mask, Causal) and spec.from_zero:
        return MaskInputs(is_causal=True)
    if plain and not added and lengths is not None and isinstance(mask, Full) and spec.opset >= 24:
        counts = context.graph.node("Min", lengths, context.keys)
        return MaskInputs(lengths=counts, some=_some_of_lengths(context, counts) if spec.crosses else "")
    table, boolean = _table(context, _seen(context), bias)
    # A token of a padded sample sees itself, or the first key; the results of padding are discarded. Every query sees a
    # key that the layer adds, and a sink takes all of the weight where no key is visible.
    hides = may_hide(context) or "bias" in context.inputs or "keep" in context.inputs
    all_see = not hides and always_sees(mask, own=spec.own) and not (lengths is not None and spec.crosses)
    some = "" if all_see or added or sinks else _some(context, table, boolean=boolean)
    if added:
        table = _with_column(context, table, torch.ones((), dtype=torch.bool) if boolean else torch.zeros(()))
    if sinks:
        table = _with_column(context, _numbers(context, table, boolean=boolean), sinks_of(context))
    return MaskInputs(table=table, some=some)


def sinks_of(context: Context) -> torch.Tensor:
    """Return the logits of the sinks, (1, heads, 1, 1); the key of `add_zero_attn` is a sink whose logit is 0."""
    layer = context.layer
    zero = torch.zeros(layer.num_heads)
    sinks = zero if layer.sinks is None else layer.sinks.detach().cpu().double()
    if layer.sinks is not None and layer.add_zero_attn:
        sinks = torch.logaddexp(sinks, zero.double())
    return sinks.reshape(1, -1, 1, 1)


def _bias(context: Context) -> str | None:
    """Add the input bias and the position bias, broadcasting to (batch, heads, queries, keys); None without either."""
    bias, own = "bias" if "bias" in context.inputs else None, position_bias(context)
    return context.graph.node("Add", own, bias) if own and bias else own or bias


def _seen(context: Context) -> str | None:
    """Combine mask, lengths and `keep`: bool, broadcasting to (batch, heads, queries, keys); None if all are True."""
    graph, mask = context.graph, context.spec.mask
    parts = [] if isinstance(mask, Full) else [visible(graph, mask, context.place)]
    if context.key_lengths is not None:
        counts = graph.node("Reshape", context.key_lengths, graph.ints(-1, 1, 1, 1))
        parts.append(graph.node("Less", context.place.columns, counts, name="real"))
    parts += ["keep"] if "keep" in context.inputs else []
    return reduce(lambda one, other: graph.node("And", one, other), parts) if parts else None


def _table(context: Context, seen: str | None, bias: str | None) -> tuple[str, bool]:
    """Build the table of visible keys or biases, (batch or 1, heads or 1, queries, keys); and whether it is bool."""
    graph = context.graph
    if seen is None and bias is None:
        seen = graph.constant(torch.ones(1, 1, 1, 1, dtype=torch.bool), name="full")
    table = str(bias or seen) if seen is None or bias is None else graph.node("Where", seen, bias, context.hidden)
    # Runtimes broadcast the first two dimensions only.
    sizes = graph.node("Concat", graph.ints(1, 1), context.queries, context.keys, axis=0)
    return graph.node("Expand", table, sizes, name="table"), bias is None


def _numbers(context: Context, table: str, *, boolean: bool) -> str:
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


def _some(context: Context, table: str, *, boolean: bool) -> str:
    graph = context.graph
    best = graph.node("ReduceMax", table, graph.ints(-1), keepdims=1)
    return best if boolean else graph.node("Not", graph.node("Equal", best, context.hidden), name="some")


def _some_of_lengths(context: Context, counts: str) -> str:
    graph = context.graph
    shaped = graph.node("Reshape", counts, graph.ints(-1, 1, 1, 1))
    return graph.node("Greater", shaped, graph.ints(0), name="some")
