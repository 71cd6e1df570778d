"""T5's bias: a learned number for each head and each bucket of distances, narrow buckets near and wide ones far."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from multihead.errors import ArgumentError, refuse_unless_integer
from multihead.scores.relative import RelativeBias, offsets


def buckets_of(distances: Tensor, *, num_buckets: int, max_distance: int, both_ways: bool) -> Tensor:
    """Tell which bucket each distance falls into.

    Half of the buckets hold one distance each, the others grow logarithmically up to max_distance and the last holds
    all beyond. With both_ways, half of all buckets are for keys behind the query; without, those share bucket 0.

    Args:
        distances: int64, key - position of the query, any shape.
        num_buckets: how many there are.
        max_distance: from where on all are in the last one, tokens.
        both_ways: whether keys behind the query are told apart.

    Returns: int64, from 0 to num_buckets - 1, shaped as distances.

    Source: arXiv:1910.10683, section 2.1, and its published code, whose float32 logarithm decides at the edges.

    >>> buckets_of(torch.tensor([0, -1, -8, -100, 1]), num_buckets=8, max_distance=20, both_ways=False)
    tensor([0, 1, 5, 7, 0])
    """
    behind: Tensor | int = 0
    if both_ways:
        num_buckets //= 2
        behind = (distances > 0).long() * num_buckets
        distances = distances.abs()
    else:
        distances = -distances.clamp(max=0)
    single = num_buckets // 2
    growth = (distances.clamp(min=1).float() / single).log() / math.log(max_distance / single)
    wide = single + (growth * (num_buckets - single)).long()
    return behind + torch.where(distances < single, distances, wide.clamp(max=num_buckets - 1))


class T5Bias(nn.Module):
    """A learned bias a head and bucket of distances; one module may serve all layers, as in T5.

    T5 multiplies scores by nothing: give the layer scale=1.0 to load its weights.

    Args:
        num_heads: number of query heads.
        num_buckets: how many buckets of distances there are.
        max_distance: from where on all distances share a bucket, tokens.
        both_ways: whether keys behind the query have buckets of their own, as in an encoder; in a decoder they are
            hidden.
        device: where the weight is made.
        dtype: of the weight.

    Raises:
        ArgumentError: numbers that make no buckets.

    Source: arXiv:1910.10683, section 2.1. `weight`, (num_buckets, num_heads), is its
        `relative_attention_bias.weight`.

    >>> bias = T5Bias(num_heads=8)
    >>> bias(queries=10, keys=10).values.shape
    torch.Size([1, 8, 19])
    """

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
        refuse_unless_integer("num_heads", num_heads)
        least = 4 if both_ways else 2
        refuse_unless_integer("num_buckets", num_buckets, least=least)
        if both_ways and num_buckets % 2:
            raise ArgumentError(
                f"num_buckets is {num_buckets}, and half of them are for keys behind the query.",
                "Give an even number, or both_ways=False.",
            )
        single = num_buckets // least
        refuse_unless_integer("max_distance", max_distance, least=single + 1)
        self.num_heads, self.num_buckets, self.max_distance = num_heads, num_buckets, max_distance
        self.both_ways = both_ways
        self.weight = nn.Parameter(torch.empty(num_buckets, num_heads, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weight anew, with a standard deviation of 0.02."""
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
        """Make the bias of a call; gradients flow to the weight.

        Args:
            queries: number of queries.
            keys: number of keys.
            query_start: where the first query stands among the keys; a tensor (batch,) has one a sample.
            device: of the bias; that of the weight if None.
            dtype: of the bias; that of the weight if None.

        Returns: `RelativeBias` with values (batch or 1, heads, queries + keys - 1).
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
        """Say the sizes."""
        sizes = f"num_heads={self.num_heads}, num_buckets={self.num_buckets}, max_distance={self.max_distance}"
        return f"{sizes}, both_ways={self.both_ways}"
