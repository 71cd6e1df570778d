"""Leading keys that every query sees, before the keys of another mask."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from multihead import masks
from multihead.errors import ArgumentError, MaskError
from multihead.kernels.plan.bounds import key_bounds
from multihead.masks.leading_keys import LeadingKeys
from multihead.masks.positions import TilePositions
from tests import oracle

INNER = [
    masks.Full(),
    masks.Causal(),
    masks.Window(2, after=1),
    masks.Lengths((2, 0)),
    masks.Documents((1, 3)),
    masks.Keep(torch.tensor([[True, False, True, True], [False, False, False, True]]), "batch keys"),
    masks.Causal() | masks.Prefix((1, 3)),
]


@pytest.mark.parametrize("inner", INNER, ids=repr)
@pytest.mark.parametrize("count", [0, 1, 3])
def test_every_query_sees_the_leading_keys_and_the_mask_applies_to_the_others(inner: masks.Mask, count: int) -> None:
    mask, place = LeadingKeys(count, inner), TilePositions.from_sizes(5, 4 + count, query_start=count - 1)
    found = mask.tile(place).expand(2, 1, 5, 4 + count)
    assert bool(found[..., :count].all())
    behind = inner.tile(TilePositions.from_sizes(5, 4, query_start=-1)).expand(2, 1, 5, 4)
    assert torch.equal(found[..., count:], behind)
    assert torch.equal(found, oracle.shown(mask, (2, 1, 5, 4 + count), torch.tensor([count - 1] * 2)))


@pytest.mark.parametrize(
    ("inner", "intervals"),
    [(masks.Full(), True), (masks.Causal(), True), (masks.Lengths((2, 0)), True), (masks.Window(2), False)],
    ids=repr,
)
def test_a_mask_that_starts_at_the_first_key_stays_an_interval(inner: masks.Mask, intervals: bool) -> None:
    bounds = key_bounds(LeadingKeys(2, inner), queries=4, keys=6, query_start=2)
    assert (bounds.remainder is None) == intervals


def test_two_are_equal_where_they_are_written_alike() -> None:
    assert LeadingKeys(1, masks.Window(2)) == LeadingKeys(1, masks.Window(2))
    assert hash(LeadingKeys(1, masks.Window(2))) == hash(LeadingKeys(1, masks.Window(2)))
    assert LeadingKeys(1, masks.Window(2)) != LeadingKeys(2, masks.Window(2))


def test_it_holds_tensors_and_uses_positions_where_its_mask_does() -> None:
    assert LeadingKeys(1, masks.Lengths(torch.tensor([2]))).holds_tensors
    assert not LeadingKeys(1, masks.Lengths((2,))).holds_tensors
    assert LeadingKeys(1, masks.Causal()).uses_positions
    assert not LeadingKeys(1, masks.Full()).uses_positions


@pytest.mark.parametrize(
    ("given", "kind", "sentence"),
    [
        ((-1, masks.Full()), ArgumentError, "LeadingKeys count is -1. Give an integer of at least 0."),
        (
            (1, 3),
            MaskError,
            (
                "mask is a int, and must be a Mask. "
                "Give one of multihead.masks, for example masks.Causal() & masks.Lengths((5, 3))."
            ),
        ),
    ],
)
def test_an_invalid_count_or_mask_is_rejected(given: Any, kind: type[Exception], sentence: str) -> None:
    with pytest.raises(kind) as refusal:
        LeadingKeys(*given)
    assert str(refusal.value) == sentence
