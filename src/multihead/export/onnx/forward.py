"""Export the layer's forward to nodes of an ONNX graph: project, normalise, rotate, attend, gate, merge, output."""

from __future__ import annotations

import torch
from torch import Tensor

from multihead.errors import ArgumentError
from multihead.export.onnx.context import ExportContext
from multihead.export.onnx.mask_input import choose_mask_inputs
from multihead.layer.qk_norm import QKNorms

PRESENT_OUTPUTS = ("present_key", "present_value")


def add_layer_nodes(context: ExportContext) -> None:
    """Add the nodes of the layer's forward, and its outputs."""
    graph, layer, spec = context.graph, context.layer, context.spec
    x, memory, values = _zero_padding_of_inputs(context)
    scale = layer.head_dim**-0.5 if layer.scale is None else layer.scale
    # In float64 q is multiplied by the scale, because the attribute `scale` of Attention is float32. The weights are
    # multiplied if no norm follows, because onnxruntime merges a Mul into a MatMul with the factor as float32.
    scaled = context.dtype == torch.float64
    folded = scaled and layer.qk_norm is None
    q = _project(context, "q_proj", x, factor=scale if folded else 1.0)
    k = _project(context, "k_proj", memory)  # (batch, keys, kv_heads * head_dim)
    v = _project(context, "v_proj", values)  # (batch, keys, kv_heads * value_head_dim)
    q, k = rotate_heads(context, *normalise_heads(context, q, k))
    if scaled and not folded:
        factor = graph.add_constant(torch.tensor(scale, dtype=torch.float64), name="scale")
        q = graph.add_node("Mul", q, factor)
    k, v = _prepend_added_keys(context, k, v)
    attended = _add_attention(context, q, k, v, 1.0 if scaled else scale)  # (batch, queries, heads * value_head_dim)
    merged = _average_heads(context, _apply_gates(context, attended))
    output = merged if layer.out_proj is None else _project(context, "out_proj", merged)
    if "lengths" in context.spec.inputs:
        output = graph.add_node("Where", context.token_mask("lengths"), output, context.zero_constant)
    graph.add_output(output, "output", context.dtype, (spec.batch, spec.queries, layer.output_dim))
    if spec.has_past:
        for name, width in zip(PRESENT_OUTPUTS, (layer.head_dim, layer.value_head_dim), strict=True):
            graph.add_output(name, name, context.dtype, (spec.batch, layer.num_kv_heads, spec.keys, width))


def _zero_padding_of_inputs(context: ExportContext) -> tuple[str, str, str]:
    """Set the padding of x, memory and values to 0 before the projections, so that NaN in padding has no effect."""

    def zero_padding(name: str, lengths: str) -> str:
        if lengths not in context.spec.inputs:
            return name
        return context.graph.add_node("Where", context.token_mask(lengths), name, context.zero_constant)

    x = zero_padding("x", "lengths")
    if not context.spec.is_cross_attention:
        return x, x, x
    memory = zero_padding("memory", "memory_lengths")
    return x, memory, zero_padding("values", "memory_lengths") if "values" in context.spec.inputs else memory


def _project(context: ExportContext, name: str, x: str, *, factor: float = 1.0) -> str:
    graph, projection = context.graph, getattr(context.layer, name)
    product = graph.add_node("MatMul", x, graph.add_constant(projection.weight.T * factor, name=f"{name}.weight.T"))
    if projection.bias is None:
        return product
    return graph.add_node("Add", product, graph.add_constant(projection.bias * factor, name=f"{name}.bias"), name=name)


def _prepend_added_keys(context: ExportContext, k: str, v: str) -> tuple[str, str]:
    """Prepend the layer's added keys to k and v: a key of 0 for sinks, then the learned key."""
    layer = context.layer
    if layer.bias_k is not None and layer.bias_v is not None:
        k, v = _prepend_row(context, layer.bias_k, k), _prepend_row(context, layer.bias_v, v)
    if layer.sinks is not None or layer.add_zero_attn:
        # A sink is exported as a key of 0 with a value of 0: its score is 0, and the bias of its column is its logit.
        width, value_width = layer.num_kv_heads * layer.head_dim, layer.num_kv_heads * layer.value_head_dim
        k = _prepend_row(context, torch.zeros(width, dtype=context.dtype), k)
        v = _prepend_row(context, torch.zeros(value_width, dtype=context.dtype), v)
    return k, v


def _prepend_row(context: ExportContext, row: Tensor, x: str) -> str:
    """Prepend the same row (features,) to each sample of x: (batch, 1 + keys, features)."""
    graph = context.graph
    sizes = graph.add_node("Concat", context.batch_size, (1, row.numel()), axis=0)
    rows = graph.add_node("Expand", graph.add_constant(row.reshape(1, 1, -1), name="added"), sizes)
    return graph.add_node("Concat", rows, x, axis=1)


def _add_attention(context: ExportContext, q: str, k: str, v: str, scale: float) -> str:
    """Add the node Attention and return its output, 0 for queries that see no key: (batch, queries, features)."""
    layer, mask = context.layer, choose_mask_inputs(context)
    past = ("past_key", "past_value") if context.spec.has_past else ("", "")
    inputs = [q, k, v, mask.attn_mask, *past, mask.lengths]
    while not inputs[-1]:
        inputs.pop()
    attended, *_ = context.graph.add_multi_output_node(
        "Attention",
        *inputs,
        names=("attended", *(PRESENT_OUTPUTS if context.spec.has_past else ())),
        q_num_heads=layer.num_heads,
        kv_num_heads=layer.num_kv_heads,
        scale=scale,
        softcap=layer.softcap or 0.0,
        is_causal=int(mask.is_causal),
    )
    if not mask.queries_with_keys:
        return attended
    # Not every runtime sets the output of queries that see no key to 0.
    rows = context.graph.add_node("Transpose", mask.queries_with_keys, perm=[0, 2, 1, 3])  # (batch, queries, heads, 1)
    kept = context.graph.add_node("Where", rows, _split_heads(context, attended), context.zero_constant)
    return _concatenate_heads(context, kept)


def _split_heads(context: ExportContext, merged: str) -> str:
    """Split into heads: (batch, queries, heads, value_head_dim)."""
    return context.graph.add_node("Reshape", merged, (0, 0, context.layer.num_heads, context.layer.value_head_dim))


def _concatenate_heads(context: ExportContext, split: str) -> str:
    """Concatenate the heads: (batch, queries, heads * value_head_dim)."""
    return context.graph.add_node("Reshape", split, (0, 0, context.layer.num_heads * context.layer.value_head_dim))


def _apply_gates(context: ExportContext, attended: str) -> str:
    """Multiply the output of each head by its learned gate, and by the input `head_gates`."""
    graph, layer = context.graph, context.layer
    if layer.head_gates is not None:
        factors = layer.head_gates.to(context.dtype).repeat_interleave(layer.value_head_dim)
        attended = graph.add_node("Mul", attended, graph.add_constant(factors, name="head_gates"))
    if "head_gates" in context.spec.inputs:
        gates = graph.add_node("Transpose", "head_gates", perm=[0, 2, 1])  # (batch or 1, queries or 1, heads or 1)
        gates = graph.add_node("Unsqueeze", gates, (-1,))
        attended = _concatenate_heads(context, graph.add_node("Mul", _split_heads(context, attended), gates))
    return attended


def _average_heads(context: ExportContext, attended: str) -> str:
    """Average the heads if the layer does: (batch, queries, value_head_dim)."""
    if context.layer.merge == "concat":
        return attended
    return context.graph.add_node("ReduceMean", _split_heads(context, attended), (2,), keepdims=0, name="averaged")


def normalise_heads(context: ExportContext, q: str, k: str) -> tuple[str, str]:
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
        # x / sqrt(sum + eps) = x / sqrt(mean + eps / head_dim) / sqrt(head_dim); the layer's scale cancels
        # sqrt(head_dim).
        scale = torch.tensor(options.initial_scale) if norms.scale is None else norms.scale.detach().cpu()
        each = scale.double().reshape(-1, 1).expand(layer.num_heads, 1)
        eps, unit = options.eps / layer.head_dim, ones * layer.head_dim**-0.5
        q = _divide_by_root_mean_square(context, q, layer.num_heads, ones, eps, factors=each)
        return q, _divide_by_root_mean_square(context, k, layer.num_kv_heads, unit, eps)

    def normalise(x: str, weight: Tensor | None, heads: int) -> str:
        groups = 1 if options.over == "all" else heads
        weight = torch.ones(heads * layer.head_dim // groups) if weight is None else weight.detach().cpu()
        return _divide_by_root_mean_square(context, x, groups, weight, options.eps)

    return normalise(q, norms.q_weight, layer.num_heads), normalise(k, norms.k_weight, layer.num_kv_heads)


def _divide_by_root_mean_square(
    context: ExportContext, x: str, groups: int, weight: Tensor, eps: float, *, factors: Tensor | None = None
) -> str:
    """Add an RMS norm over `groups` equal groups of features, each multiplied by the weight.

    x is (batch, length, features), weight (features / groups,), and factors, which multiply each group, (groups, 1) or
    None.
    """
    graph = context.graph
    dtype = torch.float64 if context.dtype == torch.float64 else torch.float32
    x = x if dtype == context.dtype else graph.add_cast(x, dtype)
    width = weight.numel()
    if groups > 1:
        # x becomes (batch, length, groups, features / groups).
        x = graph.add_node("Reshape", x, (0, 0, groups, width))
    if dtype == torch.float64:  # some runtimes compute RMSNormalization of float64 in float32
        x = _rms_norm_in_float64(context, x, weight, eps)
    else:
        scale = graph.add_constant(weight.to(dtype), name="norm.weight")
        x = graph.add_node("RMSNormalization", x, scale, axis=-1, epsilon=eps, name="normed")
    if factors is not None:
        factors = factors if groups > 1 else factors[0]
        x = graph.add_node("Mul", x, graph.add_constant(factors.to(dtype), name="norm.scale"))
    if groups > 1:
        x = graph.add_node("Reshape", x, (0, 0, groups * width))
    return x if dtype == context.dtype else graph.add_cast(x, context.dtype)


def _rms_norm_in_float64(context: ExportContext, x: str, weight: Tensor, eps: float) -> str:
    graph = context.graph
    mean = graph.add_node("ReduceMean", graph.add_node("Mul", x, x), (-1,), keepdims=1)
    square = graph.add_node("Add", mean, graph.add_constant(torch.tensor(eps, dtype=torch.float64)))
    normed = graph.add_node("Div", x, graph.add_node("Sqrt", square))
    return graph.add_node("Mul", normed, graph.add_constant(weight.double(), name="norm.weight"))


def rotate_heads(context: ExportContext, q: str, k: str) -> tuple[str, str]:
    """Rotate q and k, (batch, length, heads * head_dim), by the layer's `rotary`; a float64 layer is rejected."""
    layer, spec = context.layer, context.spec
    if layer.rotary is None:
        return q, k
    if context.dtype == torch.float64:
        raise ArgumentError(
            "The layer is float64 and has a rotary, and the operator RotaryEmbedding does not support float64.",
            "Convert it first: layer.float().",
        )
    of_queries = _cosines_and_sines(context, context.position_values.queries)
    # Queries and keys have equal positions if both start at 0, or after the keys of earlier calls.
    same = spec.has_past or (not spec.is_cross_attention and spec.starts_at_zero)
    of_keys = of_queries if same else _cosines_and_sines(context, context.position_values.keys)
    q = _rotate_by_angles(context, q, of_queries, layer.num_heads)
    return q, _rotate_by_angles(context, k, of_keys, layer.num_kv_heads)


def _cosines_and_sines(context: ExportContext, positions: str) -> tuple[str, str]:
    """Compute cosines and sines, (batch, length, pairs) in float32, from angles in float64 as the layer does."""
    graph, rotary = context.graph, context.layer.rotary
    assert rotary is not None
    frequencies = torch.tensor(rotary.frequencies(context.layer.head_dim), dtype=torch.float64)
    gain = 1.0 if rotary.scaling is None else rotary.scaling.gain
    shaped = graph.add_cast(graph.add_node("Reshape", positions, (0, -1, 1)), torch.float64)
    angles = graph.add_node("Mul", shaped, graph.add_constant(frequencies, name="frequencies"), name="angles")
    length = graph.size_of_axis(angles, 1)
    sizes = graph.add_node("Concat", context.batch_size, length, (frequencies.shape[0],), axis=0)

    def cosine_or_sine(kind: str) -> str:
        values = graph.add_node(kind, angles)
        if gain != 1:
            factor = graph.add_constant(torch.tensor(gain, dtype=torch.float64), name="gain")
            values = graph.add_node("Mul", values, factor)
        return graph.add_node("Expand", graph.add_cast(values, torch.float32), sizes, name=f"{kind.lower()}_cache")

    return cosine_or_sine("Cos"), cosine_or_sine("Sin")


def _rotate_by_angles(context: ExportContext, x: str, cosines_and_sines: tuple[str, str], heads: int) -> str:
    """Rotate x, (batch, length, heads * head_dim), by cosines and sines, in float32 as the layer does."""
    graph, rotary = context.graph, context.layer.rotary
    assert rotary is not None
    exact = context.dtype == torch.float32
    rotated_x = graph.add_node(
        "RotaryEmbedding",
        x if exact else graph.add_cast(x, torch.float32),
        *cosines_and_sines,
        num_heads=heads,
        interleaved=int(rotary.interleaved),
        rotary_embedding_dim=0 if rotary.dim in (None, context.layer.head_dim) else rotary.dim,
    )
    return rotated_x if exact else graph.add_cast(rotated_x, context.dtype)
