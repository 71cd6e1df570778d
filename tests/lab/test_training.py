"""Training: losses fall, the same seed gives the same numbers, and verdicts follow from the numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from multihead.errors import ArgumentError
from multihead_lab.tasks import TASKS
from multihead_lab.training import Experiment, Moment, Training, Verdict, compare, train, workers


def training(num_heads: int, seed: int, right: float) -> Training:
    moments = (Moment(0, 2.0, 0.1), Moment(10, 1.0, 0.95), Moment(20, 0.5, right))
    return Training(num_heads, seed, 100, 0.0, 0.0, moments)


def experiment(shares: dict[int, tuple[float, ...]]) -> Experiment:
    trainings = [training(heads, seed, right) for heads, each in shares.items() for seed, right in enumerate(each)]
    return Experiment("one", "drawn", 20, 1, 0.1, 0.1, tuple(trainings))


@pytest.mark.parametrize("name", TASKS)
def test_the_loss_falls(name: str) -> None:
    course = train(TASKS[name], 2, steps=40)
    assert course.moments[-1].loss < 0.9 * course.moments[0].loss


def test_the_same_seed_gives_the_same_training_and_another_gives_another() -> None:
    first, again, other = (train(TASKS["two"], 2, steps=5, seed=seed) for seed in (0, 0, 1))
    assert first == again
    assert first.moments != other.moments


def test_training_leaves_torch_s_own_random_numbers_and_threads_alone() -> None:
    state, threads = torch.random.get_rng_state(), torch.get_num_threads()
    train(TASKS["one"], 1, steps=1)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert torch.get_num_threads() == threads


def test_before_training_nothing_but_the_cut_into_heads_differs() -> None:
    found = compare(TASKS["one"], heads=(1, 4), seeds=1, steps=1)
    one, four = found.trainings
    assert one.parameters == four.parameters
    assert one.apart_before == 0
    assert four.apart_before > 0


def test_heads_that_start_as_copies_stay_copies() -> None:
    drawn, copied = (train(TASKS["two"], 2, steps=20, start=start) for start in ("drawn", "copied"))
    assert copied.apart_before == copied.apart_after == 0
    assert drawn.apart_before > 1
    first, second = copied.moments[-1].looks
    assert first.picture == second.picture


def test_heads_are_looked_at_at_five_moments_where_they_are_watched_and_at_the_end_elsewhere() -> None:
    watched, other = compare(TASKS["one"], heads=(2,), seeds=2, steps=20).trainings
    assert [moment.step for moment in watched.moments if moment.looks] == [0, 2, 5, 10, 20]
    assert [moment.step for moment in other.moments if moment.looks] == [20]
    assert [moment.step for moment in watched.moments] == list(range(21))


def test_two_workers_find_what_one_finds_and_report_their_progress() -> None:
    options = {"heads": (1, 2), "seeds": 1, "steps": 3}
    seen: list[tuple[int, int]] = []
    with workers(2) as pool:
        together = compare(TASKS["one"], **options, pool=pool, progress=lambda done, of: seen.append((done, of)))
    assert together == compare(TASKS["one"], **options)
    assert seen == [(1, 2), (2, 2)]


def test_a_summary_has_mean_spread_and_the_step_at_which_nine_of_ten_were_correct() -> None:
    (summary,) = experiment({2: (0.8, 1.0)}).summaries()
    assert summary.right.mean == pytest.approx(0.9)
    assert summary.right.deviation == pytest.approx(2**0.5 / 10)
    assert summary.learned == 2
    assert summary.learned_at is not None
    assert summary.learned_at.mean == 10
    never = training(1, 0, 0.5)
    assert replace(never, moments=never.moments[:1]).learned_at is None


def test_the_verdict_names_the_best_and_those_that_are_worse_by_more_than_the_spread() -> None:
    found = experiment({1: (0.1, 0.12), 2: (0.98, 1.0), 8: (0.9, 1.0)})
    assert found.verdict() == Verdict(best=2, worse=(1,), level=(8,))


def test_the_verdict_may_go_to_a_single_head_and_may_find_no_difference() -> None:
    assert experiment({1: (0.99, 0.99), 4: (0.5, 0.5)}).verdict() == Verdict(1, (4,), ())
    assert experiment({1: (0.5, 0.9), 4: (0.5, 0.8)}).verdict() == Verdict(1, (), (4,))


@pytest.mark.parametrize("name", ["heads", "seeds", "steps"])
def test_nothing_to_do_is_refused(name: str) -> None:
    options = {"heads": (1,), "seeds": 1, "steps": 1} | {name: () if name == "heads" else 0}
    with pytest.raises(ArgumentError) as refused:
        compare(TASKS["one"], **options)
    assert str(refused.value) == f"The number of {name} is 0. Give at least 1."


def test_a_single_worker_is_this_process_and_none_is_refused() -> None:
    with workers(1) as pool:
        assert pool is None
    with pytest.raises(ArgumentError) as refused, workers(0):
        pass
    assert str(refused.value) == "The number of workers is 0. Give at least 1."
