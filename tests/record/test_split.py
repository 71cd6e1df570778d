"""Parts of records, and tensors that are joined from several."""

from __future__ import annotations

import pytest
import torch

from multihead.record.split import JoinedRows, LayerPartOfRank, TensorPiece, count_tokens
from multihead.record.text_table import RowsInTensor


def joined() -> tuple[JoinedRows, torch.Tensor]:
    """Four heads and five rows: the first two heads lie in two tensors, the others in a third."""
    whole = torch.arange(60.0).view(1, 4, 5, 3)
    first = RowsInTensor(whole[:, :2, [3, 4, 0]])  # rows 3, 4 and 0
    second = RowsInTensor(whole[:, :2, 1:3])
    third = RowsInTensor(whole[:, 2:])
    pieces = (
        TensorPiece(first, (0, 2), 3, (0, 2)),
        TensorPiece(first, (2, 3), 0, (0, 2)),
        TensorPiece(second, (0, 2), 1, (0, 2)),
        TensorPiece(third, (0, 5), 0, (2, 4)),
    )
    return JoinedRows(pieces, heads=4, length=5, width=3, dtype=torch.float32), whole


def test_joined_rows_read_each_part_from_its_tensor() -> None:
    rows, whole = joined()
    assert rows.length == 5
    assert torch.equal(rows.all_rows(), whole)
    assert torch.equal(rows.rows_between(2, 9), whole[:, :, 2:])
    for _ in range(2):  # the second time from memory
        assert torch.equal(rows.rows_between(1, 4, heads=(3,))[:, 3], whole[:, 3, 1:4])
    assert torch.equal(rows.rows_between(1, 4, heads=(0, 2))[:, [0, 2]], whole[:, [0, 2], 1:4])
    assert rows.rows_between(4, 2).shape == (1, 4, 0, 3)


@pytest.mark.parametrize(
    ("split", "described"),
    [
        (LayerPartOfRank((0, 8), 8, (0, 2), 2, 1, 4), "rank 1 of 4 of the sequence"),
        (LayerPartOfRank((2, 4), 8, (0, 1), 2), "heads 2 to 3 of 8"),
        (LayerPartOfRank((2, 3), 8, (0, 1), 2, 0, 2), "head 2 of 8, rank 0 of 2 of the sequence"),
    ],
)
def test_a_part_is_described(split: LayerPartOfRank, described: str) -> None:
    assert split.describe() == described
    assert not split.is_whole


def test_all_heads_of_one_rank_are_the_whole() -> None:
    assert LayerPartOfRank((0, 8), 8, (0, 2), 2).is_whole
    assert count_tokens(()) == 0
