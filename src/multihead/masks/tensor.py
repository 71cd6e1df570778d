"""Masks given as boolean tensors: `Keep` (True = may be seen) and `Drop` (True = hidden)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor

from multihead.errors import MaskError
from multihead.masks.base import KeyBounds, Mask
from multihead.masks.distance import Full
from multihead.masks.positions import CallPositions, CallSize, SampleSpan, TilePositions
from multihead.tensors.shapes import describe_type, index_axes

AXES = ("batch", "heads", "queries", "keys")


class _TensorMask(Mask):
    """The base class of `Keep` and `Drop`: a boolean tensor and the names of its axes."""

    tensor: Tensor
    axes: str
    uses_positions: ClassVar[bool] = False

    def __init__(self, tensor: Tensor, axes: str | None = None) -> None:
        name = type(self).__name__
        if not isinstance(tensor, Tensor) or tensor.dtype != torch.bool:
            raise MaskError(
                f"{name} takes a boolean tensor, and was given {describe_type(tensor)}.",
                "Compare its values, for example masks.Keep(t != 0); an additive mask is a bias: attention(bias=t).",
            )
        if not isinstance(axes, str | None):
            raise MaskError(f"{name} was given the axes {axes!r}.", f'Name them in a string: {name}(t, "batch keys").')
        if axes is None and tensor.dim() == len(AXES):
            axes = " ".join(AXES)
        named = (axes or "").split()
        if len(named) != tensor.dim() or named != [axis for axis in AXES if axis in named]:
            given = "without axes" if axes is None else f"with axes {axes!r}"
            raise MaskError(
                f"{name} was given a tensor of {tensor.dim()} dimensions {given}.",
                f'Name each axis, in the order of "batch heads queries keys", for example {name}(t, "batch keys").',
            )
        object.__setattr__(self, "tensor", tensor)
        object.__setattr__(self, "axes", " ".join(named))

    @property
    def has_key_axis(self) -> bool:  # type: ignore[override]
        return self.four_dimensional().shape[3] > 1

    def four_dimensional(self) -> Tensor:
        """Return the tensor as (batch, heads, queries, keys), with size 1 for axes that are not in `axes`."""
        sizes = dict(zip(self.axes.split(), self.tensor.shape, strict=True))
        return self.tensor.reshape([sizes.get(axis, 1) for axis in AXES])

    def visible_cells(self) -> Tensor:
        """Return where keys are visible: bool, (batch or 1, heads or 1, queries or 1, keys or 1)."""
        return self.four_dimensional()

    def check_fits(self, size: CallSize) -> None:
        sizes = dict(zip(AXES, (size.batch, size.heads, size.queries, size.keys), strict=True))
        for axis, length in zip(self.axes.split(), self.tensor.shape, strict=True):
            if length not in (1, sizes[axis]):
                raise MaskError(
                    f"{self!r} has {length} {axis}, and the call has {sizes[axis]}.",
                    f"Give a tensor that broadcasts to (batch, heads, queries, keys) = {tuple(sizes.values())}.",
                )

    def tile(self, tile: TilePositions) -> Tensor:
        # Leading keys have negative positions and no column; their values are not used.
        columns = tile.columns.flatten().clamp(min=0)
        cells = index_axes(self.visible_cells().to(columns.device), {2: tile.rows.flatten(), 3: columns})
        return cells.expand(-1, -1, tile.rows.numel(), tile.columns.numel())

    def bounds(self, call: CallPositions) -> KeyBounds:
        """Return each query's interval from first to last visible key, and the mask as remainder if there are gaps."""
        # In torch.jit.trace, sizes are 0-dimensional tensors.
        differs = isinstance(call.keys, Tensor) and call.keys.dim()
        keys: int = self.four_dimensional().shape[3] if differs else call.keys  # type: ignore[assignment]
        cells = self.visible_cells().to(call.positions.device).expand(-1, -1, -1, keys)
        count = cells.sum(-1)  # (batch or 1, heads or 1, queries or 1)
        # The cells are padded with 1, so that argmax finds an end even if no key is visible.
        edged = torch.nn.functional.pad(cells.int(), (1, 1), value=1)
        first, stop = edged[..., 1:].argmax(-1), keys - edged[..., :-1].flip(-1).argmax(-1)
        whole = call.has_readable_values and bool((count == (stop - first).clamp(min=0)).all())
        hull_first, hull_stop = first.amin(1), stop.amax(1)
        if whole and first.shape[1] > 1:
            whole = bool((first == hull_first[:, None]).all() & (stop == hull_stop[:, None]).all())
        size = (-1, call.positions.shape[1])
        return KeyBounds(hull_first.expand(size), hull_stop.expand(size), None if whole else self)

    def select_sample(self, index: int) -> Self:
        return type(self)(index_axes(self.four_dimensional(), {0: slice(index, index + 1)}))

    def select_heads(self, select: Callable[[Tensor], Tensor]) -> Self:
        return type(self)(select(self.four_dimensional())) if "heads" in self.axes.split() else self

    def _drop_keys(self, count: int | Tensor) -> Mask:
        if not self.has_key_axis:
            return self
        if isinstance(count, Tensor):
            raise MaskError(
                f"{self!r} has a column per key, and the samples dropped different numbers of keys.",
                "Give a tensor with one column per remaining key.",
            )
        return type(self)(self.four_dimensional()[..., count:])

    def select_span(self, span: SampleSpan) -> Mask:
        index = {0: slice(span.sample, span.sample + 1), 2: slice(*span.queries), 3: slice(*span.keys)}
        mask = type(self)(index_axes(self.four_dimensional(), index))
        return Full() if bool(mask.visible_cells().all()) else mask

    def restrict_to_first_keys(self, count: int) -> Self:
        if not self.axes.endswith("keys") or self.tensor.shape[-1] == 1:
            return self
        return type(self)(self.tensor[..., :count], self.axes)


@dataclass(frozen=True, eq=False, init=False, repr=False)
class Keep(_TensorMask):
    """A boolean tensor: True = the query may see the key.

    Args:
        tensor: bool, broadcasting to (batch, heads, queries, keys).
        axes: the names of its axes if it has fewer than four, for example "batch keys".

    Raises:
        MaskError: the tensor is not boolean, or its axes are not named.

    >>> from multihead import masks
    >>> print(masks.picture(Keep(torch.tensor([[True, False, True]]), "batch keys"), queries=2, keys=3))
    ■ · ■
    ■ · ■
    """

    tensor: Tensor
    axes: str


@dataclass(frozen=True, eq=False, init=False, repr=False)
class Drop(_TensorMask):
    """A boolean tensor: True = the key is hidden from the query.

    Args:
        tensor: bool, broadcasting to (batch, heads, queries, keys).
        axes: the names of its axes if it has fewer than four, for example "batch keys".

    Raises:
        MaskError: the tensor is not boolean, or its axes are not named.

    >>> from multihead import masks
    >>> print(masks.picture(Drop(torch.tensor([[True, False, True]]), "batch keys"), queries=2, keys=3))
    · ■ ·
    · ■ ·
    """

    tensor: Tensor
    axes: str

    def visible_cells(self) -> Tensor:
        return ~self.four_dimensional()
