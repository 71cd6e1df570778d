"""Pooling a map into blocks."""

from __future__ import annotations

import torch

from multihead.probes.pooling import PooledMap, count_cells_of_intervals


def test_at_most_size_by_size_blocks_are_laid_out() -> None:
    for queries, keys, size, expected in (
        (10, 7, 4, (4, 4)),
        (3, 5, 64, (3, 5)),
        (0, 5, 2, (0, 2)),
        (65, 64, 64, (33, 64)),
    ):
        pooled = PooledMap.zero(2, queries, keys, size=size, device=torch.device("cpu"))
        assert pooled.sums.shape == (2, *expected)


def test_tiles_that_cut_through_blocks_add_up() -> None:
    shown = torch.rand(1, 7, 9) < 0.7
    cells = torch.rand(2, 7, 9) * shown
    pooled = PooledMap.zero(2, 7, 9, size=3, device=torch.device("cpu"))
    for top, bottom in ((0, 2), (2, 5), (5, 7)):
        rows = slice(top, bottom)
        pooled.count_cells(shown[:, rows], rows)
        for left, right in ((0, 4), (4, 9)):
            pooled.add(cells[:, rows, left:right], rows, (left, right))
            pooled.update_maxima(cells[:, rows, left:right], shown[:, rows, left:right], rows, (left, right))
    for row in range(3):
        for column in range(3):
            block = (slice(None), slice(3 * row, 3 * row + 3), slice(3 * column, 3 * column + 3))
            expected = cells[block].sum((1, 2)) / shown[block].sum()
            assert torch.allclose(pooled.means()[:, row, column].float(), expected, atol=1e-6)
            assert torch.equal(pooled.maxima()[:, row, column].float(), cells[block].amax((1, 2)))


def test_where_nothing_is_hidden_every_cell_counts() -> None:
    pooled = PooledMap.zero(1, 2, 3, size=1, device=torch.device("cpu"))
    pooled.add(torch.ones(1, 2, 3), slice(0, 2), (0, 3))
    pooled.counts.add_(count_cells_of_intervals(torch.zeros(2, dtype=torch.int64), torch.full((2,), 3), 1, (2, 3)))
    assert pooled.means().tolist() == [[[1.0]]]


def test_a_block_in_which_no_cell_may_be_seen_has_no_largest_weight() -> None:
    pooled = PooledMap.zero(1, 2, 2, size=2, device=torch.device("cpu"))
    shown = torch.tensor([[[True, False], [True, True]]])
    pooled.update_maxima(torch.tensor([[[1.0, 0.0], [0.0, 0.25]]]), shown, slice(0, 2), (0, 2))
    assert str(pooled.maxima().tolist()) == "[[[1.0, nan], [0.0, 0.25]]]"
