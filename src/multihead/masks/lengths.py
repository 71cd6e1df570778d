"""Masks that show the first keys: `Lengths` per sample, and `Prefix` for all queries."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Self

import torch
from torch import Tensor

from multihead.errors import MaskError
from multihead.errors.arguments import check_integer
from multihead.masks.base import Band, Sequences, row_of_sample
from multihead.masks.counts import (
    CountsMask,
    IntTuples,
    check_counts,
    counts_after_dropping,
    counts_as_tensor,
    shape_of_counts,
)
from multihead.masks.positions import CallSize, SampleSpan, TilePositions


class _FirstKeysMask(CountsMask):
    """The base class of `Lengths` and `Prefix`: a query sees the keys before a count, whatever its own position."""

    uses_positions: ClassVar[bool] = False
    starts_at_first_key: ClassVar[bool] = True

    def tile(self, tile: TilePositions) -> Tensor:
        counts = counts_as_tensor(self.counts, tile.columns.device)
        if counts.dim() < 2:
            return tile.all_visible() & (tile.columns < counts.view(-1, 1, 1, 1))
        return tile.columns < counts[:, tile.rows.flatten()][:, None, :, None]

    def interval(self, queries: Tensor, keys: int | Tensor) -> tuple[Tensor, Tensor]:
        counts = counts_as_tensor(self.counts, queries.device)
        counts = counts if counts.dim() == 2 else counts.view(-1, 1)
        return torch.zeros_like(counts), counts

    def _drop_keys(self, count: int | Tensor) -> Self:
        return type(self)(counts_after_dropping(self.counts, count))  # type: ignore[call-arg]


@dataclass(frozen=True, eq=False, repr=False)
class Lengths(_FirstKeysMask):
    """A query sees the first `lengths` keys, with one length per sample, or per sample and query.

    Args:
        lengths: numbers of tokens, ints or an integer tensor: (batch,) or (batch, queries).

    Raises:
        MaskError: a length is negative or not an integer, or the lengths have another number of dimensions.

    >>> from multihead import masks
    >>> print(masks.picture(Lengths((3, 2)), queries=2, keys=4))
    ■ ■ ■ ·   ■ ■ · ·
    ■ ■ ■ ·   ■ ■ · ·
    >>> print(masks.picture(Lengths(((1, 3), (4, 0))), queries=2, keys=4))
    ■ · · ·   ■ ■ ■ ■
    ■ ■ ■ ·   · · · ·
    """

    lengths: IntTuples | Tensor
    counts = property(lambda mask: mask.lengths)

    def __init__(self, lengths: Sequence[int] | Sequence[Sequence[int]] | Tensor) -> None:
        object.__setattr__(self, "lengths", check_counts(lengths, "Lengths", "(batch,) or (batch, queries)"))

    @cached_property
    def band(self) -> Band | None:  # type: ignore[override]
        lengths = counts_as_tensor(self.lengths, "cpu") if isinstance(self.lengths, tuple) else self.lengths
        plain = type(lengths) is Tensor and lengths.is_cpu and lengths.dtype == torch.int64 and lengths.dim() == 1
        return Band(lengths) if plain else None

    @cached_property
    def sequences(self) -> Sequences | None:  # type: ignore[override]
        return Sequences(lengths=self.lengths) if len(shape_of_counts(self.lengths)) == 1 else None

    def check_fits(self, size: CallSize) -> None:
        super().check_fits(size)
        shape = shape_of_counts(self.lengths)
        if len(shape) == 2 and shape[1] != size.queries:
            raise MaskError(
                f"{self!r} has lengths for {shape[1]} queries, and the call has {size.queries}.",
                "Give one length per sample and query.",
            )

    def select_sample(self, index: int) -> Lengths:
        lengths = counts_as_tensor(self.lengths, "cpu")
        return Lengths(row_of_sample(lengths, index)[None])

    def select_span(self, span: SampleSpan) -> Lengths:
        lengths = row_of_sample(counts_as_tensor(self.lengths, "cpu"), span.sample)
        lengths = lengths[slice(*span.queries)] if lengths.dim() == 1 else lengths
        return Lengths((lengths[None] - span.keys[0]).clamp(0, span.keys[1] - span.keys[0]))

    def restrict_to_first_keys(self, count: int) -> Lengths:
        return Lengths(torch.as_tensor(self.lengths, dtype=torch.int64).clamp(max=count))


@dataclass(frozen=True, eq=False, repr=False)
class Prefix(_FirstKeysMask):
    """Every query sees the first `length` keys: `Causal() | Prefix(n)` is a prefix LM with a prompt of n tokens.

    Args:
        length: number of tokens, an int for all samples, or ints or an integer tensor (batch,).

    Raises:
        MaskError: a length is negative or not an integer, or the lengths have another number of dimensions.

    >>> from multihead import masks
    >>> print(masks.picture(masks.Causal() | Prefix(3)))
    ■ ■ ■ · ·
    ■ ■ ■ · ·
    ■ ■ ■ · ·
    ■ ■ ■ ■ ·
    ■ ■ ■ ■ ■
    """

    length: int | tuple[int, ...] | Tensor
    counts = property(lambda mask: mask.length)

    def __init__(self, length: int | Sequence[int] | Tensor) -> None:
        if isinstance(length, int):
            check_integer("Prefix length", length, least=0)
            object.__setattr__(self, "length", length)
        else:
            object.__setattr__(self, "length", check_counts(length, "Prefix", "(batch,), or one int", dims=(1,)))

    def select_sample(self, index: int) -> Prefix:
        return Prefix(int(row_of_sample(counts_as_tensor(self.length, "cpu").view(-1), index)))

    def select_span(self, span: SampleSpan) -> Prefix:
        length = self.select_sample(span.sample).length
        assert isinstance(length, int)
        return Prefix(max(length - span.keys[0], 0))

    def restrict_to_first_keys(self, count: int) -> None:
        """Return None: the prefix may be longer than `count` keys."""
