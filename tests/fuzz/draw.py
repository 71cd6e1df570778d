"""The random numbers of one case: each choice has a stream of its own, so that one can be left out alone."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from random import Random
from typing import Any, TypeVar

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from torch import Tensor

T = TypeVar("T")

BUDGET = float(os.environ.get("MULTIHEAD_FUZZ_BUDGET", "1"))
"""Factor of every error budget, `--budget` of the command."""


class Draw:
    """The choices of one case, all of them given by its seed.

    Attributes:
        seed: of every number.
        without: features that are left out; all other choices stay the same.
        most: the largest size that is drawn; larger ones become this one.
        used: the features that the case has, in the order in which they were drawn.
        notes: what the case is, for the report: name -> value.
    """

    def __init__(self, seed: int, without: Sequence[str] = (), most: int | None = None) -> None:
        self.seed, self.without, self.most = seed, frozenset(without), most
        self.used: list[str] = []
        self.notes: dict[str, object] = {}
        self.tell: Callable[[], None] | None = None  # is called after each feature

    def stream(self, name: str) -> Random:
        """Return the random numbers of one choice."""
        return Random(f"{self.seed} {name}")

    def has(self, feature: str, share: float) -> bool:
        """Whether the case has a feature, which a share of all cases have."""
        if self.stream(f"has {feature}").random() >= share or feature in self.without:
            return False
        self.used.append(feature)
        if self.tell is not None:
            self.tell()
        return True

    def pick(self, name: str, *values: T) -> T:
        return self.stream(name).choice(values)

    def feature(self, name: str, usual: T, *others: T, share: float = 0.5) -> T:
        """Pick one of the others in a share of all cases, else the usual value."""
        return self.pick(name, *others) if self.has(name, share) else usual

    def size(self, name: str, *values: int) -> int:
        """Pick a size, at most `most`."""
        value = self.pick(name, *values)
        return value if self.most is None else min(value, self.most)

    def generator(self, name: str) -> torch.Generator:
        return torch.Generator().manual_seed(self.stream(name).getrandbits(48))

    def normal(self, name: str, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator(name), dtype=torch.float64)

    def cells(self, name: str, shape: Sequence[int], share: float) -> Tensor:
        """Random booleans, a share of them True."""
        return torch.rand(tuple(shape), generator=self.generator(name)) < share

    def from_strategy(self, name: str, strategy: SearchStrategy[T]) -> T | None:
        """Draw from a strategy of the other tests; None where it rejects its own choices."""
        _wanted[:] = [strategy]
        _found.clear()
        _one.hypothesis.fuzz_one_input(self.stream(name).randbytes(8192))  # type: ignore[attr-defined]
        return _found[0] if _found else None


_wanted: list[SearchStrategy[Any]] = []
_found: list[Any] = []


@settings(database=None, deadline=None)
@given(data=st.data())
def _one(data: st.DataObject) -> None:
    _found.append(data.draw(_wanted[0]))


class Mismatch(AssertionError):  # noqa: N818
    """A result is not what it should be. The message's words say what; its numbers differ from case to case."""


def check_error(words: str, error: float, allowed: float) -> None:
    """Compare the largest error of a result with its budget; a NaN is above every budget.

    Raises:
        Mismatch: the error is above the budget.
    """
    if not error <= BUDGET * allowed:
        kind = "not finite" if error == float("inf") else "off"
        raise Mismatch(f"{words} is {kind}: by {error:.3g}, {BUDGET * allowed:.2g} is allowed")


def described(notes: dict[str, object]) -> str:
    return ", ".join(f"{name} {value}" for name, value in notes.items())
