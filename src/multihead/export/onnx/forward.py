"""Export the layer's forward to nodes of an ONNX graph: project, normalise, rotate, attend, gate, merge, output."""

from __future__ import annotations

import torch
from torch import Tensor

from multihead.errors import ArgumentError
from multihead.export.onnx.context import Context
from multihead.export.onnx.mask_input import MaskInputs, mask_inputs
from multihead.layer.qk_norm import QKNorms

PRESENT = ("present_key", "present_value")


def forward(context: Context) -> None:
    """Add the nodes of the layer's forward, and its outputs."""
    graph, layer, spec = context.graph, context.layer, context.spec
    x, memory, values = _without_padding(context)
    folded = _scale_needs_float64(context) and layer.qk_norm is None
    q = _project(context, "q_proj", x, times=_scale_of_layer(context) if folded else 1.0)
    k = _project(context, "k_proj", memory)  # (batch, keys, kv_heads * head_dim)
    v = _project(context, "v_proj", values)  # (batch, keys, kv_heads * value_head_dim)
    q, k = rotate_heads(context, *normalise_heads(context, q, k))
    if _scale_needs_float64(context) and not folded:
        q = graph.node(
            "Mul", q, graph.constant(torch.tensor(_scale_of_layer(context), dtype=context.dtype), name="scale")
        )
    k, v = _with_added_keys(context, k, v)
    attended = _add_attention(context, q, k, v, mask_inputs(context))  # (batch, queries, heads * value_head_dim)
    merged = _project_output(context, _apply_gates(context, attended))
    output = merged if layer.out_proj is None else _project(context, "out_proj", merged)
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


def _scale_needs_float64(context: Context) -> bool:
    """Whether q must be multiplied by the scale, because the attribute `scale` is only float32."""
    return context.dtype == torch.float64


def _scale_of_layer(context: Context) -> float:
    layer = context.layer
    return layer.head_dim**-0.5 if layer.scale is None else layer.scale


def _project(context: Context, name: str, x: str, *, times: float = 1.0) -> str:
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


def _add_attention(context: Context, q: str, k: str, v: str, mask: MaskInputs) -> str:
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
        scale=1.0 if _scale_needs_float64(context) else _scale_of_layer(context),
        softcap=layer.softcap or 0.0,
        is_causal=int(mask.is_causal),
    )
    return _zero_where_empty(context, attended, mask.some) if mask.some else attended


def _split_heads(context: Context, merged: str) -> str:
    """Split into heads: (batch, queries, heads, value_head_dim)."""
    layer = context.layer
    return context.graph.node("Reshape", merged, context.graph.ints(0, 0, layer.num_heads, layer.value_head_dim))


def _concatenate_heads(context: Context, split: str) -> str:
    """Concatenate the heads: (batch, queries, heads * value_head_dim)."""
    layer = context.layer
    return context.graph.node("Reshape", split, context.graph.ints(0, 0, layer.num_heads * layer.value_head_dim))


def _zero_where_empty(context: Context, attended: str, some: str) -> str:
    """Set the output of queries that see no key to 0, which not every runtime does."""
    rows = context.graph.node("Transpose", some, perm=[0, 2, 1, 3])  # (batch or 1, queries or 1, heads or 1, 1)
    return _concatenate_heads(
        context, context.graph.node("Where", rows, _split_heads(context, attended), context.nothing)
    )


def _apply_gates(context: Context, attended: str) -> str:
    """Multiply the output of each head by its learned gate, and by that of the call."""
    graph, layer = context.graph, context.layer
    if layer.head_gates is not None:
        factors = layer.head_gates.to(context.dtype).repeat_interleave(layer.value_head_dim)
        attended = graph.node("Mul", attended, graph.constant(factors, name="head_gates"))
    if "head_gates" in context.inputs:
        gates = graph.node("Transpose", "head_gates", perm=[0, 2, 1])  # (batch or 1, queries or 1, heads or 1)
        gates = graph.node("Unsqueeze", gates, graph.ints(-1))
        attended = _concatenate_heads(context, graph.node("Mul", _split_heads(context, attended), gates))
    return attended


def _project_output(context: Context, attended: str) -> str:
    if context.layer.merge == "concat":
        return attended
    return context.graph.node(
        "ReduceMean", _split_heads(context, attended), context.graph.ints(2), keepdims=0, name="averaged"
    )


def normalise_heads(context: Context, q: str, k: str) -> tuple[str, str]:
    """Normalise q and k, (batch, length, heads * head_dim), by the layer's `qk_norm`, in float32 as the layer does.

    Raises an ArgumentError if `qk_norm` is a module that is not ours.
    """
    layer, norms = context.layer, context.layer.qk_norm
    if norms is None:
        return q, k
    if type(norms) is not QKNorms:
        raise ArgumentError(
            f"qk_norm is a {type(norms).__name__}, which cannot be exported.",
            "Give a layer constructed with qk_norm=QKNorm(...).",
        )
    options = norms.qk_norm
    ones = torch.ones(layer.head_dim, dtype=torch.float64)
    if options.kind == "l2":
        # x / sqrt(sum + eps) = x / sqrt(mean + eps / head_dim) / sqrt(head_dim); the layer's scale cancels the root.
        scale = torch.tensor(options.initial_scale) if norms.scale is None else norms.scale.detach().cpu()
        each = scale.double().reshape(-1, 1).expand(layer.num_heads, 1)
        q = _divide_by_root_mean_square(context, q, layer.num_heads, ones, options.eps / layer.head_dim, factors=each)
        return q, _divide_by_root_mean_square(
            context, k, layer.num_kv_heads, ones * layer.head_dim**-0.5, options.eps / layer.head_dim
        )
    heads = (1, 1) if options.over == "all" else (layer.num_heads, layer.num_kv_heads)
    widths = (layer.num_heads * layer.head_dim, layer.num_kv_heads * layer.head_dim)
    results = []
    for x, weight, parts, width in zip((q, k), (norms.q_weight, norms.k_weight), heads, widths, strict=True):
        factors = torch.ones(width // parts) if weight is None else weight.detach().cpu()
        results.append(_divide_by_root_mean_square(context, x, parts, factors, options.eps))
    return results[0], results[1]


def _divide_by_root_mean_square(
    context: Context, x: str, parts: int, weight: Tensor, eps: float, *, factors: Tensor | None = None
) -> str:
    """Divide each of equal parts of the features by the root of its mean square, and multiply by the weight.

    x is (batch, length, features), the weight (features / parts,), and the factors of each part (parts, 1).
    """
    graph = context.graph
    dtype = torch.float64 if context.dtype == torch.float64 else torch.float32
    x = x if dtype == context.dtype else graph.cast(x, dtype)
    width = weight.numel()
    if parts > 1:
        x = graph.node("Reshape", x, graph.ints(0, 0, parts, width))  # (batch, length, parts, features / parts)
    if dtype == torch.float64:  # the operator may compute float64 in float32
        x = _by_hand(context, x, weight, eps)
    else:
        scale = graph.constant(weight.to(dtype), name="norm.weight")
        x = graph.node("RMSNormalization", x, scale, axis=-1, epsilon=eps, name="normed")
    if factors is not None:
        x = graph.node("Mul", x, graph.constant((factors if parts > 1 else factors[0]).to(dtype), name="norm.scale"))
    if parts > 1:
        x = graph.node("Reshape", x, graph.ints(0, 0, parts * width))
    return x if dtype == context.dtype else graph.cast(x, context.dtype)


def _by_hand(context: Context, x: str, weight: Tensor, eps: float) -> str:
    graph = context.graph
    mean = graph.node("ReduceMean", graph.node("Mul", x, x), graph.ints(-1), keepdims=1)
    root = graph.node("Sqrt", graph.node("Add", mean, graph.constant(torch.tensor(eps, dtype=torch.float64))))
    return graph.node("Mul", graph.node("Div", x, root), graph.constant(weight.double(), name="norm.weight"))


def rotate_heads(context: Context, q: str, k: str) -> tuple[str, str]:
    """Rotate q and k, (batch, length, heads * head_dim), by the layer's `rotary`; the operator rejects float64."""
    layer, spec = context.layer, context.spec
    if layer.rotary is None:
        return q, k
    if context.dtype == torch.float64:
        raise ArgumentError(
            "The layer is float64 and has a rotary, and the operator RotaryEmbedding does not support float64.",
            "Convert it first: layer.float().",
        )
    of_queries = _cosines_and_sines(context, context.place.positions)
    # The positions of keys start at 0, or after the keys of earlier calls, as those of the queries do.
    same = spec.has_past or (not spec.crosses and spec.from_zero)
    of_keys = of_queries if same else _cosines_and_sines(context, context.place.columns)
    return _rotate_by(context, q, of_queries, layer.num_heads), _rotate_by(context, k, of_keys, layer.num_kv_heads)


def _cosines_and_sines(context: Context, positions: str) -> tuple[str, str]:
    """Compute cosines and sines, (batch, length, pairs) in float32, from angles in float64 as the layer does."""
    graph, rotary = context.graph, context.layer.rotary
    assert rotary is not None
    frequencies = torch.tensor(rotary.frequencies(context.layer.head_dim), dtype=torch.float64)
    gain = 1.0 if rotary.scaling is None else rotary.scaling.gain
    shaped = graph.cast(graph.node("Reshape", positions, graph.ints(0, -1, 1)), torch.float64)
    angles = graph.node("Mul", shaped, graph.constant(frequencies, name="frequencies"), name="angles")
    length = graph.size(angles, 1)
    sizes = graph.node("Concat", context.batch, length, graph.ints(frequencies.shape[0]), axis=0)

    def wave(kind: str) -> str:
        values = graph.node(kind, angles)
        if gain != 1:
            values = graph.node("Mul", values, graph.constant(torch.tensor(gain, dtype=torch.float64), name="gain"))
        return graph.node("Expand", graph.cast(values, torch.float32), sizes, name=f"{kind.lower()}_cache")

    return wave("Cos"), wave("Sin")


def _rotate_by(context: Context, x: str, waves: tuple[str, str], heads: int) -> str:
    """Rotate in float32, as the layer does: (batch, length, heads * head_dim)."""
    graph, rotary = context.graph, context.layer.rotary
    assert rotary is not None
    exact = context.dtype == torch.float32
    rotated_x = graph.node(
        "RotaryEmbedding",
        x if exact else graph.cast(x, torch.float32),
        *waves,
        num_heads=heads,
        interleaved=int(rotary.interleaved),
        rotary_embedding_dim=0 if rotary.dim in (None, context.layer.head_dim) else rotary.dim,
    )
    return rotated_x if exact else graph.cast(rotated_x, context.dtype)
