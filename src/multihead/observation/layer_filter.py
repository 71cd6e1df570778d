"""Select the attention layers to record by index or by name."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from multihead.errors import ArgumentError, ModelError


@dataclass(frozen=True)
class LayerFilter:
    """The layers to record: indices, (parts of) names, and globs."""

    items: tuple[int | str, ...]

    @staticmethod
    def from_argument(layers: Sequence[int | str] | int | str) -> LayerFilter:
        """Create a filter from the `layers` argument of `observe`.

        Raises:
            ArgumentError: an item is neither an index from 0 nor a name.
        """
        items = tuple(layers) if isinstance(layers, Iterable) and not isinstance(layers, str) else (layers,)
        for item in items:
            if isinstance(item, bool) or not (item >= 0 if isinstance(item, int) else isinstance(item, str) and item):
                raise ArgumentError(f"layers holds {item!r}.", 'Give indices from 0, or names such as "layer.3".')
        if not items:
            raise ArgumentError("layers is empty.", "Give indices or names, or None for all layers.")
        return LayerFilter(items)

    def check_modules(self, names: Sequence[str]) -> None:
        """Check that each name in the filter matches a module of the model.

        Args:
            names: names of all modules, as in `module_names`.

        Raises:
            ModelError: a name matches no module.
        """
        for item in self.unmatched_items(names):
            # The second call of a layer in one forward pass is named after its module with "#2" at the end.
            if isinstance(item, str) and "#" not in item:
                raise ModelError(
                    f"layers holds {item!r}, which matches no module of the model.",
                    'Give the name of an attention layer, a part of it or a glob such as "encoder.*", or None for all.',
                )

    def matches(self, name: str, index: int) -> bool:
        """Whether the layer with this name and index is to be recorded."""
        return any(_item_fits_layer(item, index, name) for item in self.items)

    def unmatched_items(self, names: Sequence[str]) -> list[int | str]:
        """Return the items of the filter that match none of the layers with these names, in their order."""
        return [item for item in self.items if not any(_item_fits_layer(item, *each) for each in enumerate(names))]


def _item_fits_layer(item: int | str, index: int, name: str) -> bool:
    """Whether an index, a part of a name or a glob matches a layer; "layer.1" does not match layer.10."""
    if isinstance(item, int):
        return item == index
    if any(sign in item for sign in "*?["):
        return fnmatch.fnmatchcase(name, item)
    return re.search(rf"(?<!\d){re.escape(item)}" + (r"(?!\d)" if item[-1].isdigit() else ""), name) is not None
