"""Take calls whose batch has any number of dimensions, or none, as calls with one, and give back what was given."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from multihead.errors import ShapeError
from multihead.scores.bias import Bias


class BatchDims(NamedTuple):
    """The dimensions of a call before (heads, queries, head_dim); the mask speaks of them flattened, in their order.

    >>> import torch
    >>> leading = BatchDims((2, 3))
    >>> batch = leading.joined("q", torch.zeros(2, 3, 8, 5, 16))
    >>> batch.shape, leading.apart(batch).shape
    (torch.Size([6, 8, 5, 16]), torch.Size([2, 3, 8, 5, 16]))
    """

    sizes: tuple[int, ...]

    @staticmethod
    def of(q: Tensor) -> BatchDims | None:
        """Return the leading dimensions of q where they are not one, or None: then there is nothing to do."""
        if not isinstance(q, Tensor) or q.dim() == 4 or q.dim() < 3:
            return None  # fewer than three are refused with the shape
        return BatchDims(tuple(q.shape[:-3]))

    def joined(self, name: str, tensor: Tensor) -> Tensor:
        """Make one dimension of the leading ones.

        Raises:
            ShapeError: the tensor has others.
        """
        count = len(self.sizes)
        if tuple(tensor.shape[:count]) != self.sizes:
            raise ShapeError(
                f"q has the leading dimensions {self.sizes}, and {name} has shape {tuple(tensor.shape)}.",
                "Give all tensors the same dimensions before their heads.",
            )
        return tensor.reshape(-1, *tensor.shape[count:]) if count else tensor[None]

    def joined_bias(self, bias: Bias | None) -> Bias | None:
        """Make one dimension of the leading ones of a bias, each of them 1 or that of q; four dimensions stay."""
        count = len(self.sizes)
        if not isinstance(bias, Tensor) or bias.dim() != count + 3:
            return bias
        if all(size == 1 for size in bias.shape[:count]):
            return bias.reshape(1, *bias.shape[count:])
        return self.joined("bias", bias.expand(*self.sizes, *bias.shape[count:]))

    def joined_start(self, query_start: int | Tensor | str | None) -> int | Tensor | str | None:
        """Flatten the positions of the first queries, where they come in the leading dimensions."""
        if isinstance(query_start, Tensor) and tuple(query_start.shape) == self.sizes:
            return query_start.reshape(-1)
        return query_start

    def apart(self, tensor: Tensor) -> Tensor:
        """Give back the leading dimensions: (batch, ...) -> (*leading, ...)."""
        return tensor.reshape(*self.sizes, *tensor.shape[1:])
