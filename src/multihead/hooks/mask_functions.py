"""Read a mask out of transformers' mask functions, which say for indices (batch, head, query, key) what may be seen."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from multihead.masks import Causal, Documents, Full, Keep, Mask, Window
from multihead.masks.place import Place

MaskFunction = Callable[[Any, Any, Any, Any], Any]


@dataclass(frozen=True, eq=False)
class Extent:
    """Where the queries and keys of a mask stand in the whole sequence.

    Fields:
        batch: number of samples.
        queries: number of queries.
        keys: number of keys.
        query_offset: position of the first query in the sequence, tokens.
        key_offset: position of the first key in the sequence; more than 0 where a cache dropped the oldest keys.
        device: where the mask is made.
    """

    batch: int
    queries: int
    keys: int
    query_offset: int
    key_offset: int
    device: torch.device

    @property
    def query_start(self) -> int:
        """Where the first query stands among the keys at hand."""
        return self.query_offset - self.key_offset


def recognised(function: MaskFunction, extent: Extent) -> Mask | None:
    """Say a mask function as a mask, or None where it is not one of those known here.

    A function is recognised by its name and by what its closure holds. Names are no promise, so what was read
    is compared with the function itself on the first, the middle and the last query; where they differ, None.

    Source: transformers/masking_utils.py.
    """
    mask = _read(function, extent)
    return mask if mask is not None and _agrees(mask, function, extent) else None


def _read(function: MaskFunction, extent: Extent) -> Mask | None:
    name = getattr(function, "__qualname__", "")
    held = dict(inspect.getclosurevars(function).nonlocals) if inspect.isfunction(function) else {}
    reader = _READERS.get(name)
    try:
        return reader(held, extent) if reader is not None else None
    except (KeyError, TypeError, AttributeError, IndexError):
        return None  # a closure of that name which holds something else


def _agrees(mask: Mask, function: MaskFunction, extent: Extent) -> bool:
    """Whether a mask and a mask function tell the same on three queries: O(batch * keys) cells."""
    rows = sorted({0, extent.queries // 2, extent.queries - 1} & set(range(extent.queries)))
    if not rows or not extent.keys:
        return True
    index = torch.tensor(rows, device=extent.device)
    batch = torch.arange(extent.batch, device=extent.device)[:, None, None, None]
    head = torch.zeros(1, 1, 1, 1, dtype=torch.int64, device=extent.device)
    key = torch.arange(extent.keys, device=extent.device)[None, None, None] + extent.key_offset
    try:
        told = function(batch, head, index[None, None, :, None] + extent.query_offset, key)
    except (RuntimeError, IndexError, TypeError):
        return False  # it takes single indices only
    size = (extent.batch, 1, len(rows), extent.keys)
    read = torch.cat(
        [
            mask.tile(
                Place.of(
                    extent.queries,
                    extent.keys,
                    query_start=extent.query_start,
                    device=extent.device,
                    rows=slice(row, row + 1),
                )
            ).expand(extent.batch, 1, 1, -1)
            for row in rows
        ],
        2,
    )
    return bool((told.expand(size) == read.expand(size)).all())


def _parts(held: dict[str, Any], extent: Extent) -> list[Mask] | None:
    functions = list(held["mask_functions"])
    if any(_name(each).startswith("packed_sequence_mask_function") for each in functions):
        # Inside one packed sequence positions rise by one a token, so a mask that speaks of differences of
        # positions only (causal, window) means the same with and without the remapping to them.
        remapped = [each for each in functions if _name(each).startswith("remap_positions_for_packed_sequence")]
        inner = [inspect.getclosurevars(each).nonlocals["mask_function"] for each in remapped]
        functions = [each for each in functions if each not in remapped] + inner
    masks = [_read(each, extent) for each in functions]
    return None if any(mask is None for mask in masks) else [mask for mask in masks if mask is not None]


def _and(held: dict[str, Any], extent: Extent) -> Mask | None:
    parts = _parts(held, extent)
    if parts is None:
        return None
    if Causal() in parts:
        # `key > query - w` and `key <= query` are one window: the query and the w - 1 keys before it.
        windows = [Window(each.lookback, after=extent.keys) for each in parts if each.lookback is not None]
        overlays = [each for each in windows if each in parts]
        if overlays:
            parts = [each for each in parts if each != Causal() and each not in overlays]
            parts = [Window(min(each.size for each in overlays)), *parts]
    return reduce(lambda left, right: left & right, parts)


def _or(held: dict[str, Any], extent: Extent) -> Mask | None:
    parts = _parts(held, extent)
    return None if parts is None else reduce(lambda left, right: left | right, parts)


def _window(held: dict[str, Any], extent: Extent) -> Mask:
    """Read `key > query - w`: the query, the w - 1 keys before it, and all after it."""
    return Window(int(held["sliding_window"]), after=extent.keys)


def _window_both_ways(held: dict[str, Any], extent: Extent) -> Mask:
    """Read `|query - key| <= w`, both ends included."""
    width = int(held["sliding_window"])
    return Window(width + 1, after=width)


def _chunks(held: dict[str, Any], extent: Extent) -> Mask | None:
    """Read chunks of equal size, counted from the first token that is no padding, as documents."""
    size, padding = int(held["chunk_size"]), held["left_padding"].to(extent.device)
    if extent.key_offset:
        return None
    first = padding % size  # a chunk before the first whole one, in the padding
    count = -(-extent.keys // size) + 1
    whole = torch.full((extent.batch, count), size, dtype=torch.int64, device=extent.device)
    lengths = torch.cat([first.view(-1, 1).expand(extent.batch, 1), whole], 1)
    return Documents(shortened(lengths, extent.keys))


def _padding(held: dict[str, Any], extent: Extent) -> Mask:
    return padding_mask(held["padding_mask"], extent)


def _packed(held: dict[str, Any], extent: Extent) -> Mask | None:
    """Read one sequence number a token as documents; sequences have to stand one behind the other."""
    number = held["packed_sequence_mask"]  # (batch, length)
    if extent.key_offset or extent.query_offset or not bool((number.diff(dim=-1) >= 0).all()):
        return None
    lengths = torch.nn.functional.one_hot(number - number[:, :1]).sum(1)  # (batch, sequences)
    return Documents(lengths)


def padding_mask(attention_mask: Tensor, extent: Extent) -> Mask:
    """Say a 2-D attention mask (batch, tokens), True = a token, as a mask; tokens beyond it are hidden."""
    return Keep(padding_of_keys(attention_mask, extent), "batch keys")


def padding_of_keys(attention_mask: Tensor, extent: Extent) -> Tensor:
    """Cut the keys at hand out of a 2-D attention mask: (batch, keys) bool, True = no padding."""
    kept = attention_mask.to(device=extent.device, dtype=torch.bool)
    kept = kept[:, extent.key_offset : extent.key_offset + extent.keys]
    return torch.nn.functional.pad(kept, (0, extent.keys - kept.shape[1]))


def shortened(lengths: Tensor, keys: int) -> Tensor:
    """Cut documents, (documents,) or (batch, documents) tokens each, off behind a number of keys.

    >>> shortened(torch.tensor([3, 3, 3]), 5)
    tensor([3, 2, 0])
    """
    return lengths.cumsum(-1).clamp(max=keys).diff(dim=-1, prepend=torch.zeros_like(lengths[..., :1]))


def _name(function: object) -> str:
    return getattr(function, "__qualname__", "")


_READERS: dict[str, Callable[[dict[str, Any], Extent], Mask | None]] = {
    "causal_mask_function": lambda held, extent: Causal(),
    "bidirectional_mask_function": lambda held, extent: Full(),
    "and_masks.<locals>.and_mask": _and,
    "or_masks.<locals>.or_mask": _or,
    "sliding_window_overlay.<locals>.inner_mask": _window,
    "sliding_window_bidirectional_overlay.<locals>.inner_mask": _window_both_ways,
    "chunked_overlay.<locals>.inner_mask": _chunks,
    "padding_mask_function.<locals>.inner_mask": _padding,
    "packed_sequence_mask_function.<locals>.inner_mask": _packed,
}
