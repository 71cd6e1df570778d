"""How the operator Attention is told which keys a query may see, and what is added to their scores."""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce

import torch

from multihead.export.onnx.context import Ground
from multihead.export.onnx.masks import always_sees, visible
from multihead.export.onnx.position_bias import may_hide, position_bias
from multihead.masks import Causal, Full


@dataclass(frozen=True)
class Shown:
    """What the operator is told; an empty name is an input that is left out.

    Fields:
        is_causal: by its attribute.
        table: by its input attn_mask, (batch or 1, heads or 1, queries, keys), bool or added to the scores.
        lengths: by its input nonpad_kv_seqlen, (batch,).
        some: (batch or 1, heads or 1, queries or 1, 1), bool: the queries that see a key; "" where all do.
    """

    is_causal: bool = False
    table: str = ""
    lengths: str = ""
    some: str = ""


def shown(ground: Ground) -> Shown:
    """Choose the cheapest way to say it: nothing, an attribute, lengths, or a table."""
    layer, mask, wanted, lengths = ground.layer, ground.wanted.mask, ground.wanted, ground.key_lengths
    bias = _bias(ground)
    added = layer.bias_k is not None
    sinks = layer.sinks is not None or layer.add_zero_attn
    plain = bias is None and not sinks and "keep" not in ground.inputs
    if plain and lengths is None and isinstance(mask, Full):
        return Shown()
    if plain and not added and lengths is None and isinstance(mask, Causal) and wanted.from_zero:
        return Shown(is_causal=True)
    if plain and not added and lengths is not None and isinstance(mask, Full) and wanted.opset >= 24:
        counts = ground.graph.node("Min", lengths, ground.keys)
        return Shown(lengths=counts, some=_some_of_lengths(ground, counts) if wanted.crosses else "")
    table, boolean = _table(ground, _seen(ground), bias)
    # A real query of a padded sample sees itself, or the first key; what padding sees is thrown away. A key that the
    # layer adds is seen by all, and a sink takes all of the weight where there is nothing else.
    hides = may_hide(ground) or "bias" in ground.inputs or "keep" in ground.inputs
    all_see = not hides and always_sees(mask, own=wanted.own) and not (lengths is not None and wanted.crosses)
    some = "" if all_see or added or sinks else _some(ground, table, boolean=boolean)
    if added:
        table = _in_front(ground, table, torch.ones((), dtype=torch.bool) if boolean else torch.zeros(()))
    if sinks:
        table = _in_front(ground, _numbers(ground, table, boolean=boolean), sinks_of(ground))
    return Shown(table=table, some=some)


def sinks_of(ground: Ground) -> torch.Tensor:
    """(1, heads, 1, 1), the logits of the sinks: a key of 0 is one whose logit is 0."""
    layer = ground.layer
    zero = torch.zeros(layer.num_heads)
    sinks = zero if layer.sinks is None else layer.sinks.detach().cpu().double()
    if layer.sinks is not None and layer.add_zero_attn:
        sinks = torch.logaddexp(sinks, zero.double())
    return sinks.reshape(1, -1, 1, 1)


def _bias(ground: Ground) -> str | None:
    """Broadcasting to (batch, heads, queries, keys): what is added to the scores, if anything is."""
    given, own = "bias" if "bias" in ground.inputs else None, position_bias(ground)
    return ground.graph.node("Add", own, given) if own and given else own or given


def _seen(ground: Ground) -> str | None:
    """Broadcasting to (batch, heads, queries, keys), bool; None where every key is seen."""
    graph, mask = ground.graph, ground.wanted.mask
    parts = [] if isinstance(mask, Full) else [visible(graph, mask, ground.place)]
    if ground.key_lengths is not None:
        counts = graph.node("Reshape", ground.key_lengths, graph.ints(-1, 1, 1, 1))
        parts.append(graph.node("Less", ground.place.columns, counts, name="real"))
    parts += ["keep"] if "keep" in ground.inputs else []
    return reduce(lambda one, other: graph.node("And", one, other), parts) if parts else None


def _table(ground: Ground, seen: str | None, bias: str | None) -> tuple[str, bool]:
    """(batch or 1, heads or 1, queries, keys): whether a key is seen, or what is added; and whether it is the first."""
    graph = ground.graph
    if seen is None and bias is None:
        seen = graph.constant(torch.ones(1, 1, 1, 1, dtype=torch.bool), name="full")
    table = str(bias or seen) if seen is None or bias is None else graph.node("Where", seen, bias, ground.hidden)
    # Runtimes let only the first two sizes be 1.
    sizes = graph.node("Concat", graph.ints(1, 1), ground.queries, ground.keys, axis=0)
    return graph.node("Expand", table, sizes, name="table"), bias is None


def _numbers(ground: Ground, table: str, *, boolean: bool) -> str:
    return ground.graph.node("Where", table, ground.nothing, ground.hidden) if boolean else table


def _in_front(ground: Ground, table: str, column: torch.Tensor) -> str:
    """Put a column before all others: one number or truth for all heads, or (1, heads, 1, 1)."""
    graph = ground.graph
    if column.dim():  # each head has its own, so each needs a table of its own
        table = graph.node("Expand", table, graph.ints(*column.shape))
    sizes = graph.node("Concat", graph.node("Shape", table, start=0, end=3), graph.ints(1), axis=0)
    column = column if column.dtype == torch.bool else column.to(ground.dtype)
    first = graph.node("Expand", graph.constant(column, name="column"), sizes)
    return graph.node("Concat", first, table, axis=-1, name="table")


def _some(ground: Ground, table: str, *, boolean: bool) -> str:
    graph = ground.graph
    best = graph.node("ReduceMax", table, graph.ints(-1), keepdims=1)
    return best if boolean else graph.node("Not", graph.node("Equal", best, ground.hidden), name="some")


def _some_of_lengths(ground: Ground, counts: str) -> str:
    graph = ground.graph
    shaped = graph.node("Reshape", counts, graph.ints(-1, 1, 1, 1))
    return graph.node("Greater", shaped, graph.ints(0), name="some")
