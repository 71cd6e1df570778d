"""A learned bias per head, query position and key position."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from multihead.errors import ShapeError
from multihead.errors.arguments import check_integer
from multihead.tensors.tracing import readable


class LearnedBias(nn.Module):
    """A learned table of biases by absolute positions, up to a maximum length.

    The parameter `weight`, (num_heads, queries, keys), is initialised to 0.

    Args:
        num_heads: number of query heads.
        queries: number of query positions in the table.
        keys: number of key positions in the table.
        device: device of the weight.
        dtype: dtype of the weight.

    Raises:
        ArgumentError: a size is not a positive integer.

    >>> bias = LearnedBias(num_heads=8, queries=16, keys=16)
    >>> bias(queries=4, keys=10).shape
    torch.Size([1, 8, 4, 10])
    """

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
            check_integer(name, size)
        self.num_heads, self.queries, self.keys = num_heads, queries, keys
        self.weight = nn.Parameter(torch.empty(num_heads, queries, keys, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the table to 0: a new layer computes the same as one without the bias."""
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
        """Slice the bias of a call out of the table; gradients flow to the weight.

        Args:
            queries: number of queries.
            keys: number of keys.
            query_start: position of the first query; a tensor (batch,) has one per sample. Padding queries whose
                position is outside the table use the nearest row.
            device: device of the bias; that of the weight if None.
            dtype: dtype of the bias; that of the weight if None.

        Returns:
            (batch or 1, heads, queries, keys).

        Raises:
            ShapeError: a position is outside the table.
        """
        weight = self.weight.to(device=device, dtype=dtype)
        if not isinstance(query_start, Tensor) and query_start < 0:  # some are before the first position
            query_start = torch.tensor([query_start])
        if not isinstance(query_start, Tensor):
            self._check_within(query_start + queries, keys)
            return weight[None, :, query_start : query_start + queries, :keys]
        # Padding queries cannot be identified here, but at least one sample has no padding.
        furthest = 0
        if query_start.numel() and readable(query_start.device):
            first, last = (int(end) for end in query_start.aminmax())
            furthest = max(first + queries, last)
        self._check_within(furthest, keys)
        rows = query_start.to(weight.device)[:, None] + torch.arange(queries, device=weight.device)
        rows = rows.clamp(0, self.queries - 1)  # (batch, queries)
        return weight[:, :, :keys][:, rows].transpose(0, 1)

    def _check_within(self, queries: int, keys: int) -> None:
        if queries > self.queries or keys > self.keys:
            raise ShapeError(
                f"The learned bias has {self.queries} query positions and {self.keys} key positions, and the call "
                f"needs {queries} and {keys}.",
                "Create it with larger sizes, or give fewer tokens.",
            )

    def extra_repr(self) -> str:
        """Return the sizes, for `repr`."""
        return f"num_heads={self.num_heads}, queries={self.queries}, keys={self.keys}"
