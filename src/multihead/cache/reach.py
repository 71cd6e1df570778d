"""How far back a mask looks, and what it means where the first keys of a sequence are forgotten."""

from __future__ import annotations

from functools import reduce
from operator import and_, or_

import torch
from torch import Tensor

from multihead.masks import Documents, Drop, Keep, Lengths, Mask, Prefix, Window
from multihead.masks.dense import as_tensor
from multihead.masks.values import And, Or


def reach_of(mask: Mask) -> int | None:
    """Tell how many keys a query looks back on at most, its own counted; None if nothing bounds it.

    >>> from multihead import masks
    >>> reach_of(masks.Causal() & masks.Window(8)), reach_of(masks.Causal() | masks.Window(8))
    (8, None)
    """
    if isinstance(mask, Window):
        return mask.size
    if isinstance(mask, And):
        return min((reach for part in mask.parts if (reach := reach_of(part)) is not None), default=None)
    if isinstance(mask, Or):
        reaches = [reach_of(part) for part in mask.parts]
        return None if None in reaches else max(reach for reach in reaches if reach is not None)
    return None


def has_key_axis(mask: Mask) -> bool:
    """Tell whether some part of a mask is a tensor with a column for each key."""
    if isinstance(mask, (Keep, Drop)):
        return mask.four_dimensional().shape[3] > 1
    return any(has_key_axis(part) for part in getattr(mask, "parts", ()))


def mask_behind(mask: Mask, key_start: int | Tensor) -> Mask:
    """Say what a mask of a whole sequence means on keys of which the first ones are left out.

    Args:
        mask: any mask without a tensor that has a column for each key.
        key_start: how many keys are left out at the beginning; a tensor (batch,) has one number a sample.

    >>> from multihead import masks
    >>> mask_behind(masks.Window(4) & masks.Prefix(10), 7)
    Window(4) & Prefix(3)
    """
    if not isinstance(key_start, Tensor) and not key_start:
        return mask
    if isinstance(mask, (And, Or)):
        return reduce(and_ if isinstance(mask, And) else or_, (mask_behind(part, key_start) for part in mask.parts))
    if isinstance(mask, Prefix):
        if isinstance(mask.length, int) and not isinstance(key_start, Tensor):
            return Prefix(max(0, mask.length - key_start))
        return Prefix(_behind(mask.length, key_start))
    if isinstance(mask, Lengths):
        return Lengths(_behind(mask.lengths, key_start))
    if isinstance(mask, Documents):
        ends = as_tensor(mask.lengths, _device(mask.lengths, key_start)).cumsum(-1)
        ends = (ends - (key_start[:, None] if isinstance(key_start, Tensor) else key_start)).clamp(min=0)
        return Documents(ends.diff(prepend=torch.zeros_like(ends[..., :1]), dim=-1))
    return mask  # what speaks of differences of positions means the same everywhere


def _behind(counts: object, key_start: int | Tensor) -> Tensor:
    count = as_tensor(counts, _device(counts, key_start))  # (), (batch,) or (batch, queries)
    if isinstance(key_start, Tensor):
        key_start = key_start[:, None] if count.dim() == 2 else key_start
    return (count - key_start).clamp(min=0)


def _device(counts: object, key_start: int | Tensor) -> torch.device | str:
    given = key_start if isinstance(key_start, Tensor) else counts
    return given.device if isinstance(given, Tensor) else "cpu"
