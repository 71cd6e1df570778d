"""Train small models that differ only in their number of heads, and compare them over seeds."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F
from torch import nn

from multihead.errors import ArgumentError
from multihead.layer import MultiHeadAttention
from multihead.tensors.threads import set_torch_threads
from multihead_lab.matching import MeanOverSeeds
from multihead_lab.tasks import HeadMeasurement, Task

__all__ = [
    "CurvePoint",
    "Experiment",
    "HeadCountVerdict",
    "InitialHeads",
    "SeedSummary",
    "TrainedModel",
    "check_at_least_one",
    "open_worker_pool",
    "run_experiment",
    "train_model",
]

TrainingProgress = Callable[[int, int], None]
InitialHeads = Literal["drawn", "copied"]

CURVE_POINTS = 20  # points of a learning curve after step 0
TEST_QUESTIONS = 500  # test questions per point of a learning curve
HEAD_QUESTIONS = 64  # questions on which the heads are measured
LEARNED_ACCURACY = 0.9  # share of correct answers that counts as learned


@dataclass(frozen=True)
class CurvePoint:
    """One point of a learning curve: a test of a model at one step of its training.

    Attributes:
        step: number of training steps done.
        loss: mean cross entropy on test questions, nats.
        accuracy: share of test questions answered correctly.
        head_measurements: what every head attends to; empty where the heads were not measured.
    """

    step: int
    loss: float
    accuracy: float
    head_measurements: tuple[HeadMeasurement, ...] = ()


@dataclass(frozen=True)
class TrainedModel:
    """A model that was trained, and how it learned.

    Attributes:
        num_heads, seed: the number of heads and the seed of the model.
        num_parameters: number of trained parameters.
        head_distance_before, head_distance_after: the largest distance between the weights of two heads of a layer, as
            a share of their norm, before training and after; 0 with one head.
        learning_curve: the tests of the model, from step 0 to the last step.
    """

    num_heads: int
    seed: int
    num_parameters: int
    head_distance_before: float
    head_distance_after: float
    learning_curve: tuple[CurvePoint, ...]

    @property
    def final_accuracy(self) -> float:
        """Share of test questions that the trained model answers correctly."""
        return self.learning_curve[-1].accuracy

    @property
    def final_heads(self) -> tuple[HeadMeasurement, ...]:
        """What every head attends to at the end of training."""
        return self.learning_curve[-1].head_measurements

    @property
    def first_learned_step(self) -> int | None:
        """The first tested step at which 9 of 10 answers were correct, or None."""
        return next((moment.step for moment in self.learning_curve if moment.accuracy >= LEARNED_ACCURACY), None)


@dataclass(frozen=True)
class SeedSummary:
    """How the models with one number of heads learned, one model per seed.

    Attributes:
        num_heads: the number of heads.
        accuracy: share of correct answers at the end of training.
        accuracy_by_seed: share of correct answers of each model at the end of training.
        seeds_that_learned: number of models that answered 9 of 10 questions correctly at some step.
        first_learned_step: mean of the first such steps of these models; None if there is none.
    """

    num_heads: int
    accuracy: MeanOverSeeds
    accuracy_by_seed: tuple[float, ...]
    seeds_that_learned: int
    first_learned_step: MeanOverSeeds | None


@dataclass(frozen=True)
class HeadCountVerdict:
    """The best number of heads, the numbers that are worse, and those that are equally good.

    A number of heads is worse if its mean accuracy differs from the best by more than the sum of both standard
    deviations, see `MeanOverSeeds.differs_from`.
    """

    best_num_heads: int
    worse_num_heads: tuple[int, ...]
    equal_num_heads: tuple[int, ...]


@dataclass(frozen=True)
class Experiment:
    """A task, trained with several numbers of heads and several seeds.

    Attributes:
        task: the task.
        initial_heads: "drawn" if every head started with its own weights, "copied" if all started with the same.
        steps: steps of training.
        models: every model, by number of heads and seed.
    """

    task: Task
    initial_heads: InitialHeads
    steps: int
    models: tuple[TrainedModel, ...]

    @property
    def head_counts(self) -> tuple[int, ...]:
        """The numbers of heads that were trained, in their order."""
        return tuple(dict.fromkeys(training.num_heads for training in self.models))

    def models_with_head_count(self, num_heads: int) -> tuple[TrainedModel, ...]:
        """Return the models with `num_heads` heads, one per seed."""
        return tuple(training for training in self.models if training.num_heads == num_heads)

    def summarise_seeds(self) -> tuple[SeedSummary, ...]:
        """Summarise the models of each number of heads over their seeds."""
        found = []
        for num_heads in self.head_counts:
            models = self.models_with_head_count(num_heads)
            steps = [model.first_learned_step for model in models if model.first_learned_step is not None]
            accuracies = tuple(model.final_accuracy for model in models)
            accuracy = MeanOverSeeds.from_values(accuracies, questions=TEST_QUESTIONS)
            first_learned_step = MeanOverSeeds.from_values(steps) if steps else None
            found.append(SeedSummary(num_heads, accuracy, accuracies, len(steps), first_learned_step))
        return tuple(found)

    def compare_head_counts(self) -> HeadCountVerdict:
        """Find the best number of heads, and the numbers that are worse by more than the deviation over seeds."""
        found = {summary.num_heads: summary.accuracy for summary in self.summarise_seeds()}
        best = max(found, key=lambda num_heads: found[num_heads].mean)
        others = [num_heads for num_heads in found if num_heads != best]
        worse = tuple(num_heads for num_heads in others if found[best].differs_from(found[num_heads]))
        return HeadCountVerdict(best, worse, tuple(num_heads for num_heads in others if num_heads not in worse))


def run_experiment(
    task: Task,
    *,
    heads: Sequence[int] = (1, 2, 4, 8),
    seeds: int = 5,
    seed: int = 0,
    steps: int | None = None,
    start: InitialHeads = "drawn",
    pool: Executor | None = None,
    progress: TrainingProgress | None = None,
) -> Experiment:
    """Train a task with each number of heads and each seed.

    For one seed the initial weights and all questions are the same for every number of heads. The result does not
    depend on the pool: each model is trained on one thread.

    Args:
        task: one of `multihead_lab.tasks.TASKS`, or another task.
        heads: the numbers of heads.
        seeds: models per number of heads, at least 1.
        seed: the first seed; the others count up from it.
        steps: steps of training; those of the task if None.
        start: "drawn" initialises every head with its own weights, "copied" with those of the first head.
        pool: processes that train in parallel, see `open_worker_pool`; None trains in this process.
        progress: called with (models trained, total models).
    """
    steps = task.steps if steps is None else steps
    check_at_least_one(heads=len(heads), seeds=seeds, steps=steps)
    wanted = [(num_heads, seed + index) for num_heads in heads for index in range(seeds)]
    # One call per model, the slowest first, so that no worker starts a slow one last.
    calls = [
        partial(train_model, task, num_heads, seed=each, steps=steps, start=start, watched=each == seed)
        for num_heads, each in reversed(wanted)
    ]
    if pool is None:
        trained = (call() for call in calls)
    else:
        trained = (future.result() for future in as_completed([pool.submit(call) for call in calls]))
    found = {}
    for model in trained:
        found[model.num_heads, model.seed] = model
        if progress is not None:
            progress(len(found), len(wanted))
    return Experiment(task, start, steps, tuple(found[key] for key in wanted))


def check_at_least_one(**numbers: int) -> None:
    """Reject numbers below 1; each keyword names what its number counts."""
    for name, number in numbers.items():
        if number < 1:
            raise ArgumentError(f"The number of {name} is {number}.", "Give at least 1.")


@contextmanager
def open_worker_pool(number: int) -> Iterator[Executor | None]:
    """Yield a pool of processes that train in parallel, or None if `number` is 1.

    All experiments share the pool, because starting its processes takes seconds.
    """
    check_at_least_one(workers=number)
    if number == 1:
        yield None
        return
    context = multiprocessing.get_context("spawn")  # a fork would copy torch's thread pool without its threads
    pool = ProcessPoolExecutor(number, mp_context=context)
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)


def train_model(
    task: Task,
    num_heads: int,
    *,
    seed: int = 0,
    steps: int | None = None,
    start: InitialHeads = "drawn",
    watched: bool = True,
) -> TrainedModel:
    """Train one model with Adam (arXiv:1412.6980), and record its learning curve.

    The arguments are those of `run_experiment`; `watched` measures the heads at five moments, and not only at the end.

    >>> from multihead_lab.tasks import TASKS
    >>> model = train_model(TASKS["one"], 2, steps=4)
    >>> [point.step for point in model.learning_curve]
    [0, 1, 2, 3, 4]
    """
    steps = task.steps if steps is None else steps
    # Sums over several threads round differently.
    with set_torch_threads(1), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = task.build_model(num_heads)
        if start == "copied":
            _copy_first_head(model)
        before = _largest_head_distance(model)
        optimiser = torch.optim.Adam(model.parameters(), lr=task.learning_rate, betas=(0.9, 0.99))
        questions = torch.Generator().manual_seed(2**20 + seed)
        stops = {round(steps * point / CURVE_POINTS) for point in range(CURVE_POINTS + 1)}
        pictured = {round(steps * share) for share in (0, 0.1, 0.25, 0.5, 1)} if watched else {steps}
        learning_curve = []
        for step in range(steps + 1):
            if step in stops:
                learning_curve.append(_test_model(task, model, step, look=step in pictured))
            if step < steps:
                batch = task.draw_batch(task.batch_size, questions)
                loss = _cross_entropy(model(*batch.inputs), batch.answers)
                optimiser.zero_grad()
                loss.backward()
                optimiser.step()
    size = sum(each.numel() for each in model.parameters())
    return TrainedModel(num_heads, seed, size, before, _largest_head_distance(model), tuple(learning_curve))


def _attention_layers(model: nn.Module) -> list[MultiHeadAttention]:
    return [module for module in model.modules() if isinstance(module, MultiHeadAttention)]


def _weights_per_head(layer: MultiHeadAttention) -> list[torch.Tensor]:
    """Return each projection's weights as views with the heads first: (heads, head_dim, ...)."""
    projections = (layer.q_proj, layer.k_proj, layer.v_proj)
    rows = (*(each.weight for each in projections), *(each.bias for each in projections))
    assert layer.out_proj is not None, "the lab's layers have an output projection"
    # A head's part of the output projection is its columns.
    columns = layer.out_proj.weight.unflatten(1, (layer.num_heads, -1)).movedim(1, 0)
    return [*(each.unflatten(0, (layer.num_heads, -1)) for each in rows), columns]


@torch.no_grad()
def _copy_first_head(model: nn.Module) -> None:
    """Overwrite the weights of all heads with those of the first head of their layer."""
    for layer in _attention_layers(model):
        for weights in _weights_per_head(layer):
            weights.copy_(weights[:1].clone().expand_as(weights))


@torch.no_grad()
def _largest_head_distance(model: nn.Module) -> float:
    """Return the largest distance between two heads of a layer, as a share of the norm of their weights."""
    largest = 0.0
    for layer in _attention_layers(model):
        heads = torch.cat([weights.flatten(1) for weights in _weights_per_head(layer)], 1).double()
        if layer.num_heads > 1:
            largest = max(largest, float(torch.cdist(heads, heads).max()) / float(heads.norm(dim=1).mean()))
    return largest


def _cross_entropy(logits: torch.Tensor, answers: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), answers.flatten(), ignore_index=-1)


@torch.no_grad()
def _test_model(task: Task, model: nn.Module, step: int, *, look: bool) -> CurvePoint:
    """Test a model on fixed questions, which are the same at every step and for every model."""
    fixed = torch.Generator().manual_seed(2**30)
    batch = task.draw_batch(TEST_QUESTIONS, fixed)
    logits = model(*batch.inputs)
    looks = task.measure_heads(model, task.draw_batch(HEAD_QUESTIONS, fixed)) if look else ()
    return CurvePoint(step, float(_cross_entropy(logits, batch.answers)), task.share_correct(logits, batch), looks)
