"""Rectangles cover what the bounds show: everything once, and nothing hidden without a mask."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from multihead import masks
from multihead.kernels.plan import rectangles as room
from multihead.kernels.plan.bounds import key_bounds
from multihead.kernels.plan.rectangles import Rectangle, cover_with_rectangles
from multihead.masks.base import KeyBounds
from tests import oracle
from tests.drawing import sizes, starts, trees


def spanned(piece: Rectangle, queries: int, keys: int) -> torch.Tensor:
    """(queries, keys) bool: the cells that a call for this rectangle may look at."""
    cells = torch.zeros(queries, keys, dtype=torch.bool)
    for row in range(*piece.rows):
        stop = min(piece.columns[1], piece.columns[0] + row - piece.rows[0] + 1)
        cells[row, piece.columns[0] : stop if piece.kind == "causal" else piece.columns[1]] = True
    return cells


def assert_covered(bounds: KeyBounds, keys: int, pieces: Sequence[Rectangle]) -> None:
    key = torch.arange(keys)
    inside = (key >= bounds.start[..., None]) & (key < bounds.stop[..., None])  # (batch or 1, queries, keys)
    for sample, seen in enumerate(inside):
        times = torch.zeros(seen.shape, dtype=torch.int64)
        for piece in pieces:
            if piece.sample not in (None, sample):
                continue
            cells = spanned(piece, *seen.shape)
            if piece.kind == "partial":
                cells &= seen  # its mask hides the others
            else:
                assert not bool((cells & ~seen).any()), f"{piece} shows what is hidden"
            times += cells
        assert torch.equal(times, seen.long())


@settings(max_examples=100)
@given(data=st.data())
def test_every_seen_cell_is_computed_once(data: st.DataObject) -> None:
    size = data.draw(sizes(longest=12))
    mask, start = data.draw(trees(size)), data.draw(starts(size))
    number = size.keys - size.queries if isinstance(start, str) else start
    bounds = key_bounds(mask, queries=size.queries, keys=size.keys, query_start=number)
    with pytest.MonkeyPatch.context() as patch:
        # Sizes at which small maps take many blocks and few merges, and the other way round.
        patch.setattr(room, "BLOCK_ROWS", data.draw(st.sampled_from((2, 3, 128))))
        patch.setattr(room, "CALL_COST_IN_CELLS", data.draw(st.sampled_from((0, 5, 1024))))
        for biased in (False, True):
            pieces = room._cover_bounds(bounds, biased=biased)  # not those kept from other block sizes
            assert_covered(bounds, size.keys, pieces)
            if biased or bounds.remainder is not None:
                assert {piece.kind for piece in pieces} <= {"partial"}
                assert all(piece.rows[1] - piece.rows[0] <= room.BLOCK_ROWS for piece in pieces)


LONG = {
    "full": (masks.Full(), 1),
    "causal": (masks.Causal(), 1),
    "window": (masks.Window(100), 9),
    "documents": (masks.Documents((300, 1, 400, 299)), 4),
    "causal documents": (masks.Causal() & masks.Documents((300, 1, 400, 299)), 5),
    "lengths a sample": (masks.Lengths((900, 20)), 2),
    "prefix": (masks.Causal() | masks.Prefix(200), 3),
}


@pytest.mark.parametrize("name", LONG)
def test_usual_masks_take_few_calls(name: str) -> None:
    mask, most = LONG[name]
    bounds = key_bounds(mask, queries=1000, keys=1000)
    pieces = cover_with_rectangles(bounds)
    assert_covered(bounds, 1000, pieces)
    assert len(pieces) <= most
    hidden = sum(piece.num_cells for piece in pieces if piece.kind == "partial") - sum(
        int((bounds.stop - bounds.start)[0, slice(*piece.rows)].sum()) for piece in pieces if piece.kind == "partial"
    )
    assert hidden < 0.15 * 1000 * 1000


def test_no_query_and_no_key_take_no_call() -> None:
    assert cover_with_rectangles(key_bounds(masks.Full(), queries=0, keys=4)) == ()
    assert cover_with_rectangles(key_bounds(masks.Full(), queries=4, keys=0)) == ()
    assert cover_with_rectangles(key_bounds(masks.Lengths((0, 0)), queries=4, keys=4)) == ()


def test_samples_that_see_alike_are_computed_together() -> None:
    assert cover_with_rectangles(key_bounds(masks.Lengths((3, 3)), queries=4, keys=5)) == (
        Rectangle(None, (0, 4), (0, 3), "full"),
    )
    assert [
        piece.sample for piece in cover_with_rectangles(key_bounds(masks.Lengths((3, 0, 5)), queries=4, keys=5))
    ] == [0, 2]


def test_the_oracle_of_this_file_agrees_with_that_of_masks() -> None:
    bounds = key_bounds(masks.Causal(), queries=4, keys=6, query_start=2)
    cells = sum(spanned(piece, 4, 6).long() for piece in cover_with_rectangles(bounds))
    assert torch.equal(torch.as_tensor(cells) > 0, oracle.shown(masks.Causal(), (1, 1, 4, 6), 2)[0, 0])


def test_rectangles_are_made_once_for_a_plan_and_keep_it_no_longer_than_its_user_does() -> None:
    bounds = key_bounds(masks.Lengths(torch.tensor((3, 1))), queries=4, keys=5)
    assert cover_with_rectangles(bounds) is cover_with_rectangles(bounds)
    assert cover_with_rectangles(bounds, biased=True) is not cover_with_rectangles(bounds)
    watched = weakref.ref(bounds)
    del bounds
    gc.collect()
    assert watched() is None
