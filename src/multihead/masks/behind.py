"""Say that some keys stand before those that a mask speaks of, and are seen by every query."""

from __future__ import annotations

from dataclasses import dataclass

from multihead.errors import refuse_unless_integer
from multihead.masks.values import Mask, refuse_unless_mask


@dataclass(frozen=True, eq=False)
class Behind(Mask):
    """Every query sees the first `count` keys; of the keys behind them it sees what `mask` shows, counted from there.

    Positions are counted from the first key of all: the query at position p stands at p - count for the mask.

    Args:
        count: how many keys are seen by all.
        mask: what is seen of the others.

    >>> from multihead import masks
    >>> print(masks.picture(Behind(2, masks.Window(2)), queries=3, keys=5, query_start=2))
    ■ ■ ■ · ·
    ■ ■ ■ ■ ·
    ■ ■ · ■ ■
    """

    count: int
    mask: Mask

    def __post_init__(self) -> None:
        refuse_unless_integer("Behind count", self.count, least=0)
        refuse_unless_mask(self.mask)

    @property
    def holds_tensors(self) -> bool:
        """Whether the mask behind them holds some."""
        return self.mask.holds_tensors

    @property
    def speaks_of_positions(self) -> bool:  # type: ignore[override]
        """Whether the mask behind them does."""
        return self.mask.speaks_of_positions
