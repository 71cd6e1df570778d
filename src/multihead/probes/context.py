"""Inputs of probes besides q and k: token ids, sets of keys, the output projection."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

import torch
from torch import Tensor

from multihead.errors import ProbeError
from multihead.probes.places import PICTURE_GROUPS, PlaceTable
from multihead.tensors.shapes import AttentionShape

MAP_SIZE = 64  # default of `ProbeContext.map_size`
PoolOperation = Literal["mean", "max"]


@dataclass(frozen=True, eq=False)
class ProbeContext:
    """Inputs that some probes need besides q and k; all are optional.

    Attributes:
        special_keys: (batch, keys) bool, True for the keys that `special_mass` counts.
        ids: (batch, keys) int64, token id of each key. A query has the token of the key at its position.
        sets: name of a set -> (batch, keys) bool, True for its keys; for `probes.tokens_mass` without ids.
        output_weight: (embed_dim, heads * value_dim), weight of the output projection, as in `nn.Linear`.
        first_key: index of the sample's first key, an int or (batch,); negative if a cache has dropped this key. None:
            the first key that any query sees.
        key_start: number of the text's keys before the keys of the call, such as keys that a cache has dropped, an int
            or a tensor that broadcasts to (batch, 1, queries); negative if the text begins at a later key of the call.
        id_before: (batch,) int64, token id of the dropped key just before the keys of the call.
        map_size: maximum number of rows and columns of `pooled_map`.
        map_pool: whether a cell of `pooled_map` is the "mean" or the "max" of the weights in its block.
        places: (batch, keys), the place of each key in a picture; see `with_places`.

    >>> ProbeContext(special_keys=torch.tensor([[True, False, True]])).map_pool
    'mean'
    """

    special_keys: Tensor | None = None
    ids: Tensor | None = None
    sets: Mapping[str, Tensor] = field(default_factory=dict)
    output_weight: Tensor | None = None
    first_key: int | Tensor | None = None
    key_start: int | Tensor = 0
    id_before: Tensor | None = None
    map_size: int = MAP_SIZE
    map_pool: PoolOperation = "mean"
    places: PlaceTable | None = None

    def with_places(self, places: PlaceTable, groups: Collection[str] = ("picture", "class")) -> ProbeContext:
        """Return the context with the places of the keys, and with the groups of the keys as sets.

        Args:
            places: (batch, keys), as `mh.places` returns it.
            groups: the groups of the text's keys: "picture", and "class" or "words" for keys that come from no picture.

        >>> context = ProbeContext().with_places(PlaceTable.without_places(1, 3))
        >>> context.sets["class"].tolist(), context.sets["picture"].any()
        ([[True, True, True]], tensor(False))
        """
        of_keys = places.groups(has_words="words" in groups)
        sets = {name: of_keys == PICTURE_GROUPS.index(name) for name in groups}
        return replace(self, places=places, sets={**self.sets, **sets})


def keys_of_set(context: ProbeContext, name: str, tokens: frozenset[int] | None, device: torch.device) -> Tensor:
    """Return which keys are in a set, (batch, keys) bool, from the context or by token ids."""
    if name == "special" and context.special_keys is not None:
        return context.special_keys.to(device)
    if tokens is None or context.ids is None or name in context.sets:
        return context.sets[name].to(device)
    ids = context.ids.to(device)
    return torch.isin(ids, torch.tensor(sorted(tokens), dtype=ids.dtype, device=device))


def check_context_fits(context: ProbeContext, shape: AttentionShape) -> None:
    """Check the inputs in a context against the shape of a call.

    Raises:
        ProbeError: a shape, a dtype or an option is wrong.
    """
    sizes = (shape.batch, shape.key_length)
    if context.places is not None and tuple(context.places.picture.shape) != sizes:
        raise ProbeError(
            f"places has keys of shape {tuple(context.places.picture.shape)}.", f"Give (batch, keys) = {sizes}."
        )
    for name, flags in (("special_keys", context.special_keys), *context.sets.items()):
        if flags is not None and (flags.dtype != torch.bool or tuple(flags.shape) != sizes):
            raise ProbeError(
                f"{name} is a {flags.dtype} tensor of shape {tuple(flags.shape)}.",
                f"Give booleans (batch, keys) = {sizes}.",
            )
    ids = context.ids
    if ids is not None and (ids.is_floating_point() or ids.dtype == torch.bool or tuple(ids.shape) != sizes):
        raise ProbeError(
            f"ids is a {ids.dtype} tensor of shape {tuple(ids.shape)}.",
            f"Give integers (batch, keys) = {sizes}.",
        )
    if isinstance(context.map_size, bool) or not isinstance(context.map_size, int) or context.map_size < 1:
        raise ProbeError(f"map_size is {context.map_size!r}.", "Give an integer of at least 1.")
    if context.map_pool not in get_args(PoolOperation):
        raise ProbeError(f"map_pool is {context.map_pool!r}.", 'Give "mean" or "max".')


def check_output_weight_fits(weight: Tensor, shape: AttentionShape) -> None:
    """Check the weight of an output projection against the shape of a call.

    Raises:
        ProbeError: `weight` is not a floating-point tensor (embed_dim, heads * value_dim).
    """
    width = shape.num_heads * shape.value_dim
    if not weight.is_floating_point() or weight.dim() != 2 or weight.shape[1] != width:
        raise ProbeError(
            f"output_weight is a {weight.dtype} tensor of shape {tuple(weight.shape)}.",
            f"Give floating point numbers (embed_dim, heads * value_dim), with {shape.num_heads} heads of "
            f"{shape.value_dim}: {width} columns.",
        )
