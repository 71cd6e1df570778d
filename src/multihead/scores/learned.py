"""A learned bias: a number for each head, place of a query and place of a key."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from multihead.errors import ShapeError, refuse_unless_integer
from multihead.tracing import readable


class LearnedBias(nn.Module):
    """A table of biases by absolute places, up to a size.

    Args:
        num_heads: number of query heads.
        queries: how many places of queries the table has.
        keys: how many places of keys it has.
        device: where the weight is made.
        dtype: of the weight.

    Raises:
        ArgumentError: a size that is no positive integer.

    The parameter `weight`, (num_heads, queries, keys), begins at 0.

    >>> bias = LearnedBias(num_heads=8, queries=16, keys=16)
    >>> bias(queries=4, keys=10).shape
    torch.Size([1, 8, 4, 10])
    """

    of_distance = False  # it speaks of absolute places

    def __init__(
        self,
        num_heads: int,
        queries: int,
        keys: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        for name, size in (("num_heads", num_heads), ("queries", queries), ("keys", keys)):
            refuse_unless_integer(name, size)
        self.num_heads, self.queries, self.keys = num_heads, queries, keys
        self.weight = nn.Parameter(torch.empty(num_heads, queries, keys, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the table to 0: a layer begins as one without it."""
        nn.init.zeros_(self.weight)

    def forward(
        self,
        queries: int,
        keys: int,
        *,
        query_start: int | Tensor = 0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """Cut the bias of a call out of the table; gradients flow to it.

        Args:
            queries: number of queries.
            keys: number of keys.
            query_start: where the first query stands; a tensor (batch,) has one a sample, and a query that is
                padding and stands at no place takes the nearest one.
            device: of the bias; that of the weight if None.
            dtype: of the bias; that of the weight if None.

        Returns: (batch or 1, heads, queries, keys).

        Raises:
            ShapeError: places that the table does not have.
        """
        weight = self.weight.to(device=device, dtype=dtype)
        if not isinstance(query_start, Tensor) and query_start < 0:  # some stand before the first place
            query_start = torch.tensor([query_start])
        if not isinstance(query_start, Tensor):
            self._refuse_unless_within(query_start + queries, keys)
            return weight[None, :, query_start : query_start + queries, :keys]
        # Which queries are padding is not known here, but one sample at least has as many tokens as the longest.
        furthest = 0
        if query_start.numel() and readable(query_start.device):
            first, last = (int(end) for end in query_start.aminmax())
            furthest = max(first + queries, last)
        self._refuse_unless_within(furthest, keys)
        rows = query_start.to(weight.device)[:, None] + torch.arange(queries, device=weight.device)
        rows = rows.clamp(0, self.queries - 1)  # (batch, queries)
        return weight[:, :, :keys][:, rows].transpose(0, 1)

    def _refuse_unless_within(self, queries: int, keys: int) -> None:
        if queries > self.queries or keys > self.keys:
            raise ShapeError(
                f"The learned bias has places for {self.queries} queries and {self.keys} keys, and the call reaches "
                f"to {queries} and {keys}.",
                "Make it larger, or give fewer tokens.",
            )

    def extra_repr(self) -> str:
        """Say the sizes."""
        return f"num_heads={self.num_heads}, queries={self.queries}, keys={self.keys}"
