"""Training: losses fall, the same seed gives the same numbers, and verdicts follow from the numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from multihead.errors import ArgumentError
from multihead_lab.tasks import TASKS
from multihead_lab.training import (
    CurvePoint,
    Experiment,
    HeadCountVerdict,
    TrainedModel,
    open_worker_pool,
    run_experiment,
    train_model,
)


def training(num_heads: int, seed: int, right: float) -> TrainedModel:
    moments = (CurvePoint(0, 2.0, 0.1), CurvePoint(10, 1.0, 0.95), CurvePoint(20, 0.5, right))
    return TrainedModel(num_heads, seed, 100, 0.0, 0.0, moments)


def experiment(shares: dict[int, tuple[float, ...]]) -> Experiment:
    trainings = [training(heads, seed, right) for heads, each in shares.items() for seed, right in enumerate(each)]
    return Experiment(TASKS["one"], "drawn", 20, tuple(trainings))


@pytest.mark.parametrize("name", TASKS)
def test_the_loss_falls(name: str) -> None:
    course = train_model(TASKS[name], 2, steps=40)
    assert course.learning_curve[-1].loss < 0.9 * course.learning_curve[0].loss


def test_the_same_seed_gives_the_same_training_and_another_gives_another() -> None:
    first, again, other = (train_model(TASKS["two"], 2, steps=5, seed=seed) for seed in (0, 0, 1))
    assert first == again
    assert first.learning_curve != other.learning_curve


def test_training_leaves_torch_s_own_random_numbers_and_threads_alone() -> None:
    state, threads = torch.random.get_rng_state(), torch.get_num_threads()
    train_model(TASKS["one"], 1, steps=1)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert torch.get_num_threads() == threads


def test_before_training_nothing_but_the_cut_into_heads_differs() -> None:
    found = run_experiment(TASKS["one"], heads=(1, 4), seeds=1, steps=1)
    one, four = found.models
    assert one.num_parameters == four.num_parameters
    assert one.head_distance_before == 0
    assert four.head_distance_before > 0


def test_heads_that_start_as_copies_stay_copies() -> None:
    drawn, copied = (train_model(TASKS["two"], 2, steps=5, start=start) for start in ("drawn", "copied"))
    assert copied.head_distance_before == copied.head_distance_after == 0
    assert drawn.head_distance_before > 1
    first, second = copied.learning_curve[-1].head_measurements
    assert first.weights == second.weights


def test_heads_are_looked_at_at_five_moments_where_they_are_watched_and_at_the_end_elsewhere() -> None:
    watched, other = run_experiment(TASKS["one"], heads=(2,), seeds=2, steps=20).models
    assert [moment.step for moment in watched.learning_curve if moment.head_measurements] == [0, 2, 5, 10, 20]
    assert [moment.step for moment in other.learning_curve if moment.head_measurements] == [20]
    assert [moment.step for moment in watched.learning_curve] == list(range(21))


@pytest.mark.usefixtures("_imported_before")
def test_two_workers_find_what_one_finds_and_report_their_progress() -> None:
    options = {"heads": (1, 2), "seeds": 1, "steps": 3}
    seen: list[tuple[int, int]] = []
    with open_worker_pool(2) as pool:
        together = run_experiment(TASKS["one"], **options, pool=pool, progress=lambda done, of: seen.append((done, of)))
    assert together == run_experiment(TASKS["one"], **options)
    assert seen == [(1, 2), (2, 2)]


def test_a_summary_has_mean_spread_and_the_step_at_which_nine_of_ten_were_correct() -> None:
    (summary,) = experiment({2: (0.8, 1.0)}).summarise_seeds()
    assert summary.accuracy.mean == pytest.approx(0.9)
    assert summary.accuracy.deviation == pytest.approx(2**0.5 / 10)
    assert summary.seeds_that_learned == 2
    assert summary.first_learned_step is not None
    assert summary.first_learned_step.mean == 10
    never = training(1, 0, 0.5)
    assert replace(never, learning_curve=never.learning_curve[:1]).first_learned_step is None


def test_the_verdict_names_the_best_and_those_that_are_worse_by_more_than_the_spread() -> None:
    found = experiment({1: (0.1, 0.12), 2: (0.98, 1.0), 8: (0.9, 1.0)})
    assert found.compare_head_counts() == HeadCountVerdict(best_num_heads=2, worse_num_heads=(1,), equal_num_heads=(8,))


def test_the_verdict_may_go_to_a_single_head_and_may_find_no_difference() -> None:
    assert experiment({1: (0.99, 0.99), 4: (0.5, 0.5)}).compare_head_counts() == HeadCountVerdict(1, (4,), ())
    assert experiment({1: (0.5, 0.9), 4: (0.5, 0.8)}).compare_head_counts() == HeadCountVerdict(1, (), (4,))


@pytest.mark.parametrize("name", ["heads", "seeds", "steps"])
def test_nothing_to_do_is_refused(name: str) -> None:
    options = {"heads": (1,), "seeds": 1, "steps": 1} | {name: () if name == "heads" else 0}
    with pytest.raises(ArgumentError) as refused:
        run_experiment(TASKS["one"], **options)
    assert str(refused.value) == f"The number of {name} is 0. Give at least 1."


def test_a_single_worker_is_this_process_and_none_is_refused() -> None:
    with open_worker_pool(1) as pool:
        assert pool is None
    with pytest.raises(ArgumentError) as refused, open_worker_pool(0):
        pass
    assert str(refused.value) == "The number of workers is 0. Give at least 1."
