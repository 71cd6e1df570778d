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


def paired(ours: Callable[[], object], rival: Callable[[], object], *, pairs: int) -> Ratio:
    """Run both once to warm up, then alternately; the order within a pair changes from pair to pair.

    Args:
        ours: the function that should be fast.
        rival: the function to compare with.
        pairs: how many times each is run.
    """
    ours(), rival()
    ratios = []
    for pair in range(pairs):
        if pair % 2:
            of_rival, of_ours = seconds(rival), seconds(ours)
        else:
            of_ours, of_rival = seconds(ours), seconds(rival)
        ratios.append(of_rival / of_ours)
    return Ratio.of(ratios)


def seconds(run: Callable[[], object]) -> float:
    """Return how long one run takes."""
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin
