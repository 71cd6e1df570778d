"""Say what seeing took: the memory of this process, of q and k, and of the weights that were never held."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from multihead.record.layer import LayerRecord


@dataclass(frozen=True)
class Memory:
    """What a record took, in bytes.

    Attributes:
        peak: the most that this process has held so far, the model with it; None where the system does not say.
        kept: q and k of all layers, as the record keeps them; 0 where only statistics are kept.
        weights: the attention weights of all heads in the model's dtype, which eager attention holds to return them.
    """

    peak: int | None
    kept: int
    weights: int


def memory_of(layers: Sequence[LayerRecord]) -> Memory:
    """Count what a record keeps, and what all its weights would take.

    >>> import torch, multihead as mh
    >>> layer = mh.MultiHeadAttention(embed_dim=8, num_heads=2)
    >>> with mh.observe(layer) as seen:
    ...     y = layer(torch.randn(1, 100, 8))
    >>> memory = memory_of(seen.layers)
    >>> memory.kept, memory.weights
    (6400, 80000)
    """
    kept = weights = 0
    for layer in layers:
        for one in layer.samples:
            size = one.dtype.itemsize
            weights += size * one.num_heads * one.num_queries * one.num_keys
            if one.keeps_weights:
                kv_heads = one.segments[0].request.shape.num_kv_heads
                kept += size * one.head_dim * (one.num_heads * one.num_queries + kv_heads * one.num_keys)
    return Memory(_peak(), kept, weights)


def _peak() -> int | None:
    try:
        import resource
    except ImportError:  # Windows has none
        return None
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else 1024 * most  # kilobytes but on macOS, see getrusage(2)
