"""Draw a mask: a row per query, a column per key, ■ where the key may be seen."""

from __future__ import annotations

from torch import Tensor

from multihead.masks.base import Mask
from multihead.masks.place import Place


def picture(mask: Mask, *, queries: int = 5, keys: int = 5, query_start: int | Tensor = 0) -> str:
    """Draw a mask, samples (or heads) side by side.

    Args:
        mask: any mask.
        queries: how many queries to draw.
        keys: how many keys to draw.
        query_start: position of the first query among the keys.

    >>> from multihead import masks
    >>> print(masks.picture(masks.Causal(), queries=2, query_start=3))
    ■ ■ ■ ■ ·
    ■ ■ ■ ■ ■
    """
    seen = mask.tile(Place.of(queries, keys, query_start=query_start)).flatten(0, 1)
    drawn = [[" ".join("■" if cell else "·" for cell in row) for row in sample] for sample in seen.tolist()]
    return "\n".join("   ".join(line) for line in zip(*drawn, strict=True))
