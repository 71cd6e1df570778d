"""Flatten any leading batch dimensions into one, and restore them."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from multihead.errors import ShapeError
from multihead.scores.bias import Bias


class BatchDims(NamedTuple):
    """The leading dimensions before (heads, queries, head_dim), which are flattened into one batch for the call.

    >>> import torch
    >>> dims = BatchDims((2, 3))
    >>> batch = dims.flatten("q", torch.zeros(2, 3, 8, 5, 16))
    >>> batch.shape, dims.restore(batch).shape
    (torch.Size([6, 8, 5, 16]), torch.Size([2, 3, 8, 5, 16]))
    """

    sizes: tuple[int, ...]

    @staticmethod
    def from_query(q: Tensor) -> BatchDims | None:
        """Return the leading dimensions of q; None if q has exactly one, the batch."""
        if not isinstance(q, Tensor) or q.dim() == 4 or q.dim() < 3:
            return None  # if q has fewer than three dimensions, the check of the shapes raises an error later
        return BatchDims(tuple(q.shape[:-3]))

    def flatten(self, name: str, tensor: Tensor) -> Tensor:
        """Flatten (*leading, ...) to (batch, ...); raise a ShapeError if the leading dimensions differ from q's."""
        count = len(self.sizes)
        if tuple(tensor.shape[:count]) != self.sizes:
            raise ShapeError(
                f"q has the leading dimensions {self.sizes}, and {name} has shape {tuple(tensor.shape)}.",
                "Give all tensors the same dimensions before their heads.",
            )
        return tensor.reshape(-1, *tensor.shape[count:]) if count else tensor[None]

    def flatten_bias(self, bias: Bias | None) -> Bias | None:
        """Flatten the leading dimensions of a bias, each 1 or equal to q's; one of four dimensions is unchanged."""
        count = len(self.sizes)
        if not isinstance(bias, Tensor) or bias.dim() != count + 3:
            return bias
        if all(size == 1 for size in bias.shape[:count]):
            return bias.reshape(1, *bias.shape[count:])
        return self.flatten("bias", bias.expand(*self.sizes, *bias.shape[count:]))

    def flatten_query_start(self, query_start: int | Tensor | str | None) -> int | Tensor | str | None:
        """Flatten a query_start of shape (*leading) to (batch,); any other value is returned unchanged."""
        if isinstance(query_start, Tensor) and tuple(query_start.shape) == self.sizes:
            return query_start.reshape(-1)
        return query_start

    def restore(self, tensor: Tensor) -> Tensor:
        """Restore the leading dimensions: (batch, ...) -> (*leading, ...)."""
        return tensor.reshape(*self.sizes, *tensor.shape[1:])
