"""Which texts a row has is what its mask says, and nothing else."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from multihead import masks
from multihead.masks.base import Mask
from multihead.masks.documents import Chunks
from multihead.masks.texts import RowTexts


def texts_of(mask: Mask) -> RowTexts:
    assert mask.row_texts is not None
    return mask.row_texts


def edges(mask: Mask) -> list[list[int]]:
    found = texts_of(mask)
    return [row[: count + 1] for row, count in zip(found.edges.tolist(), found.num_texts.tolist(), strict=True)]


@pytest.mark.parametrize(
    "mask",
    [
        masks.Causal(),
        masks.Lengths((5, 3)) & masks.Window(2),
        Chunks((4, 4)) & masks.Causal(),
        masks.Documents((4, 4)) | masks.Prefix(2),
        masks.Keep(torch.eye(4, dtype=torch.bool), "queries keys"),
    ],
    ids=repr,
)
def test_a_row_is_one_text_unless_documents_separate_it(mask: Mask) -> None:
    assert mask.row_texts is None
    assert mask.without_documents() == mask


def test_documents_of_length_0_are_texts_but_where_they_fill_up_a_row() -> None:
    assert edges(masks.Documents((3, 0, 2, 0))) == [[0, 3, 3, 5, 5]]
    assert edges(masks.Documents(((3, 0, 2), (4, 0, 0)))) == [[0, 3, 3, 5], [0, 4]]
    assert edges(masks.Documents(torch.tensor([[2, 1], [0, 0]]))) == [[0, 2, 3], [0]]


def test_documents_of_two_masks_cut_at_the_edges_of_both() -> None:
    both = masks.Documents((3, 4)) & masks.Causal() & masks.Documents(((2, 3), (9, 0)))
    assert edges(both) == [[0, 2, 3, 5], [0, 3, 7]]
    assert both.without_documents() == masks.Causal()
    assert edges(Chunks((2, 2)) & masks.Documents((4,))) == [[0, 4]]


@pytest.mark.parametrize("count", [4, torch.tensor([4])])
def test_a_text_keeps_its_first_key_when_a_cache_drops_it(count: int | Tensor) -> None:
    left = (masks.Documents((3, 4, 5)) & masks.Window(9)).after_dropping_keys(count).after_dropping_keys(1)
    assert edges(left) == [[-5, -2, 2, 7]]
    text, place = texts_of(left).locate(torch.arange(4)[None])
    assert (text.tolist(), place.tolist()) == ([[1, 1, 2, 2]], [[2, 3, 0, 1]])


def test_tokens_are_numbered_through_the_rows_of_a_batch() -> None:
    texts = texts_of(masks.Documents(((2, 1), (3, 0))))
    number, place = texts.number_of_tokens(torch.arange(-1, 4)[None], 2)
    assert number.tolist() == [[0, 0, 0, 1, 0], [0, 2, 2, 2, 0]]
    assert place.tolist() == [[-1, 0, 1, 0, -1], [-1, 0, 1, 2, -1]]


def test_a_call_of_a_cache_has_the_last_keys_as_queries() -> None:
    found = texts_of(masks.Documents((3, 4, 5))).ranges(5, batch=1, queries=3, keys=8)
    assert found.T.tolist() == [[0, 0, 0, 0, 3], [0, 0, 2, 3, 7], [0, 2, 3, 7, 8]]
    later = texts_of(masks.Documents((3, 4, 5))).ranges(torch.tensor([0]), batch=1, queries=2, keys=2)
    assert [stop - first for _, first, stop, *_ in later.T.tolist()] == [2, 0, 0]
