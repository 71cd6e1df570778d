"""Pool an attention map into blocks: the mean or the maximum of the visible weights in a block."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from multihead.kernels.call import AttentionRequest
from multihead.kernels.dense_tile import visible_cells
from multihead.masks.base import KeyBounds
from multihead.tensors.precision import widen, widest_float
from multihead.tensors.shapes import consecutive_slices, index_axes

MAX_INTERVALS_AT_ONCE = 1 << 22  # queries x column blocks per step if cells are counted from intervals
ROWS_PER_STEP = 256  # queries per step if visible (query, key) cells are counted one by one


def cell_of_map(queries: int, keys: int, size: int) -> tuple[int, int]:
    """Return the queries and keys of a cell of a map of at most size x size cells."""
    return max(1, -(-queries // size)), max(1, -(-keys // size))


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
        row_block, column_block = cell_of_map(queries, keys, size)
        rows, columns = -(-queries // row_block), -(-keys // column_block)
        sums = torch.zeros(heads, rows, columns, dtype=widest_float(device), device=device)
        return PooledMap(sums, torch.zeros_like(sums), torch.full_like(sums, -torch.inf), row_block, column_block)

    def sum_row_blocks(self, cells: Tensor, rows: slice) -> Tensor:
        """Sum cells (heads, rows, columns) over the rows of each block: (heads, row blocks touched, columns)."""
        block = torch.arange(rows.start, rows.stop, device=cells.device) // self.row_block
        member = torch.nn.functional.one_hot(block - block[0]).to(cells.dtype)  # (rows, row blocks touched)
        return member.mT @ cells

    def add(self, weights: Tensor, rows: slice, columns: tuple[int, int]) -> None:
        """Add the weights of a tile, 0 where hidden: (heads, rows, columns)."""
        by_row_block = self.sum_row_blocks(weights, rows)
        first = rows.start // self.row_block
        block = torch.arange(*columns, device=weights.device) // self.column_block
        self.sums[:, first : first + by_row_block.shape[1]].index_add_(2, block, widen(by_row_block))

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
        self.largest[place] = self.largest[place].maximum(widen(cells))

    def count_visible_cells(
        self, request: AttentionRequest, bounds: KeyBounds, sample: int, *, heads: slice = slice(None)
    ) -> None:
        """Count the visible cells of one sample of a call; `heads` are the heads that this map has."""
        if bounds.remainder is None and request.bias is None:
            row = 0 if bounds.is_shared_by_samples else sample
            block = (self.row_block, self.column_block)
            self.counts.add_(count_cells_of_intervals(bounds.start[row], bounds.stop[row], self.counts.shape[2], block))
            return
        shape = request.shape
        for rows in consecutive_slices(shape.query_length, ROWS_PER_STEP):
            shown = index_axes(visible_cells(request, rows), {0: slice(sample, sample + 1), 1: heads})[0]
            self.count_cells(shown.expand(-1, rows.stop - rows.start, shape.key_length), rows)

    def count_cells(self, shown: Tensor, rows: slice) -> None:
        """Add the visible cells of some rows, given as (heads or 1, rows, keys) bool, to the counts."""
        first = rows.start // self.row_block
        block = torch.arange(shown.shape[2], device=shown.device) // self.column_block
        counted = widen(self.sum_row_blocks(shown.float(), rows))
        target = slice(first, first + counted.shape[1])
        self.counts[:, target].index_add_(2, block, counted.expand(self.counts.shape[0], -1, -1))

    def means(self) -> Tensor:
        """Return (heads, row blocks, column blocks): the mean weight, NaN where no cell is visible."""
        return self.sums / self.counts

    def maxima(self) -> Tensor:
        """Return (heads, row blocks, column blocks): the largest weight, NaN where no cell is visible."""
        return self.largest.masked_fill(self.largest == -torch.inf, torch.nan)


def sum_over_blocks(cells: Tensor, block: tuple[int, int]) -> Tensor:
    """Sum the numbers in each block: (heads, rows, columns) -> (heads, row blocks, column blocks)."""
    rest = (0, -cells.shape[2] % block[1], 0, -cells.shape[1] % block[0])
    whole = torch.nn.functional.pad(cells, rest)
    added: Tensor = whole.unflatten(2, (-1, block[1])).sum(-1).unflatten(1, (-1, block[0])).sum(2)
    return added


def count_cells_of_intervals(start: Tensor, stop: Tensor, column_blocks: int, block: tuple[int, int]) -> Tensor:
    """Count the cells of each block in the intervals of keys of queries, (queries,): (row blocks, column blocks)."""
    height, width = block
    first = torch.arange(column_blocks, device=start.device) * width  # first key of each column block
    counts = []
    step = max(MAX_INTERVALS_AT_ONCE // max(column_blocks, 1) // height, 1) * height
    for row in range(0, max(len(start), 1), step):
        some = slice(row, row + step)
        inside = stop[some, None].minimum(first + width) - start[some, None].maximum(first)  # (queries, column blocks)
        counts.append(sum_over_blocks(inside.clamp_(min=0)[None], (height, 1))[0])
    return torch.cat(counts)


def _block_maxima(cells: Tensor, axis: int, first: int, block: int) -> Tensor:
    """Return the maximum of each block along an axis of (heads, rows, columns) whose first index is `first`."""
    before = first % block
    after = -(before + cells.shape[axis]) % block
    filled = torch.nn.functional.pad(cells.movedim(axis, -1), (before, after), value=-torch.inf).contiguous()
    return filled.view(*filled.shape[:-1], -1, block).amax(-1).movedim(-1, axis)
