"""Causal attention: no query sees a later key."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from multihead.masks.base import Band, Mask


@dataclass(frozen=True, eq=False)
class Causal(Mask):
    """A query sees the key at its own position and those before it.

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
    band: ClassVar[Band] = Band(after=0)

    def visible(self, queries: Tensor, keys: Tensor) -> Tensor:
        return keys <= queries

    def interval(self, queries: Tensor, keys: int | Tensor) -> tuple[Tensor, Tensor]:
        return torch.zeros_like(queries), queries + 1

    def interval_at(self, position: int, keys: int) -> tuple[int, int]:
        return 0, position + 1
