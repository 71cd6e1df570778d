"""Rows of several texts are appended in any order, and each text reads its own, one after another."""

from __future__ import annotations

import torch
from torch import Tensor

from multihead.record.text_table import RaggedRows, RowsInTable, TextTable, append_new_keys

HEADS = 4
K = torch.randn(HEADS, 10, 8, generator=torch.Generator().manual_seed(0))


def test_the_rows_of_a_text_follow_each_other_however_calls_append_them() -> None:
    column = RaggedRows()
    column.append(K[:, :5], [(0, 2), (2, 0), (1, 3)])
    column.append(K[:, 5:6], [(1, 1)])
    column.append(K[:, 6:9], [(0, 1), (1, 1), (0, 1)])  # the last two are windows of one text
    expected = {0: [0, 1, 6, 8], 1: [2, 3, 4, 5, 7], 2: []}
    assert {text: column.length(text) for text in range(4)} == {0: 4, 1: 5, 2: 0, 3: 0}
    for text, rows in expected.items():
        assert torch.equal(column.rows_of(text), K[:, rows])
    column.append(K[:, 9:], [(2, 1)])
    assert torch.equal(column.rows_of(2), K[:, 9:])
    assert torch.equal(column.rows_of(1), K[:, expected[1]])
    assert torch.equal(RowsInTable(column, 1).rows_between(2, 9), K[None, :, [4, 5, 7]])


def test_the_texts_of_one_call_are_views_of_its_rows() -> None:
    column = RaggedRows()
    column.append(K, [(0, 4), (1, 6)])
    assert column.rows_of(1).data_ptr() == K[:, 4:].data_ptr()


def test_rows_that_are_read_later_are_read_once() -> None:
    class Later:
        count = 0

        def read(self) -> Tensor:
            self.count += 1
            return K

    column, later = RaggedRows(), Later()
    column.append(later, [(0, 10)])
    assert later.count == 0
    assert torch.equal(column.rows_of(0), K)
    column.append(K, [(0, 10)])
    assert torch.equal(column.rows_of(0), torch.cat([K, K], 1))
    assert later.count == 1


def test_texts_of_two_dtypes_keep_theirs() -> None:
    column, half = RaggedRows(), K[:, :3].half()
    column.append(half, [(0, 1), (2, 2)])
    column.append(K[:, 5:], [(1, 5)])
    for text, rows in ((0, half[:, :1]), (1, K[:, 5:]), (2, half[:, 1:])):
        assert column.rows_of(text).dtype == rows.dtype
        assert torch.equal(column.rows_of(text), rows)


def test_a_statistic_that_one_call_of_a_text_lacks_is_left_out_of_this_text() -> None:
    table, values = TextTable(), K[..., 0]
    table.append([(0, 5), (1, 5)], values, {"entropy": values, "sink_mass": values}, None)
    table.append([(1, 0)], values[:, :0], {"entropy": values[:, :0]}, None)
    assert [list(table.statistics_of(text)) for text in range(3)] == [["entropy", "sink_mass"], ["entropy"], []]


def test_only_what_is_new_is_taken_of_a_growing_cache() -> None:
    column, device = RaggedRows(), torch.device("cpu")
    append_new_keys(column, 0, K[:, :4], start=0, device=device)
    append_new_keys(column, 0, K[:, :6], start=0, device=device)
    append_new_keys(column, 1, K[:, :0], start=0, device=device)
    append_new_keys(column, 0, K[:, 3:9], start=3, device=device)
    assert column.counts.pieces == {0: 3, 1: 1}
    assert torch.equal(column.rows_of(0), K[:, :9])
    assert column.rows_of(1).shape == (HEADS, 0, 8)


def test_keys_that_were_dropped_before_anybody_saw_them_are_zero() -> None:
    column = RaggedRows()
    append_new_keys(column, 0, K[:, :2], start=3, device=torch.device("cpu"))
    assert torch.equal(column.rows_of(0)[:, :3], torch.zeros(HEADS, 3, 8))
    assert torch.equal(column.rows_of(0)[:, 3:], K[:, :2])
