"""Masks that depend only on the distance from query to key: `Full`, `Causal` and `Window`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from multihead.errors.arguments import check_integer
from multihead.masks.base import Band, Mask, Sequences
from multihead.tensors.shapes import MAX_POSITION


@dataclass(frozen=True, eq=False)
class Full(Mask):
    """Every query sees every key.

    >>> from multihead import masks
    >>> print(masks.picture(Full(), queries=3, keys=5))
    ■ ■ ■ ■ ■
    ■ ■ ■ ■ ■
    ■ ■ ■ ■ ■
    """

    uses_positions: ClassVar[bool] = False
    translation_invariant: ClassVar[bool] = True
    hides_nothing: ClassVar[bool] = True
    starts_at_first_key: ClassVar[bool] = True
    band: ClassVar[Band] = Band()
    sequences: ClassVar[Sequences] = Sequences()

    def visible(self, queries: Tensor, keys: Tensor) -> Tensor:
        return torch.ones_like(queries, dtype=torch.bool) & torch.ones_like(keys, dtype=torch.bool)

    def interval(self, queries: Tensor, keys: int | Tensor) -> tuple[Tensor, Tensor]:
        first = torch.zeros_like(queries[:1])
        return first, first + keys


@dataclass(frozen=True, eq=False)
class Causal(Mask):
    """A query sees the key at its own position and all keys before it.

    The position of query i among the keys is `query_start + i`.

    >>> from multihead import masks
    >>> print(masks.picture(Causal()))
    ■ · · · ·
    ■ ■ · · ·
    ■ ■ ■ · ·
    ■ ■ ■ ■ ·
    ■ ■ ■ ■ ■
    """

    translation_invariant: ClassVar[bool] = True
    sees_no_later_key: ClassVar[bool] = True
    starts_at_first_key: ClassVar[bool] = True
    band: ClassVar[Band] = Band(keys_after=0)
    sequences: ClassVar[Sequences] = Sequences(keys_after=0)

    def visible(self, queries: Tensor, keys: Tensor) -> Tensor:
        return keys <= queries

    def interval(self, queries: Tensor, keys: int | Tensor) -> tuple[Tensor, Tensor]:
        return torch.zeros_like(queries), queries + 1


@dataclass(frozen=True, eq=False)
class Window(Mask):
    """A query sees `size` keys (its own and the `size - 1` keys before it), and `after` keys after it.

    Libraries count windows differently: `size` includes the query's own key, as in Hugging Face and unlike in ONNX.

    >>> from multihead import masks
    >>> print(masks.picture(Window(3)))
    ■ · · · ·
    ■ ■ · · ·
    ■ ■ ■ · ·
    · ■ ■ ■ ·
    · · ■ ■ ■
    >>> print(masks.picture(Window(2, after=1)))
    ■ ■ · · ·
    ■ ■ ■ · ·
    · ■ ■ ■ ·
    · · ■ ■ ■
    · · · ■ ■
    """

    size: int
    after: int = 0
    translation_invariant: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_integer("Window size", self.size, least=1)
        check_integer("Window after", self.after, least=0)

    def __repr__(self) -> str:
        return f"Window({self.size}, after={self.after})" if self.after else f"Window({self.size})"

    @property
    def sees_no_later_key(self) -> bool:  # type: ignore[override]
        return self.after == 0

    @property
    def lookback(self) -> int:  # type: ignore[override]
        return self.size

    @property
    def _keys_before_and_after(self) -> tuple[int, int]:
        """The numbers of keys that a query sees before and after its own key, clamped so that sums do not overflow."""
        return min(self.size - 1, MAX_POSITION), min(self.after, MAX_POSITION)

    @cached_property
    def band(self) -> Band:  # type: ignore[override]
        before, after = self._keys_before_and_after
        return Band(keys_before=before, keys_after=after)

    @cached_property
    def sequences(self) -> Sequences:  # type: ignore[override]
        return Sequences(keys_before=self.band.keys_before, keys_after=self.band.keys_after)

    def visible(self, queries: Tensor, keys: Tensor) -> Tensor:
        before, after = self._keys_before_and_after
        return (keys >= queries - before) & (keys <= queries + after)

    def interval(self, queries: Tensor, keys: int | Tensor) -> tuple[Tensor, Tensor]:
        before, after = self._keys_before_and_after
        return queries - before, queries + after + 1
