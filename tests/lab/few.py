"""A small run of the lab, made once: two numbers of heads, two seeds, a handful of steps."""

from __future__ import annotations

from functools import cache

from multihead_lab.matching import match_vectors
from multihead_lab.parameters import parameters
from multihead_lab.run import Answers
from multihead_lab.tasks import TASKS
from multihead_lab.training import compare


@cache
def few_answers() -> Answers:
    """Everything the lab finds out, cut very short."""
    return Answers(
        parameters=parameters(embed_dim=16, length=4, heads=(1, 2)),
        experiments=tuple(compare(task, heads=(1, 2), seeds=2, steps=4) for task in TASKS.values()),
        copies=compare(TASKS["two"], heads=(2,), seeds=2, steps=4, start="copied"),
        vectors=match_vectors(trials=40, seeds=2, lengths=(8, 64), noises=(0.5, 2.0)),
        seeds=2,
        seed=0,
        quick=False,
        torch_version="x.y",
        seconds=1.0,
    )
