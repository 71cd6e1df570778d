"""Normalise queries and keys, in nodes of an ONNX graph."""

from __future__ import annotations

import torch
from torch import Tensor

from multihead.errors import ArgumentError
from multihead.export.onnx.context import Ground
from multihead.qk_norm import QKNorms


def normalised(ground: Ground, q: str, k: str) -> tuple[str, str]:
    """Normalise queries and keys as the layer's `qk_norm` says, in float32 as the layer does.

    Args:
        ground: of the layer.
        q: (batch, queries, heads * head_dim).
        k: (batch, keys, kv_heads * head_dim).

    Raises:
        ArgumentError: the layer's `qk_norm` is a module that is not ours.
    """
    layer, norms = ground.layer, ground.layer.qk_norm
    if norms is None:
        return q, k
    if type(norms) is not QKNorms:
        raise ArgumentError(
            f"qk_norm is a {type(norms).__name__}, and what it computes is not known here.",
            "Give a layer made with qk_norm=QKNorm(...).",
        )
    said = norms.qk_norm
    ones = torch.ones(layer.head_dim, dtype=torch.float64)
    if said.kind == "l2":
        # x / sqrt(sum + eps) = x / sqrt(mean + eps / head_dim) / sqrt(head_dim); the layer's scale cancels the root.
        scale = torch.tensor(said.initial_scale) if norms.scale is None else norms.scale.detach().cpu()
        each = scale.double().reshape(-1, 1).expand(layer.num_heads, 1)
        q = _divided(ground, q, layer.num_heads, ones, said.eps / layer.head_dim, factors=each)
        return q, _divided(ground, k, layer.num_kv_heads, ones * layer.head_dim**-0.5, said.eps / layer.head_dim)
    heads = (1, 1) if said.over == "all" else (layer.num_heads, layer.num_kv_heads)
    widths = (layer.num_heads * layer.head_dim, layer.num_kv_heads * layer.head_dim)
    found = []
    for x, weight, parts, width in zip((q, k), (norms.q_weight, norms.k_weight), heads, widths, strict=True):
        factors = torch.ones(width // parts) if weight is None else weight.detach().cpu()
        found.append(_divided(ground, x, parts, factors, said.eps))
    return found[0], found[1]


def _divided(ground: Ground, x: str, parts: int, weight: Tensor, eps: float, *, factors: Tensor | None = None) -> str:
    """Divide each of so many parts of the features by the root of its mean square, and multiply by the weight.

    Args:
        ground: of the layer.
        x: (batch, length, features).
        parts: how many there are.
        weight: (features / parts,).
        eps: added to the mean square.
        factors: (parts, 1), what each part is multiplied by beside.
    """
    graph = ground.graph
    dtype = torch.float64 if ground.dtype == torch.float64 else torch.float32
    x = x if dtype == ground.dtype else graph.cast(x, dtype)
    width = weight.numel()
    if parts > 1:
        x = graph.node("Reshape", x, graph.ints(0, 0, parts, width))  # (batch, length, parts, features / parts)
    if dtype == torch.float64:  # the operator may compute float64 in float32
        x = _by_hand(ground, x, weight, eps)
    else:
        scale = graph.constant(weight.to(dtype), name="norm.weight")
        x = graph.node("RMSNormalization", x, scale, axis=-1, epsilon=eps, name="normed")
    if factors is not None:
        x = graph.node("Mul", x, graph.constant((factors if parts > 1 else factors[0]).to(dtype), name="norm.scale"))
    if parts > 1:
        x = graph.node("Reshape", x, graph.ints(0, 0, parts * width))
    return x if dtype == ground.dtype else graph.cast(x, ground.dtype)


def _by_hand(ground: Ground, x: str, weight: Tensor, eps: float) -> str:
    graph = ground.graph
    mean = graph.node("ReduceMean", graph.node("Mul", x, x), graph.ints(-1), keepdims=1)
    root = graph.node("Sqrt", graph.node("Add", mean, graph.constant(torch.tensor(eps, dtype=torch.float64))))
    return graph.node("Mul", graph.node("Div", x, root), graph.constant(weight.double(), name="norm.weight"))
