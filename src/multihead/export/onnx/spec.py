"""Check the specification of an exported model: its inputs, mask, query positions and sizes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from multihead.errors import ArgumentError, MaskError
from multihead.errors.arguments import check_integer
from multihead.export.onnx.masks import QueryStart, fixed_sizes
from multihead.layer import MultiHeadAttention
from multihead.masks.base import Mask, check_is_mask

INPUTS = ("x", "memory", "values", "past", "lengths", "memory_lengths", "keep", "bias", "head_gates", "query_start")
OPSETS = (23, 24, 25)


@dataclass(frozen=True, eq=False)
class ModelSpec:
    """The checked specification of an exported model; a size is a number or a symbolic name.

    `start` is the position of the first query among the keys, or "query_start" if it is an input of the model. `opset`
    is the version of the standard operators.
    """

    inputs: frozenset[str]
    mask: Mask
    start: QueryStart
    opset: int
    batch: int | str
    queries: int | str
    keys: int | str

    @property
    def is_cross_attention(self) -> bool:
        """Whether the keys are computed from the input `memory`, not from x."""
        return "memory" in self.inputs

    @property
    def has_past(self) -> bool:
        """Whether the model has inputs with the keys and values of earlier calls."""
        return "past" in self.inputs

    @property
    def starts_at_zero(self) -> bool:
        """Whether the first query is at the position of the first key."""
        return isinstance(self.start, int) and not self.start

    @property
    def has_own_keys(self) -> bool:
        """Whether there is a key at each query's own position."""
        return not self.is_cross_attention and (self.starts_at_zero or self.has_past)


def check_spec(
    layer: MultiHeadAttention,
    inputs: Sequence[str],
    mask: Mask,
    query_start: int | Tensor | str | None,
    opset: int,
    sizes: dict[str, int | None],
) -> ModelSpec:
    """Check a layer and the specification of its model; see `multihead.export.onnx.to_model` for the arguments."""
    _check_layer(layer)
    check_is_mask(mask)
    if opset not in OPSETS:
        raise ArgumentError(
            f"opset is {opset!r}, and the operator Attention is supported for opsets 23, 24 and 25.",
            "Give one of them.",
        )
    _check_inputs(layer, inputs)
    start = _query_start_input(layer, inputs, mask, query_start)
    batch, queries, keys = _symbolic_sizes(layer, inputs, mask, start, sizes)
    return ModelSpec(frozenset(inputs), mask, start, opset, batch, queries, keys)


def _check_layer(layer: MultiHeadAttention) -> None:
    """Reject a layer whose forward or projections were replaced, or that has dropout in training mode."""
    if not isinstance(layer, MultiHeadAttention):
        raise ArgumentError(
            f"layer is a {type(layer).__name__}, not a multihead.MultiHeadAttention.",
            "Convert it first; multihead.compat converts many other layers.",
        )
    if type(layer).forward is not MultiHeadAttention.forward:
        raise ArgumentError(
            f"{type(layer).__name__} overrides forward, which cannot be exported.",
            "Give a multihead.MultiHeadAttention.",
        )
    if layer.training and layer.dropout:
        raise ArgumentError(
            f"The layer is in training mode with a dropout of {layer.dropout:.0%}, which cannot be exported.",
            "Call layer.eval() first.",
        )
    for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
        projection = getattr(layer, name)
        if projection is not None and getattr(type(projection), "forward", None) is not nn.Linear.forward:
            raise ArgumentError(
                f"{name} is a {type(projection).__name__}, which cannot be exported.",
                "Give a layer whose projections are plain nn.Linear; merge adapters such as LoRA into them first.",
            )


def _check_inputs(layer: MultiHeadAttention, inputs: Sequence[str]) -> None:
    unknown = [name for name in inputs if name not in INPUTS]
    if isinstance(inputs, str) or unknown or "x" not in inputs or len(set(inputs)) < len(inputs):
        raise ArgumentError(
            f"inputs is {inputs!r}.",
            f'Give "x", and any others of {", ".join(INPUTS[1:])}, each once.',
        )
    if "past" in inputs:
        _check_past(layer, inputs)
    if "memory" in inputs:
        return
    if needless := [name for name in ("values", "memory_lengths") if name in inputs]:
        raise ArgumentError(
            f"{needless[0]} is an input, and memory is not.", 'Give inputs=("x", "memory", ...) for cross-attention.'
        )
    if not layer.embed_dim == layer.key_dim == layer.value_dim:
        raise ArgumentError(
            f"memory is not an input, and the layer's queries are computed from {layer.embed_dim} features, its keys "
            f"from {layer.key_dim} and its values from {layer.value_dim}.",
            'Give inputs=("x", "memory", ...).',
        )


def _check_past(layer: MultiHeadAttention, inputs: Sequence[str]) -> None:
    """Reject inputs and options that the operator Attention does not support together with past keys and values."""
    if others := [name for name in ("memory", "lengths", "query_start") if name in inputs]:
        raise ArgumentError(
            f"past and {others[0]} are both inputs.",
            "Remove one of them: with past, the keys are the past keys followed by the keys of x, without padding.",
        )
    if layer.bias_k is not None or layer.sinks is not None or layer.add_zero_attn:
        raise ArgumentError(
            "past is an input, and the layer adds a key of its own (add_bias_kv, add_zero_attn or sinks), which the "
            "operator would place after the past keys.",
            "Give a layer without added keys, or remove past.",
        )


def _query_start_input(
    layer: MultiHeadAttention, inputs: Sequence[str], mask: Mask, query_start: int | Tensor | str | None
) -> QueryStart:
    if "query_start" in inputs:
        if query_start is not None:
            raise ArgumentError("query_start is both an input and an argument.", "Remove one of them.")
        return "query_start"
    if "past" in inputs:
        if query_start is not None:
            raise ArgumentError(
                f"query_start is {query_start!r}, and past is an input.",
                "Remove query_start: the queries follow the keys of past.",
            )
        return "end"
    if query_start is None:
        uses_positions = mask.uses_positions or layer.rotary is not None or layer.position_bias is not None
        if uses_positions and "memory" in inputs:
            raise ArgumentError(
                "memory is an input, and the mask or the layer depends on the positions of queries among the keys.",
                "Give the position of the first query: query_start=0 (as torch's is_causal) or "
                'query_start="end" (decoding).',
            )
        return 0
    if isinstance(query_start, str):
        if query_start != "end":
            raise ArgumentError(
                f"query_start is {query_start!r}.", 'Give an int, a tensor with one int per sample, or "end".'
            )
        return "end"
    if not isinstance(query_start, Tensor):
        check_integer("query_start", query_start, least=0)
    elif query_start.dim() != 1 or query_start.dtype not in (torch.int64, torch.int32):
        raise ArgumentError(
            f"query_start is a {query_start.dtype} tensor of shape {tuple(query_start.shape)}.",
            "Give one int per sample.",
        )
    return query_start


def _symbolic_sizes(
    layer: MultiHeadAttention, inputs: Sequence[str], mask: Mask, start: QueryStart, given: dict[str, int | None]
) -> tuple[int | str, int | str, int | str]:
    """Return batch, queries and keys: numbers that are given or fixed by the mask, else names of dynamic sizes."""
    fixed = fixed_sizes(mask)
    if fixed.get("heads", layer.num_heads) != layer.num_heads:
        raise MaskError(
            f"{mask!r} has {fixed['heads']} heads, and the layer has {layer.num_heads}.",
            f"Give it {layer.num_heads} heads, or 1.",
        )
    if isinstance(start, Tensor) and start.shape[0] > 1:
        fixed.setdefault("batch", start.shape[0])
    apart = "memory" in inputs or "past" in inputs
    named = {axis: given[axis] for axis in ("batch", "queries", "keys")}
    if not apart:  # queries and keys are the same tokens
        both = named["queries"] if named["keys"] is None else named["keys"]
        length = fixed.get("queries", fixed.get("keys"))
        named |= {"queries": both if named["queries"] is None else named["queries"], "keys": both}
        fixed |= {} if length is None else {axis: fixed.get(axis, length) for axis in ("queries", "keys")}
    for axis, size in named.items():
        if size is not None:
            check_integer(axis, size)
        if size is not None and fixed.get(axis, size) != size:
            raise MaskError(f"{mask!r} has {fixed[axis]} {axis}, and {axis} is {size}.", "Give them the same size.")
        named[axis] = fixed.get(axis, size)
    if not apart and named["queries"] != named["keys"]:
        raise ArgumentError(
            f"There are {named['queries']} queries and {named['keys']} keys, and neither memory nor past is an input.",
            "Give the same number of both: in self-attention they are the same tokens.",
        )
    fewest, most = named["queries"], named["keys"]
    if "past" in inputs and fewest is not None and most is not None and most < fewest:
        raise ArgumentError(
            f"There are {fewest} queries and {most} keys, including those of past.", f"Give at least {fewest} keys."
        )
    names = {"batch": "batch", "queries": "queries" if apart else "length", "keys": "keys" if apart else "length"}
    batch, queries, keys = (names[axis] if size is None else size for axis, size in named.items())
    return batch, queries, keys
