"""A small run of the lab, made once: two numbers of heads, two seeds, two steps, few questions."""

from __future__ import annotations

from functools import cache
from unittest.mock import patch

from multihead_lab.matching import match_vectors
from multihead_lab.parameters import compare_parameters
from multihead_lab.run import LabResults
from multihead_lab.tasks import TASKS
from multihead_lab.training import run_experiment


@cache
@patch("multihead_lab.training.HEAD_QUESTIONS", 8)  # looking at the heads takes most of the time
def few_answers() -> LabResults:
    """Everything the lab finds out, cut very short."""
    return LabResults(
        parameters=compare_parameters(embed_dim=16, length=4, heads=(1, 2)),
        experiments=tuple(run_experiment(task, heads=(1, 2), seeds=2, steps=2) for task in TASKS.values()),
        experiment_with_copied_heads=run_experiment(TASKS["two"], heads=(2,), seeds=2, steps=2, start="copied"),
        vector_matching=match_vectors(trials=40, seeds=2, lengths=(8, 64), noises=(0.5, 2.0)),
        models_per_head_count=2,
        first_seed=0,
        quick=False,
        torch_version="x.y",
        seconds=1.0,
    )
