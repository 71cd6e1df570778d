"""Classify the tiles of a score matrix as full, partial or skipped."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from multihead.masks.base import KeyBounds

SKIPPED, PARTIAL, FULL = 0, 1, 2


@dataclass(frozen=True, eq=False)
class Tiles:
    """The tiles of a score matrix.

    Attributes:
        kinds: (batch or 1, query tiles, key tiles), int8: SKIPPED no cell is seen, FULL all are, PARTIAL some may be.
        query_block: queries per tile.
        key_block: keys per tile.
    """

    kinds: Tensor
    query_block: int
    key_block: int


def tiles(bounds: KeyBounds, *, keys: int, query_block: int = 64, key_block: int = 64) -> Tiles:
    """Classify tiles by the bounds of their rows, in one byte per query and tile of keys.

    A tile under a remainder is never FULL: the remainder is evaluated tile by tile.

    >>> from multihead import masks
    >>> from multihead.kernels.plan.bounds import key_bounds
    >>> tiles(key_bounds(masks.Causal(), queries=6, keys=6), keys=6, query_block=2, key_block=2).kinds[0]
    tensor([[1, 0, 0],
            [2, 1, 0],
            [2, 2, 1]], dtype=torch.int8)
    """
    first = torch.arange(0, max(keys, 1), key_block, device=bounds.start.device)  # (key tiles,)
    last = (first + key_block).clamp(max=keys)  # one past the last key
    # The last tile of queries is padded with copies of the last row, which change neither any() nor all().
    missing = -bounds.start.shape[1] % query_block
    start, stop = (
        _filled(edge, missing).unflatten(1, (-1, query_block))[..., None] for edge in (bounds.start, bounds.stop)
    )  # (batch or 1, query tiles, query_block, 1)
    touched = ((start < last) & (stop > first) & (start < stop)).any(2)
    covered = ((start <= first) & (stop >= last) & (start < stop)).all(2)
    if bounds.remainder is not None:
        covered = torch.zeros_like(covered)
    kinds = torch.where(covered, FULL, torch.where(touched, PARTIAL, SKIPPED)).to(torch.int8)
    return Tiles(kinds, query_block, key_block)


def seen_share(bounds: KeyBounds, *, keys: int) -> float:
    """Return the share of the score matrix within the bounds, 0 to 1."""
    cells = bounds.start.numel() * keys
    return float((bounds.stop - bounds.start).sum()) / cells if cells else 0.0


def _filled(edge: Tensor, missing: int) -> Tensor:
    if not missing or not edge.shape[1]:
        return edge
    return pad(edge[:, None].double(), (0, missing), mode="replicate")[:, 0].long()
