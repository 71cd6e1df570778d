"""Further inputs of probes: token ids, sets of keys, the output projection."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

import torch
from torch import Tensor

from multihead.errors import ProbeError
from multihead.tensors.shapes import AttentionShape

MAP_SIZE = 64
Pool = Literal["mean", "max"]


@dataclass(frozen=True, eq=False)
class ProbeContext:
    """What some probes need besides q and k; all of it may be left out.

    Attributes:
        special_keys: (batch, keys) bool, the keys that `special_mass` counts.
        ids: (batch, keys) int64, the token id of each key; the token of a query is that of the key at its position.
        sets: name of a set -> (batch, keys) bool, for `probes.tokens_mass` without ids.
        output_weight: (embed_dim, heads * value_dim), the output projection, as `nn.Linear` stores it.
        first_key: which key is the sample's first, an int or (batch,); it may lie before those of the call. None is
            the first that some query sees.
        key_start: how many keys of the sample lie before those of the call, such as keys that a cache has dropped.
        id_before: (batch,) int64, the token id of the key right before those of the call, which a cache has dropped.
        map_size: the most rows and columns of `pooled_map`.
        map_pool: what a block of `pooled_map` holds, the "mean" or the "max" of its weights.

    >>> ProbeContext(special_keys=torch.tensor([[True, False, True]])).map_pool
    'mean'
    """

    special_keys: Tensor | None = None
    ids: Tensor | None = None
    sets: Mapping[str, Tensor] = field(default_factory=dict)
    output_weight: Tensor | None = None
    first_key: int | Tensor | None = None
    key_start: int = 0
    id_before: Tensor | None = None
    map_size: int = MAP_SIZE
    map_pool: Pool = "mean"


def check_context_fits(context: ProbeContext, shape: AttentionShape) -> None:
    """Reject a context that does not fit the call.

    Raises:
        ProbeError: a shape, dtype or option is wrong.
    """
    sizes = (shape.batch, shape.key_length)
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
    if context.map_pool not in get_args(Pool):
        raise ProbeError(f"map_pool is {context.map_pool!r}.", 'Give "mean" or "max".')


def check_output_weight_fits(weight: Tensor, shape: AttentionShape) -> None:
    """Reject an output projection that does not fit the outputs of the heads.

    Raises:
        ProbeError: it is not (embed_dim, heads * value_dim) of floating point numbers.
    """
    width = shape.num_heads * shape.value_dim
    if not weight.is_floating_point() or weight.dim() != 2 or weight.shape[1] != width:
        raise ProbeError(
            f"output_weight is a {weight.dtype} tensor of shape {tuple(weight.shape)}.",
            f"Give floating point numbers (embed_dim, heads * value_dim), with {shape.num_heads} heads of "
            f"{shape.value_dim}: {width} columns.",
        )
