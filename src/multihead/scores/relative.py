"""A bias that depends on a key's distance from the query alone, held in memory that grows with the length."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from multihead.errors import DtypeError, ShapeError


@dataclass(frozen=True, eq=False)
class RelativeBias:
    """What is added to the score of query i and key j is `values[..., j - i + queries - 1]`.

    Written down for every query and key such a bias would take queries x keys memory; along a diagonal it is one
    number.

    Args:
        values: (batch or 1, heads or 1, queries + keys - 1), from the key furthest before its query to the one
            furthest behind; -inf hides.

    Raises:
        DtypeError: no floating point tensor.
        ShapeError: it has not three dimensions.

    >>> bias = RelativeBias(-offsets(3, 3).abs()[None].float())  # a key counts less the further away it is
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
        """Write out a tile: (batch or 1, heads or 1, rows, columns)."""
        row = torch.arange(queries, device=self.values.device)[rows]
        column = torch.arange(keys, device=self.values.device)[columns]
        return self.values[:, :, column - row[:, None] + queries - 1]

    def part(self, queries: int, rows: tuple[int, int], columns: tuple[int, int]) -> RelativeBias:
        """Keep what is added between some consecutive queries [first, behind) of all, and some consecutive keys."""
        first = columns[0] - rows[0] + queries - (rows[1] - rows[0])
        count = max(rows[1] - rows[0] + columns[1] - columns[0] - 1, 0)
        return RelativeBias(self.values[:, :, first : first + count])


def offsets(queries: int, keys: int, *, query_start: int | Tensor = 0, device: torch.device | str = "cpu") -> Tensor:
    """Tell how far from its query's position the key of each entry of `RelativeBias.values` stands.

    Args:
        queries: number of queries.
        keys: number of keys.
        query_start: where the first query stands among the keys; a tensor (batch,) has one a sample.
        device: where it is made.

    Returns: (batch or 1, queries + keys - 1), int64, key - position.

    >>> offsets(2, 3)
    tensor([[-1,  0,  1,  2]])
    """
    start = query_start.to(device)[:, None] if isinstance(query_start, Tensor) else query_start
    behind = keys if torch.compiler.is_compiling() else max(keys, 1 - queries)  # a graph has no case of no tokens
    return torch.arange(1 - queries, behind, device=device)[None] - start
