"""Time two functions turn by turn in one process, and compare them pair by pair."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Ratio:
    """How many times faster ours was than the rival, over paired runs.

    Fields:
        median: of the paired ratios.
        low: their lower quartile.
        high: their upper quartile.
        pairs: how many runs of each.
    """

    median: float
    low: float
    high: float
    pairs: int

    def __str__(self) -> str:
        return f"{self.median:.2f} x ({self.low:.2f}-{self.high:.2f})"


def paired(ours: Callable[[], object], rival: Callable[[], object], *, pairs: int) -> Ratio:
    """Run both once to warm up, then in turns; which of them goes first changes from pair to pair.

    Args:
        ours: what should be fast.
        rival: what it is compared with.
        pairs: how many times each is run.
    """
    ours(), rival()
    ratios = []
    for turn in range(pairs):
        if turn % 2:
            of_rival, of_ours = seconds(rival), seconds(ours)
        else:
            of_ours, of_rival = seconds(ours), seconds(rival)
        ratios.append(of_rival / of_ours)
    low, median, high = statistics.quantiles(ratios, n=4)
    return Ratio(median, low, high, pairs)


def seconds(run: Callable[[], object]) -> float:
    """Run once, and return how long it took."""
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin
