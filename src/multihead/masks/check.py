"""Tools for authors of masks: draw a mask, and check that its attributes and `interval` agree with `visible`."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from multihead.errors import MaskError
from multihead.masks.base import Mask, check_is_mask
from multihead.masks.positions import CallPositions, CallSize, TilePositions


def check(mask: Mask, queries: int = 8, keys: int = 8) -> None:
    """Check that `interval` and the attributes of a mask agree with `visible`, in every cell of small calls.

    The small calls differ in the position of their first query. The check takes queries x keys memory.

    Args:
        mask: the mask to check, usually user-defined.
        queries: number of queries.
        keys: number of keys.

    Raises:
        MaskError: `interval` or an attribute disagrees with `visible`; the error names the first query and key.

    >>> from multihead import masks
    >>> masks.check(masks.Causal() & masks.Window(3))
    >>> class Wrong(masks.Mask):
    ...     def visible(self, queries, keys):
    ...         return keys <= queries
    ...
    ...     def interval(self, queries, keys):
    ...         return queries - 2, queries + 1
    >>> masks.check(Wrong())
    Traceback (most recent call last):
    multihead.errors.MaskError: Wrong.interval hides key 0 from query 3, and visible shows it (query_start=0). ...
    """
    check_is_mask(mask)
    for start in sorted({0, 1, max(keys - queries, 0), keys // 2, keys}):
        tile = TilePositions.from_sizes(queries, keys, query_start=start)
        visible = mask.tile(tile)  # (batch or 1, heads or 1, queries, keys)
        mask.check_fits(CallSize(visible.shape[0], visible.shape[1], queries, keys))
        for name, claimed in _visibility_by_attribute(mask, tile, visible):
            differs = (claimed != visible).nonzero()
            if len(differs):
                sample, head, query, key = differs[0].tolist()
                shows = bool(visible[sample, head, query, key])
                says, instead = ("hides", "shows") if shows else ("shows", "hides")
                preposition = "from" if shows else "to"
                raise MaskError(
                    f"{type(mask).__name__}.{name} {says} key {key} {preposition} query {query}, and visible {instead} "
                    f"it (query_start={start}).",
                    "Change one of them so that both agree.",
                )


def _visibility_by_attribute(mask: Mask, tile: TilePositions, visible: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield the name of each attribute of a mask, and the visibility (batch, heads, queries, keys) that it implies."""
    keys, positions, columns = visible.shape[3], tile.positions, tile.columns
    bounds = mask.bounds(CallPositions(positions.view(1, -1), keys, has_readable_values=True))
    first, stop = (edge[:, None, :, None] for edge in (bounds.start, bounds.stop))
    inside = (columns >= first) & (columns < stop)
    yield "interval", inside if bounds.remainder is None else inside & bounds.remainder.tile(tile)
    if mask.band is not None:
        lengths, before, after = mask.band
        near = torch.ones_like(visible) if lengths is None else columns < lengths.view(-1, 1, 1, 1)
        near = near if before < 0 else near & (columns >= positions - before)
        yield "band", near if after < 0 else near & (columns <= positions + after)
    if not mask.uses_positions:
        yield "uses_positions = False", mask.tile(TilePositions(positions + 1, tile.rows, columns))
    if mask.translation_invariant:
        yield "translation_invariant", mask.tile(tile.shifted(1))
    if mask.sees_no_later_key:
        yield "sees_no_later_key", visible & (columns <= positions)
    if mask.lookback is not None:
        yield "lookback", visible & (columns > positions - mask.lookback)
    if mask.hides_nothing:
        yield "hides_nothing", torch.ones_like(visible)


def picture(mask: Mask, *, queries: int = 5, keys: int = 5, query_start: int | Tensor = 0) -> str:
    """Draw a mask, samples (or heads) side by side.

    Args:
        mask: any mask.
        queries: number of queries to draw.
        keys: number of keys to draw.
        query_start: position of the first query among the keys.

    >>> from multihead import masks
    >>> print(masks.picture(masks.Causal(), queries=2, query_start=3))
    ■ ■ ■ ■ ·
    ■ ■ ■ ■ ■
    """
    seen = mask.tile(TilePositions.from_sizes(queries, keys, query_start=query_start)).flatten(0, 1)
    drawn = [[" ".join("■" if cell else "·" for cell in row) for row in sample] for sample in seen.tolist()]
    return "\n".join("   ".join(line) for line in zip(*drawn, strict=True))
