"""The cost model of ranks counts the work and the keys of the plans that ranks follow."""

from __future__ import annotations

import pytest
import torch

from benchmarks.simulated_ranks import Heads, Machine, simulate, work_per_step
from multihead import masks
from multihead.kernels.plan.bounds import key_bounds
from multihead.parallel.layout import Layout
from multihead.parallel.plan import plan_ring, work_per_rank

MASKS = {
    "causal": masks.Causal(),
    "window": masks.Causal() & masks.Window(5),
    "documents": masks.Documents((9, 30, 25)),
}
FREE = Machine(1e9, 1e9, 0, 1e30, 0)  # sending and calls take no time


@pytest.mark.parametrize("kind", ["contiguous", "balanced"])
@pytest.mark.parametrize("name", MASKS)
def test_each_step_has_the_work_and_the_keys_of_the_plan(name: str, kind: str) -> None:
    layout = Layout(kind, 4)  # type: ignore[arg-type]
    bounds = key_bounds(MASKS[name], queries=64, keys=64)
    cells, keys, calls, messages = work_per_step(bounds, layout)
    assert cells.sum(1).tolist() == work_per_rank(bounds, layout)
    for rank in range(4):
        steps = plan_ring(MASKS[name], 64, layout, rank).steps
        of_distance = [[step for step in steps if step.distance == distance] for distance in range(4)]
        assert keys[rank].tolist() == [sum(step.keys_received for step in each) for each in of_distance]
        assert messages[rank].tolist() == [
            sum(len(step.received_ranges) > 0 for step in each if step.distance) for each in of_distance
        ]
        pieces = [sum(len(step.pieces) for step in each) for each in of_distance]
        assert all(count <= most <= 2 * count for count, most in zip(pieces, calls[rank].tolist(), strict=True))


def test_ranks_with_equal_work_and_free_transfers_are_fully_efficient() -> None:
    found = simulate(masks.Causal(), 64, 4, "balanced", FREE, Heads())
    assert (round(found.efficiency, 2), found.imbalance) == (1, 1)
    worse = simulate(masks.Causal(), 64, 4, "contiguous", FREE, Heads())
    assert worse.imbalance > 1.7
    assert worse.efficiency < 0.6


def test_transfers_that_computation_cannot_hide_take_their_time() -> None:
    slow = Machine(1e9, 1e9, 0, 1e3, 0)
    heads = Heads(heads=2, kv_heads=1, head_dim=4)
    found = simulate(masks.Full(), 8, 2, "contiguous", slow, heads)
    one_step = 4 * heads.bytes_per_key
    assert found.bytes_sent == 3 * one_step  # keys twice, and gradients once
    assert found.seconds == pytest.approx(3 * one_step / 1e3, rel=1e-3)
    all_at_once = simulate(masks.Full(), 8, 2, "contiguous", slow, heads, gathered=True)
    assert all_at_once.seconds == pytest.approx(2 * one_step / 1e3, rel=1e-3)
    late = Machine(1e9, 1e9, 0, 1e30, 2.0)
    assert simulate(masks.Full(), 8, 2, "contiguous", late, heads).seconds == pytest.approx(12, rel=1e-3)
    calls = Machine(1e30, 1e30, 3.0, 1e30, 0)
    assert simulate(masks.Full(), 8, 2, "contiguous", calls, heads).seconds == pytest.approx(2 * 3 * 3)


def test_documents_that_do_not_cross_ranks_send_nothing() -> None:
    found = simulate(masks.Documents((16, 16)), 32, 2, "contiguous", Machine(1, 1, 0, 1, 1), Heads())
    assert (found.bytes_sent, found.efficiency) == (0, 1)
    assert torch.tensor(found.imbalance) == 1
