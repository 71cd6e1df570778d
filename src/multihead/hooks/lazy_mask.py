"""A tensor that stores a mask as a value while a model passes it on, and becomes dense only when computed with."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from multihead.masks import Keep, Mask
from multihead.masks.place import Place

_KEYS_AXIS = 3


class LazyMask(Tensor):
    """A tensor subclass shaped like a model's boolean mask (batch, 1, queries, keys) that stores a Mask and no cells.

    Models pass the mask from where it is made to their attention layers, mostly unchanged; some slice keys off its
    end. Both keep the stored mask. Any other operation runs on the dense tensor, so that every change that a model
    makes to its mask takes effect.

    Attributes:
        keys: number of keys.
        mask: which keys each query may see.
        query_start: position of the first query among the keys.
        key_offset: position of the first key in the sequence, tokens.
        padding: (batch, keys) bool, True = no padding; None where there is none.
        packed_lengths: (samples,) int64, tokens per sample, where the one row holds packed samples; else None.
    """

    keys: int
    mask: Mask
    query_start: int
    key_offset: int
    padding: Tensor | None
    packed_lengths: Tensor | None = None
    # `__torch_dispatch__` sees every operation. Another hook would only make attributes slow.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment] # noqa: SLF001

    @staticmethod
    def __new__(
        cls: type[LazyMask],
        size: tuple[int, int, int, int],
        mask: Mask,
        *,
        query_start: int,
        key_offset: int,
        padding: Tensor | None,
        device: torch.device,
    ) -> LazyMask:
        """Create a tensor of the size that the model expects of its own mask."""
        made: LazyMask = torch.Tensor._make_wrapper_subclass(cls, size, dtype=torch.bool, device=device)  # noqa: SLF001 - torch's documented way
        made.keys, made.mask, made.query_start = size[_KEYS_AXIS], mask, query_start
        made.key_offset, made.padding = key_offset, padding
        return made

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"LazyMask({tuple(self.shape)}, {self.mask!r}, query_start={self.query_start})"

    def dense(self) -> Tensor:
        """Return the mask as a plain tensor: bool (batch, 1, queries, keys), True = visible."""
        batch, heads, queries, keys = self.shape
        place = Place.of(queries, keys, query_start=self.query_start, device=self.device)
        return self.mask.tile(place).expand(batch, heads, queries, keys)

    def first_keys(self, keys: int) -> LazyMask:
        """Return the mask of the first keys."""
        batch, heads, queries, before = self.shape
        mask = self.mask if keys == before else self.mask.with_first_keys(keys)
        made = LazyMask(
            (batch, heads, queries, keys),
            Keep(self.dense()[..., :keys]) if mask is None else mask,
            query_start=self.query_start,
            key_offset=self.key_offset,
            padding=None if self.padding is None else self.padding[:, :keys],
            device=self.device,
        )
        made.packed_lengths = self.packed_lengths if keys == before else None
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[Any, Any] | None = None
    ) -> Any:
        """Run an operation on the dense mask, except for copies and for slices that cut keys off the end."""
        name = getattr(function, "__name__", "")
        source = args[0] if args else None
        if isinstance(source, LazyMask):
            if name in ("detach.default", "alias.default"):
                return source.first_keys(source.shape[_KEYS_AXIS])
            if name == "slice.Tensor":
                options = list(args[1:])  # axis, start, end and step; the last ones may be missing
                axis, start, end, step = options + [0, None, None, 1][len(options) :]
                size = source.shape[axis]
                stop = size if end is None else min(end if end >= 0 else end + size, size)
                if not start and step == 1 and (axis in (_KEYS_AXIS, -1) or stop == size):
                    return source.first_keys(stop if axis in (_KEYS_AXIS, -1) else source.shape[_KEYS_AXIS])
        args, kwargs = pytree.tree_map_only(LazyMask, LazyMask.dense, (args, kwargs or {}))
        return function(*args, **kwargs)
