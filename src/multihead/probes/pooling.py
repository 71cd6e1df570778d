"""Pool an attention map into blocks: the mean over the cells of a block that may be seen."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class PooledMap:
    """The sums and counts of a map's blocks.

    Fields:
        sums: (heads, row blocks, column blocks), float64, sum of the weights.
        counts: (heads, row blocks, column blocks), float64, number of cells that may be seen.
        row_block: queries a block.
        column_block: keys a block.
    """

    sums: Tensor
    counts: Tensor
    row_block: int
    column_block: int

    @staticmethod
    def zero(heads: int, queries: int, keys: int, *, size: int, device: torch.device) -> PooledMap:
        """Lay out at most size x size blocks of equal size; the last ones may be smaller."""
        row_block, column_block = max(1, -(-queries // size)), max(1, -(-keys // size))
        rows, columns = -(-queries // row_block), -(-keys // column_block)
        sums = torch.zeros(heads, rows, columns, dtype=torch.float64, device=device)
        return PooledMap(sums, torch.zeros_like(sums), row_block, column_block)

    def row_blocks(self, cells: Tensor, rows: slice) -> Tensor:
        """Sum cells (heads, rows, columns) over the rows of each block: (heads, row blocks touched, columns)."""
        block = torch.arange(rows.start, rows.stop, device=cells.device) // self.row_block
        block = block - block[0]
        member = torch.nn.functional.one_hot(block).to(cells.dtype)  # (rows, row blocks touched)
        return member.mT @ cells

    def add(self, by_row_block: Tensor, shown: Tensor | None, rows: slice, columns: tuple[int, int]) -> None:
        """Add a tile whose rows are summed already, and count its cells that may be seen."""
        first = rows.start // self.row_block
        block = torch.arange(*columns, device=by_row_block.device) // self.column_block
        target = slice(first, first + by_row_block.shape[1])
        self.sums[:, target].index_add_(2, block, by_row_block.double())
        if shown is None:
            shown = torch.ones(
                1, rows.stop - rows.start, columns[1] - columns[0], dtype=torch.bool, device=block.device
            )
        self.count_cells(shown, rows, columns)

    def count_cells(self, shown: Tensor, rows: slice, columns: tuple[int, int]) -> None:
        """Count the cells that may be seen among some rows and columns: (heads or 1, rows, columns) bool."""
        first = rows.start // self.row_block
        block = torch.arange(*columns, device=shown.device) // self.column_block
        counted = self.row_blocks(shown.float(), rows).double()
        target = slice(first, first + counted.shape[1])
        self.counts[:, target].index_add_(2, block, counted.expand(self.counts.shape[0], -1, -1))

    def count_intervals(self, start: Tensor, stop: Tensor) -> None:
        """Count the cells within each query's interval of keys: (queries,) each, start <= stop."""
        keys = torch.arange(self.counts.shape[2], device=start.device) * self.column_block  # first of each cell
        inside = stop[:, None].minimum(keys + self.column_block) - start[:, None].maximum(keys)  # (queries, cells)
        rows = torch.arange(len(start), device=start.device) // self.row_block
        summed = self.counts.new_zeros(self.counts.shape[1:]).index_add_(0, rows, inside.clamp(min=0).double())
        self.counts.add_(summed)

    def means(self) -> Tensor:
        """Return (heads, row blocks, column blocks): the mean weight, NaN where no cell may be seen."""
        return self.sums / self.counts
