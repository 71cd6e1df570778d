"""The layer's forward once more, in nodes of an ONNX graph: project, place, attend, merge, output."""

from __future__ import annotations

import torch
from torch import Tensor

from multihead.export.onnx.context import Ground
from multihead.export.onnx.mask_input import Shown, shown
from multihead.export.onnx.qk_norm import normalised
from multihead.export.onnx.rotary import turned

PRESENT = ("present_key", "present_value")


def forward(ground: Ground) -> None:
    """Put down the layer's forward, and its output."""
    graph, layer, wanted = ground.graph, ground.layer, ground.wanted
    x, memory, values = _without_padding(ground)
    folded = _wide(ground) and layer.qk_norm is None
    q = _projected(ground, "q_proj", x, times=_scale(ground) if folded else 1.0)
    k = _projected(ground, "k_proj", memory)  # (batch, keys, kv_heads * head_dim)
    v = _projected(ground, "v_proj", values)  # (batch, keys, kv_heads * value_head_dim)
    q, k = turned(ground, *normalised(ground, q, k))
    if _wide(ground) and not folded:
        q = graph.node("Mul", q, graph.constant(torch.tensor(_scale(ground), dtype=ground.dtype), name="scale"))
    k, v = _with_added_keys(ground, k, v)
    attended = _attended(ground, q, k, v, shown(ground))  # (batch, queries, heads * value_head_dim)
    merged = _merged(ground, _gated(ground, attended))
    output = merged if layer.out_proj is None else _projected(ground, "out_proj", merged)
    if "lengths" in ground.inputs:
        output = graph.node("Where", ground.inside("lengths"), output, ground.nothing)
    graph.output(output, "output", ground.dtype, (wanted.batch, wanted.queries, layer.output_dim))
    if wanted.goes_on:
        for name, width in zip(PRESENT, (layer.head_dim, layer.value_head_dim), strict=True):
            graph.also(name, ground.dtype, (wanted.batch, layer.num_kv_heads, wanted.keys, width))


def _without_padding(ground: Ground) -> tuple[str, str, str]:
    """Set padding to 0 before the projections, so that NaN in it reaches nothing: x, memory and values."""

    def cleaned(name: str, lengths: str) -> str:
        if lengths not in ground.inputs:
            return name
        return ground.graph.node("Where", ground.inside(lengths), name, ground.nothing)

    x = cleaned("x", "lengths")
    if not ground.wanted.crosses:
        return x, x, x
    memory = cleaned("memory", "memory_lengths")
    return x, memory, cleaned("values", "memory_lengths") if "values" in ground.inputs else memory


def _wide(ground: Ground) -> bool:
    """Whether the scale must be multiplied in: as an attribute it would be float32."""
    return ground.dtype == torch.float64


def _scale(ground: Ground) -> float:
    layer = ground.layer
    return layer.head_dim**-0.5 if layer.scale is None else layer.scale


def _projected(ground: Ground, name: str, x: str, *, times: float = 1.0) -> str:
    graph, projection = ground.graph, getattr(ground.layer, name)
    product = graph.node("MatMul", x, graph.constant(projection.weight.T * times, name=f"{name}.weight.T"))
    if projection.bias is None:
        return product
    return graph.node("Add", product, graph.constant(projection.bias * times, name=f"{name}.bias"), name=name)


def _with_added_keys(ground: Ground, k: str, v: str) -> tuple[str, str]:
    """Put the keys that the layer adds before all others: its learned one, and one of 0 for sinks before that."""
    layer = ground.layer
    if layer.bias_k is not None and layer.bias_v is not None:
        k, v = _in_front(ground, layer.bias_k, k), _in_front(ground, layer.bias_v, v)
    if layer.sinks is not None or layer.add_zero_attn:
        # A sink is a key of 0 with a value of 0 whose logit is added to its score, which is 0.
        width, value_width = layer.num_kv_heads * layer.head_dim, layer.num_kv_heads * layer.value_head_dim
        k = _in_front(ground, torch.zeros(width, dtype=ground.dtype), k)
        v = _in_front(ground, torch.zeros(value_width, dtype=ground.dtype), v)
    return k, v


def _in_front(ground: Ground, row: Tensor, x: str) -> str:
    """Put one row before all others of each sample: (batch, 1 + keys, features)."""
    graph = ground.graph
    sizes = graph.node("Concat", ground.batch, graph.ints(1, row.numel()), axis=0)
    rows = graph.node("Expand", graph.constant(row.reshape(1, 1, -1), name="added"), sizes)
    return graph.node("Concat", rows, x, axis=1)


def _attended(ground: Ground, q: str, k: str, v: str, seen: Shown) -> str:
    """(batch, queries, heads * value_head_dim)."""
    layer = ground.layer
    past = ("past_key", "past_value") if ground.wanted.goes_on else ("", "")
    given = [q, k, v, seen.table, *past, seen.lengths]
    while not given[-1]:
        given.pop()
    attended, *_ = ground.graph.several(
        "Attention",
        *given,
        names=("attended", *(PRESENT if ground.wanted.goes_on else ())),
        q_num_heads=layer.num_heads,
        kv_num_heads=layer.num_kv_heads,
        scale=1.0 if _wide(ground) else _scale(ground),
        softcap=layer.softcap or 0.0,
        is_causal=int(seen.is_causal),
    )
    return _blanked(ground, attended, seen.some) if seen.some else attended


def _split(ground: Ground, merged: str) -> str:
    """(batch, queries, heads, value_head_dim)."""
    layer = ground.layer
    return ground.graph.node("Reshape", merged, ground.graph.ints(0, 0, layer.num_heads, layer.value_head_dim))


def _concatenated(ground: Ground, split: str) -> str:
    """(batch, queries, heads * value_head_dim)."""
    layer = ground.layer
    return ground.graph.node("Reshape", split, ground.graph.ints(0, 0, layer.num_heads * layer.value_head_dim))


def _blanked(ground: Ground, attended: str, some: str) -> str:
    """Give 0 for a query that sees no key: not every runtime does so of itself."""
    rows = ground.graph.node("Transpose", some, perm=[0, 2, 1, 3])  # (batch or 1, queries or 1, heads or 1, 1)
    return _concatenated(ground, ground.graph.node("Where", rows, _split(ground, attended), ground.nothing))


def _gated(ground: Ground, attended: str) -> str:
    """Multiply what each head gives by its learned gate, and by that of the call."""
    graph, layer = ground.graph, ground.layer
    if layer.head_gates is not None:
        factors = layer.head_gates.to(ground.dtype).repeat_interleave(layer.value_head_dim)
        attended = graph.node("Mul", attended, graph.constant(factors, name="head_gates"))
    if "head_gates" in ground.inputs:
        gates = graph.node("Transpose", "head_gates", perm=[0, 2, 1])  # (batch or 1, queries or 1, heads or 1)
        gates = graph.node("Unsqueeze", gates, graph.ints(-1))
        attended = _concatenated(ground, graph.node("Mul", _split(ground, attended), gates))
    return attended


def _merged(ground: Ground, attended: str) -> str:
    if ground.layer.merge == "concat":
        return attended
    return ground.graph.node("ReduceMean", _split(ground, attended), ground.graph.ints(2), keepdims=0, name="averaged")
