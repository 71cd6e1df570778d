"""Compute the memory use of a recorded run, compared with the size of dense attention weights."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from multihead.record.layer import LayerRecord

__all__ = ["memory_of"]


@dataclass(frozen=True)
class MemoryUse:
    """The memory of a recorded run, in bytes.

    Attributes:
        peak: peak resident memory of this process, bytes; None if the operating system does not report it.
        kept: bytes of q and k of all layers in the record; 0 if only statistics are kept.
        weights: bytes that the attention weights of all heads would take in the model's dtype.
    """

    peak: int | None
    kept: int
    weights: int


def memory_of(layers: Sequence[LayerRecord]) -> MemoryUse:
    """Compute the memory use of recorded layers.

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
    return MemoryUse(peak_memory_of_process(), kept, weights)


def peak_memory_of_process() -> int | None:
    """Return the peak resident memory of this process, bytes; None if the operating system does not report it."""
    try:
        import resource
    except ImportError:  # Windows has no module resource
        return None
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # ru_maxrss is in bytes on macOS and in kilobytes elsewhere, see getrusage(2)
    return most if sys.platform == "darwin" else 1024 * most
