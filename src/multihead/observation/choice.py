"""Choose layers by index or by name."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Sequence
from dataclasses import dataclass

from multihead.errors import ArgumentError


@dataclass(frozen=True)
class Choice:
    """Which layers are kept: indices and names; None for all."""

    items: tuple[int | str, ...] | None

    @staticmethod
    def of(layers: Sequence[int | str] | int | str | None) -> Choice:
        """Read what a caller asked for.

        Raises:
            ArgumentError: something that is neither an index from 0 nor a name.
        """
        if layers is None:
            return Choice(None)
        items = (layers,) if isinstance(layers, (int, str)) else tuple(layers)
        for item in items:
            if isinstance(item, bool) or not isinstance(item, (int, str)) or item == "" or item in range(-99, 0):
                raise ArgumentError(f"layers holds {item!r}.", 'Give indices from 0, or names such as "layer.3".')
        if not items:
            raise ArgumentError("layers is empty.", "Give indices or names, or None for all layers.")
        return Choice(items)

    def takes(self, name: str, index: int) -> bool:
        """Whether a layer is one of those asked for."""
        return self.items is None or any(_fits(item, name, index) for item in self.items)

    def missed(self, names: Sequence[str]) -> list[int | str]:
        """Say what was asked for and is none of these layers."""
        items = self.items or ()
        return [item for item in items if not any(_fits(item, name, index) for index, name in enumerate(names))]


def _fits(item: int | str, name: str, index: int) -> bool:
    """Tell whether an index or a name means a layer; "layer.1" does not mean layer.10."""
    if isinstance(item, int):
        return item == index
    if any(sign in item for sign in "*?["):
        return fnmatch.fnmatchcase(name, item)
    return re.search(rf"(?<!\d){re.escape(item)}" + (r"(?!\d)" if item[-1].isdigit() else ""), name) is not None
