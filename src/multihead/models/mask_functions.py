"""Convert mask functions of transformers, (batch, head, query, key) -> visible, to masks of this library.

Padding on the right is converted to `Lengths` once per forward pass. The key intervals of `Lengths` are computed by
arithmetic, so the attention calls of the model need no plan. In a call without a plan our attention function spends
less time in Python than transformers' function for SDPA. In a compiled graph the mask is a tensor, or none if it is
causal, because a graph must not depend on tensor values.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, reduce
from operator import and_, or_
from typing import Any

import torch
from torch import Tensor

from multihead.errors import ArgumentError
from multihead.kernels import sequence_split
from multihead.masks import Causal, Documents, Full, Keep, Lengths, Mask, Window
from multihead.masks.base import Sequences
from multihead.masks.documents import Chunks
from multihead.masks.positions import TilePositions
from multihead.tensors.shapes import MAX_POSITION

MaskFunction = Callable[[Any, Any, Any, Any], Any]


@dataclass(frozen=True, eq=False)
class MaskExtent:
    """Numbers of queries and keys of a mask, and their positions in the sequence.

    Attributes:
        batch: number of samples.
        queries: number of queries.
        keys: number of keys.
        query_offset: position of the first query in the sequence, tokens.
        key_offset: position of the first key in the sequence; more than 0 where a cache dropped the oldest keys.
        device: device of the mask.
    """

    batch: int
    queries: int
    keys: int
    query_offset: int
    key_offset: int
    device: torch.device

    @property
    def query_start(self) -> int:
        """Position of the first query, counted from the first available key."""
        return self.query_offset - self.key_offset

    def positions_of_rows(self, rows: slice) -> TilePositions:
        """Return the positions of some queries and all keys, for `Mask.tile`."""
        return TilePositions.from_sizes(
            self.queries, self.keys, query_start=self.query_start, device=self.device, rows=rows
        )


def mask_of_function(function: MaskFunction, extent: MaskExtent) -> Mask | None:
    """Convert a mask function of transformers to a mask; None if the function is unknown.

    A function is recognised by its name and the variables of its closure. The resulting mask is then compared with the
    function on the first, the middle and the last query; if they differ, the result is None.

    Source: transformers/masking_utils.py.
    """
    if getattr(function, "__closure__", None) is None and inspect.isfunction(function):
        return _mask_of_plain_function(function)
    return _mask_if_equal(function, extent)


@cache
def _mask_of_plain_function(function: MaskFunction) -> Mask | None:
    """Convert a mask function without closure variables, and compare the mask with it once, on 5 x 5 cells."""
    return _mask_if_equal(function, MaskExtent(2, 5, 5, 0, 0, torch.device("cpu")))


def _mask_if_equal(function: MaskFunction, extent: MaskExtent) -> Mask | None:
    """Convert a mask function to a mask; None if the function is unknown, or the mask is not equal to it."""
    try:
        mask = _mask_by_name(function, extent)
    except (LookupError, TypeError, AttributeError, ArgumentError):
        return None  # the function is from a version of transformers with other closure variables, or a window is empty
    return mask if _agrees_on_three_queries(mask, function, extent) else None


def _mask_by_name(function: MaskFunction, extent: MaskExtent) -> Mask:
    """Convert a mask function by its name and closure variables; an error is raised if they are unknown."""
    closure = dict(inspect.getclosurevars(function).nonlocals) if inspect.isfunction(function) else {}
    return _CONVERTERS[_name_of_function(function)](closure, extent)


def _agrees_on_three_queries(mask: Mask, function: MaskFunction, extent: MaskExtent) -> bool:
    """Whether a mask equals a mask function on the first, middle and last query: O(batch * keys) time."""
    rows = sorted({0, extent.queries // 2, extent.queries - 1} & set(range(extent.queries)))
    if not rows or not extent.keys:
        return True
    index = torch.tensor(rows, device=extent.device)
    batch = torch.arange(extent.batch, device=extent.device)[:, None, None, None]
    head = torch.zeros(1, 1, 1, 1, dtype=torch.int64, device=extent.device)
    key = torch.arange(extent.keys, device=extent.device)[None, None, None] + extent.key_offset
    try:
        expected = function(batch, head, index[None, None, :, None] + extent.query_offset, key)
    except (RuntimeError, IndexError, TypeError):
        return False  # the function does not support tensors of indices
    size = (extent.batch, 1, len(rows), extent.keys)
    tiles = [mask.tile(extent.positions_of_rows(slice(row, row + 1))) for row in rows]
    read = torch.cat([each.expand(extent.batch, 1, 1, -1) for each in tiles], 2)
    return bool((expected.expand(size) == read.expand(size)).all())


def _masks_of_subfunctions(closure: dict[str, Any], extent: MaskExtent) -> list[Mask]:
    functions = list(closure["mask_functions"])
    if any(_name_of_function(each).startswith("packed_sequence_mask_function") for each in functions):
        # Within a packed sequence positions increase by one per token, so remapping positions does not change a mask
        # that depends only on differences of positions (causal, window).
        remapped = [
            each for each in functions if _name_of_function(each).startswith("remap_positions_for_packed_sequence")
        ]
        inner = [inspect.getclosurevars(each).nonlocals["mask_function"] for each in remapped]
        functions = [each for each in functions if each not in remapped] + inner
    return [_mask_by_name(each, extent) for each in functions]


def _intersection_mask(closure: dict[str, Any], extent: MaskExtent) -> Mask:
    parts = _masks_of_subfunctions(closure, extent)
    if Causal() in parts:
        # `key > query - w` and `key <= query` together are one window: the query and the w - 1 keys before it.
        windows = [
            Window(each.lookback, after=_later_keys_limit(extent)) for each in parts if each.lookback is not None
        ]
        overlays = [each for each in windows if each in parts]
        if overlays:
            parts = [each for each in parts if each != Causal() and each not in overlays]
            parts = [Window(min(each.size for each in overlays)), *parts]
    return reduce(and_, parts)


def _lookback_window(closure: dict[str, Any], extent: MaskExtent) -> Mask:
    """Convert `key > query - w` to a window: the query, the w - 1 keys before it, and all keys after it."""
    return Window(int(closure["sliding_window"]), after=_later_keys_limit(extent))


def _later_keys_limit(extent: MaskExtent) -> int:
    """Return an upper bound on the number of keys after a query, including keys of other ranks."""
    return extent.keys if sequence_split.active_split is None else MAX_POSITION


def _two_sided_window_mask(closure: dict[str, Any], extent: MaskExtent) -> Mask:
    """Convert `|query - key| <= w` to a window of w keys on each side."""
    width = int(closure["sliding_window"])
    return Window(width + 1, after=width)


def _documents_of_chunks(closure: dict[str, Any], extent: MaskExtent) -> Mask:
    """Convert chunked attention, chunks of equal size after the left padding, which are parts of one text."""
    size, padding = int(closure["chunk_size"]), closure["left_padding"].to(extent.device)
    if extent.key_offset:
        raise LookupError("The chunks of dropped keys are unknown.")
    first = padding % size  # number of tokens of the incomplete chunk at the start, which is all padding
    count = -(-extent.keys // size) + 1
    whole = torch.full((extent.batch, count), size, dtype=torch.int64, device=extent.device)
    lengths = torch.cat([first.view(-1, 1).expand(extent.batch, 1), whole], 1)
    return Chunks(truncate_documents(lengths, extent.keys))


def _documents_of_sequence_numbers(closure: dict[str, Any], extent: MaskExtent) -> Mask:
    """Convert the sequence number of each token, in increasing order, to a Documents mask."""
    number = closure["packed_sequence_mask"]  # (batch, length)
    if extent.key_offset or extent.query_offset or not bool((number.diff(dim=-1) >= 0).all()):
        raise LookupError("The packed sequences are not in order, or continue a cache.")
    lengths = torch.nn.functional.one_hot(number - number[:, :1]).sum(1)  # (batch, sequences)
    return Documents(lengths)


def padding_mask(padding: Tensor) -> Mask:
    """Convert a padding mask, (batch, keys) bool, True = no padding, to a mask.

    >>> padding_mask(torch.tensor([[True, True, True], [True, False, False]]))
    Lengths(<int64 tensor (2,)>)
    """
    if bool(padding.all()):
        return Full()
    if bool((padding[:, 1:] <= padding[:, :-1]).all()):
        return Lengths(padding.sum(-1))  # padding on the right: lengths suffice
    mask = Keep(padding, "batch keys")
    if padding.is_cuda and bool((padding[:, 1:] >= padding[:, :-1]).all()):  # padding on the left
        object.__setattr__(mask, "sequences", Sequences(skipped=padding.shape[1] - padding.sum(-1)))
    return mask


def padding_of_keys(attention_mask: Tensor, extent: MaskExtent) -> Tensor:
    """Slice an attention mask (batch, tokens) to the available keys: (batch, keys) bool, True = no padding."""
    kept = attention_mask.to(device=extent.device, dtype=torch.bool)
    kept = kept[:, extent.key_offset : extent.key_offset + extent.keys]
    return torch.nn.functional.pad(kept, (0, extent.keys - kept.shape[1]))


def truncate_documents(lengths: Tensor, keys: int) -> Tensor:
    """Truncate document lengths, (documents,) or (batch, documents), so that they sum to at most `keys`.

    >>> truncate_documents(torch.tensor([3, 3, 3]), 5)
    tensor([3, 2, 0])
    """
    return lengths.cumsum(-1).clamp(max=keys).diff(dim=-1, prepend=torch.zeros_like(lengths[..., :1]))


def _name_of_function(function: object) -> str:
    return getattr(function, "__qualname__", "")


_CONVERTERS: dict[str, Callable[[dict[str, Any], MaskExtent], Mask]] = {
    "causal_mask_function": lambda closure, extent: Causal(),
    "bidirectional_mask_function": lambda closure, extent: Full(),
    "and_masks.<locals>.and_mask": _intersection_mask,
    "or_masks.<locals>.or_mask": lambda closure, extent: reduce(or_, _masks_of_subfunctions(closure, extent)),
    "sliding_window_overlay.<locals>.inner_mask": _lookback_window,
    "sliding_window_bidirectional_overlay.<locals>.inner_mask": _two_sided_window_mask,
    "chunked_overlay.<locals>.inner_mask": _documents_of_chunks,
    "padding_mask_function.<locals>.inner_mask": lambda closure, extent: padding_mask(
        padding_of_keys(closure["padding_mask"], extent)
    ),
    "packed_sequence_mask_function.<locals>.inner_mask": _documents_of_sequence_numbers,
}
