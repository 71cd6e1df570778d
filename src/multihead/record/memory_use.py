"""Memory of a recorded run: peak of the process, q and k that are kept, and dense attention weights for comparison."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from multihead.record.layer import LayerRecord


@dataclass(frozen=True)
class Memory:
    """The memory of a recorded run, in bytes.

    Attributes:
        peak: peak resident memory of this process so far, with the model; None if the system does not report it.
        kept: q and k of all layers in the record; 0 if only statistics are kept.
        weights: the attention weights of all heads in the model's dtype, as eager attention would return them.
    """

    peak: int | None
    kept: int
    weights: int


def memory_of(layers: Sequence[LayerRecord]) -> Memory:
    """Return the bytes that recorded layers keep, and those that all their weights would take.

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
    return Memory(_peak_of_process(), kept, weights)


def _peak_of_process() -> int | None:
    try:
        import resource
    except ImportError:  # Windows has none
        return None
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else 1024 * most  # in kilobytes, but in bytes on macOS, see getrusage(2)
