"""The lookback of masks, and masks after keys were dropped."""

from __future__ import annotations

import pytest
import torch

from multihead import masks
from tests import oracle

WINDOW = masks.Window(4)


@pytest.mark.parametrize(
    ("mask", "reach"),
    [
        (masks.Full(), None),
        (masks.Causal(), None),
        (WINDOW, 4),
        (masks.Causal() & WINDOW, 4),
        (WINDOW & masks.Window(2), 2),
        (WINDOW | masks.Window(9), 9),
        (masks.Causal() | WINDOW, None),
        (masks.Causal() & (WINDOW | masks.Window(9)), 9),
        (masks.Prefix(3), None),
        (WINDOW & masks.Documents((3, 9)), 4),
    ],
    ids=str,
)
def test_the_lookback_of_a_mask(mask: masks.Mask, reach: int | None) -> None:
    assert mask.lookback == reach


def test_a_tensor_has_a_key_axis_where_keys_differ_by_it() -> None:
    assert (WINDOW & masks.Keep(torch.ones(5, dtype=torch.bool), "keys")).has_key_axis
    assert (masks.Drop(torch.ones(2, 5, dtype=torch.bool), "batch keys")).has_key_axis
    assert not (masks.Keep(torch.ones(5, dtype=torch.bool), "heads")).has_key_axis
    assert not (masks.Keep(torch.ones(5, 1, dtype=torch.bool), "heads keys")).has_key_axis
    assert not (masks.Causal()).has_key_axis


TENSOR = torch.tensor([6, 9])
MASKS = [
    masks.Causal(),
    masks.Window(3, after=1),
    masks.Prefix(5),
    masks.Prefix((5, 8)),
    masks.Prefix(TENSOR),
    masks.Lengths((6, 9)),
    masks.Lengths(TENSOR),
    masks.Lengths(((6, 9, 1), (10, 4, 5))),
    masks.Documents((2, 3, 0, 4)),
    masks.Documents(((2, 7, 1), (5, 1, 2))),
    masks.Window(4) & (masks.Documents((2, 6)) | masks.Prefix(3)),
    masks.Keep(torch.tensor([True, False]), "batch"),
]


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("key_start", [0, 4, torch.tensor([2, 5])], ids=str)
def test_a_mask_shows_the_same_cells_after_dropping_keys(mask: masks.Mask, key_start: int | torch.Tensor) -> None:
    batch, queries, keys, position = 2, 3, 10, 6
    whole = oracle.shown(mask, (batch, 1, queries, keys), position)
    each = [int(start) for start in key_start] if isinstance(key_start, torch.Tensor) else [key_start] * batch
    left = keys - max(each)
    part = oracle.shown(
        mask.after_dropping_keys(key_start), (batch, 1, queries, left), torch.tensor(each).neg() + position
    )
    for sample, start in enumerate(each):
        assert part[sample].equal(whole[sample, ..., start : start + left])


def test_ints_stay_ints_where_they_can() -> None:
    assert masks.Prefix(5).after_dropping_keys(2) == masks.Prefix(3)
    assert masks.Prefix(5).after_dropping_keys(9) == masks.Prefix(0)


def test_a_combination_of_masks_that_do_not_change_is_not_built_anew() -> None:
    """A decoding step drops no keys, or none that matter, and the band of a combination is computed once."""
    near = masks.Causal() & masks.Window(3)
    assert near.after_dropping_keys(5) is near
    with_prefix = near | masks.Prefix(4)
    assert with_prefix.after_dropping_keys(0) is with_prefix
    assert with_prefix.after_dropping_keys(1) == near | masks.Prefix(3)
