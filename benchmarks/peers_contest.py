"""Check every contender of a case against float64, then time ours and its peers in turns."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.measure import Ratio, seconds
from benchmarks.peers_cases import CASES, TOLERANCE, Trial, trial
from benchmarks.peers_contender import CannotError, Contender, run_of
from benchmarks.peers_list import peers_of
from benchmarks.peers_reference import difference, right
from benchmarks.peers_torch import multihead

OURS = "multihead"
MOST_ROUNDS = 101  # fewer than the steps that a cache has room for
OVERHEAD_ROUNDS = 501  # what is small beside its spread takes more of them
# How many rounds a peer takes at least, by how many times as long as ours it takes: what is far behind needs few.
LEAST_ROUNDS = ((1.3, 7), (2.5, 5), (8.0, 3), (float("inf"), 1))
LEAST_SHARE = 0.97  # of our speed that the best peer may have more than: of the upper quartile
MOST_PERCENT, MOST_MICROSECONDS = 3.0, 40.0  # that a call of ours may cost beside one by hand

Run = Callable[[], Tensor]
Pairs = Sequence[tuple[float, float]]  # our seconds and the peer's, round by round


@dataclass(frozen=True)
class Standing:
    """What came of a peer in a case.

    Fields:
        peer: its name.
        ratio: its time by ours, over paired runs; None where it was not timed.
        beyond: microseconds that a call of ours takes longer, the median over paired runs.
        error: the largest difference from float64, as a share of the largest value.
        note: why it was not timed, or "".
    """

    peer: str
    ratio: Ratio | None = None
    beyond: float | None = None
    error: float | None = None
    note: str = ""


@dataclass(frozen=True)
class Row:
    """What came of a case in a dtype.

    Fields:
        case: its name.
        dtype: "fp32" or "bf16".
        standings: of every peer that the case is meant for.
        milliseconds: the median of our runs, a call; None where nothing was timed.
        error: our largest difference from float64, as a share of the largest value.
        note: why nothing was timed, or "".
        commit: the commit that was measured.
    """

    case: str
    dtype: str
    standings: tuple[Standing, ...] = ()
    milliseconds: float | None = None
    error: float | None = None
    note: str = ""
    commit: str = ""

    @property
    def best(self) -> Standing | None:
        """The peer with the smallest median ratio, or None where none was timed."""
        return min(
            (each for each in self.standings if each.ratio is not None),
            key=lambda each: each.ratio.median,
            default=None,
        )

    def to_dict(self) -> dict[str, Any]:
        """Write it as what JSON can hold."""
        return asdict(self)

    @staticmethod
    def from_dict(written: dict[str, Any]) -> Row:
        """Read what `to_dict` wrote."""
        standings = (
            Standing(**{**each, "ratio": None if each["ratio"] is None else Ratio(**each["ratio"])})
            for each in written["standings"]
        )
        return Row(**{**written, "standings": tuple(standings)})


def measured(index: int, dtype: str, budget: float, commit: str) -> Row:
    """Check the contenders of a case, then time those that are right for about so many seconds."""
    case = CASES[index]
    given = trial(case, dtype)
    expected = right(given)
    with torch.no_grad():
        ours = checked(OURS, multihead, given, expected, TOLERANCE[dtype])
        if isinstance(ours, Standing):
            return Row(case.name, dtype, error=ours.error, note=ours.note, commit=commit)
        entered = {
            peer.name: checked(peer.name, peer.make, given, expected, TOLERANCE[dtype]) for peer in peers_of(case)
        }
        del expected
        racing = {name: each[0] for name, each in entered.items() if not isinstance(each, Standing)}
        most = OVERHEAD_ROUNDS if case.overhead else MOST_ROUNDS
        pairs = raced(ours[0], racing, budget=budget, calls=case.calls, most=most)
    standings = tuple(
        each if isinstance(each, Standing) else standing(name, pairs[name], error=each[1], calls=case.calls)
        for name, each in entered.items()
    )
    taken = [mine for each in pairs.values() for mine, _ in each]
    milliseconds = 1e3 * statistics.median(taken) / case.calls if taken else None
    return Row(case.name, dtype, standings, milliseconds, ours[1], commit=commit)


def checked(
    name: str, make: Callable[[Trial], Contender], given: Trial, expected: Tensor, tolerance: float
) -> tuple[Run, float] | Standing:
    """Run a contender once: return it with its error, or where it cannot be timed its standing, which says why."""
    try:
        run = run_of(given, make(given))
        error = difference(given, run(), expected)
    except CannotError as reason:
        return Standing(name, note=f"cannot: {reason}")
    except Exception as failure:  # noqa: BLE001 - whatever a peer raises, the others go on
        said = str(failure).strip().splitlines()
        return Standing(name, note=f"failed: {type(failure).__name__}: {said[0] if said else ''}")
    if not error <= tolerance:
        note = f"wrong: it differs from float64 by {error:.1e} of the largest value, more than {tolerance:.0e}"
        return Standing(name, error=error, note=note)
    return run, error


def raced(
    ours: Run, peers: dict[str, Run], *, budget: float, calls: int = 1, most: int = MOST_ROUNDS
) -> dict[str, Pairs]:
    """Run ours and the peers in rounds, each round in an order of its own; a peer leaves when its time is spent.

    Every peer has an equal share of half of the budget. The other half is the two quickest peers', since on them it
    depends which is the best, and by how much.

    Args:
        ours: runs in every round.
        peers: by their names.
        budget: seconds that all peers have together.
        calls: of a run that are timed together.
        most: rounds.
    """
    pairs: dict[str, list[tuple[float, float]]] = {name: [] for name in peers}
    chance = random.Random(0)
    while racing := [
        name
        for name in peers
        if _goes_on(pairs[name], budget / (4 if name in _leading(pairs) else 2 * len(peers)), most)
    ]:
        order = [OURS, *racing]
        chance.shuffle(order)
        took = {name: seconds(_times(calls, ours if name == OURS else peers[name])) for name in order}
        for name in racing:
            pairs[name].append((took[OURS], took[name]))
    return pairs


def _goes_on(pairs: Pairs, share: float, most: int) -> bool:
    """Tell whether a peer needs another round."""
    if not pairs:
        return True
    least = next(rounds for limit, rounds in LEAST_ROUNDS if _behind(pairs) < limit)
    return len(pairs) < least or (len(pairs) < most and sum(theirs for _, theirs in pairs) < share)


def _leading(pairs: dict[str, list[tuple[float, float]]]) -> list[str]:
    """Name the two peers that have been the quickest so far."""
    return sorted((name for name in pairs if pairs[name]), key=lambda name: _behind(pairs[name]))[:2]


def _behind(pairs: Pairs) -> float:
    """Return how many times as long as ours a peer has taken so far."""
    return statistics.median(theirs / mine for mine, theirs in pairs)


def _times(calls: int, run: Run) -> Callable[[], None]:
    def many() -> None:
        for _ in range(calls):
            run()

    return many


def standing(peer: str, pairs: Pairs, *, error: float, calls: int = 1) -> Standing:
    """Sum up a peer's rounds: its time by ours, and by how much ours takes longer."""
    beyond = 1e6 * statistics.median(mine - theirs for mine, theirs in pairs) / calls
    return Standing(peer, spread(theirs / mine for mine, theirs in pairs), beyond, error)


def spread(ratios: Iterable[float]) -> Ratio:
    """Return the median and the quartiles of ratios; all the same, where there is one only."""
    found = list(ratios)
    low, median, high = statistics.quantiles(found, n=4) if len(found) > 1 else found * 3
    return Ratio(median, low, high, len(found))
