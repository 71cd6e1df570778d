"""What each mask means: the boolean tensor of the keys that each query may see."""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor

from multihead.errors import MaskError
from multihead.masks.behind import Behind
from multihead.masks.values import AXES, And, Causal, Documents, Full, Keep, Lengths, Mask, Or, Prefix, Window, _Given
from multihead.reading import readable


@dataclass(frozen=True, eq=False)
class Place:
    """Where a tile of the map stands: its queries' positions among the keys, and its keys.

    Fields:
        positions: (batch or 1, 1, rows, 1), int64, the key index at which each query stands.
        rows: (1, 1, rows, 1), int64, the query indices.
        columns: (1, 1, 1, columns), int64, the key indices.
    """

    positions: Tensor
    rows: Tensor
    columns: Tensor

    @staticmethod
    def of(
        queries: int,
        keys: int,
        *,
        query_start: int | Tensor = 0,
        device: torch.device | str = "cpu",
        rows: slice = slice(None),
        columns: slice = slice(None),
    ) -> Place:
        """Lay out the tile `rows` x `columns` of a map of `queries` x `keys`."""
        row = torch.arange(queries, device=device)[rows].view(1, 1, -1, 1)
        column = torch.arange(keys, device=device)[columns].view(1, 1, 1, -1)
        start = query_start.to(device).view(-1, 1, 1, 1) if isinstance(query_start, Tensor) else query_start
        return Place(row + start, row, column)

    def within_keys(self) -> Place:
        """Read the first key where a column lies before all keys: a tensor has no cell there."""
        return Place(self.positions, self.rows, self.columns.clamp(min=0))


def visible(mask: Mask, place: Place) -> Tensor:
    """Tell which keys each query may see.

    Returns: bool, broadcasting to (batch, heads, rows, columns); True = may be seen.

    >>> place = Place.of(queries=3, keys=3)
    >>> visible(Causal(), place)[0, 0].int()
    tensor([[1, 0, 0],
            [1, 1, 0],
            [1, 1, 1]], dtype=torch.int32)
    """
    if isinstance(mask, And):
        return reduce(torch.logical_and, (visible(part, place) for part in mask.parts))
    if isinstance(mask, Or):
        return reduce(torch.logical_or, (visible(part, place) for part in mask.parts))
    if isinstance(mask, _Given):
        tile = _tile(mask.four_dimensional().to(place.columns.device), place)
        return tile if isinstance(mask, Keep) else ~tile
    if isinstance(mask, Behind):
        inner = Place(place.positions - mask.count, place.rows, place.columns - mask.count)
        # What is before the first key of all is no key of the mask: its own places end at 0.
        return (place.columns < mask.count) | (visible(mask.mask, inner.within_keys()) & (place.columns >= mask.count))
    everywhere = torch.ones_like(place.rows, dtype=torch.bool) & torch.ones_like(place.columns, dtype=torch.bool)
    if isinstance(mask, Full):
        return everywhere
    if isinstance(mask, Causal):
        return place.columns <= place.positions
    if isinstance(mask, Window):
        return (place.columns > place.positions - mask.size) & (place.columns <= place.positions + mask.after)
    if isinstance(mask, Lengths):
        lengths = as_tensor(mask.lengths, place.columns.device)
        if lengths.dim() == 1:
            return everywhere & (place.columns < lengths.view(-1, 1, 1, 1))
        return place.columns < lengths[:, place.rows.flatten()][:, None, :, None]
    if isinstance(mask, Prefix):
        return everywhere & (place.columns < as_tensor(mask.length, place.columns.device).view(-1, 1, 1, 1))
    if isinstance(mask, Documents):
        lengths = as_tensor(mask.lengths, place.columns.device)
        of_query = document_of(place.positions, lengths)
        return (of_query == document_of(place.columns, lengths)) & (of_query >= 0)
    raise MaskError(f"{mask!r} has no meaning written in masks/dense.py.", "Use the masks of multihead.masks.")


def as_tensor(counts: object, device: torch.device | str) -> Tensor:
    """Return lengths as an int64 tensor on a device; a tensor there already stays what it is."""
    return torch.as_tensor(counts, dtype=torch.int64, device=device)


def document_of(positions: Tensor, lengths: Tensor) -> Tensor:
    """Tell in which document each position lies.

    Args:
        positions: (batch or 1, 1, n, 1) or (batch or 1, 1, 1, n), int64.
        lengths: (documents,) or (batch, documents), int64, tokens.

    Returns: int64, of the positions' shape with the batch of the lengths; -1 outside all documents.
    """
    ends = lengths.cumsum(-1)
    rows = max(positions.shape[0], ends.shape[0] if ends.dim() == 2 else 1)
    flat = positions.expand(rows, -1, -1, -1).reshape(rows, -1)
    bounds = ends.expand(rows, -1) if ends.dim() == 2 else ends.expand(rows, ends.shape[0])
    index = torch.searchsorted(bounds.contiguous(), flat.contiguous(), right=True)
    outside = (index >= bounds.shape[-1]) | (flat < 0)
    return index.masked_fill(outside, -1).view(rows, *positions.shape[1:])


def _tile(tensor: Tensor, place: Place) -> Tensor:
    """Cut the tile out of a tensor whose axes have size 1 where they do not matter."""
    if tensor.shape[2] > 1:
        tensor = tensor[:, :, place.rows.flatten()]
    if tensor.shape[3] > 1:
        tensor = tensor[:, :, :, place.columns.flatten()]
    return tensor.expand(-1, -1, place.rows.numel(), place.columns.numel())


def refuse_unless_fitting(
    mask: Mask, *, batch: int, heads: int, queries: int, keys: int, to_come: bool = False
) -> None:
    """Refuse a mask that does not fit the shape of a call; lengths may reach beyond the keys where more are to come.

    Raises:
        MaskError: a tensor does not broadcast, lengths are for another batch, or reach beyond the keys.
    """
    if isinstance(mask, (And, Or)):
        for part in mask.parts:
            refuse_unless_fitting(part, batch=batch, heads=heads, queries=queries, keys=keys, to_come=to_come)
    elif isinstance(mask, Behind):
        behind = keys - mask.count
        refuse_unless_fitting(mask.mask, batch=batch, heads=heads, queries=queries, keys=behind, to_come=to_come)
    elif isinstance(mask, _Given):
        sizes = dict(zip(AXES, (batch, heads, queries, keys), strict=True))
        for axis, size in zip(mask.axes.split(), mask.tensor.shape, strict=True):
            if size not in (1, sizes[axis]):
                raise MaskError(
                    f"{mask!r} has {size} {axis}, and the call has {sizes[axis]}.",
                    f"Give a tensor that broadcasts to (batch, heads, queries, keys) = {tuple(sizes.values())}.",
                )
    elif isinstance(mask, (Lengths, Documents, Prefix)):
        _refuse_unless_counts_fit(mask, batch=batch, queries=queries, keys=None if to_come else keys)


def _refuse_unless_counts_fit(
    mask: Lengths | Documents | Prefix, *, batch: int, queries: int, keys: int | None
) -> None:
    counts = mask.length if isinstance(mask, Prefix) else mask.lengths
    shape = tuple(counts.shape) if isinstance(counts, Tensor) else tuple(torch.tensor(counts).shape)
    a_row_a_sample = len(shape) == 2 or (len(shape) == 1 and not isinstance(mask, Documents))
    if a_row_a_sample and shape[0] not in (1, batch):
        raise MaskError(f"{mask!r} speaks of {shape[0]} samples, and the batch has {batch}.", "Give one row a sample.")
    if isinstance(mask, Lengths) and len(shape) == 2 and shape[1] != queries:
        raise MaskError(
            f"{mask!r} speaks of {shape[1]} queries, and the call has {queries}.", "Give one length a sample and query."
        )
    device = counts.device if isinstance(counts, Tensor) else torch.device("cpu")
    if keys is None or not readable(device) or 0 in shape:
        return  # in a graph, or on an accelerator where reading would make the host wait: bounds are clamped
    totals = as_tensor(counts, "cpu")
    longest = int((totals.sum(-1) if isinstance(mask, Documents) else totals).max())
    if longest > keys:
        what = "documents of together" if isinstance(mask, Documents) else "a length of"
        raise MaskError(
            f"{mask!r} speaks of {what} {longest} tokens, and there are {keys} keys.",
            f"Give lengths that add up to at most {keys}."
            if isinstance(mask, Documents)
            else f"Give lengths of at most {keys} tokens.",
        )
