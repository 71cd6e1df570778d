"""The arguments of a layer's call as one value, checked before the projections would raise less clear errors.

Functions outside the layer pass on the arguments of an attention as one tuple (`AttentionArguments`), because a
`NamedTuple` takes 0.5 microseconds to make, a twentieth of the time of a small call.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from multihead.errors import ArgumentError, DtypeError, ShapeError
from multihead.kernels import sequence_split
from multihead.kernels.call import AttentionArguments
from multihead.kernels.quantised import Int8Scales
from multihead.kernels.sequence_split import reject_split_sequence
from multihead.layer.cache import KeyValueCache
from multihead.layer.packing import Packing, Padding, PaddingSide, check_packed
from multihead.layer.sharding import LayerOfLocalHeads, ShardableLayer
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


class LayerInputs(NamedTuple):
    """The tensors from which a call projects queries, keys and values: (batch, length, features) each.

    Attributes:
        x: the input of the queries.
        memory: the input of the keys; x itself in self-attention.
        values: the input of the values; memory itself unless the call has others.
        has_batch_dim: whether x was given with a batch.
    """

    x: Tensor
    memory: Tensor
    values: Tensor
    has_batch_dim: bool = True


class KeysOfCall(NamedTuple):
    """The keys and values of an attention, those of a cache included.

    Attributes:
        k: (batch, kv_heads, keys, head_dim).
        v: (batch, kv_heads, keys, value_head_dim).
        mask: which of these keys each query may see; hides the padding.
        query_start: the position of the first query among these keys.
        scales: the dequantisation factors of int8 k and v, or None.
    """

    k: Tensor
    v: Tensor
    mask: Mask
    query_start: int | Tensor
    scales: Int8Scales | None = None


class PreparedAttention(NamedTuple):
    """A call before its attention, and what its last steps need, as `MultiHeadAttention._prepare_attention` found it.

    Attributes:
        q: (batch, heads, queries, head_dim).
        keys: the keys and values.
        arguments: the other arguments of the attention.
        padding: the padding of x and memory.
        cache: the keys and values of earlier calls, or None.
        is_cross_attention: whether keys and queries come from different sequences, for listeners; None if unknown.
        local_layer: the layer, or its attributes sliced to the heads of this process.
        head_gates: the caller's gates of the heads of this process, or None.
        has_batch_dim: whether x was given with a batch.
    """

    q: Tensor
    keys: KeysOfCall
    arguments: AttentionArguments
    padding: Padding
    cache: KeyValueCache | None
    is_cross_attention: bool | None
    local_layer: ShardableLayer | LayerOfLocalHeads
    head_gates: Tensor | None
    has_batch_dim: bool


class LayerCall(NamedTuple):
    """The arguments of a call of `MultiHeadAttention`, as `forward` received them.

    Attributes:
        x: (batch, queries, embed_dim), or (queries, embed_dim).
        mask: which keys each query may see; no default, because torch 2.11 cannot compile one that is a mask.
        memory: (batch, keys, key_dim), or None.
        values: (batch, keys, value_dim), or None.
        bias: added to the scores, or None.
        lengths: (batch,), or None.
        memory_lengths: (batch,), or None.
        padding_side: "right" or "left".
        packing: the positions of packed tokens in their samples, or None.
        cache: the keys and values of earlier calls, or None.
        head_gates: (heads,), or broadcasting to (batch, heads, queries), or None.
        query_start: the position of the first query, or None.
    """

    x: Tensor
    mask: Mask
    memory: Tensor | None = None
    values: Tensor | None = None
    bias: Bias | None = None
    lengths: Sequence[int] | Tensor | None = None
    memory_lengths: Sequence[int] | Tensor | None = None
    padding_side: PaddingSide = "right"
    packing: Packing | None = None
    cache: KeyValueCache | None = None
    head_gates: Tensor | None = None
    query_start: int | Tensor | str | None = None

    def find_padding(self, inputs: LayerInputs, layer: ShardableLayer, *, intercepted: bool) -> Padding:
        """Return the padding of the inputs of a layer's call, from lengths or packing.

        `intercepted`: whether a tracer, a mode or a transform runs around the call.
        """
        x, memory = inputs.x, inputs.memory
        # If only differences of positions matter, all samples can be attended in one row of tokens, as documents.
        in_one_row = (
            memory is x
            and self.bias is None
            and self.cache is None
            and (self.query_start is None or (isinstance(self.query_start, int) and self.query_start == 0))
            and (self.head_gates is None or self.head_gates.dim() == 1)
            and layer.bias_k is None
            and (layer.position_bias is None or getattr(layer.position_bias, "of_distance", False))
            and self.mask.translation_invariant
            and self.mask.defines_interval  # other masks would be evaluated densely over all tokens
        )
        sequence = sequence_split.active_split
        if self.packing is not None:
            return Padding.of_packed(self.packing, in_one_row=in_one_row)
        if sequence is not None and self.lengths is not None:
            return Padding.of_split_sequence(sequence, x, self.lengths, self.padding_side)
        lengths, side = (self.lengths, self.memory_lengths), self.padding_side
        return Padding.of_call(x, memory, *lengths, in_one_row=in_one_row, side=side, intercepted=intercepted)

    # ---- checks of the arguments

    def check_inputs(self, widths: LayerInputWidths) -> LayerInputs:
        """Check x, memory and values, and return them with a batch and with defaults filled in.

        The default of memory is x, and the default of values is memory. Raises an error about the first invalid input.
        """
        check_is_mask(self.mask)
        _check_tensors(self.x, self.memory, self.values)
        has_batch_dim = self.x.dim() != 2
        x, memory, values = (self.x, self.memory, self.values) if has_batch_dim else self._add_batch_dimension()
        _check_shapes(widths, x, memory, values)
        if memory is None and self.memory_lengths is not None and self.lengths is not None:
            raise ArgumentError(
                "lengths and memory_lengths are both given, and there is no memory.",
                "Give lengths alone: in self-attention they are those of queries and keys.",
            )
        memory = x if memory is None else memory
        return LayerInputs(x, memory, memory if values is None else values, has_batch_dim)

    def _add_batch_dimension(self) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return x, memory and values (length, features) with a batch axis; equal inputs stay one tensor."""
        for name, tensor in (("memory", self.memory), ("values", self.values)):
            if tensor is not None and tensor.dim() != 2:
                raise ShapeError(
                    f"x has shape {tuple(self.x.shape)} and {name} has shape {tuple(tensor.shape)}.",
                    "Give all of them a batch, or none.",
                )
        x = self.x[None]
        memory = None if self.memory is None else x if self.memory is self.x else self.memory[None]
        values = None if self.values is None else memory if self.values is self.memory else self.values[None]
        return x, memory, values

    def check_packing(self, packing: Packing, x: Tensor) -> None:
        """Check that x (1, tokens, features) fits `packing`, and that memory, lengths and cache are not given."""
        check_packed("x", x, packing)
        for name, given in (("memory", self.memory), ("lengths", self.lengths), ("cache", self.cache)):
            if given is not None and given is not self.x:
                raise ArgumentError(
                    f"packing and {name} are both given.",
                    "Packed tokens attend within their own samples: give packing alone, or unpack them first.",
                )

    def check_cache(self, cache: KeyValueCache, inputs: LayerInputs) -> None:
        """Check that a cache fits the call: a cache with a window must keep all keys that the mask shows."""
        if inputs.memory is not inputs.x:
            cache.check_same_memory(inputs.memory)
            return
        if self.query_start is not None:
            raise ArgumentError(
                f"query_start is {self.query_start!r}, and a cache is given, which knows the position of the next "
                "token.",
                "Leave query_start out.",
            )
        cache.check_window_fits_mask(self.mask)

    def check_sequence_split(self, inputs: LayerInputs, *, added_key: bool) -> None:
        """Reject arguments that a split sequence does not support; `added_key`: whether add_bias_kv is set."""
        if self.memory_lengths is not None:
            reject_split_sequence("memory_lengths=", "Give lengths=, with the lengths of the whole sequences.")
        if self.packing is not None:
            reject_split_sequence("packing=", "Give mask=masks.Documents(lengths), with the lengths of all documents.")
        if self.cache is not None:
            reject_split_sequence("A cache", "Decode outside of context_parallel.")
        if inputs.memory is not inputs.x:
            reject_split_sequence("Cross-attention", "Compute it outside of context_parallel.")
        if added_key:
            reject_split_sequence("add_bias_kv", "Use sinks=True, or add_zero_attn=True.")


def check_position_bias(bias: object, padding: Padding, cache: KeyValueCache | None) -> None:
    """Reject a position bias that is not a RelativeBias, if samples are packed or a cache's window drops keys.

    A tensor may depend on absolute positions, which are unknown then; a RelativeBias cannot.
    """
    if isinstance(bias, RelativeBias):
        return
    if padding.documents is not None:
        raise ArgumentError(
            f"The layer's position_bias has of_distance = True, and returned a {type(bias).__name__}.",
            "Return a scores.RelativeBias, or set of_distance = False.",
        )
    if cache is not None and cache.window is not None:
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
