"""Check the arguments of a layer's call, before its projections raise errors of their own."""

from __future__ import annotations

import inspect
from typing import NamedTuple

import torch
from torch import Tensor, nn

from multihead.cache import KeyValueCache
from multihead.errors import ArgumentError, DtypeError, ShapeError
from multihead.masks import Mask
from multihead.masks.base import check_is_mask
from multihead.packing import Packing, check_packed
from multihead.scores.relative import RelativeBias
from multihead.sequence_split import reject_in_split


class Widths(NamedTuple):
    """The features of x, memory and values that a layer takes, and their dtype; None where the projections decide."""

    x: int
    memory: int
    values: int
    dtype: torch.dtype | None


def dtype_of(projection: nn.Module) -> torch.dtype | None:
    """Return the dtype that a projection takes, or None: a quantised one has no weight, or one of integers."""
    weight = projection.weight
    return weight.dtype if isinstance(weight, Tensor) and weight.is_floating_point() else None


def check_inputs(
    widths: Widths,
    mask: object,
    x: Tensor,
    memory: Tensor | None,
    values: Tensor | None,
    lengths: object,
    memory_lengths: object,
) -> tuple[Tensor, Tensor | None, Tensor | None, bool]:
    """Check the inputs of a layer, and add a batch of one where they have none.

    Returns:
        x, memory and values, (batch, length, features) each, and whether x has a batch.

    Raises:
        ShapeError, DtypeError, MaskError, ArgumentError: the first one that does not fit.
    """
    check_is_mask(mask)
    x, memory, values, batched = _with_batch(x, memory, values)
    _check_shapes(widths, x, memory, values)
    if memory is None and memory_lengths is not None and lengths is not None:
        raise ArgumentError(
            "lengths and memory_lengths are both given, and there is no memory.",
            "Give lengths alone: in self-attention they are those of queries and keys.",
        )
    return x, memory, values, batched


def _with_batch(
    x: Tensor, memory: Tensor | None, values: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor | None, bool]:
    """Add a batch of one where x is (length, features), and return whether it has a batch."""
    _check_tensors(x, memory, values)
    if x.dim() != 2:
        return x, memory, values, True
    for name, tensor in (("memory", memory), ("values", values)):
        if tensor is not None and tensor.dim() != 2:
            raise ShapeError(
                f"x has shape {tuple(x.shape)} and {name} has shape {tuple(tensor.shape)}.",
                "Give all of them a batch, or none.",
            )
    x_one = x[None]
    memory_one = None if memory is None else x_one if memory is x else memory[None]
    values_one = None if values is None else memory_one if values is memory else values[None]
    return x_one, memory_one, values_one, False


def _check_tensors(x: object, memory: object, values: object) -> None:
    for name, tensor in (("x", x), ("memory", memory), ("values", values)):
        if isinstance(tensor, Tensor) or (tensor is None and name != "x"):
            continue
        if isinstance(tensor, Mask):
            raise DtypeError(f"{name} is the mask {tensor!r}, and must be a tensor.", f"Name it: mask={tensor!r}.")
        raise DtypeError(
            f"{name} is a {type(tensor).__name__}, and must be a tensor.", "Give a tensor (batch, length, features)."
        )


def _autocasts(device_type: str) -> bool:
    return torch.amp.is_autocast_available(device_type) and torch.is_autocast_enabled(device_type)


def _check_shapes(widths: Widths, x: Tensor, memory: Tensor | None, values: Tensor | None) -> None:
    for name, tensor, width in (
        ("x", x, widths.x),
        ("memory", memory, widths.memory),
        ("values", values, widths.values),
    ):
        if tensor is None:
            continue
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
            f"There is no memory, and the layer's keys are projected from {widths.memory} features"
            + (" and separate values are given." if values is not None else f", its queries from {widths.x}."),
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


def check_packing(
    packing: Packing, x: Tensor, memory: Tensor | None, lengths: object, cache: KeyValueCache | None
) -> None:
    """Check packed tokens, and that no other argument conflicts with their samples."""
    check_packed("x", x, packing)
    for name, given in (("memory", memory), ("lengths", lengths), ("cache", cache)):
        if given is not None and given is not x:
            raise ArgumentError(
                f"packing and {name} are both given.",
                "Packed tokens attend within their own samples: give packing alone, or unpack them first.",
            )


def check_is_cache(cache: object) -> None:
    """Check that an argument is a cache."""
    if not isinstance(cache, KeyValueCache):
        raise ArgumentError(
            f"cache is a {type(cache).__name__}.", "Give a KeyValueCache() of this layer's own, the same in every call."
        )


def check_cache(cache: KeyValueCache, mask: Mask, query_start: object, memory: Tensor | None) -> None:
    """Check a cache against the other arguments of a call.

    Args:
        cache: the cache.
        mask: the mask; a cache with a window must keep all keys that it shows.
        query_start: in self-attention the cache knows it.
        memory: (batch, keys, features), the other sequence of a cross-attention, or None in self-attention.
    """
    if query_start is not None and memory is None:
        raise ArgumentError(
            f"query_start is {query_start!r}, and a cache is given, which knows the position of the next token.",
            "Leave query_start out.",
        )
    if memory is None:
        cache.check_remembered(mask)
    else:
        cache.check_same_memory(memory)


def check_takes_positions(position_bias: nn.Module) -> None:
    """Check that the forward of a position bias takes the arguments that the layer passes."""
    try:
        inspect.signature(position_bias.forward).bind(1, 1, query_start=0, device=None, dtype=None)
    except TypeError as error:
        raise ArgumentError(
            f"position_bias is a {type(position_bias).__name__}, whose forward does not take the positions of a call: "
            f"{error}.",
            "Define forward(self, queries, keys, *, query_start=0, device=None, dtype=None).",
        ) from error


def check_position_bias(bias: object, *, packed: bool, cache: KeyValueCache | None) -> None:
    """Check that a bias depends on the distance alone where positions are not those of the whole sequence.

    Args:
        bias: what the position bias returned; a tensor may depend on absolute positions.
        packed: whether all samples are in one row, so that positions in the row are not those in the sample.
        cache: the cache of the call; one with a window drops the first keys.
    """
    if isinstance(bias, RelativeBias):
        return
    if packed:
        raise ArgumentError(
            f"The layer's position_bias has of_distance = True, and returned a {type(bias).__name__}.",
            "Return a scores.RelativeBias, or set of_distance = False.",
        )
    if cache is not None and cache.window is not None:
        raise ArgumentError(
            f"The layer's position_bias returned a {type(bias).__name__}, which may depend on absolute positions, and "
            "a cache with a window drops the first ones.",
            "Return a scores.RelativeBias if only the distance matters, or give a cache that keeps all keys: "
            "KeyValueCache().",
        )


def check_split(memory_lengths: object, packing: object, cache: object, *, within: bool, added_key: bool) -> None:
    """Reject what a layer cannot compute where a sequence is split over ranks.

    Args:
        memory_lengths: the argument of the call, as the two after it.
        packing: see above.
        cache: see above.
        within: whether this is self-attention.
        added_key: whether the layer has a learned key.
    """
    if memory_lengths is not None:
        reject_in_split("memory_lengths=", "Give lengths=, with the lengths of the whole sequences.")
    if packing is not None:
        reject_in_split("packing=", "Give mask=masks.Documents(lengths), with the lengths of all documents.")
    if cache is not None:
        reject_in_split("A cache", "Decode outside of it.")
    if not within:
        reject_in_split("Cross-attention", "Compute it outside of it.")
    if added_key:
        reject_in_split("add_bias_kv", "Use sinks=True, or add_zero_attn=True.")
