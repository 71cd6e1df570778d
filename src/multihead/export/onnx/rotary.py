"""Turn queries and keys by their positions, in nodes of an ONNX graph."""

from __future__ import annotations

import torch

from multihead.errors import ArgumentError
from multihead.export.onnx.context import Ground


def turned(ground: Ground, q: str, k: str) -> tuple[str, str]:
    """Turn queries and keys as the layer's `rotary` says.

    Args:
        ground: of the layer.
        q: (batch, queries, heads * head_dim).
        k: (batch, keys, kv_heads * head_dim).

    Raises:
        ArgumentError: the layer is float64, which the operator RotaryEmbedding does not take.
    """
    layer, wanted = ground.layer, ground.wanted
    if layer.rotary is None:
        return q, k
    if ground.dtype == torch.float64:
        raise ArgumentError(
            "The layer is float64 and has a rotary, and the operator RotaryEmbedding takes no float64.",
            "Convert it first: layer.float().",
        )
    of_queries = _waves(ground, ground.place.positions)
    # Keys stand from 0 on, and behind those of earlier calls where there are some, as the queries do.
    same = wanted.goes_on or (not wanted.crosses and wanted.from_zero)
    of_keys = of_queries if same else _waves(ground, ground.place.columns)
    return _by(ground, q, of_queries, layer.num_heads), _by(ground, k, of_keys, layer.num_kv_heads)


def _waves(ground: Ground, positions: str) -> tuple[str, str]:
    """(batch, length, pairs) twice, float32: cosines and sines, whose angles are float64 as the layer's are."""
    graph, rotary = ground.graph, ground.layer.rotary
    assert rotary is not None
    frequencies = torch.tensor(rotary.frequencies(ground.layer.head_dim), dtype=torch.float64)
    gain = 1.0 if rotary.scaling is None else rotary.scaling.gain
    standing = graph.cast(graph.node("Reshape", positions, graph.ints(0, -1, 1)), torch.float64)
    angles = graph.node("Mul", standing, graph.constant(frequencies, name="frequencies"), name="angles")
    length = graph.size(angles, 1)
    sizes = graph.node("Concat", ground.batch, length, graph.ints(frequencies.shape[0]), axis=0)

    def wave(kind: str) -> str:
        made = graph.node(kind, angles)
        if gain != 1:
            made = graph.node("Mul", made, graph.constant(torch.tensor(gain, dtype=torch.float64), name="gain"))
        return graph.node("Expand", graph.cast(made, torch.float32), sizes, name=f"{kind.lower()}_cache")

    return wave("Cos"), wave("Sin")


def _by(ground: Ground, x: str, waves: tuple[str, str], heads: int) -> str:
    """Turn in float32, as the layer does: (batch, length, heads * head_dim)."""
    graph, rotary = ground.graph, ground.layer.rotary
    assert rotary is not None
    exact = ground.dtype == torch.float32
    x_turned = graph.node(
        "RotaryEmbedding",
        x if exact else graph.cast(x, torch.float32),
        *waves,
        num_heads=heads,
        interleaved=int(rotary.interleaved),
        rotary_embedding_dim=0 if rotary.dim in (None, ground.layer.head_dim) else rotary.dim,
    )
    return x_turned if exact else graph.cast(x_turned, ground.dtype)
