"""Attention of one layer of any class, written out in float64 with a change to its heads, one text at a time."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

Change = Callable[[Tensor], Tensor]
"""Function that changes the output of the heads of a text: (heads, queries, value_dim) -> the same shape."""


class Parts(NamedTuple):
    """The projections of a layer: q, k and v as (tokens, heads * dim), and the output."""

    q: Callable[[Tensor], Tensor]
    k: Callable[[Tensor], Tensor]
    v: Callable[[Tensor], Tensor]
    out: Callable[[Tensor], Tensor]
    heads: int
    kv_heads: int
    averages: bool = False


def parts_of(layer: Any) -> Parts:
    """Find the projections of a layer of this library or of a drop-in."""
    if isinstance(layer, nn.MultiheadAttention):
        matrices = (layer.q_proj_weight, layer.k_proj_weight, layer.v_proj_weight)
        given = layer.in_proj_weight.chunk(3) if layer.in_proj_weight is not None else matrices
        biases = layer.in_proj_bias.chunk(3)
        q, k, v = (partial(linear, weight=w, bias=b) for w, b in zip(given, biases, strict=True))
        return Parts(q, k, v, layer.out_proj, layer.num_heads, layer.num_heads)
    if hasattr(layer, "q_proj"):
        averages = layer.merge == "mean"
        gates = torch.ones(layer.num_heads) if layer.head_gates is None else layer.head_gates
        wide = gates.to(layer.q_proj.weight).repeat_interleave(1 if averages else layer.value_head_dim)

        def out(merged: Tensor) -> Tensor:
            return layer.out_proj(merged if averages else merged * wide)  # type: ignore[no-any-return]

        return Parts(layer.q_proj, layer.k_proj, layer.v_proj, out, layer.num_heads, layer.num_kv_heads, averages)
    if hasattr(layer, "W_Q"):
        q, k, v = (partial(torch.matmul, other=torch.cat(list(each), 1)) for each in (layer.W_Q, layer.W_K, layer.W_V))
        return Parts(q, k, v, lambda x: x @ layer.W_O, layer.num_heads, layer.num_heads)
    if hasattr(layer, "linears"):
        return Parts(*layer.linears, layer.h, layer.h)
    heads = layer.num_heads if hasattr(layer, "num_heads") else layer.h
    return Parts(layer.W_q, layer.W_k, layer.W_v, layer.W_o, heads, heads)


def attend_by_hand(
    layer: Any, x: Tensor, change: Change, *, memory: Tensor | None = None, causal: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Attend in one text.

    Args:
        layer: the layer.
        x: (queries, features).
        change: what becomes of its heads.
        memory: (keys, features); x if None.
        causal: whether a query sees no later key.

    Returns:
        the layer's output (queries, output_dim), the weights (heads, queries, keys), and the changed outputs of the
        heads (heads, queries, value_dim).
    """
    parts = parts_of(layer)
    keys = x if memory is None else memory
    q = parts.q(x).unflatten(-1, (parts.heads, -1)).transpose(0, 1)
    k, v = (each(keys).unflatten(-1, (parts.kv_heads, -1)).transpose(0, 1) for each in (parts.k, parts.v))
    k, v = (each.repeat_interleave(parts.heads // parts.kv_heads, 0) for each in (k, v))
    scores = q @ k.mT / q.shape[-1] ** 0.5
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[1:]).triu(1).bool(), -torch.inf)
    weights = scores.softmax(-1)
    output = change(weights @ v)
    merged = output.mean(0) if parts.averages else output.transpose(0, 1).flatten(1)
    return parts.out(merged), weights, output


def scaled(factors: dict[int, float], positions: Any = slice(None)) -> Change:
    """Multiply heads by factors, at some positions."""

    def change(output: Tensor) -> Tensor:
        new = output.clone()
        for head, factor in factors.items():
            new[head, positions] = output[head, positions] * factor
        return new

    return change


def unchanged(output: Tensor) -> Tensor:
    return output
