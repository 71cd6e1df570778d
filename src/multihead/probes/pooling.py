"""Pool an attention map into blocks: the mean or the maximum of the visible weights in a block."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from multihead.kernels.call import AttentionRequest
from multihead.kernels.dense_tile import visible_cells
from multihead.masks.base import KeyBounds

ROWS_PER_STEP = 256  # queries per step if visible (query, key) cells are counted one by one


@dataclass(frozen=True, eq=False)
class PooledMap:
    """Sums, counts and largest weights of the blocks of an attention map, filled tile by tile.

    Attributes:
        sums: (heads, row blocks, column blocks), float64, sum of the weights.
        counts: (heads, row blocks, column blocks), float64, number of visible cells.
        largest: (heads, row blocks, column blocks), float64, the largest weight, -inf where no cell is visible.
        row_block: queries per block.
        column_block: keys per block.
    """

    sums: Tensor
    counts: Tensor
    largest: Tensor
    row_block: int
    column_block: int

    @staticmethod
    def zero(heads: int, queries: int, keys: int, *, size: int, device: torch.device) -> PooledMap:
        """Create an empty map of at most size x size blocks, all of equal size except the last ones."""
        row_block, column_block = max(1, -(-queries // size)), max(1, -(-keys // size))
        rows, columns = -(-queries // row_block), -(-keys // column_block)
        sums = torch.zeros(heads, rows, columns, dtype=torch.float64, device=device)
        return PooledMap(sums, torch.zeros_like(sums), torch.full_like(sums, -torch.inf), row_block, column_block)

    def sum_row_blocks(self, cells: Tensor, rows: slice) -> Tensor:
        """Sum cells (heads, rows, columns) over the rows of each block: (heads, row blocks touched, columns)."""
        block = self._row_block_indices(rows, cells.device)
        member = torch.nn.functional.one_hot(block - block[0]).to(cells.dtype)  # (rows, row blocks touched)
        return member.mT @ cells

    def add(self, weights: Tensor, rows: slice, columns: tuple[int, int]) -> None:
        """Add the weights of a tile, 0 where hidden: (heads, rows, columns)."""
        by_row_block = self.sum_row_blocks(weights, rows)
        first = rows.start // self.row_block
        block = torch.arange(*columns, device=weights.device) // self.column_block
        self.sums[:, first : first + by_row_block.shape[1]].index_add_(2, block, by_row_block.double())

    def update_maxima(self, weights: Tensor, shown: Tensor | None, rows: slice, columns: tuple[int, int]) -> None:
        """Update the largest weight of each block with the weights of a tile.

        Args:
            weights: (heads, rows, columns).
            shown: (heads or 1, rows, columns) bool, True = visible; None if all cells are visible.
            rows: queries of the tile.
            columns: range of the tile's keys, [first, stop).
        """
        if shown is not None:
            weights = weights.masked_fill(~shown, -torch.inf)
        cells = _block_maxima(_block_maxima(weights, 2, columns[0], self.column_block), 1, rows.start, self.row_block)
        row, column = rows.start // self.row_block, columns[0] // self.column_block
        place = (slice(None), slice(row, row + cells.shape[1]), slice(column, column + cells.shape[2]))
        self.largest[place] = self.largest[place].maximum(cells.double())

    def count_visible_cells(
        self, request: AttentionRequest, bounds: KeyBounds, sample: int, *, heads: slice = slice(None)
    ) -> None:
        """Count the visible cells of one sample of a call; `heads` are the heads that this map has."""
        if bounds.remainder is None and request.bias is None:
            row = 0 if bounds.is_shared_by_samples else sample
            self.count_intervals(bounds.start[row], bounds.stop[row])
            return
        shape = request.shape
        for first in range(0, shape.query_length, ROWS_PER_STEP):
            rows = slice(first, min(first + ROWS_PER_STEP, shape.query_length))
            shown = visible_cells(request, rows)
            shown = shown[sample if shown.shape[0] > 1 else 0]  # (heads or 1, rows or 1, keys or 1)
            shown = shown[heads] if len(shown) > 1 else shown
            self.count_cells(shown.expand(-1, rows.stop - first, shape.key_length), rows)

    def count_cells(self, shown: Tensor, rows: slice) -> None:
        """Add the visible cells of some rows, given as (heads or 1, rows, keys) bool, to the counts."""
        first = rows.start // self.row_block
        block = torch.arange(shown.shape[2], device=shown.device) // self.column_block
        counted = self.sum_row_blocks(shown.float(), rows).double()
        target = slice(first, first + counted.shape[1])
        self.counts[:, target].index_add_(2, block, counted.expand(self.counts.shape[0], -1, -1))

    def count_intervals(self, start: Tensor, stop: Tensor) -> None:
        """Add the cells in each query's interval of visible keys to the counts; (queries,) each, start <= stop."""
        keys = (
            torch.arange(self.counts.shape[2], device=start.device) * self.column_block
        )  # first key of each column block
        inside = stop[:, None].minimum(keys + self.column_block) - start[:, None].maximum(
            keys
        )  # (queries, column blocks)
        rows = self._row_block_indices(slice(0, len(start)), start.device)
        summed = self.counts.new_zeros(self.counts.shape[1:]).index_add_(0, rows, inside.clamp(min=0).double())
        self.counts.add_(summed)

    def means(self) -> Tensor:
        """Return (heads, row blocks, column blocks): the mean weight, NaN where no cell is visible."""
        return self.sums / self.counts

    def maxima(self) -> Tensor:
        """Return (heads, row blocks, column blocks): the largest weight, NaN where no cell is visible."""
        return self.largest.masked_fill(self.largest == -torch.inf, torch.nan)

    def _row_block_indices(self, rows: slice, device: torch.device) -> Tensor:
        """Return the index of the row block of each query: (rows,)."""
        return torch.arange(rows.start, rows.stop, device=device) // self.row_block


def _block_maxima(cells: Tensor, axis: int, first: int, block: int) -> Tensor:
    """Return the maximum of each block along an axis of (heads, rows, columns) whose first index is `first`."""
    before = first % block
    after = -(before + cells.shape[axis]) % block
    filled = torch.nn.functional.pad(cells.movedim(axis, -1), (before, after), value=-torch.inf).contiguous()
    return filled.view(*filled.shape[:-1], -1, block).amax(-1).movedim(-1, axis)
