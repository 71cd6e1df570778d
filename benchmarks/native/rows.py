"""Measure one case of the native kernel, and compare the result with its target."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.measure import Duel, NotMeasuredError, Ratio, paired, seconds
from benchmarks.native.cases import CASES, Accuracy, Case

LEAST_PAIRS, MOST_PAIRS = 5, 101


@dataclass(frozen=True)
class Row:
    """The result of a case.

    Attributes:
        name: the name of the case.
        rival: its rival, "" for an accuracy.
        ratio: of the times; None for an accuracy, and if nothing was measured.
        error: the largest difference from float64, or the value of an accuracy.
        note: why nothing was measured, or "".
        commit: the commit that was measured.
    """

    name: str
    rival: str
    ratio: Ratio | None = None
    error: float | None = None
    note: str = ""
    commit: str = ""

    @property
    def failed(self) -> bool:
        """Whether an error or a wrong result prevented the measurement."""
        return self.note.startswith("failed")

    @staticmethod
    def from_dict(written: dict[str, Any]) -> Row:
        """Return a row from the dict that `dataclasses.asdict` made of it."""
        ratio = written["ratio"]
        return Row(**{**written, "ratio": None if ratio is None else Ratio(**ratio)})


def identity(case: Case | Accuracy) -> tuple[str, str]:
    """Return what identifies a case: its name and its rival."""
    return case.name, case.rival if isinstance(case, Case) else ""


def measured(index: int, budget: float, commit: str) -> Row:
    """Check a case, then time it for about `budget` seconds."""
    case = CASES[index]
    name, rival = identity(case)
    torch.manual_seed(0)
    with torch.no_grad():
        if isinstance(case, Accuracy):
            return Row(name, rival, error=case.find(), commit=commit)
        try:
            duel = case.make()
        except NotMeasuredError as missing:
            return Row(name, rival, note=f"not measured: {missing}", commit=commit)
        wrong, error = checked(case, duel)
        if wrong:
            return Row(name, rival, error=error, note=f"failed: {wrong}", commit=commit)
        pair = seconds(duel.ours) + seconds(duel.rival)
        pairs = min(max(LEAST_PAIRS, round(budget / pair)), MOST_PAIRS)
        return Row(name, rival, paired(duel.ours, duel.rival, pairs=pairs), error, commit=commit)


def all_measured(indices: list[int], budget: float, commit: str) -> list[Row]:
    """Check and time several cases, one after the other."""
    return [measured(index, budget, commit) for index in indices]


def index_of(name: str) -> int:
    """Return the index of the first case with a name."""
    return [case.name for case in CASES].index(name)


def checked(case: Case, duel: Duel) -> tuple[str, float]:
    """Return what is wrong, or "", and the largest error of the outputs of the native kernel."""
    found = {"ours": duel.check_ours(duel.ours()), case.rival: duel.check_rival(duel.rival())}
    wrong = [
        f"{name} differs from the definition by {error:.1e}, more than {duel.tolerance:.0e}"
        for name, error in found.items()
        if not error <= duel.tolerance
    ]
    return ", and ".join(wrong), max(found.values()) if case.is_cost else found["ours"]


def requirement(case: Case | Accuracy, instruction_set: str) -> tuple[str, Callable[[float], bool]] | None:
    """Return the target as text and as a condition on the measured value, or None if there is no target."""
    if isinstance(case, Accuracy):
        return f"at most {case.most:g}", lambda found: found <= case.most
    least = case.wide if instruction_set == "avx512_bf16" else case.least
    most = case.most if instruction_set == "avx2" else None
    if least is not None and (instruction_set == "avx2" or least is case.wide):
        return f"at least {least:g} x", lambda found: found >= least
    if most is not None and most != float("inf"):
        return f"at most {most:g} x", lambda found: found <= most
    return None


def is_met(row: Row, case: Case | Accuracy, instruction_set: str) -> bool | None:
    """Return whether a row meets its target; None if nothing was measured, or there is no target."""
    condition = requirement(case, instruction_set)
    found = row.error if isinstance(case, Accuracy) else None if row.ratio is None else row.ratio.median
    return None if condition is None or found is None else condition[1](found)
