"""What the layers of one forward pass share: found by the first of them, and on the CPU once."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypeVar

from torch import Tensor
from torch.utils._pytree import tree_map_only

from multihead.masks.base import Mask

Found = TypeVar("Found")
MaskOf = TypeVar("MaskOf", bound=Mask)
ChanceLevels: TypeAlias = dict[object, dict[str, Tensor]]
"""Mask and sizes of a call -> its chance levels: name of a statistic -> (heads or 1, rows)."""


@dataclass(eq=False)
class SharedByLayers:
    """What the layers of one pass share, found by the first of them.

    Attributes:
        chance_levels: the chance levels of the calls of the pass.
    """

    chance_levels: ChanceLevels = field(default_factory=dict)
    _found: dict[Hashable, tuple[object, Any]] = field(default_factory=dict)

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy nothing: the objects of a copy have other ids."""
        return SharedByLayers, ()

    def once(self, kind: str, of: object, find: Callable[[], Found]) -> Found:
        """Return what `find` returned first for a kind of thing about an object, or a tuple of some, which are kept."""
        key = (kind, *map(id, of)) if type(of) is tuple else (kind, id(of))
        if key not in self._found:
            self._found[key] = of, find()
        found: Found = self._found[key][1]
        return found

    def on_cpu(self, tensor: Tensor) -> Tensor:
        """Return a tensor on the CPU."""
        return tensor if tensor.is_cpu else self.once("tensor", tensor, tensor.cpu)

    def mask_on_cpu(self, mask: MaskOf) -> MaskOf:
        """Return a mask whose tensors are on the CPU."""
        if not mask.holds_tensors:
            return mask
        found: MaskOf = self.once("mask", mask, lambda: tree_map_only(Tensor, self.on_cpu, mask))
        return found
