"""The arguments of a layer's call in one object, checked before the projections would raise less clear errors.

The steps of a call change its `LayerCall` in place, because a frozen object would be copied at each step. Functions
outside the layer pass on the arguments of an attention as one tuple (`AttentionArguments`), because a `NamedTuple`
takes 0.5 microseconds to make, a twentieth of the time of a small call.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn

from multihead.errors import ArgumentError, DtypeError, ShapeError
from multihead.kernels import sequence_split
from multihead.kernels.quantised import Int8Scales
from multihead.kernels.sequence_split import reject_split_sequence
from multihead.layer.cache import KeyValueCache
from multihead.layer.cache.cache import ProjectedMemory
from multihead.layer.packing import NO_PADDING, Packing, Padding, PaddingSide, check_packed
from multihead.layer.sharding import LayerOfLocalHeads, ShardableLayer, local_heads
from multihead.masks import Mask
from multihead.masks.base import check_is_mask
from multihead.scores.bias import Bias, RelativeBias


class LayerInputWidths(NamedTuple):
    """The numbers of features that a layer expects in x, memory and values, and their dtype; None = any dtype."""

    x_width: int
    memory_width: int
    values_width: int
    projection_dtype: torch.dtype | None


def projection_dtype(projection: nn.Module) -> torch.dtype | None:
    """Return the dtype of a projection's weight; None for a quantised projection (no weight, or an integer one)."""
    weight = projection.weight
    return weight.dtype if isinstance(weight, Tensor) and weight.is_floating_point() else None


@dataclass(slots=True, eq=False)
class LayerCall:
    """State of a layer's call: the arguments of `MultiHeadAttention.forward`, and values set by the steps of the call.

    Each call creates a LayerCall, and its steps modify it in place.

    Attributes:
        x: (batch, queries, embed_dim); x, memory and values without a batch get a batch of one.
        memory: (batch, keys, key_dim), or None.
        values: (batch, keys, value_dim), or None.
        mask: the caller's mask, later replaced by the mask of the attention (with padding, or for a cache).
        bias: added to the scores, or None; `slice_to_local_heads` slices it, mask and head_gates to the heads of this
            process.
        lengths: (batch,), or None.
        memory_lengths: (batch,), or None.
        padding_side: "right" or "left".
        packing: the positions of packed tokens in their samples, or None.
        cache: the keys and values of earlier calls, or None.
        head_gates: (heads,), or broadcasting to (batch, heads, queries), or None.
        query_start: the caller's position of the first query, or None.
        local_layer: the layer, or its attributes sliced to the heads of this process.
        needs_module_calls: whether the projections' modules must be called, because hooks or tracers need these calls.
        has_batch_dim: whether x was given with a batch.
        is_self_attention: whether queries and keys are computed from the same tokens.
        cached_memory: the memory projected in an earlier call, or None.
        padding: the padding of x and memory.
        first_query_position: the position of the first query among the keys of the attention.
        int8_scales: the dequantisation factors of int8 keys and values of a cache, or None.
    """

    x: Tensor
    memory: Tensor | None = None
    values: Tensor | None = None
    mask: Mask = field(kw_only=True)  # no default: torch 2.11 cannot compile a constructor whose default is a mask
    bias: Bias | None = None
    lengths: Sequence[int] | Tensor | None = None
    memory_lengths: Sequence[int] | Tensor | None = None
    padding_side: PaddingSide = "right"
    packing: Packing | None = None
    cache: KeyValueCache | None = None
    head_gates: Tensor | None = None
    query_start: int | Tensor | str | None = None
    local_layer: ShardableLayer | LayerOfLocalHeads = field(init=False)
    needs_module_calls: bool = field(init=False)
    has_batch_dim: bool = field(default=True, init=False)
    is_self_attention: bool = field(default=True, init=False)
    cached_memory: ProjectedMemory | None = field(default=None, init=False)
    padding: Padding = field(default=NO_PADDING, init=False)
    first_query_position: int | Tensor = field(default=0, init=False)
    int8_scales: Int8Scales | None = field(default=None, init=False)

    @property
    def is_cross_attention(self) -> bool | None:
        """Whether keys and queries come from different sequences, for listeners; None if unknown."""
        # If x and memory differ and query_start is given, x may hold the newest tokens of the sequence in memory.
        return not self.is_self_attention if self.is_self_attention or self.query_start is None else None

    def find_padding(self, x: Tensor, memory: Tensor) -> None:
        """Set `padding` from lengths or packing; x and memory are (batch, length, features)."""
        local, sequence = self.local_layer, sequence_split.active_split
        # If only differences of positions matter, all samples can be attended in one row of tokens, as documents.
        in_one_row = (
            self.is_self_attention
            and self.bias is None
            and self.cache is None
            and (self.query_start is None or (isinstance(self.query_start, int) and self.query_start == 0))
            and (self.head_gates is None or self.head_gates.dim() == 1)
            and local.bias_k is None
            and (local.position_bias is None or getattr(local.position_bias, "of_distance", False))
            and self.mask.translation_invariant
            and self.mask.defines_interval  # other masks would be evaluated densely over all tokens
        )
        if self.packing is not None:
            self.padding = Padding.of_packed(self.packing, in_one_row=in_one_row)
        elif sequence is not None and self.lengths is not None:
            self.padding = Padding.of_split_sequence(sequence, x, self.lengths, self.padding_side)
        else:
            lengths, side = (self.lengths, self.memory_lengths), self.padding_side
            self.padding = Padding.of_call(x, memory, *lengths, in_one_row=in_one_row, side=side)

    def slice_to_local_heads(self, layer: ShardableLayer, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Slice mask, bias, gates and parameters to this process's heads, and return sliced k, v (batch, keys, dim)."""
        keys_are_new = self.cached_memory is None  # a cached memory has only the keys of this process
        local = local_heads(layer, q, k, v) if keys_are_new else local_heads(layer, q)
        if local is None:
            return k, v
        if keys_are_new:
            k = local.slice_keys(k, layer.num_kv_heads, layer.head_dim)
            v = local.slice_keys(v, layer.num_kv_heads, layer.value_head_dim)
        self.local_layer = local.slice_parameters(layer)
        self.mask = local.slice_mask(self.mask)
        self.bias = None if self.bias is None else local.slice_bias(self.bias, "bias")
        self.head_gates = None if self.head_gates is None else local.slice_gates(self.head_gates)
        return k, v

    # ---- checks of the arguments

    def check_inputs(self, widths: LayerInputWidths) -> tuple[Tensor, Tensor, Tensor]:
        """Check x, memory and values, and return them with defaults filled in, (batch, length, features) each.

        An input without a batch dimension gets one of size 1. The default of memory is x, and the default of values is
        memory. Raises an error about the first invalid input.
        """
        check_is_mask(self.mask)
        _check_tensors(self.x, self.memory, self.values)
        if self.x.dim() == 2:
            self._add_batch_dimension()
        _check_shapes(widths, self.x, self.memory, self.values)
        if self.memory is None and self.memory_lengths is not None and self.lengths is not None:
            raise ArgumentError(
                "lengths and memory_lengths are both given, and there is no memory.",
                "Give lengths alone: in self-attention they are those of queries and keys.",
            )
        memory = self.x if self.memory is None else self.memory
        self.is_self_attention = memory is self.x
        return self.x, memory, memory if self.values is None else self.values

    def _add_batch_dimension(self) -> None:
        """Add a batch axis to x, memory and values (length, features); equal inputs stay one tensor."""
        x, memory, values = self.x, self.memory, self.values
        for name, tensor in (("memory", memory), ("values", values)):
            if tensor is not None and tensor.dim() != 2:
                raise ShapeError(
                    f"x has shape {tuple(x.shape)} and {name} has shape {tuple(tensor.shape)}.",
                    "Give all of them a batch, or none.",
                )
        self.has_batch_dim, self.x = False, x[None]
        self.memory = None if memory is None else self.x if memory is x else memory[None]
        self.values = None if values is None else self.memory if values is memory else values[None]

    def check_packing(self, packing: Packing) -> None:
        """Check that x fits `packing`, and that memory, lengths and cache are not given."""
        check_packed("x", self.x, packing)
        for name, given in (("memory", self.memory), ("lengths", self.lengths), ("cache", self.cache)):
            if given is not None and given is not self.x:
                raise ArgumentError(
                    f"packing and {name} are both given.",
                    "Packed tokens attend within their own samples: give packing alone, or unpack them first.",
                )

    def check_cache(self, cache: KeyValueCache) -> None:
        """Check that a cache fits the other arguments: a cache with a window must keep all keys that the mask shows."""
        if not self.is_self_attention and self.memory is not None:
            cache.check_same_memory(self.memory)
            return
        if self.query_start is not None:
            raise ArgumentError(
                f"query_start is {self.query_start!r}, and a cache is given, which knows the position of the next "
                "token.",
                "Leave query_start out.",
            )
        cache.check_window_fits_mask(self.mask)

    def check_sequence_split(self, *, added_key: bool) -> None:
        """Reject arguments that a split sequence does not support; `added_key`: whether add_bias_kv is set."""
        if self.memory_lengths is not None:
            reject_split_sequence("memory_lengths=", "Give lengths=, with the lengths of the whole sequences.")
        if self.packing is not None:
            reject_split_sequence("packing=", "Give mask=masks.Documents(lengths), with the lengths of all documents.")
        if self.cache is not None:
            reject_split_sequence("A cache", "Decode outside of context_parallel.")
        if not self.is_self_attention:
            reject_split_sequence("Cross-attention", "Compute it outside of context_parallel.")
        if added_key:
            reject_split_sequence("add_bias_kv", "Use sinks=True, or add_zero_attn=True.")

    def check_position_bias(self, bias: object) -> None:
        """Reject a position bias that is not a RelativeBias, if samples are packed or a cache's window drops keys.

        A tensor may depend on absolute positions, which are unknown then; a RelativeBias cannot.
        """
        if isinstance(bias, RelativeBias):
            return
        if self.padding.documents is not None:
            raise ArgumentError(
                f"The layer's position_bias has of_distance = True, and returned a {type(bias).__name__}.",
                "Return a scores.RelativeBias, or set of_distance = False.",
            )
        if self.cache is not None and self.cache.window is not None:
            raise ArgumentError(
                f"The layer's position_bias returned a {type(bias).__name__}, which may depend on absolute positions, "
                "and a cache with a window drops the first ones.",
                "Return a scores.RelativeBias if only the distance matters, or give a cache that keeps all keys: "
                "KeyValueCache().",
            )


def check_is_cache(cache: object) -> None:
    """Raise an ArgumentError if the argument `cache` is not a KeyValueCache."""
    if not isinstance(cache, KeyValueCache):
        raise ArgumentError(
            f"cache is a {type(cache).__name__}.", "Give a KeyValueCache() of this layer's own, the same in every call."
        )


def check_bias_signature(position_bias: nn.Module) -> None:
    """Raise an ArgumentError if `forward` of a position bias does not accept the arguments that the layer passes."""
    try:
        inspect.signature(position_bias.forward).bind(1, 1, query_start=0, device=None, dtype=None)
    except TypeError as error:
        raise ArgumentError(
            f"position_bias is a {type(position_bias).__name__}, whose forward does not take the positions of a call: "
            f"{error}.",
            "Define forward(self, queries, keys, *, query_start=0, device=None, dtype=None).",
        ) from error


def _check_tensors(x: object, memory: object, values: object) -> None:
    for name, tensor in (("x", x), ("memory", memory), ("values", values)):
        if isinstance(tensor, Tensor) or (tensor is None and name != "x"):
            continue
        if isinstance(tensor, Mask):
            raise DtypeError(
                f"{name} is the mask {tensor!r}, and must be a tensor.", f"Pass it by keyword: mask={tensor!r}."
            )
        raise DtypeError(
            f"{name} is a {type(tensor).__name__}, and must be a tensor.", "Give a tensor (batch, length, features)."
        )


def _is_autocast_on(device_type: str) -> bool:
    return torch.amp.is_autocast_available(device_type) and torch.is_autocast_enabled(device_type)


def _check_shapes(widths: LayerInputWidths, x: Tensor, memory: Tensor | None, values: Tensor | None) -> None:
    for name, tensor, width in (
        ("x", x, widths.x_width),
        ("memory", memory, widths.memory_width),
        ("values", values, widths.values_width),
    ):
        if tensor is None:
            continue
        if tensor.dim() != 3 or tensor.shape[2] != width:
            raise ShapeError(
                f"{name} has shape {tuple(tensor.shape)}.", f"Give (batch, length, features) with {width} features."
            )
        if widths.projection_dtype not in (None, tensor.dtype) and not _is_autocast_on(tensor.device.type):
            raise DtypeError(
                f"{name} has dtype {tensor.dtype}, and the layer has {widths.projection_dtype}.",
                f"Convert one of them, for example {name}.to({widths.projection_dtype}).",
            )
    if memory is None and (widths.memory_width != widths.x_width or values is not None):
        raise ShapeError(
            f"There is no memory, and the layer's keys are projected from {widths.memory_width} features"
            + (" and separate values are given." if values is not None else f", its queries from {widths.x_width}."),
            "Give memory: layer(x, memory).",
        )
    for name, tensor in (("memory", memory), ("values", values)):
        if tensor is not None and tensor.shape[0] != x.shape[0]:
            raise ShapeError(
                f"x has {x.shape[0]} samples and {name} has {tensor.shape[0]}.", "Give both the same batch."
            )
    if memory is not None and values is not None and values.shape[1] != memory.shape[1]:
        raise ShapeError(
            f"memory has {memory.shape[1]} keys and values has {values.shape[1]}.", "Give one value per key."
        )
