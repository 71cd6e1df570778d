"""Export the rotary position embedding to nodes of an ONNX graph."""

from __future__ import annotations

import torch

from multihead.errors import ArgumentError
from multihead.export.onnx.context import Context


def rotated(context: Context, q: str, k: str) -> tuple[str, str]:
    """Rotate queries and keys by the layer's `rotary`.

    Args:
        context: context of the export.
        q: (batch, queries, heads * head_dim).
        k: (batch, keys, kv_heads * head_dim).

    Raises:
        ArgumentError: the layer is float64, which the operator RotaryEmbedding does not support.
    """
    layer, spec = context.layer, context.spec
    if layer.rotary is None:
        return q, k
    if context.dtype == torch.float64:
        raise ArgumentError(
            "The layer is float64 and has a rotary, and the operator RotaryEmbedding does not support float64.",
            "Convert it first: layer.float().",
        )
    of_queries = _waves(context, context.place.positions)
    # The positions of keys start at 0, or after the keys of earlier calls, as those of the queries do.
    same = spec.has_past or (not spec.crosses and spec.from_zero)
    of_keys = of_queries if same else _waves(context, context.place.columns)
    return _by(context, q, of_queries, layer.num_heads), _by(context, k, of_keys, layer.num_kv_heads)


def _waves(context: Context, positions: str) -> tuple[str, str]:
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


def _by(context: Context, x: str, waves: tuple[str, str], heads: int) -> str:
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
