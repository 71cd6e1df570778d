"""Convert the weights of keras.layers.MultiHeadAttention to our layer; Keras itself is not needed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from multihead.compat.projections import copy_to_projections
from multihead.errors import ArgumentError, ShapeError
from multihead.errors.given import reject_given
from multihead.layer import MultiHeadAttention

__all__ = ["from_keras"]

_WEIGHT_AXES = {
    "query": "(features, heads, key_dim)",
    "key": "(features, kv_heads, key_dim)",
    "value": "(features, kv_heads, value_dim)",
    "attention_output": "(heads, value_dim, output_dim)",
}


def from_keras(weights: Mapping[str, Any] | Sequence[Any], *, dropout: float = 0.0) -> MultiHeadAttention:
    """Build a layer from the weights of a Keras layer, with equal outputs.

    The arguments of Keras are `layer(query, value, key)`, ours are `layer(query, key, value)`. For its attention_mask
    (batch, queries, keys), True = visible, pass `mask=masks.Keep(attention_mask, "batch queries keys")`; for
    use_causal_mask pass `mask=masks.Causal(), query_start=0`. For a query that sees no key, the output projection
    receives 0 here, and the mean of all values in Keras.

    Args:
        weights: `layer.get_weights()`, 8 arrays, or 4 without biases; or a dict of them by name, "query/kernel",
            "query/bias", and so on for key, value and attention_output, with any prefix. The weights of
            `GroupQueryAttention` are accepted too.
        dropout: fraction of the attention weights dropped in training; Keras does not store it among the weights.

    Returns:
        a layer with copies of the weights, in their dtype.

    Raises:
        ArgumentError: a weight is missing or unknown.
        ShapeError: an array does not have the shape that Keras uses.

    Source: keras.layers.MultiHeadAttention, whose kernels are (features, heads, key_dim) and
        (heads, value_dim, output_dim).

    >>> kernels = [np.zeros((16, 2, 4)), np.zeros((16, 2, 4)), np.zeros((16, 2, 5)), np.zeros((2, 5, 16))]
    >>> from_keras(kernels).v_proj
    Linear(in_features=16, out_features=10, bias=False)
    """
    named = _arrays_by_name(weights)
    kernels = {part: _tensor_of_variable(named, f"{part}/kernel") for part in _WEIGHT_AXES}
    for part, kernel in kernels.items():
        if kernel.dim() != 3:
            raise ShapeError(f"{part}/kernel has shape {tuple(kernel.shape)}.", f"Give {_WEIGHT_AXES[part]}.")
    query, key, value, output = kernels.values()
    heads, kv_heads = query.shape[1], key.shape[1]
    if query.shape[2] != key.shape[2] or value.shape[1] != kv_heads or output.shape[:2] != (heads, value.shape[2]):
        shapes = ", ".join(f"{part}/kernel {tuple(kernel.shape)}" for part, kernel in kernels.items())
        raise ShapeError(
            f"The kernels do not fit each other: {shapes}.",
            f"Give {', '.join(f'{part}/kernel {axes}' for part, axes in _WEIGHT_AXES.items())}.",
        )
    biased = "query/bias" in named
    layer = MultiHeadAttention(
        embed_dim=query.shape[0],
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=query.shape[2],
        value_head_dim=value.shape[2],
        key_dim=key.shape[0],
        value_dim=value.shape[0],
        output_dim=output.shape[2],
        bias=biased,
        dropout=dropout,
        dtype=query.dtype,
    )
    parameters: list[tuple[Tensor, Tensor | None]] = []
    for part, kernel in kernels.items():
        columns = kernel.flatten(0, 1) if part == "attention_output" else kernel.flatten(1, 2)
        bias = _tensor_of_variable(named, f"{part}/bias") if biased else None
        if bias is not None and bias.numel() != columns.shape[1]:
            raise ShapeError(f"{part}/bias has shape {tuple(bias.shape)}.", f"Give {columns.shape[1]} numbers.")
        parameters.append((columns.mT, None if bias is None else bias.flatten()))
    copy_to_projections(layer, parameters)
    return layer


def _arrays_by_name(weights: Mapping[str, Any] | Sequence[Any]) -> dict[str, Any]:
    """Return the arrays by the last two parts of their paths, such as "query/kernel"."""
    if not isinstance(weights, (Mapping, Sequence)) or isinstance(weights, (str, bytes)):
        reject_given("weights", weights, "weights of Keras", "Give layer.get_weights().")
    if not isinstance(weights, Mapping):
        arrays = list(weights)
        kinds = {4: ("kernel",), 8: ("kernel", "bias")}.get(len(arrays))
        if kinds is None:
            raise ArgumentError(
                f"weights has {len(arrays)} arrays.", "Give layer.get_weights(): 8 arrays, or 4 without biases."
            )
        return dict(zip((f"{part}/{kind}" for part in _WEIGHT_AXES for kind in kinds), arrays, strict=True))
    named = {"/".join(path.split(":")[0].split("/")[-2:]): array for path, array in weights.items()}
    kernels = [f"{part}/kernel" for part in _WEIGHT_AXES]
    biases = [f"{part}/bias" for part in _WEIGHT_AXES]
    expected = kernels + biases if any(bias in named for bias in biases) else kernels
    missing, unknown = [name for name in expected if name not in named], sorted(set(named) - {*kernels, *biases})
    if missing or unknown:
        problems = [
            f"{', '.join(names)} {problem}" for names, problem in ((missing, "missing"), (unknown, "unknown")) if names
        ]
        raise ArgumentError(f"Among the weights: {'; '.join(problems)}.", f"Give {', '.join(expected)}.")
    return named


def _tensor_of_variable(named: Mapping[str, Any], name: str) -> Tensor:
    array = named[name]
    return array.detach().clone() if isinstance(array, Tensor) else torch.from_numpy(np.array(array))
