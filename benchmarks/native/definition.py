"""Attention by its definition in float64, block by block: the reference of all checks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from multihead.masks import Mask
from multihead.masks.positions import TilePositions

BLOCK = 1024  # queries


@dataclass(frozen=True, eq=False)
class Defined:
    """The results of a call by the definition.

    Attributes:
        output: (batch, heads, queries, value_dim), float64.
        logsumexp: (batch, heads, queries), float64.
        entropy: (batch, heads, queries), float64.
        largest: (batch, heads, queries, 2), float64, the two largest scores per query.
        largest_key: (batch, heads, queries), int64.
        received: (batch, heads, keys), float64.
    """

    output: Tensor
    logsumexp: Tensor
    entropy: Tensor
    largest: Tensor
    largest_key: Tensor
    received: Tensor


def defined(q: Tensor, k: Tensor, v: Tensor, mask: Mask, *, query_start: int = 0) -> Defined:
    """Compute a call by s = q.k / sqrt(head_dim), P = softmax(s), output = P v; every query must see a key.

    Args:
        q: (batch, heads, queries, head_dim).
        k: (batch, kv_heads, keys, head_dim).
        v: (batch, kv_heads, keys, value_dim).
        mask: the mask.
        query_start: position of the first query.
    """
    rows = q.shape[:3]
    output = torch.empty(*rows, v.shape[3], dtype=torch.float64)
    logsumexp, entropy = torch.empty(rows, dtype=torch.float64), torch.empty(rows, dtype=torch.float64)
    largest, largest_key = torch.empty(*rows, 2, dtype=torch.float64), torch.empty(rows, dtype=torch.int64)
    received = torch.zeros(*rows[:2], k.shape[2], dtype=torch.float64)
    for at, kv, scores in _scores(q, k, mask, query_start):
        sample, head, queries = at
        top = scores.topk(min(2, scores.shape[1]), -1)
        largest[at] = top.values
        largest_key[at] = top.indices[:, 0]
        logsumexp[at] = scores.logsumexp(-1)
        log_weights = scores - logsumexp[at][:, None]
        weights = log_weights.exp()
        entropy[at] = -torch.where(weights > 0, weights * log_weights, 0).sum(-1)
        output[sample, head, queries] = weights @ v[sample, kv].double()
        received[sample, head] += weights.sum(0)
    return Defined(output, logsumexp, entropy, largest, largest_key, received)


def defined_gradients(q: Tensor, k: Tensor, v: Tensor, of_output: Tensor, mask: Mask) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of sum(output * of_output): dV = P' dO, dS = P (dO V' - dO . O), dQ = dS K, dK = dS' Q.

    Args:
        q: (batch, heads, queries, head_dim).
        k: (batch, kv_heads, keys, head_dim).
        v: (batch, kv_heads, keys, value_dim).
        of_output: (batch, heads, queries, value_dim).
        mask: the mask.

    Returns:
        The gradients of q, k and v, float64.
    """
    scale = q.shape[3] ** -0.5
    of_q, of_k, of_v = (torch.zeros(tensor.shape, dtype=torch.float64) for tensor in (q, k, v))
    for at, kv, scores in _scores(q, k, mask, 0):
        sample, head, queries = at
        weights = scores.softmax(-1)
        values, of_rows = v[sample, kv].double(), of_output[at].double()
        of_weights = of_rows @ values.mT
        of_scores = weights * (of_weights - (weights * of_weights).sum(-1, keepdim=True)) * scale
        of_q[sample, head, queries] = of_scores @ k[sample, kv].double()
        of_k[sample, kv] += of_scores.mT @ q[at].double()
        of_v[sample, kv] += weights.mT @ of_rows
    return of_q, of_k, of_v


def _scores(q: Tensor, k: Tensor, mask: Mask, query_start: int) -> Iterator[tuple[tuple[int, int, slice], int, Tensor]]:
    """Yield sample, head and queries of each block, its kv head, and its scores (queries, keys), -inf if hidden."""
    batch, heads, queries, dim = q.shape
    for first in range(0, queries, BLOCK):
        rows = slice(first, min(first + BLOCK, queries))
        shown = mask.tile(TilePositions.from_sizes(queries, k.shape[2], query_start=query_start, rows=rows))
        shown = shown.expand(batch, 1, rows.stop - first, k.shape[2])[:, 0]
        for sample in range(batch):
            for head in range(heads):
                kv = head * k.shape[1] // heads
                scores = q[sample, head, rows].double() @ k[sample, kv].double().mT * dim**-0.5
                yield (sample, head, rows), kv, scores.masked_fill_(~shown[sample], -torch.inf)
