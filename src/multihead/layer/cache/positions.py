"""Count the tokens of each sample: as an int where all samples have equally many, else as a tensor.

A step that is not compiled keeps no tensor of counts. Only compiled graphs need it, and adding to it took as long as
copying the token. A prompt still makes one, so that the compiled steps after it share one graph; a compiled step
directly after uncompiled ones is compiled once more.
"""

from __future__ import annotations

from typing import TypeAlias

import torch
from torch import Tensor

from multihead.errors import ArgumentError
from multihead.tensors.tracing import is_traced

Snapshot: TypeAlias = tuple[int | None, Tensor | None, bool, int | Tensor]


class SlotCounts:
    """Number of buffer slots that each sample has filled.

    Args:
        batch: number of samples.
        device: device of the tensors of counts.
        in_graphs: whether to keep the counts as a tensor besides the int, because a compiled graph would be compiled
            again for each int.

    Attributes:
        dropped: number of tokens before the first slot that were dropped, an int or (batch,).

    >>> progress = SlotCounts(2, torch.device("cpu"))
    >>> progress.add_tokens(3), progress.next_slot
    (0, 3)
    >>> progress.add_tokens(4, torch.tensor([4, 1])), progress.next_slot
    (tensor([3, 3]), tensor([7, 4]))
    """

    def __init__(self, batch: int, device: torch.device, *, in_graphs: bool = False) -> None:
        self.batch, self.device = batch, device
        self._longest: int | None = 0  # None if only the tensor _counts is up to date
        self._in_graphs = in_graphs
        # None if all samples have `_longest` tokens and no graph needs a tensor
        self._counts = torch.zeros(batch, dtype=torch.int64, device=device) if in_graphs else None
        self._uniform = True
        self.dropped: int | Tensor = 0

    @property
    def snapshot(self) -> Snapshot:
        """The counts as an immutable tuple, to which they can be set back."""
        return self._longest, self._counts, self._uniform, self.dropped

    @snapshot.setter
    def snapshot(self, snapshot: Snapshot) -> None:
        self._longest, self._counts, self._uniform, self.dropped = snapshot

    @property
    def next_position(self) -> int | Tensor:
        """Position of the next token, dropped tokens included; a tensor (batch,) where samples differ."""
        return self.next_slot + self.dropped

    @property
    def is_uniform(self) -> bool:
        """Whether all samples have equally many tokens."""
        return self._uniform

    @property
    def next_slot(self) -> int | Tensor:
        """Slot of the next token; a tensor (batch,) where samples differ, and in a graph."""
        if not self._uniform or (self._in_graphs and torch.compiler.is_compiling()):
            return self.counts
        return self.longest

    @property
    def counts(self) -> Tensor:
        """(batch,), int64: number of filled slots of each sample."""
        if self._counts is None:
            return torch.full((self.batch,), self.longest, device=self.device)
        return self._counts

    @property
    def longest(self) -> int:
        """Number of filled slots of the longest sample."""
        if self._longest is None:
            self._longest = _largest_count(self.counts)
        return self._longest

    def add_tokens(self, new: int, real: Tensor | None = None) -> int | Tensor:
        """Count new tokens, of which `real` (batch,) are no padding, and return the slot of the first one."""
        if self._in_graphs and torch.compiler.is_compiling():
            return self._add_in_graph(new, real)
        if real is not None:
            start = self.counts
            self.set_counts(start + real)
            return start
        if not self._uniform:
            start = self.counts
            self._longest, self._counts = self.longest + new, start + new  # a new tensor: callers hold the old one
            return start
        first = self.longest
        self._longest = first + new
        if self._in_graphs:
            self._counts = None
            # The tensor of counts is made after a prompt, which compiled steps usually follow, and not after a decoding
            # step, where it would take as long as copying the token; a compiled step then makes it itself.
            if new > 1 or not first:
                self._counts = self.counts
        return first

    def _add_in_graph(self, new: int, real: Tensor | None) -> Tensor:
        start = self.counts
        self._counts, self._longest = start + (new if real is None else real), None
        if real is not None:
            self._uniform = False
        return start

    def set_counts(self, slots: int | Tensor) -> None:
        """Set the number of filled slots: an int for all samples, or (batch,)."""
        if isinstance(slots, Tensor):
            self._counts, self._longest, self._uniform = slots, _largest_count(slots), False
            return
        self._longest = slots
        if self._in_graphs or not self._uniform:
            self._counts = torch.full((self.batch,), slots, device=self.device)

    def drop_slots(self, count: int | Tensor) -> None:
        """Drop the first `count` slots: an int for all samples, or (batch,)."""
        self.set_counts(self.next_slot - count)
        self.dropped = self.dropped + count

    def select_samples(self, index: Tensor) -> None:
        """Select samples by `index`, (new batch,): the old sample of each new one."""
        self.batch = len(index)
        self._counts = None if self._counts is None else self._counts.index_select(0, index)
        if isinstance(self.dropped, Tensor):
            self.dropped = self.dropped.index_select(0, index)

    def move_to(self, device: torch.device | str) -> None:
        """Move the tensors of counts to a device."""
        self.device = torch.device(device)
        self._counts = None if self._counts is None else self._counts.to(device)
        if isinstance(self.dropped, Tensor):
            self.dropped = self.dropped.to(device)


def _largest_count(counts: Tensor) -> int:
    if is_traced() and not torch.compiler.is_compiling():
        raise ArgumentError(
            "The cache counts the tokens of each sample, and torch.jit.trace, make_fx or FakeTensorMode runs this "
            "code, where counts cannot be read.",
            "Leave lengths out there, or use torch.compile with KeyValueCache(capacity=...).",
        )
    return int(counts.max()) if counts.numel() else 0
