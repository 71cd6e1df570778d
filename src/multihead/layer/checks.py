"""Refuse what does not fit a layer, in the layer's words and not in those of its projections."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from multihead.cache import KeyValueCache
from multihead.errors import ArgumentError, DtypeError, ShapeError
from multihead.masks import Mask
from multihead.packing import Packing, refuse_unless_packed


class Widths(NamedTuple):
    """What a layer takes: features of x, memory and values, and their dtype; None where the projections decide."""

    x: int
    memory: int
    values: int
    dtype: torch.dtype | None


def batched(
    x: Tensor, memory: Tensor | None, values: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor | None, bool]:
    """Give one sample a batch of one: (length, features) becomes (1, length, features); and say whether it was one."""
    if not isinstance(x, Tensor) or not (memory is None or isinstance(memory, Tensor)):
        _refuse_unless_tensors(x, memory, values)
    if x.dim() != 2:
        return x, memory, values, False
    _refuse_unless_tensors(x, memory, values)
    for name, tensor in (("memory", memory), ("values", values)):
        if tensor is not None and tensor.dim() != 2:
            raise ShapeError(
                f"x has shape {tuple(x.shape)} and {name} has shape {tuple(tensor.shape)}.",
                "Give all of them a batch, or none.",
            )
    x_one = x[None]
    memory_one = None if memory is None else x_one if memory is x else memory[None]
    values_one = None if values is None else memory_one if values is memory else values[None]
    return x_one, memory_one, values_one, True


def _refuse_unless_tensors(x: object, memory: object, values: object) -> None:
    for name, given in (("x", x), ("memory", memory), ("values", values)):
        if isinstance(given, Tensor) or (given is None and name != "x"):
            continue
        if isinstance(given, Mask):
            raise DtypeError(f"{name} is the mask {given!r}, and must be a tensor.", f"Name it: mask={given!r}.")
        raise DtypeError(
            f"{name} is a {type(given).__name__}, and must be a tensor.", "Give a tensor (batch, length, features)."
        )


def child(layer: nn.Module, name: str) -> nn.Module:
    """Return a module of a layer: as an attribute it is looked for half a microsecond longer, in every call."""
    found = layer._modules[name]  # noqa: SLF001
    assert found is not None
    return found


def dtype_of(projection: nn.Module) -> torch.dtype | None:
    """Tell the dtype that a projection takes, or None: a quantised one keeps its weight elsewhere, or as integers."""
    plain = projection._parameters.get("weight")  # noqa: SLF001 - an attribute is looked for half a microsecond longer
    weight = projection.weight if plain is None else plain
    return weight.dtype if isinstance(weight, Tensor) and weight.is_floating_point() else None


def _autocasts(device_type: str) -> bool:
    return torch.amp.is_autocast_available(device_type) and torch.is_autocast_enabled(device_type)


def refuse_unless_fitting(
    widths: Widths, x: Tensor, memory: Tensor | None, values: Tensor | None, lengths: object, memory_lengths: object
) -> None:
    """Refuse inputs of the wrong shape or dtype."""
    alone = memory is None and values is None and memory_lengths is None
    if alone and x.dim() == 3 and x.shape[2] == widths.x == widths.memory and x.dtype == widths.dtype:
        return  # the usual case
    for name, tensor, width in (
        ("x", x, widths.x),
        ("memory", memory, widths.memory),
        ("values", values, widths.values),
    ):
        if tensor is None:
            continue
        if not isinstance(tensor, Tensor):
            _refuse_unless_tensors(x, memory, values)
        if tensor.dim() != 3 or tensor.shape[2] != width:
            raise ShapeError(
                f"{name} has shape {tuple(tensor.shape)}.", f"Give (batch, length, features) with {width} features."
            )
        if widths.dtype not in (None, tensor.dtype) and not _autocasts(tensor.device.type):
            raise DtypeError(
                f"{name} has dtype {tensor.dtype}, and the layer has {widths.dtype}.",
                f"Convert one of them, for example {name}.to({widths.dtype}).",
            )
    if memory is None and (widths.memory != widths.x or values is not None):
        raise ShapeError(
            f"There is no memory, and the layer's keys are made of {widths.memory} features"
            + (" beside separate values." if values is not None else f", its queries of {widths.x}."),
            "Give memory: layer(x, memory).",
        )
    for name, tensor in (("memory", memory), ("values", values)):
        if tensor is not None and tensor.shape[0] != x.shape[0]:
            raise ShapeError(
                f"x has {x.shape[0]} samples and {name} has {tensor.shape[0]}.", "Give both the same batch."
            )
    if memory is not None and values is not None and values.shape[1] != memory.shape[1]:
        raise ShapeError(
            f"memory has {memory.shape[1]} keys and values has {values.shape[1]}.", "Give every key its one value."
        )
    if memory is None and memory_lengths is not None and lengths is not None:
        raise ArgumentError(
            "lengths and memory_lengths are both given, and there is no memory.",
            "Give lengths alone: in self-attention they speak of queries and keys.",
        )


def refuse_unless_as_long(name: str, x: Tensor, projected: Tensor, packing: Packing | None) -> None:
    """Refuse padding where a projection gathers tokens of other processes, whose padding nobody knows here."""
    if packing is None or projected.shape[1] == x.shape[1]:
        return
    raise ShapeError(
        f"{name} was given {x.shape[1]} tokens and returns {projected.shape[1]}, and the padding is known for "
        f"{x.shape[1]}.",
        "Give every process all tokens where lengths or packing are given, or hide the padding with "
        "mask=masks.Lengths(...).",
    )


def refuse_unless_packing_fits(
    packing: Packing, x: Tensor, memory: Tensor | None, lengths: object, cache: KeyValueCache | None
) -> None:
    """Refuse packed tokens where the layer could not tell its samples apart."""
    refuse_unless_packed("x", x, packing)
    for name, given in (("memory", memory), ("lengths", lengths), ("cache", cache)):
        if given is not None and given is not x:
            raise ArgumentError(
                f"packing and {name} are both given.",
                "Packed tokens attend within their own samples: give packing alone, or unpack them first.",
            )


def refuse_unless_cache(cache: object) -> None:
    """Refuse what is no cache."""
    if not isinstance(cache, KeyValueCache):
        raise ArgumentError(
            f"cache is a {type(cache).__name__}.", "Give a KeyValueCache() of this layer's own, the same in every call."
        )


def refuse_unless_cache_fits(cache: KeyValueCache, query_start: object, *, absolute_bias: bool, within: bool) -> None:
    """Refuse what a cache says itself, and a bias of absolute places where a cache forgets the first ones."""
    if query_start is not None and within:
        raise ArgumentError(
            f"query_start is {query_start!r}, and a cache is given, which knows where the text goes on.",
            "Leave query_start out.",
        )
    if absolute_bias and cache.window is not None:
        raise ArgumentError(
            "The layer's position_bias speaks of absolute places, and a cache with a window forgets the first ones.",
            "Give a cache that keeps all keys: KeyValueCache().",
        )
