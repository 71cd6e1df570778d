"""Layouts of a split sequence: which tokens each rank has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from multihead.errors import ArgumentError, ShapeError

LayoutName = Literal["contiguous", "balanced"]
TokenRange = tuple[int, int]  # first token, and one past the last


class Layout(NamedTuple):
    """The layout of a split sequence: which tokens each rank has, in ascending order of position.

    "contiguous": the sequence is cut into one chunk per rank, all of equal length, and rank r has chunk r.
    "balanced": the sequence is cut into two chunks per rank, and rank r has chunk r and chunk r from the end, so that
    all ranks have equal work under a causal mask (the zig-zag order of ring attention).

    Attributes:
        kind: "contiguous" or "balanced".
        ranks: number of ranks.

    >>> Layout("balanced", 2).chunks(0, 8), Layout("balanced", 2).chunks(1, 8)
    (((0, 2), (6, 8)), ((2, 4), (4, 6)))
    """

    kind: LayoutName
    ranks: int

    def chunks(self, rank: int, length: int) -> tuple[TokenRange, ...]:
        """Return the ranges of positions, [first, stop) each, of a rank's tokens in a sequence of `length` tokens."""
        size = length // self.chunk_count
        return tuple((index * size, (index + 1) * size) for index in self._chunk_indices(rank))

    def _chunk_indices(self, rank: int) -> tuple[int, ...]:
        return (rank,) if self.kind == "contiguous" else (rank, self.chunk_count - 1 - rank)

    @property
    def chunk_count(self) -> int:
        """Number of chunks into which the sequence is cut."""
        return self.ranks if self.kind == "contiguous" else 2 * self.ranks

    def positions(self, rank: int, length: int, device: torch.device | str = "cpu") -> Tensor:
        """Return the positions of a rank's tokens: (tokens,) int64."""
        return torch.cat([torch.arange(*chunk, device=device) for chunk in self.chunks(rank, length)])

    def select_tokens_of_rank(self, whole: Tensor, rank: int, dim: int) -> Tensor:
        """Slice the tokens of a rank from a tensor of the whole sequence, whose dimension `dim` is tokens."""
        chunks = whole.chunk(self.chunk_count, dim)
        return torch.cat([chunks[index] for index in self._chunk_indices(rank)], dim)

    def stack_tokens_of_ranks(self, whole: Tensor, dim: int) -> Tensor:
        """Stack the tokens of all ranks, (ranks, ...), from a tensor of the whole sequence along dimension `dim`."""
        chunks = whole.chunk(self.chunk_count, dim)
        return torch.stack(
            [torch.cat([chunks[index] for index in self._chunk_indices(rank)], dim) for rank in range(self.ranks)]
        )

    def join_tokens_of_ranks(self, parts: Sequence[Tensor], dim: int) -> Tensor:
        """Concatenate the tokens of all ranks, listed by rank, to the whole sequence along dimension `dim`."""
        count = self.chunk_count // self.ranks
        chunks = [part.chunk(count, dim) for part in parts]
        ordered = [each[0] for each in chunks] + [each[1] for each in reversed(chunks) if count > 1]
        return torch.cat(ordered, dim)

    def check_length(self, length: int) -> None:
        """Check that a sequence of `length` tokens can be cut into chunks of equal length."""
        if length % self.chunk_count or not length:
            lower = length - length % self.chunk_count
            upper = lower + self.chunk_count
            fitting = f"{lower} or {upper}" if lower else str(upper)
            raise ShapeError(
                f"The sequence has {length} tokens, and {self.ranks} ranks hold {self.chunk_count} equal chunks of it.",
                f"Pad or cut it to {fitting} tokens, and hide padding with mask=masks.Lengths(...).",
            )


def check_layout_name(layout: str) -> LayoutName:
    """Return the name of a layout; an ArgumentError if it is neither "contiguous" nor "balanced"."""
    if layout not in get_args(LayoutName):
        raise ArgumentError(f"layout is {layout!r}.", 'Give "contiguous" or "balanced".')
    return layout  # type: ignore[return-value]
