"""T5's relative position bias: a learned number per head and distance bucket, buckets widening with the distance."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from multihead.errors import ArgumentError
from multihead.errors.arguments import check_integer
from multihead.scores.relative import RelativeBias, offsets


def buckets_of(distances: Tensor, *, num_buckets: int, max_distance: int, both_ways: bool) -> Tensor:
    """Return the bucket of each distance.

    Half of the buckets hold one distance each, the others grow logarithmically up to max_distance, and the last one
    holds all larger distances. With both_ways, half of all buckets are for keys after the query; without, those keys
    share bucket 0.

    Args:
        distances: int64, key position - query position, any shape.
        num_buckets: number of buckets.
        max_distance: distance from which on all keys share the last bucket, tokens.
        both_ways: whether keys after the query have their own buckets.

    Returns:
        int64, from 0 to num_buckets - 1, shaped as distances.

    Source: arXiv:1910.10683, section 2.1, and its published code, whose float32 logarithm decides at bucket edges.

    >>> buckets_of(torch.tensor([0, -1, -8, -100, 1]), num_buckets=8, max_distance=20, both_ways=False)
    tensor([0, 1, 5, 7, 0])
    """
    first: Tensor | int = 0  # the first bucket of the query's side
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

    The parameter `weight`, (num_buckets, num_heads), is T5's `relative_attention_bias.weight`. T5 does not scale its
    scores: give the layer scale=1.0 to load its weights.

    Args:
        num_heads: number of query heads.
        num_buckets: number of distance buckets.
        max_distance: distance from which on all keys share the last bucket, tokens.
        both_ways: whether keys after the query have their own buckets, as in an encoder; in a decoder they are
            hidden.
        device: device of the weight.
        dtype: dtype of the weight.

    Raises:
        ArgumentError: a number is out of range, or num_buckets is odd and both_ways is True.

    Source: arXiv:1910.10683, section 2.1.

    >>> bias = T5Bias(num_heads=8)
    >>> bias(queries=10, keys=10).values.shape
    torch.Size([1, 8, 19])
    """

    of_distance = True  # only the distance matters: samples with lengths may be packed in one row

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
            query_start: position of the first query among the keys; a tensor (batch,) has one per sample.
            device: device of the bias; that of the weight if None.
            dtype: dtype of the bias; that of the weight if None.

        Returns:
            `RelativeBias` with values (batch or 1, heads, queries + keys - 1).
        """
        weight = self.weight.to(device=device, dtype=dtype)
        buckets = buckets_of(
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
