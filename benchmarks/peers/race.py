"""Check every contender of a case against float64, then time ours and its peers alternately."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.in_process import failure
from benchmarks.measure import Ratio, seconds
from benchmarks.peers.cases import CASES, TOLERANCE, Trial, trial
from benchmarks.peers.contender import CannotError, Contender, run_of
from benchmarks.peers.pytorch import multihead
from benchmarks.peers.reference import difference, right
from benchmarks.peers.registry import peers_of

OURS = "multihead"
MOST_ROUNDS = 101  # fewer than the steps that a cache has room for
OVERHEAD_ROUNDS = 501  # a small difference needs more of them
# The fewest rounds of a peer, by its time divided by ours: a slow peer needs few.
LEAST_ROUNDS = ((1.3, 7), (2.5, 5), (8.0, 3), (float("inf"), 1))
LEAST_SHARE = 0.97  # the least upper quartile of the ratio to the best peer
MOST_PERCENT, MOST_MICROSECONDS = 3.0, 40.0  # the limits of our overhead over hand-written code

Run = Callable[[], Tensor]
Pairs = Sequence[tuple[float, float]]  # our seconds and those of the peer, per round


@dataclass(frozen=True)
class Standing:
    """The result of a peer in a case.

    Attributes:
        peer: its name.
        ratio: its time divided by ours, over paired runs; None if it was not timed.
        beyond: by how many microseconds our call takes longer, the median over paired runs.
        error: the largest difference from float64, relative to the largest value.
        note: why it was not timed, or "".
    """

    peer: str
    ratio: Ratio | None = None
    beyond: float | None = None
    error: float | None = None
    note: str = ""


@dataclass(frozen=True)
class Row:
    """The result of a case in a dtype.

    Attributes:
        case: its name.
        dtype: "fp32" or "bf16".
        standings: the results of the peers.
        milliseconds: our time per call, the median; None if nothing was timed.
        error: our largest difference from float64, relative to the largest value.
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
        """The peer with the smallest median ratio, or None if none was timed."""
        return min(
            (each for each in self.standings if each.ratio is not None),
            key=lambda each: each.ratio.median,
            default=None,
        )

    @staticmethod
    def from_dict(written: dict[str, Any]) -> Row:
        """Return a row from the dict that `dataclasses.asdict` made of it."""
        standings = (
            Standing(**{**each, "ratio": None if each["ratio"] is None else Ratio(**each["ratio"])})
            for each in written["standings"]
        )
        return Row(**{**written, "standings": tuple(standings)})


def measured(index: int, dtype: str, budget: float, commit: str) -> Row:
    """Check the contenders of a case, then time those that are right for about `budget` seconds."""
    case = CASES[index]
    inputs = trial(case, dtype)
    expected = right(inputs)
    with torch.no_grad():
        ours = checked(OURS, multihead, inputs, expected, TOLERANCE[dtype])
        if isinstance(ours, Standing):
            return Row(case.name, dtype, error=ours.error, note=ours.note, commit=commit)
        entered = {
            peer.name: checked(peer.name, peer.make, inputs, expected, TOLERANCE[dtype]) for peer in peers_of(case)
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
    name: str, make: Callable[[Trial], Contender], inputs: Trial, expected: Tensor, tolerance: float
) -> tuple[Run, float] | Standing:
    """Run a contender once, and return it with its error or, if it cannot be timed, a standing with the reason."""
    try:
        run = run_of(inputs, make(inputs))
        error = difference(inputs, run(), expected)
    except CannotError as reason:
        return Standing(name, note=f"cannot: {reason}")
    except Exception as error:  # noqa: BLE001 - whatever a peer raises, the others continue
        return Standing(name, note=failure(error))
    if not error <= tolerance:
        note = f"wrong: it differs from float64 by {error:.1e} of the largest value, more than {tolerance:.0e}"
        return Standing(name, error=error, note=note)
    return run, error


def raced(
    ours: Run, peers: dict[str, Run], *, budget: float, calls: int = 1, most: int = MOST_ROUNDS
) -> dict[str, Pairs]:
    """Run ours and the peers in rounds, each in a random order; a peer leaves when it has used its time.

    Half of the budget is shared equally. The other half belongs to the two fastest peers, because they decide which
    one is the best, and by how much.

    Args:
        ours: runs in every round.
        peers: the peers by name.
        budget: seconds for all peers together.
        calls: calls that are timed together.
        most: the most rounds.
    """
    pairs: dict[str, list[tuple[float, float]]] = {name: [] for name in peers}
    chance = random.Random(0)
    while racing := [
        name
        for name in peers
        if _needs_round(pairs[name], budget / (4 if name in _fastest(pairs) else 2 * len(peers)), most)
    ]:
        order = [OURS, *racing]
        chance.shuffle(order)
        took = {name: seconds(_times(calls, ours if name == OURS else peers[name])) for name in order}
        for name in racing:
            pairs[name].append((took[OURS], took[name]))
    return pairs


def _needs_round(pairs: Pairs, share: float, most: int) -> bool:
    """Return whether a peer needs another round."""
    if not pairs:
        return True
    least = next(rounds for limit, rounds in LEAST_ROUNDS if _median_ratio(pairs) < limit)
    return len(pairs) < least or (len(pairs) < most and sum(theirs for _, theirs in pairs) < share)


def _fastest(pairs: dict[str, list[tuple[float, float]]]) -> list[str]:
    """Return the names of the two fastest peers so far."""
    return sorted((name for name in pairs if pairs[name]), key=lambda name: _median_ratio(pairs[name]))[:2]


def _median_ratio(pairs: Pairs) -> float:
    """Return the median of a peer's time divided by ours so far."""
    return statistics.median(theirs / mine for mine, theirs in pairs)


def _times(calls: int, run: Run) -> Callable[[], None]:
    def many() -> None:
        for _ in range(calls):
            run()

    return many


def standing(peer: str, pairs: Pairs, *, error: float, calls: int = 1) -> Standing:
    """Summarise the rounds of a peer: its time divided by ours, and by how much ours takes longer."""
    beyond = 1e6 * statistics.median(mine - theirs for mine, theirs in pairs) / calls
    return Standing(peer, Ratio.of(theirs / mine for mine, theirs in pairs), beyond, error)
