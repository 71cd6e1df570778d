"""Position biases as modules: ALiBi, a learned table of absolute positions, and T5's distance buckets."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from multihead.errors import ArgumentError, ShapeError
from multihead.errors.arguments import check_integer
from multihead.scores.bias import RelativeBias, offsets
from multihead.tensors.tracing import can_read_values


def alibi_slopes(num_heads: int) -> tuple[float, ...]:
    """Return the slope of each head, per token: 2 ** (-8 h / heads) for h = 1, 2, ... where heads is a power of two.

    Otherwise the slopes of the next smaller power of two come first, followed by every second slope of the next larger
    power of two, as in the paper's code.

    Source: arXiv:2108.12409, section 3, and its published code.

    >>> alibi_slopes(8) == tuple(2.0**-h for h in range(1, 9))
    True
    >>> [round(slope, 3) for slope in alibi_slopes(3)]
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

    Source: arXiv:2108.12409. The paper hides keys after the query; here the bias of these keys also falls with the
    distance.

    >>> bias = ALiBi(2)(queries=2, keys=3)
    >>> bias.tile(2, 3)[0, 0] * 16  # the first of two heads has the slope 1 / 16
    tensor([[-0., -1., -2.],
            [-1., -0., -1.]])
    """

    slopes: Tensor

    of_distance = True  # the bias depends only on the distance, so samples with lengths may be packed in one row

    def __init__(self, num_heads: int, *, device: torch.device | str | None = None) -> None:
        super().__init__()
        self.num_heads = num_heads
        slopes = alibi_slopes(num_heads)
        self.register_buffer("slopes", torch.empty(len(slopes), dtype=torch.float32, device=device), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Recompute the slopes. Call it after `to_empty`, because a state_dict does not contain them."""
        with torch.no_grad():
            self.slopes.copy_(torch.tensor(alibi_slopes(self.num_heads)))

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
            query_start: position of the first query among the keys, an int or (batch,).
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
        """Set the table to 0, so that a new layer computes the same as without the bias."""
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
        """Return the bias of a call, a slice of the table; gradients flow to the weight.

        Args:
            queries: number of queries.
            keys: number of keys.
            query_start: position of the first query, an int or (batch,). Padding queries with a position outside the
                table use the nearest row.
            device: device of the bias; that of the weight if None.
            dtype: dtype of the bias; that of the weight if None.

        Returns:
            (batch or 1, heads, queries, keys).

        Raises:
            ShapeError: a position is outside the table.
        """
        weight = self.weight.to(device=device, dtype=dtype)
        if not isinstance(query_start, Tensor) and query_start < 0:  # the first query is before position 0
            query_start = torch.tensor([query_start])
        if not isinstance(query_start, Tensor):
            self._check_within_table(query_start + queries, keys)
            return weight[None, :, query_start : query_start + queries, :keys]
        # Which queries are padding is unknown here, but at least one sample has no padding.
        furthest = 0
        if query_start.numel() and can_read_values(query_start.device):
            first, last = (int(end) for end in query_start.aminmax())
            furthest = max(first + queries, last)
        self._check_within_table(furthest, keys)
        rows = query_start.to(weight.device)[:, None] + torch.arange(queries, device=weight.device)
        rows = rows.clamp(0, self.queries - 1)  # (batch, queries)
        return weight[:, :, :keys][:, rows].transpose(0, 1)

    def _check_within_table(self, queries: int, keys: int) -> None:
        if queries > self.queries or keys > self.keys:
            raise ShapeError(
                f"The learned bias has {self.queries} query positions and {self.keys} key positions, and the call "
                f"needs {queries} and {keys}.",
                "Create it with larger sizes, or give fewer tokens.",
            )

    def extra_repr(self) -> str:
        """Return the sizes, for `repr`."""
        return f"num_heads={self.num_heads}, queries={self.queries}, keys={self.keys}"


def distance_buckets(distances: Tensor, *, num_buckets: int, max_distance: int, both_ways: bool) -> Tensor:
    """Return the bucket of each distance (key position - query position, tokens), int64 from 0 to num_buckets - 1.

    Half of the buckets contain one distance each; the others grow logarithmically up to max_distance, and the last
    bucket contains all larger distances. With both_ways, half of all buckets are for keys after the query; otherwise
    these keys share bucket 0.

    Source: arXiv:1910.10683, section 2.1, and its published code, whose float32 logarithm decides at bucket edges.

    >>> distance_buckets(torch.tensor([0, -1, -8, -100, 1]), num_buckets=8, max_distance=20, both_ways=False)
    tensor([0, 1, 5, 7, 0])
    """
    first: Tensor | int = 0  # the first bucket of the side (before or after the query) that a key is on
    if both_ways:
        num_buckets //= 2
        first = (distances > 0).long() * num_buckets
        distances = distances.abs()
    else:
        distances = -distances.clamp(max=0)
    single = num_buckets // 2
    growth = (distances.clamp(min=1).float() / single).log() / math.log(max_distance / single)
    wide = single + (growth * (num_buckets - single)).long()
    return first + torch.where(distances < single, distances, wide.clamp(max=num_buckets - 1))


class T5Bias(nn.Module):
    """A learned bias per head and distance bucket; layers may share one module, as in T5.

    The parameter `weight`, (num_buckets, num_heads), is T5's `relative_attention_bias.weight`. T5 does not scale
    scores: construct the layer with scale=1.0 to load T5's weights.

    Args:
        num_heads: number of query heads.
        num_buckets: number of distance buckets.
        max_distance: distance in tokens from which all keys share the last bucket.
        both_ways: whether keys after the query have their own buckets (encoder); in a decoder such keys are hidden.
        device: device of the weight.
        dtype: dtype of the weight.

    Raises:
        ArgumentError: a number is out of range, or num_buckets is odd and both_ways is True.

    Source: arXiv:1910.10683, section 2.1.

    >>> bias = T5Bias(num_heads=8)
    >>> bias(queries=10, keys=10).values.shape
    torch.Size([1, 8, 19])
    """

    of_distance = True  # the bias depends only on the distance, so samples with lengths may be packed in one row

    def __init__(
        self,
        num_heads: int,
        num_buckets: int = 32,
        max_distance: int = 128,
        *,
        both_ways: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_integer("num_heads", num_heads)
        min_buckets = 4 if both_ways else 2
        check_integer("num_buckets", num_buckets, least=min_buckets)
        if both_ways and num_buckets % 2:
            raise ArgumentError(
                f"num_buckets is {num_buckets}, and half of the buckets are for keys after the query.",
                "Give an even number, or both_ways=False.",
            )
        single = num_buckets // min_buckets  # buckets that hold one distance each
        check_integer("max_distance", max_distance, least=single + 1)
        self.num_heads, self.num_buckets, self.max_distance = num_heads, num_buckets, max_distance
        self.both_ways = both_ways
        self.weight = nn.Parameter(torch.empty(num_buckets, num_heads, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise the weight from a normal distribution with a standard deviation of 0.02."""
        nn.init.normal_(self.weight, std=0.02)

    def forward(
        self,
        queries: int,
        keys: int,
        *,
        query_start: int | Tensor = 0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> RelativeBias:
        """Compute the bias of a call; gradients flow to the weight.

        Args:
            queries: number of queries.
            keys: number of keys.
            query_start: position of the first query among the keys, an int or (batch,).
            device: device of the bias; that of the weight if None.
            dtype: dtype of the bias; that of the weight if None.

        Returns:
            `RelativeBias` with values (batch or 1, heads, queries + keys - 1).
        """
        weight = self.weight.to(device=device, dtype=dtype)
        buckets = distance_buckets(
            offsets(queries, keys, query_start=query_start, device=weight.device),
            num_buckets=self.num_buckets,
            max_distance=self.max_distance,
            both_ways=self.both_ways,
        )  # (batch or 1, queries + keys - 1)
        return RelativeBias(nn.functional.embedding(buckets, weight).mT)

    def extra_repr(self) -> str:
        """Return the sizes, for `repr`."""
        sizes = f"num_heads={self.num_heads}, num_buckets={self.num_buckets}, max_distance={self.max_distance}"
        return f"{sizes}, both_ways={self.both_ways}"
