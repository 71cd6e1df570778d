"""Check one case of benchmarks/cases.py, then time it."""

from __future__ import annotations

from dataclasses import dataclass

import click
import torch

from benchmarks.cases import CASES, Case, Contest
from benchmarks.measure import Ratio, paired

TOLERANCE = 1e-5  # between two float32 computations of the same output, whose values are below 4


@dataclass(frozen=True)
class Row:
    """The result of a case.

    Attributes:
        case: its index in CASES.
        error: the largest difference between both outputs.
        ratio: the times.
        memory: bytes that our call holds besides its inputs, or None.
    """

    case: int
    error: float
    ratio: Ratio
    memory: int | None


def measured(index: int) -> Row:
    """Check a case and time it."""
    case = CASES[index]
    torch.manual_seed(0)
    with torch.inference_mode():
        contest = case.make()
        error = checked(case, contest)
        return Row(index, error, paired(contest.ours, contest.rival, pairs=case.pairs), contest.memory)


def checked(case: Case, contest: Contest) -> float:
    """Return the largest difference between ours and the rival.

    Raises:
        ClickException: it is too large to be rounding.
    """
    ours, rival = (contest.compared(run()) for run in (contest.ours, contest.rival))
    error = float((ours - rival).abs().max())
    if not error <= TOLERANCE:
        raise click.ClickException(f"{case.name}: differs from {case.rival} by {error:.1e}, more than {TOLERANCE}.")
    return error
