"""The active split of a sequence over ranks (processes), where each rank holds some of its tokens.

A sequence may be split over processes (`parallel/`, `kernels/sequence_split.py`). The seam is `functional.attend`:
where a split is active, it passes the request on, so layers, functions and Hugging Face models are split alike.
`request_of` checks masks and biases against the whole sequence, and a layer takes the positions of its tokens from the
split. Calls without a split pay for reading one global variable; it is no ContextVar, because compiled graphs guard on
it and backward passes run in other threads.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from multihead.errors import ArgumentError
from multihead.kernels.call import AttentionRequest, AttentionResult
from multihead.tensors.shapes import AttentionShape


class RankWork(NamedTuple):
    """What one rank does in a call on a split sequence.

    Attributes:
        parts: the calls that the rank computes; their tensors have the right shapes and no values.
        cells: number of cells of the rank's part of the score matrix, over batch and heads.
        shown: how many of these cells lie within the mask's intervals.
        received: bytes of keys and values of other ranks that the rank holds at once.
        lines: what the rank does, what it sends and why: (label of one word, sentence).
    """

    parts: list[AttentionRequest]
    cells: int
    shown: int
    received: int
    lines: tuple[tuple[str, str], ...]


class SequenceSplit(Protocol):
    """How a sequence is split over ranks, and how they compute its attention together."""

    def positions(self, tokens: int, device: torch.device) -> Tensor:
        """Return the position of each token of this rank in the whole sequence: (1, tokens) int64."""
        ...

    def whole_shape(self, shape: AttentionShape) -> AttentionShape:
        """Return the sizes of the whole sequence, which masks must fit; an ArgumentError for cross-attention."""
        ...

    def attend(self, request: AttentionRequest, *, kernel: str | None) -> AttentionResult:
        """Compute the queries of this rank, together with the other ranks."""
        ...

    @property
    def rank_and_ranks(self) -> tuple[int, int]:
        """The index of this rank, and the number of ranks that share the sequence."""
        ...

    def chunks(self, length: int) -> tuple[tuple[int, int], ...]:
        """Return the ranges of positions that this rank holds, of a sequence of `length` tokens."""
        ...

    def gather_tokens(self, tensor: Tensor, dim: int) -> Tensor:
        """Return the whole sequence of a tensor whose dimension `dim` has this rank's tokens; all ranks call it."""
        ...

    def estimate_rank_work(self, request: AttentionRequest, *, kernel: str | None) -> RankWork:
        """Return what this rank would do, without computing or sending anything."""
        ...


# No ContextVar: the backward pass may run in another thread, and compilers can check a global variable.
active: SequenceSplit | None = None
"""How the sequence of the calls made here is split; None where each call has its whole sequence."""


@contextmanager
def use_split(sequence: SequenceSplit | None) -> Iterator[None]:
    """Treat the calls in this context as parts of a split sequence, or as whole calls (None).

    >>> with use_split(None):
    ...     print(active)
    None
    """
    global active  # noqa: PLW0603
    before, active = active, sequence
    try:
        yield
    finally:
        active = before


def reject_split_sequence(name: str, remedy: str) -> None:
    """Raise an error where the sequence is split and a call uses something that needs all of its tokens.

    `name` is the subject of the error's first sentence, and `remedy` is its second sentence.
    """
    if active is not None:
        raise ArgumentError(f"{name} cannot be used in context_parallel, where a rank has part of the tokens.", remedy)
