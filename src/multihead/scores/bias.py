"""A bias added to the scores, as a dense tensor or per distance (`RelativeBias`); -inf hides a key like a mask.

`RelativeBias` holds one number per diagonal of the attention map. The native kernel reads it as a dense tensor with a
row stride of -1, which needs no extra code. The gradient of the values is written in rows that are each shifted by one
number, so that summing columns sums diagonals.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from multihead.errors import DtypeError, ShapeError
from multihead.tensors.shapes import AttentionShape, describe_type, index_axes
from multihead.tensors.tracing import is_traced


@dataclass(frozen=True, eq=False)
class RelativeBias:
    """A bias that adds `values[..., j - i + queries - 1]` to the score of query i and key j.

    The bias is constant along each diagonal of the map, so it stores queries + keys - 1 numbers and not queries x keys.

    Args:
        values: (batch or 1, heads or 1, queries + keys - 1), one per distance key - query, ascending; -inf hides the
            key.

    Raises:
        DtypeError: values is not a floating point tensor.
        ShapeError: values does not have three dimensions.

    >>> bias = RelativeBias(-offsets(3, 3).abs()[None].float())  # a penalty that grows with the distance
    >>> bias.tile(3, 3)[0, 0]
    tensor([[-0., -1., -2.],
            [-1., -0., -1.],
            [-2., -1., -0.]])
    """

    values: Tensor

    def __post_init__(self) -> None:
        if not isinstance(self.values, Tensor) or not self.values.is_floating_point():
            raise DtypeError(
                f"RelativeBias was given {describe_type(self.values)}, and it is added to floating point scores.",
                "Give a floating point tensor (batch, heads, queries + keys - 1).",
            )
        if self.values.dim() != 3:
            raise ShapeError(
                f"RelativeBias was given a tensor of shape {tuple(self.values.shape)}.",
                "Give (batch, heads, queries + keys - 1), with 1 for batch and heads where all have the same.",
            )

    def tile(self, queries: int, keys: int, *, rows: slice = slice(None), columns: slice = slice(None)) -> Tensor:
        """Return a dense tile: (batch or 1, heads or 1, rows, columns)."""
        row = torch.arange(queries, device=self.values.device)[rows]
        column = torch.arange(keys, device=self.values.device)[columns]
        return self.values[:, :, column - row[:, None] + queries - 1]

    def slice_ranges(self, queries: int, rows: tuple[int, int], columns: tuple[int, int]) -> RelativeBias:
        """Return the bias for the queries `rows` and the keys `columns`, [first, stop) each."""
        first = columns[0] - rows[0] + queries - (rows[1] - rows[0])
        count = max(rows[1] - rows[0] + columns[1] - columns[0] - 1, 0)
        return RelativeBias(self.values[:, :, first : first + count])


def offsets(queries: int, keys: int, *, query_start: int | Tensor = 0, device: torch.device | str = "cpu") -> Tensor:
    """Return the offset from query to key, key position - query position, for each entry of `RelativeBias.values`.

    Args:
        queries: number of queries.
        keys: number of keys.
        query_start: position of the first query among the keys, an int or (batch,).
        device: device of the result.

    Returns:
        (batch or 1, queries + keys - 1), int64, tokens; negative for keys before the query.

    >>> offsets(2, 3)
    tensor([[-1,  0,  1,  2]])
    """
    start = query_start.to(device)[:, None] if isinstance(query_start, Tensor) else query_start
    stop = keys if torch.compiler.is_compiling() else max(keys, 1 - queries)  # a compiled graph has at least one token
    return torch.arange(1 - queries, stop, device=device)[None] - start


Bias: TypeAlias = "Tensor | RelativeBias"


def check_bias_fits(bias: object, shape: AttentionShape) -> None:
    """Raise an error unless a bias is a RelativeBias or a float tensor that broadcasts to the scores."""
    if isinstance(bias, RelativeBias):
        _check_relative_fits(bias, shape)
        return
    sizes = (shape.batch, shape.num_heads, shape.query_length, shape.key_length)
    if not isinstance(bias, Tensor) or not bias.is_floating_point():
        raise DtypeError(
            f"bias is {describe_type(bias)}, and it is added to floating point scores.",
            "Give a floating point tensor; to hide keys, give a mask, for example mask=masks.Keep(t).",
        )
    if bias.device != shape.device:
        raise DtypeError(f"bias is on {bias.device} and q is on {shape.device}.", "Move it: bias.to(q.device).")
    if bias.dim() != 4 or any(length not in (1, size) for length, size in zip(bias.shape, sizes, strict=True)):
        raise ShapeError(
            f"bias has shape {tuple(bias.shape)}, and it is added to (batch, heads, queries, keys) = {sizes}.",
            "Give four dimensions, each of that size or 1.",
        )


def _check_relative_fits(bias: RelativeBias, shape: AttentionShape) -> None:
    given, sizes = tuple(bias.values.shape), (shape.batch, shape.num_heads, shape.query_length + shape.key_length - 1)
    if bias.values.device != shape.device:
        raise DtypeError(f"bias is on {bias.values.device} and q is on {shape.device}.", "Move it: to(q.device).")
    # In a trace, lengths may be symbolic; the operator checks them again when it runs.
    fits = is_traced() or given[2] == max(sizes[2], 0)
    if given[0] not in (1, sizes[0]) or given[1] not in (1, sizes[1]) or not fits:
        raise ShapeError(
            f"bias is RelativeBias with values of shape {given}, and there are {shape.query_length} queries and "
            f"{shape.key_length} keys.",
            f"Give (batch or 1, heads or 1, queries + keys - 1) = {sizes}, or 1 for the first two.",
        )


def values_of(bias: Bias) -> Tensor:
    """Return the tensor of a bias: the values of a RelativeBias, or the dense tensor itself."""
    return bias.values if isinstance(bias, RelativeBias) else bias


def with_values(bias: Bias, values: Tensor) -> Bias:
    """Return a bias of the same type (RelativeBias or tensor) with other values."""
    return RelativeBias(values) if isinstance(bias, RelativeBias) else values


def index_bias(bias: Bias | None, indices: Mapping[int, slice | Tensor]) -> Bias | None:
    """Index samples (axis 0) and heads (axis 1) of a bias, axis -> index; an axis of size 1 is kept."""
    return None if bias is None else with_values(bias, index_axes(values_of(bias), indices))


def dense_bias(bias: Bias, queries: int, keys: int) -> Tensor:
    """Return a bias as a tensor broadcasting to (batch, heads, queries, keys)."""
    return bias if isinstance(bias, Tensor) else bias.tile(queries, keys)


def add_biases(bias: Bias, other: Bias, queries: int, keys: int) -> Bias:
    """Add two biases. The sum is a RelativeBias where both are."""
    if isinstance(bias, RelativeBias) and isinstance(other, RelativeBias):
        return RelativeBias(bias.values + other.values)
    return dense_bias(bias, queries, keys) + dense_bias(other, queries, keys)


def prepend_zero_column(bias: Bias, queries: int, keys: int) -> Tensor:
    """Prepend a column of zeros to a bias, for a key that is prepended."""
    return torch.nn.functional.pad(dense_bias(bias, queries, keys).expand(-1, -1, -1, keys), (1, 0))


def slice_bias(bias: Bias, queries: int, rows: tuple[int, int], keys: tuple[int, int]) -> Bias:
    """Return a view of a bias for the queries `rows` and the keys `keys`, [first, stop) each, of the same type."""
    if isinstance(bias, RelativeBias):
        return bias.slice_ranges(queries, rows, keys)
    return index_axes(bias, {2: slice(*rows), 3: slice(*keys)})


def bias_tile(bias: Bias, shape: AttentionShape, queries: slice, keys: slice) -> Tensor:
    """Slice a tile of a bias, keeping axes of size 1: (batch or 1, heads or 1, queries or 1, keys or 1)."""
    if isinstance(bias, RelativeBias):
        return bias.tile(shape.query_length, shape.key_length, rows=queries, columns=keys)
    return index_axes(bias, {2: queries, 3: keys})
