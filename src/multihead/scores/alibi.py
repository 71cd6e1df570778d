"""ALiBi: a bias that falls linearly with the distance between query and key, with one slope per head."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from multihead.errors.arguments import check_integer
from multihead.scores.relative import RelativeBias, offsets


def slopes_of(num_heads: int) -> tuple[float, ...]:
    """Return the slope of each head, per token: 2 ** (-8 h / heads) for h = 1, 2, ... where heads is a power of two.

    For any other number of heads, the slopes of the next smaller power of two come first, followed by every second
    slope of the next larger one, as in the paper's code.

    Source: arXiv:2108.12409, section 3, and its published code.

    >>> slopes_of(8) == tuple(2.0**-h for h in range(1, 9))
    True
    >>> [round(slope, 3) for slope in slopes_of(3)]
    [0.062, 0.004, 0.25]
    """
    check_integer("num_heads", num_heads)
    below = 1 << (num_heads.bit_length() - 1)
    slopes = [2.0 ** (-8 * h / below) for h in range(1, below + 1)]
    above = [2.0 ** (-8 * h / (2 * below)) for h in range(1, 2 * below + 1, 2)]
    return tuple((slopes + above)[:num_heads])


class ALiBi(nn.Module):
    """A bias of -slope * |distance|, without parameters.

    Args:
        num_heads: number of query heads.
        device: device of the slopes, which are float32.

    Raises:
        ArgumentError: num_heads is not a positive integer.

    Source: arXiv:2108.12409. The paper hides keys after the query; here their bias falls with the distance too.

    >>> bias = ALiBi(2)(queries=2, keys=3)
    >>> bias.tile(2, 3)[0, 0] * 16  # the first of two heads has the slope 1 / 16
    tensor([[-0., -1., -2.],
            [-1., -0., -1.]])
    """

    slopes: Tensor

    of_distance = True  # only the distance matters: samples with lengths may be packed in one row

    def __init__(self, num_heads: int, *, device: torch.device | str | None = None) -> None:
        super().__init__()
        self.num_heads = num_heads
        slopes = slopes_of(num_heads)
        self.register_buffer("slopes", torch.empty(len(slopes), dtype=torch.float32, device=device), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Recompute the slopes. Call it after `to_empty`, because a state_dict does not contain them."""
        with torch.no_grad():
            self.slopes.copy_(torch.tensor(slopes_of(self.num_heads)))

    def forward(
        self,
        queries: int,
        keys: int,
        *,
        query_start: int | Tensor = 0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> RelativeBias:
        """Compute the bias of a call.

        Args:
            queries: number of queries.
            keys: number of keys.
            query_start: position of the first query among the keys; a tensor (batch,) has one per sample.
            device: device of the bias; that of the slopes if None.
            dtype: dtype of the bias; float32 if None.

        Returns:
            `RelativeBias` with values (batch or 1, heads, queries + keys - 1).
        """
        slopes = self.slopes.float() if device is None else self.slopes.to(device, torch.float32)
        distance = offsets(queries, keys, query_start=query_start, device=slopes.device).abs()
        values = distance[:, None] * -slopes[:, None]  # (batch or 1, heads, queries + keys - 1)
        return RelativeBias(values if dtype is None else values.to(dtype))

    def extra_repr(self) -> str:
        """Return the number of heads, for `repr`."""
        return f"num_heads={self.num_heads}"
