"""Export the normalisation of queries and keys to nodes of an ONNX graph."""

from __future__ import annotations

import torch
from torch import Tensor

from multihead.errors import ArgumentError
from multihead.export.onnx.context import Context
from multihead.layer.qk_norm import QKNorms


def normalised(context: Context, q: str, k: str) -> tuple[str, str]:
    """Normalise queries and keys by the layer's `qk_norm`, in float32 as the layer does.

    Args:
        context: context of the export.
        q: (batch, queries, heads * head_dim).
        k: (batch, keys, kv_heads * head_dim).

    Raises:
        ArgumentError: the layer's `qk_norm` is a module that is not ours.
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
        q = _divided(context, q, layer.num_heads, ones, options.eps / layer.head_dim, factors=each)
        return q, _divided(context, k, layer.num_kv_heads, ones * layer.head_dim**-0.5, options.eps / layer.head_dim)
    heads = (1, 1) if options.over == "all" else (layer.num_heads, layer.num_kv_heads)
    widths = (layer.num_heads * layer.head_dim, layer.num_kv_heads * layer.head_dim)
    results = []
    for x, weight, parts, width in zip((q, k), (norms.q_weight, norms.k_weight), heads, widths, strict=True):
        factors = torch.ones(width // parts) if weight is None else weight.detach().cpu()
        results.append(_divided(context, x, parts, factors, options.eps))
    return results[0], results[1]


def _divided(context: Context, x: str, parts: int, weight: Tensor, eps: float, *, factors: Tensor | None = None) -> str:
    """Divide each part of the features by the root of its mean square, and multiply by the weight.

    Args:
        context: context of the export.
        x: (batch, length, features).
        parts: number of equal parts of the features.
        weight: (features / parts,).
        eps: added to the mean square.
        factors: (parts, 1), a further factor for each part.
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
