"""What a ring computes and sends, compared with the dense mask."""

from __future__ import annotations

import pytest
import torch

from multihead import masks
from multihead.kernels.plan.bounds import key_bounds
from multihead.masks.positions import TilePositions
from multihead.parallel.layout import Layout
from multihead.parallel.plan import RingPlan, count_keys_sent, plan_ring, work_per_rank
from tests.parallel.cases import LENGTH, MASKS

LAYOUTS = [Layout(kind, ranks) for kind in ("contiguous", "balanced") for ranks in (1, 2, 4)]


def plans(mask: masks.Mask, length: int, layout: Layout) -> list[RingPlan]:
    return [plan_ring(mask, length, layout, rank) for rank in range(layout.ranks)]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("name", MASKS)
def test_the_pieces_show_every_visible_cell_once(name: str, layout: Layout) -> None:
    mask = MASKS[name]()
    expected = mask.tile(TilePositions.from_sizes(LENGTH, LENGTH)).expand(2, 4, -1, -1)
    shown = torch.zeros(2, 4, LENGTH, LENGTH, dtype=torch.int64)
    for rank, plan in enumerate(plans(mask, LENGTH, layout)):
        own = layout.positions(rank, LENGTH)
        for step in plan.steps:
            theirs = layout.positions((rank - step.distance) % layout.ranks, LENGTH)
            keys = torch.cat([theirs[slice(*each)] for each in step.received_ranges] or [theirs[:0]])
            for piece in step.pieces:
                rows, columns = own[piece.query_slice], keys[piece.key_slice]
                assert (rows[0], rows[-1] + 1, columns[0], columns[-1] + 1) == (*piece.rows, *piece.keys)
                tile = piece.mask.tile(TilePositions.from_sizes(len(rows), len(columns))).expand(2, 4, -1, -1)
                shown[:, :, rows[:, None], columns] += tile.long()
                bounds = key_bounds(piece.mask, queries=len(rows), keys=len(columns))
                column = torch.arange(len(columns))
                inside = (column >= bounds.start[..., None]) & (column < bounds.stop[..., None])
                assert not (tile & ~inside[:, None]).any()
    assert torch.equal(shown, expected.long())


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("name", MASKS)
def test_what_one_rank_sends_is_what_another_expects(name: str, layout: Layout) -> None:
    of_rank = plans(MASKS[name](), LENGTH, layout)
    for rank, plan in enumerate(of_rank):
        assert plan.steps[0].sent_ranges == ()
        for index, step in list(enumerate(plan.steps))[1:]:
            assert step.sent_ranges == of_rank[(rank + step.distance) % layout.ranks].steps[index].received_ranges


def test_a_ring_of_a_window_sends_the_keys_at_the_borders_only() -> None:
    mask = masks.Causal() & masks.Window(256)
    of_rank = plans(mask, 8192, Layout("contiguous", 4))
    assert [each.keys_sent for each in of_rank[1:]] + [of_rank[0].keys_sent] == [255, 255, 0, 255]
    assert sum(each.keys_sent for each in of_rank) == 3 * 255
    assert all(not step.pieces for each in of_rank for step in each.steps if step.distance > 1)


def test_the_keys_of_a_rank_arrive_in_two_halves() -> None:
    """So that a rank holds half of them at a time."""
    causal = plans(masks.Causal(), 256, Layout("balanced", 4))
    assert [step.keys_received for step in causal[0].steps] == [64, *[32, 32] * 3]
    assert [step.keys_received for step in causal[2].steps] == [64, *[16, 16] * 2, 32, 32]
    full = plans(masks.Full(), 64, Layout("contiguous", 2))
    assert [step.received_ranges for step in full[0].steps] == [((0, 32),), ((0, 16),), ((16, 32),)]


def test_documents_that_end_at_a_border_send_nothing() -> None:
    of_rank = plans(masks.Documents((4, 4, 8)), 16, Layout("contiguous", 4))
    assert [each.keys_sent for each in of_rank] == [0, 0, 4, 4]


@pytest.mark.parametrize("ranks", [2, 4, 16])
def test_balanced_ranks_have_equal_work_under_a_causal_mask(ranks: int) -> None:
    length = 64 * ranks
    bounds = key_bounds(masks.Causal(), queries=length, keys=length)
    balanced = work_per_rank(bounds, Layout("balanced", ranks))
    assert max(balanced) == min(balanced)
    contiguous = work_per_rank(bounds, Layout("contiguous", ranks))
    assert max(contiguous) > 1.4 * sum(contiguous) / ranks


def test_in_every_step_balanced_ranks_compute_pieces_of_equal_size() -> None:
    """A step ends for all ranks together: the slowest rank of each step counts."""
    of_rank = plans(masks.Causal(), 256, Layout("balanced", 4))
    for index in range(1, 7):
        cells = [
            sum(
                (piece.query_slice.stop - piece.query_slice.start) * (piece.key_slice.stop - piece.key_slice.start)
                for piece in pieces
            )
            for pieces in (plan.steps[index].pieces for plan in of_rank)
        ]
        assert max(cells) == min(cells)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("name", ["full", "causal", "window", "lengths", "prefix"])
def test_the_estimate_of_a_ring_counts_the_keys_that_are_sent(name: str, layout: Layout) -> None:
    of_rank = plans(MASKS[name](), LENGTH, layout)
    assert count_keys_sent(of_rank[0].bounds, layout) == sum(each.keys_sent for each in of_rank)


def test_a_plan_is_made_once_per_mask() -> None:
    layout = Layout("balanced", 2)
    assert plan_ring(masks.Causal(), 8, layout, 0) is plan_ring(masks.Causal(), 8, layout, 0)
    kept = masks.Keep(torch.ones(8, 8, dtype=torch.bool), "queries keys")  # may change in place
    assert plan_ring(kept, 8, layout, 0) is not plan_ring(kept, 8, layout, 0)
