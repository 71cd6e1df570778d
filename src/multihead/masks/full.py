"""Full attention: nothing is hidden."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from multihead.masks.base import Band, Mask


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

    def visible(self, queries: Tensor, keys: Tensor) -> Tensor:
        return torch.ones_like(queries, dtype=torch.bool) & torch.ones_like(keys, dtype=torch.bool)

    def interval(self, queries: Tensor, keys: int | Tensor) -> tuple[Tensor, Tensor]:
        first = torch.zeros_like(queries[:1])
        return first, first + keys

    def interval_at(self, position: int, keys: int) -> tuple[int, int]:
        return 0, keys
