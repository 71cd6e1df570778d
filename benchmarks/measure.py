"""Time two functions alternately in one process, and compare them pair by pair."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any


class NotMeasuredError(Exception):
    """A case cannot be measured here; the message says what is missing."""


@dataclass(frozen=True)
class Ratio:
    """How many times faster ours was than the rival, over paired runs.

    Attributes:
        median: the median of the paired ratios.
        low: their lower quartile.
        high: their upper quartile.
        pairs: the number of pairs.
    """

    median: float
    low: float
    high: float
    pairs: int

    def __str__(self) -> str:
        return f"{self.median:.2f} x ({self.low:.2f}-{self.high:.2f})"

    @staticmethod
    def of(ratios: Iterable[float]) -> Ratio:
        """Return the median and the quartiles of ratios; all three are equal if there is only one ratio."""
        found = list(ratios)
        low, median, high = statistics.quantiles(found, n=4) if len(found) > 1 else found * 3
        return Ratio(median, low, high, len(found))


@dataclass(frozen=True, eq=False)
class Duel:
    """Two computations of the same result, and how each is checked.

    Attributes:
        ours: our computation.
        rival: the one whose time is divided by that of ours.
        check_ours: returns the largest error of an output of `ours`.
        check_rival: returns that of an output of `rival`.
        tolerance: the largest error that is rounding.
    """

    ours: Callable[[], object]
    rival: Callable[[], object]
    check_ours: Callable[[Any], float]
    check_rival: Callable[[Any], float]
    tolerance: float


LEAST_SECONDS = 1e-3
"""A function that takes less is called several times per measurement: a single call of microseconds measures caches
that the other function has just filled, and an interpreter that has not yet specialised the code."""


def paired(ours: Callable[[], object], rival: Callable[[], object], *, pairs: int) -> Ratio:
    """Run both to warm up, then alternately; the order within a pair changes from pair to pair.

    Args:
        ours: the function that should be fast.
        rival: the function to compare with.
        pairs: how many times each is measured.
    """
    calls = {run: calls_per_measurement(run) for run in (ours, rival)}
    ratios = []
    for pair in range(pairs):
        order = (rival, ours) if pair % 2 else (ours, rival)
        took = {run: seconds(run, calls[run]) for run in order}
        ratios.append(took[rival] / took[ours])
    return Ratio.of(ratios)


def calls_per_measurement(run: Callable[[], object]) -> int:
    """Return how many calls of a function take LEAST_SECONDS, at least 1."""
    run()
    return max(1, round(LEAST_SECONDS / max(min(seconds(run) for _ in range(3)), 1e-9)))


def seconds(run: Callable[[], object], calls: int = 1) -> float:
    """Return how long a call takes, the mean of `calls`."""
    begin = time.perf_counter()
    for _ in range(calls):
        run()
    return (time.perf_counter() - begin) / calls
