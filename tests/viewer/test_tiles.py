"""Tiles, and who computes them: exact at every fine level, newest first, shared, given up when nobody waits."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import wait
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from multihead import masks
from multihead.probes.blocks import CancelledError
from multihead.viewer import tiles
from multihead.viewer.tiles import (
    ArrayCache,
    WorkerThreads,
    fine_tile,
    maps_of_all_heads,
    tiles_per_side,
    weights_of_queries,
)
from tests.viewer.test_levels import KINDS
from tests.viewer.watching import block_means, watch


@pytest.mark.parametrize("kind", KINDS)
def test_a_tile_holds_the_means_over_what_may_be_seen(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "TILE_SIDE", 7)
    record = watch(dtype=torch.float64, **KINDS[kind])
    for sample, level, sink in product(record.layers[0].samples, range(6), (True, False)):
        head = sample.num_heads - 1
        expected = block_means(sample, head, level, sink=sink)
        rows = [
            [
                fine_tile(sample, head, level, row=row, column=column, sink=sink)
                for column in range(tiles_per_side(sample.num_keys, level))
            ]
            for row in range(tiles_per_side(sample.num_queries, level))
        ]
        assert {max(each.shape) for row in rows for each in row} <= {*range(1, 8)}
        found = torch.from_numpy(np.block(rows)).double()
        assert_close(found, expected, rtol=1e-7, atol=1e-12, equal_nan=True)


def test_small_maps_are_those_of_every_head() -> None:
    sample = watch(heads=4, kv_heads=2, mask=masks.Causal(), dtype=torch.float64).layers[0].sample()
    found = maps_of_all_heads(sample, 2)
    assert found.shape == (4, 10, 10)
    for head in range(4):
        assert_close(
            torch.from_numpy(found[head]).double(), block_means(sample, head, 2), rtol=1e-6, atol=1e-9, equal_nan=True
        )


def test_a_row_is_one_querys_weights_with_the_hidden_ones_absent() -> None:
    sample = watch(mask=masks.Causal()).layers[0].sample()
    found = weights_of_queries(sample, 1, slice(5, 6))[0]
    assert found.dtype == np.float32
    assert np.isnan(found[6:]).all()
    np.testing.assert_array_equal(found[:6], sample.weights(1, queries=slice(5, 6))[0, :6].numpy())
    apart = watch(**KINDS["heads apart"]).layers[0].sample()
    for head in range(2):
        np.testing.assert_array_equal(
            ~np.isnan(weights_of_queries(apart, head, slice(9, 10))[0]), apart.visible()[head, 9].numpy()
        )


class TestTheCache:
    def test_the_least_recently_used_array_is_dropped_first(self) -> None:
        cache = ArrayCache(max_bytes=8 * 3)
        for key in "abc":
            cache.put(key, np.zeros(1))
        assert cache.get("a") is not None
        cache.put("d", np.zeros(1))
        assert [key for key in "abcd" if cache.get(key) is not None] == ["a", "c", "d"]

    def test_it_never_holds_more_bytes_than_it_may(self) -> None:
        cache = ArrayCache(max_bytes=1000)
        for index in range(200):
            cache.put(index % 70, np.zeros(index % 40))
            assert cache.num_bytes <= 1000
            assert cache.num_bytes == sum(each.nbytes for each in cache._arrays.values())

    def test_what_is_larger_than_all_the_room_is_not_kept(self) -> None:
        cache = ArrayCache(max_bytes=100)
        cache.put("small", np.zeros(2))
        cache.put("large", np.zeros(20))
        assert cache.get("large") is None
        assert cache.get("small") is not None


@pytest.fixture
def workers() -> Any:
    made = WorkerThreads(1)
    yield made
    made.close()


class Gate:
    """A computation that signals its start, and waits until it is released or cancelled."""

    def __init__(self) -> None:
        self.begun, self.may_end = threading.Event(), threading.Event()
        self.times = 0

    def __call__(self, cancelled: Callable[[], bool]) -> str:
        self.times += 1
        self.begun.set()
        while not self.may_end.wait(0.005):
            if cancelled():
                raise CancelledError
        return "done"


class TestTheWorkers:
    def test_the_newest_job_runs_first(self, workers: WorkerThreads) -> None:
        gate, order = Gate(), []
        workers.submit("gate", gate)
        gate.begun.wait(5)
        jobs = [workers.submit(name, lambda _, name=name: order.append(name)) for name in "abc"]
        gate.may_end.set()
        wait([job.result for job in jobs], 5)
        assert order == ["c", "b", "a"]

    def test_the_same_request_is_computed_once(self, workers: WorkerThreads) -> None:
        gate = Gate()
        jobs = [workers.submit("same", gate) for _ in range(5)]
        gate.begun.wait(5)
        jobs.append(workers.submit("same", gate))
        gate.may_end.set()
        assert [job.result.result(5) for job in jobs] == ["done"] * 6
        assert gate.times == 1
        assert workers.submit("same", gate).result.result(5) == "done"
        assert gate.times == 2

    def test_a_job_that_is_submitted_again_moves_to_the_front(self, workers: WorkerThreads) -> None:
        gate, order = Gate(), []
        workers.submit("gate", gate)
        gate.begun.wait(5)
        jobs = [workers.submit(name, lambda _, name=name: order.append(name)) for name in ("a", "b", "a")]
        gate.may_end.set()
        wait([job.result for job in jobs], 5)
        assert order == ["a", "b"]

    def test_what_nobody_waits_for_is_given_up(self, workers: WorkerThreads) -> None:
        gate, never = Gate(), Gate()
        job = workers.submit("gate", gate)
        gate.begun.wait(5)
        waiting = workers.submit("never", never)
        workers.stop_waiting(waiting)
        workers.stop_waiting(job)
        with pytest.raises(CancelledError):
            job.result.result(5)
        assert workers.submit("next", lambda _: "next").result.result(5) == "next"
        assert never.times == 0

    def test_it_goes_on_while_one_of_two_still_waits(self, workers: WorkerThreads) -> None:
        gate = Gate()
        first, second = workers.submit("same", gate), workers.submit("same", gate)
        gate.begun.wait(5)
        workers.stop_waiting(first)
        time.sleep(0.03)
        gate.may_end.set()
        assert second.result.result(5) == "done"

    def test_who_asks_after_it_was_given_up_has_it_computed_anew(self, workers: WorkerThreads) -> None:
        gate = Gate()
        job = workers.submit("same", gate)
        gate.begun.wait(5)
        workers.stop_waiting(job)
        again = workers.submit("same", gate)
        gate.may_end.set()
        assert again is not job
        assert again.result.result(5) == "done"

    def test_a_failure_reaches_who_waits_and_the_worker_goes_on(self, workers: WorkerThreads) -> None:
        def fail(cancelled: Callable[[], bool]) -> None:
            raise ValueError("no")

        with pytest.raises(ValueError, match=r"^no$"):
            workers.submit("bad", fail).result.result(5)
        assert workers.submit("good", lambda _: 1).result.result(5) == 1

    def test_who_has_time_does_a_step_and_lets_requests_go_first(self) -> None:
        steps, held = [], threading.Event()

        def step() -> bool:
            steps.append(len(steps))
            held.wait(5)
            return len(steps) < 4

        workers = WorkerThreads(1, run_background_step=step)
        workers.announce_background_work()
        while not steps:
            time.sleep(0.001)
        seen = workers.submit("now", lambda _: len(steps))
        held.set()
        assert seen.result.result(5) == 1  # the step that had begun, and no other
        while len(steps) < 4:
            time.sleep(0.001)
        time.sleep(0.02)
        assert steps == [0, 1, 2, 3]
        workers.close()

    def test_closing_ends_what_runs_and_what_waits(self) -> None:
        workers, gate = WorkerThreads(1), Gate()
        running, waiting = workers.submit("gate", gate), None
        gate.begun.wait(5)
        waiting = workers.submit("later", lambda _: 1)
        workers.close()
        for job in (running, waiting):
            with pytest.raises(CancelledError):
                job.result.result(1)


def test_a_tile_that_nobody_wants_is_left_unfinished() -> None:
    sample = watch(300, mask=masks.Causal()).layers[0].sample()
    with pytest.raises(CancelledError):
        fine_tile(sample, 0, 0, row=0, column=0, cancelled=lambda: True)
