"""Run the experiments of the lab, and collect the results as one tree of numbers."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch

from multihead.errors import ArgumentError
from multihead.layer.heads import head_dim_of
from multihead_lab.matching import VectorMatching, match_vectors
from multihead_lab.parameters import ParameterComparison, compare_parameters
from multihead_lab.tasks import Task, find_task
from multihead_lab.training import Experiment, InitialHeads, check_at_least_one, open_worker_pool, run_experiment

__all__ = ["LAB_PARTS", "LabPart", "LabResults", "run_lab"]

LabPart = Literal["parameters", "tasks", "vectors"]
LAB_PARTS: tuple[LabPart, ...] = ("parameters", "tasks", "vectors")
TRAINED_TASKS = ("one", "two", "induction")

LabProgress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class LabResults:
    """The results of the lab; a part that did not run is None or empty.

    Attributes:
        parameters: what the number of heads changes in a layer.
        experiments: the tasks, each trained with every number of heads.
        experiment_with_copied_heads: the task "two", trained with 2 heads that start as copies of each other.
        vector_matching: how often long rows and short rows find their partner.
        models_per_head_count, first_seed: models per number of heads, and the first seed.
        quick: whether training and matching were shortened.
        torch_version: the version of PyTorch.
        seconds: how long all parts took.
    """

    parameters: ParameterComparison | None
    experiments: tuple[Experiment, ...]
    experiment_with_copied_heads: Experiment | None
    vector_matching: VectorMatching | None
    models_per_head_count: int
    first_seed: int
    quick: bool
    torch_version: str
    seconds: float


def run_lab(
    *,
    parts: Sequence[LabPart] = LAB_PARTS,
    heads: Sequence[int] = (1, 2, 4, 8),
    seeds: int = 5,
    seed: int = 0,
    quick: bool = False,
    workers: int = 1,
    progress: LabProgress | None = None,
) -> LabResults:
    """Count parameters, train small models, and match vectors.

    `seeds` are models per number of heads, and draws of the vectors. With `quick` training is half as long, and fewer
    vectors are matched. `progress` is called with (name of the part, models trained, total models).

    Raises:
        ArgumentError: a part does not exist, seeds or workers is less than 1, seed is negative, or a number of heads
            does not divide the widths (512 and 32).
    """
    for part in parts:
        if part not in LAB_PARTS:
            raise ArgumentError(f"There is no part {part!r}.", f"Give some of {', '.join(LAB_PARTS)}.")
    check_at_least_one(seeds=seeds, workers=workers)
    if seed < 0:
        raise ArgumentError(f"seed is {seed}.", "Give 0 or more.")
    if "tasks" in parts:  # rejected now, not after a minute of other work
        for name in TRAINED_TASKS:
            for num_heads in heads:
                head_dim_of(find_task(name).embed_dim, num_heads)
    began = time.monotonic()
    report = progress if progress is not None else lambda name, done, total: None
    counted = matched = copies = None
    experiments = []
    if "parameters" in parts:
        report("parameters", 0, 1)
        counted = compare_parameters(heads=heads, seed=seed)
        report("parameters", 1, 1)
    if "tasks" in parts:
        with open_worker_pool(workers) as pool:

            def train(name: str, task: Task, heads: Sequence[int], start: InitialHeads) -> Experiment:
                steps = task.steps // 2 if quick else task.steps
                progress = partial(report, name)
                return run_experiment(
                    task, heads=heads, seeds=seeds, seed=seed, steps=steps, start=start, pool=pool, progress=progress
                )

            experiments = [train(name, find_task(name), heads, "drawn") for name in TRAINED_TASKS]
            copies = train("copies", find_task("two"), (2,), "copied")
    if "vectors" in parts:
        report("vectors", 0, 1)
        matched = match_vectors(trials=100 if quick else 400, seeds=seeds, seed=seed)
        report("vectors", 1, 1)
    seconds = time.monotonic() - began
    return LabResults(counted, tuple(experiments), copies, matched, seeds, seed, quick, torch.__version__, seconds)
