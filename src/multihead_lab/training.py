"""Train small models that differ only in their number of heads, and compare them over seeds."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import nn

from multihead.errors import ArgumentError
from multihead.layer import MultiHeadAttention
from multihead_lab.matching import Spread
from multihead_lab.tasks import HeadLook, Task

__all__ = ["Experiment", "Moment", "Start", "Summary", "Training", "Verdict", "compare", "train", "workers"]

Progress = Callable[[int, int], None]
Start = Literal["drawn", "copied"]

POINTS = 20  # points of a learning curve, besides its start
TESTED = 500  # test questions per point
WATCHED = 64  # questions on which the heads are measured
REACHED = 0.9  # share of correct answers that counts as learned


@dataclass(frozen=True)
class Moment:
    """One point of a training.

    Attributes:
        step: number of steps done.
        loss: mean cross entropy on test questions, nats.
        right: share of test questions answered correctly.
        looks: what every head attends to, at some moments; empty at others.
    """

    step: int
    loss: float
    right: float
    looks: tuple[HeadLook, ...] = ()


@dataclass(frozen=True)
class Training:
    """The training of one model.

    Attributes:
        num_heads, seed: its number of heads and its seed.
        parameters: number of trained parameters.
        apart_before, apart_after: the largest distance between the weights of two heads of a layer, as a share of
            their size, before training and after; 0 with one head.
        moments: the learning curve, from step 0.
    """

    num_heads: int
    seed: int
    parameters: int
    apart_before: float
    apart_after: float
    moments: tuple[Moment, ...]

    @property
    def right(self) -> float:
        """Share of correct answers at the end."""
        return self.moments[-1].right

    @property
    def learned_at(self) -> int | None:
        """The first tested step at which 9 of 10 answers were correct, or None."""
        return next((moment.step for moment in self.moments if moment.right >= REACHED), None)


@dataclass(frozen=True)
class Summary:
    """All seeds of one number of heads.

    Attributes:
        num_heads: the number of heads.
        right: share of correct answers at the end.
        each: the same, for each seed.
        learned: number of seeds that reached 9 correct answers of 10.
        learned_at: the step at which these seeds reached it; None if none did.
    """

    num_heads: int
    right: Spread
    each: tuple[float, ...]
    learned: int
    learned_at: Spread | None


@dataclass(frozen=True)
class Verdict:
    """The best number of heads, and those that are worse by more than the spread; the others are level.

    One is worse if its mean differs from the best by more than the sum of both standard deviations, see `Spread.apart`.
    """

    best: int
    worse: tuple[int, ...]
    level: tuple[int, ...]


@dataclass(frozen=True)
class Experiment:
    """A task, trained with several numbers of heads and several seeds.

    Attributes:
        task: the name of the task.
        start: "drawn" if every head started with its own weights, "copied" if all started with the same.
        steps, batch_size, learning_rate: the settings of the training.
        chance: share of correct answers of random guessing.
        trainings: every model, by number of heads and seed.
    """

    task: str
    start: Start
    steps: int
    batch_size: int
    learning_rate: float
    chance: float
    trainings: tuple[Training, ...]

    @property
    def heads(self) -> tuple[int, ...]:
        """The numbers of heads, in order."""
        return tuple(dict.fromkeys(training.num_heads for training in self.trainings))

    def of(self, num_heads: int) -> tuple[Training, ...]:
        """Return the trainings with one number of heads."""
        return tuple(training for training in self.trainings if training.num_heads == num_heads)

    def summaries(self) -> tuple[Summary, ...]:
        """Summarise the seeds of each number of heads."""
        found = []
        for num_heads in self.heads:
            each = self.of(num_heads)
            steps = [float(training.learned_at) for training in each if training.learned_at is not None]
            shares = [training.right for training in each]
            found.append(
                Summary(
                    num_heads,
                    Spread.of(shares, questions=TESTED),
                    tuple(shares),
                    len(steps),
                    Spread.of(steps) if steps else None,
                )
            )
        return tuple(found)

    def verdict(self) -> Verdict:
        """Find the best number of heads at the end, and those that are worse by more than the spread."""
        found = {summary.num_heads: summary.right for summary in self.summaries()}
        best = max(found, key=lambda num_heads: found[num_heads].mean)
        others = [num_heads for num_heads in found if num_heads != best]
        worse = tuple(num_heads for num_heads in others if found[best].apart(found[num_heads]))
        return Verdict(best, worse, tuple(num_heads for num_heads in others if num_heads not in worse))


def compare(
    task: Task,
    *,
    heads: Sequence[int] = (1, 2, 4, 8),
    seeds: int = 5,
    seed: int = 0,
    steps: int | None = None,
    start: Start = "drawn",
    pool: Executor | None = None,
    progress: Progress | None = None,
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
        pool: processes that train in parallel, see `workers`; None trains in this process.
        progress: called with (models trained, total models).
    """
    steps = task.steps if steps is None else steps
    for name, value in (("heads", len(heads)), ("seeds", seeds), ("steps", steps)):
        if value < 1:
            raise ArgumentError(f"The number of {name} is {value}.", "Give at least 1.")
    wanted = [(num_heads, seed + index) for num_heads in heads for index in range(seeds)]
    found: dict[tuple[int, int], Training] = {}

    def options(each: int) -> dict[str, Any]:
        return {"seed": each, "steps": steps, "start": start, "watched": each == seed}

    if pool is None:
        for num_heads, each in wanted:
            found[num_heads, each] = train(task, num_heads, **options(each))
            if progress is not None:
                progress(len(found), len(wanted))
    else:
        futures = {
            pool.submit(train, task, num_heads, **options(each)): (num_heads, each)
            # The slowest first, so that no worker starts a slow one last.
            for num_heads, each in reversed(wanted)
        }
        for future in as_completed(futures):
            found[futures[future]] = future.result()
            if progress is not None:
                progress(len(found), len(wanted))
    trainings = tuple(found[key] for key in wanted)
    return Experiment(task.name, start, steps, task.batch_size, task.learning_rate, task.chance, trainings)


@contextmanager
def workers(number: int) -> Iterator[Executor | None]:
    """Yield processes that train in parallel, or None for one: they start once, which takes seconds, for every task."""
    if number < 1:
        raise ArgumentError(f"The number of workers is {number}.", "Give at least 1.")
    if number == 1:
        yield None
        return
    context = multiprocessing.get_context("spawn")  # a fork would copy torch's thread pool without its threads
    pool = ProcessPoolExecutor(number, mp_context=context)
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)


def train(
    task: Task,
    num_heads: int,
    *,
    seed: int = 0,
    steps: int | None = None,
    start: Start = "drawn",
    watched: bool = True,
) -> Training:
    """Train one model with Adam (arXiv:1412.6980), and record its learning curve.

    The arguments are those of `compare`; `watched` measures the heads at five moments, and not only at the end.

    >>> from multihead_lab.tasks import TASKS
    >>> course = train(TASKS["one"], 2, steps=4)
    >>> [moment.step for moment in course.moments]
    [0, 1, 2, 3, 4]
    """
    steps = task.steps if steps is None else steps
    with _one_thread(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = task.build(num_heads)
        if start == "copied":
            _copy_first_head(model)
        before = _heads_apart(model)
        optimiser = torch.optim.Adam(model.parameters(), lr=task.learning_rate, betas=(0.9, 0.99))
        questions = torch.Generator().manual_seed(2**20 + seed)
        stops = sorted({round(steps * point / POINTS) for point in range(POINTS + 1)})
        pictured = {round(steps * share) for share in (0, 0.1, 0.25, 0.5, 1)} if watched else {steps}
        moments = []
        for step in range(steps + 1):
            if step in stops:
                moments.append(_test_at_step(task, model, step, look=step in pictured))
            if step < steps:
                batch = task.draw(task.batch_size, questions)
                loss = _loss_of_answers(model(*batch.inputs), batch.answers)
                optimiser.zero_grad()
                loss.backward()
                optimiser.step()
    size = sum(each.numel() for each in model.parameters())
    return Training(num_heads, seed, size, before, _heads_apart(model), tuple(moments))


def _own_weights(layer: MultiHeadAttention) -> list[torch.Tensor]:
    """Return each projection's weights as views with the heads first: (heads, head_dim, ...)."""
    projections = [layer.q_proj, layer.k_proj, layer.v_proj]
    rows = [each.weight.unflatten(0, (layer.num_heads, -1)) for each in projections]
    rows += [each.bias.unflatten(0, (layer.num_heads, -1)) for each in projections]
    assert layer.out_proj is not None, "the lab's layers have an output projection"
    # A head's part of the output projection is its columns.
    return [*rows, layer.out_proj.weight.unflatten(1, (layer.num_heads, -1)).movedim(1, 0)]


@torch.no_grad()
def _copy_first_head(model: nn.Module) -> None:
    """Overwrite the weights of all heads with those of the first head of their layer."""
    for layer in model.modules():
        if isinstance(layer, MultiHeadAttention):
            for own in _own_weights(layer):
                own.copy_(own[:1].clone().expand_as(own))


@torch.no_grad()
def _heads_apart(model: nn.Module) -> float:
    """Return the largest distance between two heads of a layer, as a share of the norm of their weights."""
    largest = 0.0
    for layer in model.modules():
        if isinstance(layer, MultiHeadAttention):
            heads = torch.cat([own.flatten(1) for own in _own_weights(layer)], 1).double()
            size = float(heads.norm(dim=1).mean())
            largest = max(largest, float(torch.cdist(heads, heads).max()) / size if layer.num_heads > 1 else 0.0)
    return largest


def _loss_of_answers(logits: torch.Tensor, answers: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), answers.flatten(), ignore_index=-1)


@torch.no_grad()
def _test_at_step(task: Task, model: nn.Module, step: int, *, look: bool) -> Moment:
    """Test a model on fixed questions, the same at every moment and for every model."""
    fixed = torch.Generator().manual_seed(2**30)
    batch = task.draw(TESTED, fixed)
    logits = model(*batch.inputs)
    looks = task.look(model, task.draw(WATCHED, fixed)) if look else ()
    return Moment(step, float(_loss_of_answers(logits, batch.answers)), task.right(logits, batch), looks)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Run the block on one thread: sums over several threads round differently."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
