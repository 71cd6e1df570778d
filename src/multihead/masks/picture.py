"""Draw a mask: a row a query, a column a key, ■ where the key may be seen."""

from __future__ import annotations

from torch import Tensor

from multihead.masks.dense import Place, visible
from multihead.masks.values import Mask


def picture(mask: Mask, *, queries: int = 5, keys: int = 5, query_start: int | Tensor = 0) -> str:
    """Draw a mask, samples (or heads) side by side.

    Args:
        mask: any mask.
        queries: how many queries to draw.
        keys: how many keys to draw.
        query_start: where the first query stands among the keys.

    >>> from multihead import masks
    >>> print(masks.picture(masks.Causal(), queries=2, query_start=3))
    ■ ■ ■ ■ ·
    ■ ■ ■ ■ ■
    """
    seen = visible(mask, Place.of(queries, keys, query_start=query_start)).flatten(0, 1)
    drawn = [[" ".join("■" if cell else "·" for cell in row) for row in sample] for sample in seen.tolist()]
    return "\n".join("   ".join(line) for line in zip(*drawn, strict=True))
