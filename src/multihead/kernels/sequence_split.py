"""The active split of a sequence over ranks (processes), each of which holds some of its tokens.

`parallel/` activates a split. `functional.attend` passes each request to the active split instead of a kernel, so
layers, functions and Hugging Face models are split in the same way. `functional.request_of` checks masks and biases
against the whole sequence, and a layer takes the positions of its tokens from the split. Calls without a split only
read one global variable. The variable is no ContextVar, because compiled graphs guard on it and backward passes run in
other threads.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from multihead.errors import ArgumentError
from multihead.kernels.call import AttentionRequest, AttentionResult
from multihead.tensors.shapes import AttentionShape
from multihead.tensors.undo import Undo


class RankWork(NamedTuple):
    """The work of one rank in a call on a split sequence.

    Attributes:
        requests: the calls that the rank computes; their tensors have the right shapes, but no meaningful values.
        computed_cells: number of scores of the rank's queries, over batch and heads.
        visible_cells: number of these scores within the mask's intervals.
        received_bytes: maximum size of received keys and values that the rank holds at once.
        labelled_facts: (label of one word, sentence) about the rank's work and communication.
    """

    requests: list[AttentionRequest]
    computed_cells: int
    visible_cells: int
    received_bytes: int
    labelled_facts: tuple[tuple[str, str], ...]


class SequenceSplit(Protocol):
    """Protocol of a split of a sequence over ranks, which computes its attention."""

    def positions_of_rank(self, tokens: int, device: torch.device) -> Tensor:
        """Return the position of each token of this rank in the whole sequence: (1, tokens) int64."""
        ...

    def whole_shape(self, shape: AttentionShape) -> AttentionShape:
        """Return the shape of the call on the whole sequence, which masks must fit; reject cross-attention."""
        ...

    def attend(self, request: AttentionRequest, *, kernel: str | None) -> AttentionResult:
        """Compute the attention of this rank's queries to all visible keys; all ranks call it."""
        ...

    @property
    def rank_and_world_size(self) -> tuple[int, int]:
        """The index of this rank, and the number of ranks."""
        ...

    def chunks_of_rank(self, length: int) -> tuple[tuple[int, int], ...]:
        """Return the ranges [first, stop) of positions that this rank holds, of a sequence of `length` tokens."""
        ...

    def gather_tokens(self, tensor: Tensor, dim: int) -> Tensor:
        """Gather the tokens of all ranks: dimension `dim` of the tensor has this rank's tokens; all ranks call it."""
        ...

    def estimate_rank_work(self, request: AttentionRequest, *, kernel: str | None) -> RankWork:
        """Return the work of this rank in a call, without computing or sending anything."""
        ...


# No ContextVar: the backward pass may run in another thread, and compilers can check a global variable.
active_split: SequenceSplit | None = None
"""The split of the sequence in attention calls of this process; None if sequences are whole."""


@contextmanager
def use_split(sequence: SequenceSplit | None) -> Iterator[None]:
    """Set the split of the sequence for calls in this context; None = whole sequences.

    >>> with use_split(None):
    ...     print(active_split)
    None
    """
    with Undo() as undo:
        undo.set_attribute(sys.modules[__name__], "active_split", sequence)
        yield


def reject_split_sequence(name: str, remedy: str) -> None:
    """Raise an ArgumentError if the sequence is split: a call uses an option that needs all tokens.

    `name` is the option, the subject of the error's first sentence; `remedy` is its second sentence.
    """
    if active_split is not None:
        raise ArgumentError(f"{name} cannot be used in context_parallel, where a rank has part of the tokens.", remedy)
