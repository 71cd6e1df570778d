"""Masks that show the first keys: `Lengths` per sample, and `Prefix` for all queries."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from multihead.errors import MaskError
from multihead.errors.arguments import check_integer
from multihead.masks.base import Band, Mask
from multihead.masks.counts import (
    IntOrInts,
    as_tensor,
    check_counts,
    check_counts_within_keys,
    check_rows_per_sample,
    counts_after_dropping,
    repr_of_value,
    shape_of_counts,
)
from multihead.masks.positions import CallSize, SampleSpan, TilePositions


@dataclass(frozen=True, eq=False)
class Lengths(Mask):
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

    lengths: IntOrInts | Tensor
    uses_positions: ClassVar[bool] = False
    starts_at_first_key: ClassVar[bool] = True

    def __init__(self, lengths: Sequence[int] | Sequence[Sequence[int]] | Tensor) -> None:
        object.__setattr__(self, "lengths", check_counts(lengths, "Lengths", "(batch,) or (batch, queries)"))

    def __repr__(self) -> str:
        return f"Lengths({repr_of_value(self.lengths)})"

    @cached_property
    def band(self) -> Band | None:  # type: ignore[override]
        lengths = as_tensor(self.lengths, "cpu") if isinstance(self.lengths, tuple) else self.lengths
        plain = type(lengths) is Tensor and lengths.is_cpu and lengths.dtype == torch.int64 and lengths.dim() == 1
        return Band(lengths) if plain else None

    def check_fits(self, size: CallSize) -> None:
        shape = shape_of_counts(self.lengths)
        check_rows_per_sample(self, shape, size)
        if len(shape) == 2 and shape[1] != size.queries:
            raise MaskError(
                f"{self!r} has lengths for {shape[1]} queries, and the call has {size.queries}.",
                "Give one length per sample and query.",
            )
        check_counts_within_keys(self, self.lengths, size)

    def tile(self, tile: TilePositions) -> Tensor:
        lengths = as_tensor(self.lengths, tile.columns.device)
        if lengths.dim() == 1:
            return tile.all_visible() & (tile.columns < lengths.view(-1, 1, 1, 1))
        return tile.columns < lengths[:, tile.rows.flatten()][:, None, :, None]

    def interval(self, queries: Tensor, keys: int | Tensor) -> tuple[Tensor, Tensor]:
        lengths = as_tensor(self.lengths, queries.device)
        lengths = lengths[:, None] if lengths.dim() == 1 else lengths
        return torch.zeros_like(lengths), lengths

    def select_sample(self, index: int) -> Lengths:
        lengths = as_tensor(self.lengths, "cpu")
        return Lengths(lengths[index if len(lengths) > 1 else 0][None])

    def select_heads(self, select: Callable[[Tensor], Tensor]) -> Lengths:
        return self  # all heads share the counts

    def after_dropping_keys(self, count: int | Tensor) -> Lengths:
        return (
            self if not isinstance(count, Tensor) and not count else Lengths(counts_after_dropping(self.lengths, count))
        )

    def select_span(self, span: SampleSpan) -> Lengths:
        lengths = as_tensor(self.lengths, "cpu")
        lengths = lengths[span.sample if len(lengths) > 1 else 0]
        lengths = lengths[slice(*span.queries)] if lengths.dim() == 1 else lengths
        return Lengths((lengths[None] - span.keys[0]).clamp(0, span.keys[1] - span.keys[0]))

    def restrict_to_first_keys(self, count: int) -> Lengths:
        return Lengths(torch.as_tensor(self.lengths, dtype=torch.int64).clamp(max=count))


@dataclass(frozen=True, eq=False)
class Prefix(Mask):
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
    uses_positions: ClassVar[bool] = False
    starts_at_first_key: ClassVar[bool] = True

    def __init__(self, length: int | Sequence[int] | Tensor) -> None:
        if isinstance(length, int):
            check_integer("Prefix length", length, least=0)
            object.__setattr__(self, "length", length)
        else:
            object.__setattr__(self, "length", check_counts(length, "Prefix", "(batch,), or one int", dims=(1,)))

    def __repr__(self) -> str:
        return f"Prefix({repr_of_value(self.length)})"

    def check_fits(self, size: CallSize) -> None:
        if shape := shape_of_counts(self.length):
            check_rows_per_sample(self, shape, size)
        check_counts_within_keys(self, self.length, size)

    def visible(self, queries: Tensor, keys: Tensor) -> Tensor:
        lengths = as_tensor(self.length, keys.device).view(-1, 1, 1, 1)
        return torch.ones_like(queries, dtype=torch.bool) & (keys < lengths)

    def interval(self, queries: Tensor, keys: int | Tensor) -> tuple[Tensor, Tensor]:
        length = as_tensor(self.length, queries.device).reshape(-1, 1)
        return torch.zeros_like(length), length

    def select_sample(self, index: int) -> Prefix:
        length = as_tensor(self.length, "cpu").flatten()
        return Prefix(int(length[index if length.numel() > 1 else 0]))

    def select_heads(self, select: Callable[[Tensor], Tensor]) -> Prefix:
        return self  # all heads share the counts

    def after_dropping_keys(self, count: int | Tensor) -> Prefix:
        if isinstance(self.length, int) and not isinstance(count, Tensor):
            return Prefix(max(0, self.length - count)) if count else self
        return (
            self if not isinstance(count, Tensor) and not count else Prefix(counts_after_dropping(self.length, count))
        )

    def select_span(self, span: SampleSpan) -> Prefix:
        length = self.select_sample(span.sample).length
        assert isinstance(length, int)
        return Prefix(max(length - span.keys[0], 0))

    def restrict_to_first_keys(self, count: int) -> None:
        """Return None: the prefix may be longer than `count` keys."""
