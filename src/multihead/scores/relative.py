"""A bias that depends only on the distance from query to key, in memory linear in the length."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from multihead.errors import DtypeError, ShapeError


@dataclass(frozen=True, eq=False)
class RelativeBias:
    """A bias that adds `values[..., j - i + queries - 1]` to the score of query i and key j.

    It is constant along each diagonal of the map, so it stores queries + keys - 1 numbers and not queries x keys.

    Args:
        values: (batch or 1, heads or 1, queries + keys - 1), from the key furthest before its query to the key
            furthest after it; -inf hides the key.

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
            given = (
                f"a {self.values.dtype} tensor"
                if isinstance(self.values, Tensor)
                else f"a {type(self.values).__name__}"
            )
            raise DtypeError(
                f"RelativeBias was given {given}, and it is added to floating point scores.",
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

    def part(self, queries: int, rows: tuple[int, int], columns: tuple[int, int]) -> RelativeBias:
        """Return the bias between a range of the queries and a range of the keys, [first, stop) each."""
        first = columns[0] - rows[0] + queries - (rows[1] - rows[0])
        count = max(rows[1] - rows[0] + columns[1] - columns[0] - 1, 0)
        return RelativeBias(self.values[:, :, first : first + count])


def offsets(queries: int, keys: int, *, query_start: int | Tensor = 0, device: torch.device | str = "cpu") -> Tensor:
    """Return the offset from query to key, key position - query position, for each entry of `RelativeBias.values`.

    Args:
        queries: number of queries.
        keys: number of keys.
        query_start: position of the first query among the keys; a tensor (batch,) has one per sample.
        device: device of the result.

    Returns:
        (batch or 1, queries + keys - 1), int64, tokens; negative for keys before the query.

    >>> offsets(2, 3)
    tensor([[-1,  0,  1,  2]])
    """
    start = query_start.to(device)[:, None] if isinstance(query_start, Tensor) else query_start
    stop = keys if torch.compiler.is_compiling() else max(keys, 1 - queries)  # a graph has no case of no tokens
    return torch.arange(1 - queries, stop, device=device)[None] - start
