"""Count the cached tokens of each sample: as an int if all samples have the same number, else as a tensor.

A step that is not compiled keeps no tensor of counts. Only compiled graphs need the tensor, and incrementing it took as
long as copying the new token into the cache. The call with the prompt still creates the tensor, so that the compiled
steps after it share one graph; if the first compiled step comes directly after uncompiled ones, it is compiled once
more.
"""

from __future__ import annotations

from typing import TypeAlias

import torch
from torch import Tensor

from multihead.errors import ArgumentError
from multihead.tensors.tracing import is_traced

CountsSnapshot: TypeAlias = tuple[int | None, Tensor | None, bool, int | Tensor]


class SlotCounts:
    """The number of filled buffer slots of each sample.

    Args:
        batch: number of samples.
        device: device of the tensors of counts.
        in_graphs: whether to keep the counts also as a tensor, because a graph would be recompiled for each int.

    Attributes:
        dropped: number of dropped tokens, which were before the first slot, an int or (batch,).

    >>> slot_counts = SlotCounts(2, torch.device("cpu"))
    >>> slot_counts.add_tokens(3), slot_counts.next_slot
    (0, 3)
    >>> slot_counts.add_tokens(4, torch.tensor([4, 1])), slot_counts.next_slot
    (tensor([3, 3]), tensor([7, 4]))
    """

    def __init__(self, batch: int, device: torch.device, *, in_graphs: bool = False) -> None:
        self.batch, self.device = batch, device
        self._longest: int | None = 0  # None if only the tensor _counts is up to date
        self._in_graphs = in_graphs
        # (batch,), or None if all samples have `_longest` tokens and no graph needs a tensor
        self._counts = torch.zeros(batch, dtype=torch.int64, device=device) if in_graphs else None
        self._uniform = True
        self.dropped: int | Tensor = 0

    @property
    def snapshot(self) -> CountsSnapshot:
        """The counts as an immutable tuple; assigning it restores them."""
        return self._longest, self._counts, self._uniform, self.dropped

    @snapshot.setter
    def snapshot(self, snapshot: CountsSnapshot) -> None:
        self._longest, self._counts, self._uniform, self.dropped = snapshot

    @property
    def next_position(self) -> int | Tensor:
        """Position of the next token in the sequence, with dropped tokens: an int, or (batch,) if samples differ."""
        return self.next_slot + self.dropped

    @property
    def is_uniform(self) -> bool:
        """Whether all samples have the same number of tokens."""
        return self._uniform

    @property
    def next_slot(self) -> int | Tensor:
        """Slot of the next token: an int, or (batch,) if samples differ or in a graph."""
        if not self._uniform or (self._in_graphs and torch.compiler.is_compiling()):
            return self.counts
        return self.largest_count

    @property
    def counts(self) -> Tensor:
        """(batch,), int64: number of filled slots of each sample."""
        if self._counts is None:
            return torch.full((self.batch,), self.largest_count, device=self.device)
        return self._counts

    @property
    def largest_count(self) -> int:
        """Number of filled slots of the longest sample."""
        if self._longest is None:
            self._longest = _largest_count(self.counts)
        return self._longest

    def add_tokens(self, new: int, lengths: Tensor | None = None) -> int | Tensor:
        """Count `new` tokens per sample, or `lengths` (batch,) if some are padding; return the first new slot."""
        if self._in_graphs and torch.compiler.is_compiling():
            return self._add_in_graph(new, lengths)
        if lengths is not None:
            start = self.counts
            self.set_counts(start + lengths)
            return start
        if not self._uniform:
            start = self.counts
            self._longest, self._counts = (
                self.largest_count + new,
                start + new,
            )  # not in place, because callers hold the old tensor
            return start
        first = self.largest_count
        self._longest = first + new
        if self._in_graphs:
            self._counts = None
            # Create the tensor of counts after a prompt, which compiled steps usually follow. After a decoding step it
            # would take as long as copying the token; a compiled step creates it if needed.
            if new > 1 or not first:
                self._counts = self.counts
        return first

    def _add_in_graph(self, new: int, lengths: Tensor | None) -> Tensor:
        start = self.counts
        self._counts, self._longest = start + (new if lengths is None else lengths), None
        if lengths is not None:
            self._uniform = False
        return start

    def set_counts(self, slots: int | Tensor) -> None:
        """Set the number of filled slots, an int or (batch,)."""
        if isinstance(slots, Tensor):
            self._counts, self._longest, self._uniform = slots, _largest_count(slots), False
            return
        self._longest = slots
        if self._in_graphs or not self._uniform:
            self._counts = torch.full((self.batch,), slots, device=self.device)

    def drop_slots(self, count: int | Tensor) -> None:
        """Drop the first `count` slots, an int or (batch,)."""
        self.set_counts(self.next_slot - count)
        self.dropped = self.dropped + count

    def select_samples(self, index: Tensor) -> None:
        """Select samples: new sample i has the counts of old sample `index[i]`; index is (new batch,)."""
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
