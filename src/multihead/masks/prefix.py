"""Bidirectional prefix: its keys are visible to every query."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from multihead.errors.arguments import check_integer
from multihead.masks.base import Mask
from multihead.masks.counts import as_tensor, check_longest, check_rows, checked_counts, dropped, shape_of, shown
from multihead.masks.place import CallSize, Span


@dataclass(frozen=True, eq=False)
class Prefix(Mask):
    """Every query sees the first `length` keys: `Causal() | Prefix(n)` is a prefix LM with a prompt of n tokens.

    Args:
        length: an int for all samples, or ints or an integer tensor (batch,), tokens.

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
            object.__setattr__(self, "length", checked_counts(length, "Prefix", "(batch,), or one int", dims=(1,)))

    def __repr__(self) -> str:
        return f"Prefix({shown(self.length)})"

    def check_fits(self, size: CallSize) -> None:
        if shape := shape_of(self.length):
            check_rows(self, shape, size)
        check_longest(self, self.length, size)

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

    def after_dropping(self, count: int | Tensor) -> Prefix:
        if isinstance(self.length, int) and not isinstance(count, Tensor):
            return Prefix(max(0, self.length - count)) if count else self
        return self if not isinstance(count, Tensor) and not count else Prefix(dropped(self.length, count))

    def part(self, span: Span) -> Prefix:
        length = self.select_sample(span.sample).length
        assert isinstance(length, int)
        return Prefix(max(length - span.keys[0], 0))

    def with_first_keys(self, count: int) -> None:
        """Return None: the prefix may be longer than these keys."""
