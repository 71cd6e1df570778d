"""Count how many tokens of each sample have come: as a number where all are alike, as a tensor where they are not."""

from __future__ import annotations

from typing import TypeAlias

import torch
from torch import Tensor

from multihead.errors import ArgumentError
from multihead.tracing import traced

Counted: TypeAlias = "tuple[int | None, Tensor | None, bool, int | Tensor]"


class Progress:
    """How many places of a buffer each sample has filled.

    Args:
        batch: number of samples.
        device: where tensors are made.
        in_graphs: whether a tensor is kept up to date too: a compiled graph must not depend on a number that changes.

    >>> progress = Progress(2, torch.device("cpu"))
    >>> progress.add(3), progress.start
    (0, 3)
    >>> progress.add(4, torch.tensor([4, 1])), progress.start
    (tensor([3, 3]), tensor([7, 4]))
    """

    def __init__(self, batch: int, device: torch.device, *, in_graphs: bool = False) -> None:
        self.batch, self.device = batch, device
        self._longest: int | None = 0  # None where only the tensor knows
        self._each = torch.zeros(batch, dtype=torch.int64, device=device) if in_graphs else None
        self._alike = True
        self.forgotten: int | Tensor = 0  # tokens that stood before the first place

    @property
    def counted(self) -> Counted:
        """All that is counted, to go back to: it is no number that later tokens change."""
        return self._longest, self._each, self._alike, self.forgotten

    @counted.setter
    def counted(self, counted: Counted) -> None:
        self._longest, self._each, self._alike, self.forgotten = counted

    @property
    def position(self) -> int | Tensor:
        """The position of the next token, those forgotten counted; a tensor (batch,) where samples differ."""
        return self.start + self.forgotten

    @property
    def alike(self) -> bool:
        """Whether all samples have equally many tokens."""
        return self._alike

    @property
    def start(self) -> int | Tensor:
        """The place of the next token; a tensor (batch,) where samples differ, and in a graph."""
        if self._each is not None and (not self._alike or torch.compiler.is_compiling()):
            return self._each
        return self.longest

    @property
    def each(self) -> Tensor:
        """(batch,), int64: how many places of each sample are filled."""
        if self._each is None:
            return torch.full((self.batch,), self.longest, device=self.device)
        return self._each

    @property
    def longest(self) -> int:
        """How many places of the longest sample are filled."""
        if self._longest is None:
            self._longest = _largest(self.each)
        return self._longest

    def add(self, new: int, real: Tensor | None = None) -> int | Tensor:
        """Count new tokens, of which the first `real` (batch,) are no padding, and return the place of the first."""
        if self._each is not None and torch.compiler.is_compiling():
            return self._add_in_graph(new, real)
        start = self.start
        if real is not None:
            start = self.each
            self.put(start + real)
            return start
        self._longest = self.longest + new
        if self._each is not None:
            self._each = self._each + new  # never in place: who was handed it keeps it
        return start

    def _add_in_graph(self, new: int, real: Tensor | None) -> Tensor:
        start = self.each
        self._each, self._longest = start + (new if real is None else real), None
        if real is not None:
            self._alike = False
        return start

    def put(self, places: int | Tensor) -> None:
        """Set how many places are filled: an int for all, or (batch,)."""
        if isinstance(places, Tensor):
            self._each, self._longest, self._alike = places, _largest(places), False
            return
        self._longest = places
        if self._each is not None:
            self._each = torch.full_like(self._each, places)

    def forget(self, first: int | Tensor) -> None:
        """Let the place `first` be the new first one: an int for all, or (batch,)."""
        self.put(self.start - first)
        self.forgotten = self.forgotten + first

    def choose(self, index: Tensor) -> None:
        """Choose samples anew: (new batch,), the old sample of each."""
        self.batch = len(index)
        self._each = None if self._each is None else self._each.index_select(0, index)
        if isinstance(self.forgotten, Tensor):
            self.forgotten = self.forgotten.index_select(0, index)

    def move(self, device: torch.device | str) -> None:
        """Move its tensors to a device."""
        self.device = torch.device(device)
        self._each = None if self._each is None else self._each.to(device)
        if isinstance(self.forgotten, Tensor):
            self.forgotten = self.forgotten.to(device)


def _largest(counts: Tensor) -> int:
    if traced() and not torch.compiler.is_compiling():
        raise ArgumentError(
            "The cache counts the tokens of each sample, and torch.jit.trace, make_fx or FakeTensorMode runs this "
            "code, where counts cannot be read.",
            "Leave lengths out there, or use torch.compile with KeyValueCache(capacity=...).",
        )
    return int(counts.max()) if counts.numel() else 0
