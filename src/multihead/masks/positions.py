"""Positions of queries and keys at which masks are evaluated, and sizes of calls against which masks are checked.

`Shifted(mask, offset)` re-expresses a mask for a cache that dropped its first keys. Masks that depend on distances
alone need no shift, and lengths and prefixes are shortened instead.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class TilePositions:
    """Positions of the queries and keys of one tile of the attention map.

    Attributes:
        positions: (batch or 1, 1, rows, 1), int64, the position of each query among the keys.
        rows: (1, 1, rows, 1), int64, the query indices.
        columns: (batch or 1, 1, 1, columns), int64, the key positions.
    """

    positions: Tensor
    rows: Tensor
    columns: Tensor

    @staticmethod
    def from_sizes(
        queries: int,
        keys: int,
        *,
        query_start: int | Tensor = 0,
        device: torch.device | str = "cpu",
        rows: slice = slice(None),
        columns: slice = slice(None),
    ) -> TilePositions:
        """Return the positions of the tile `rows` x `columns` of an attention map of `queries` x `keys`."""
        row = torch.arange(queries, device=device)[rows].view(1, 1, -1, 1)
        column = torch.arange(keys, device=device)[columns].view(1, 1, 1, -1)
        start = query_start.to(device).view(-1, 1, 1, 1) if isinstance(query_start, Tensor) else query_start
        return TilePositions(row + start, row, column)

    def shifted(self, offset: int | Tensor) -> TilePositions:
        """Add an offset, an int or (batch,), to the positions of queries and keys."""
        if isinstance(offset, Tensor):
            offset = offset.to(self.columns.device).view(-1, 1, 1, 1)
        return TilePositions(self.positions + offset, self.rows, self.columns + offset)

    def all_visible(self) -> Tensor:
        """Return a tile of True: (1, 1, rows, columns) bool."""
        return torch.ones_like(self.rows, dtype=torch.bool) & torch.ones_like(self.columns, dtype=torch.bool)


@dataclass(frozen=True, eq=False)
class CallPositions:
    """Positions of the queries and number of keys of a call, for converting a mask to intervals.

    Attributes:
        positions: (batch or 1, queries), int64, the position of each query among the keys.
        keys: number of keys, an int or (batch, 1).
        has_readable_values: whether values can be read without device synchronisation or a graph break.
    """

    positions: Tensor
    keys: int | Tensor
    has_readable_values: bool


@dataclass(frozen=True)
class SampleSpan:
    """The queries and keys of one sample in a call with several samples.

    Attributes:
        sample: index of the sample in the batch.
        queries: first query of the sample and one past the last.
        keys: first key of the sample and one past the last.
        holds_all_visible_keys: whether the queries see no keys outside the span, so that statistics of the call can be
            sliced.
        holds_first_visible_key: whether the first key that the queries see is the key that the kernel used for
            `first_mass`.
        is_text_of_row: whether the sample is one of the texts of its row, see `Mask.row_texts`.
    """

    sample: int
    queries: tuple[int, int]
    keys: tuple[int, int]
    holds_all_visible_keys: bool = field(default=False, compare=False)
    holds_first_visible_key: bool = field(default=False, compare=False)
    is_text_of_row: bool = field(default=False, compare=False)


class CallSize(NamedTuple):
    """The sizes of a call, which a mask must fit.

    With `more_keys_later`, lengths in a mask may exceed the keys, because later calls add keys to a cache.
    """

    batch: int
    heads: int
    queries: int
    keys: int
    more_keys_later: bool = False
