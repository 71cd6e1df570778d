"""Export the layer's forward to nodes of an ONNX graph: project, normalise, rotate, attend, gate, merge, output."""

from __future__ import annotations

import torch
from torch import Tensor

from multihead.export.onnx.context import Context
from multihead.export.onnx.mask_input import MaskInputs, mask_inputs
from multihead.export.onnx.qk_norm import normalised
from multihead.export.onnx.rotary import rotated

PRESENT = ("present_key", "present_value")


def forward(context: Context) -> None:
    """Add the nodes of the layer's forward, and its outputs."""
    graph, layer, spec = context.graph, context.layer, context.spec
    x, memory, values = _without_padding(context)
    folded = _wide(context) and layer.qk_norm is None
    q = _projected(context, "q_proj", x, times=_scale(context) if folded else 1.0)
    k = _projected(context, "k_proj", memory)  # (batch, keys, kv_heads * head_dim)
    v = _projected(context, "v_proj", values)  # (batch, keys, kv_heads * value_head_dim)
    q, k = rotated(context, *normalised(context, q, k))
    if _wide(context) and not folded:
        q = graph.node("Mul", q, graph.constant(torch.tensor(_scale(context), dtype=context.dtype), name="scale"))
    k, v = _with_added_keys(context, k, v)
    attended = _attended(context, q, k, v, mask_inputs(context))  # (batch, queries, heads * value_head_dim)
    merged = _merged(context, _gated(context, attended))
    output = merged if layer.out_proj is None else _projected(context, "out_proj", merged)
    if "lengths" in context.inputs:
        output = graph.node("Where", context.inside("lengths"), output, context.nothing)
    graph.output(output, "output", context.dtype, (spec.batch, spec.queries, layer.output_dim))
    if spec.has_past:
        for name, width in zip(PRESENT, (layer.head_dim, layer.value_head_dim), strict=True):
            graph.also(name, context.dtype, (spec.batch, layer.num_kv_heads, spec.keys, width))


def _without_padding(context: Context) -> tuple[str, str, str]:
    """Set padding to 0 before the projections, so that NaN in it has no effect: x, memory and values."""

    def cleaned(name: str, lengths: str) -> str:
        if lengths not in context.inputs:
            return name
        return context.graph.node("Where", context.inside(lengths), name, context.nothing)

    x = cleaned("x", "lengths")
    if not context.spec.crosses:
        return x, x, x
    memory = cleaned("memory", "memory_lengths")
    return x, memory, cleaned("values", "memory_lengths") if "values" in context.inputs else memory


def _wide(context: Context) -> bool:
    """Whether q must be multiplied by the scale, because the attribute `scale` is only float32."""
    return context.dtype == torch.float64


def _scale(context: Context) -> float:
    layer = context.layer
    return layer.head_dim**-0.5 if layer.scale is None else layer.scale


def _projected(context: Context, name: str, x: str, *, times: float = 1.0) -> str:
    graph, projection = context.graph, getattr(context.layer, name)
    product = graph.node("MatMul", x, graph.constant(projection.weight.T * times, name=f"{name}.weight.T"))
    if projection.bias is None:
        return product
    return graph.node("Add", product, graph.constant(projection.bias * times, name=f"{name}.bias"), name=name)


def _with_added_keys(context: Context, k: str, v: str) -> tuple[str, str]:
    """Prepend the keys that the layer adds: its learned one, and before that one of 0 for sinks."""
    layer = context.layer
    if layer.bias_k is not None and layer.bias_v is not None:
        k, v = _with_row(context, layer.bias_k, k), _with_row(context, layer.bias_v, v)
    if layer.sinks is not None or layer.add_zero_attn:
        # A sink is a key of 0 with a value of 0 whose logit is added to its score, which is 0.
        width, value_width = layer.num_kv_heads * layer.head_dim, layer.num_kv_heads * layer.value_head_dim
        k = _with_row(context, torch.zeros(width, dtype=context.dtype), k)
        v = _with_row(context, torch.zeros(value_width, dtype=context.dtype), v)
    return k, v


def _with_row(context: Context, row: Tensor, x: str) -> str:
    """Prepend one row to each sample: (batch, 1 + keys, features)."""
    graph = context.graph
    sizes = graph.node("Concat", context.batch, graph.ints(1, row.numel()), axis=0)
    rows = graph.node("Expand", graph.constant(row.reshape(1, 1, -1), name="added"), sizes)
    return graph.node("Concat", rows, x, axis=1)


def _attended(context: Context, q: str, k: str, v: str, mask: MaskInputs) -> str:
    """Add the operator Attention: (batch, queries, heads * value_head_dim)."""
    layer = context.layer
    past = ("past_key", "past_value") if context.spec.has_past else ("", "")
    inputs = [q, k, v, mask.table, *past, mask.lengths]
    while not inputs[-1]:
        inputs.pop()
    attended, *_ = context.graph.several(
        "Attention",
        *inputs,
        names=("attended", *(PRESENT if context.spec.has_past else ())),
        q_num_heads=layer.num_heads,
        kv_num_heads=layer.num_kv_heads,
        scale=1.0 if _wide(context) else _scale(context),
        softcap=layer.softcap or 0.0,
        is_causal=int(mask.is_causal),
    )
    return _zero_where_empty(context, attended, mask.some) if mask.some else attended


def _split(context: Context, merged: str) -> str:
    """Split into heads: (batch, queries, heads, value_head_dim)."""
    layer = context.layer
    return context.graph.node("Reshape", merged, context.graph.ints(0, 0, layer.num_heads, layer.value_head_dim))


def _concatenated(context: Context, split: str) -> str:
    """Concatenate the heads: (batch, queries, heads * value_head_dim)."""
    layer = context.layer
    return context.graph.node("Reshape", split, context.graph.ints(0, 0, layer.num_heads * layer.value_head_dim))


def _zero_where_empty(context: Context, attended: str, some: str) -> str:
    """Set the output of queries that see no key to 0, which not every runtime does."""
    rows = context.graph.node("Transpose", some, perm=[0, 2, 1, 3])  # (batch or 1, queries or 1, heads or 1, 1)
    return _concatenated(context, context.graph.node("Where", rows, _split(context, attended), context.nothing))


def _gated(context: Context, attended: str) -> str:
    """Multiply the output of each head by its learned gate, and by that of the call."""
    graph, layer = context.graph, context.layer
    if layer.head_gates is not None:
        factors = layer.head_gates.to(context.dtype).repeat_interleave(layer.value_head_dim)
        attended = graph.node("Mul", attended, graph.constant(factors, name="head_gates"))
    if "head_gates" in context.inputs:
        gates = graph.node("Transpose", "head_gates", perm=[0, 2, 1])  # (batch or 1, queries or 1, heads or 1)
        gates = graph.node("Unsqueeze", gates, graph.ints(-1))
        attended = _concatenated(context, graph.node("Mul", _split(context, attended), gates))
    return attended


def _merged(context: Context, attended: str) -> str:
    if context.layer.merge == "concat":
        return attended
    return context.graph.node(
        "ReduceMean", _split(context, attended), context.graph.ints(2), keepdims=0, name="averaged"
    )
