"""A few weights of each query, exp(s_ij - L_i), in memory that grows with the queries: offsets and first keys."""

from __future__ import annotations

import torch
from torch import Tensor

from multihead.kernels.tile import working_dtype
from multihead.probes.subject import Subject
from multihead.scores.softcap import softcapped


def at_offset(subject: Subject, offset: int) -> Tensor:
    """Return the weight on the key at an offset from each query's position: (batch, heads, queries), 0 if hidden."""
    return _weights(subject, (subject.positions + offset)[..., None])


def on_first(subject: Subject, count: int) -> Tensor:
    """Sum the weights on the first keys of each sample: (batch, heads, queries)."""
    shape = subject.request.shape
    total = torch.zeros_like(subject.logsumexp)
    least, most = (int(edge) for edge in subject.first_keys.aminmax()) if shape.batch else (0, 0)
    for place in range(max(0, -most), min(count, shape.key_length - least)):  # the others exist in no sample
        keys = (subject.first_keys + place)[:, None, None].expand(-1, shape.query_length, 1)
        total += _weights(subject, keys)
    return total


def _weights(subject: Subject, keys: Tensor) -> Tensor:
    """Return each query's weight on a key of its own: (batch, heads, queries) of (batch, queries, 1)."""
    request, shape = subject.cleaned, subject.request.shape
    if not shape.key_length:
        return torch.zeros_like(subject.logsumexp)
    shown = subject.shown_at(keys)[..., 0]  # (batch, heads or 1, queries)
    keys = keys.clamp(0, shape.key_length - 1)
    dtype = working_dtype(shape.dtype)
    index = keys[:, None].expand(-1, shape.num_kv_heads, -1, shape.head_dim)
    k = request.k.to(dtype).gather(2, index)[:, :, None]  # (batch, kv_heads, 1, queries, head_dim)
    q = request.q.to(dtype).unflatten(1, (shape.num_kv_heads, -1))  # (batch, kv_heads, group, queries, head_dim)
    cells = softcapped(((q * k).sum(-1) * request.scale).flatten(1, 2), request.softcap)
    bias = subject.bias_at(keys)
    if bias is not None:
        cells = cells + bias[..., 0].to(dtype)
    return (cells - subject.divisor).exp_().masked_fill_(~shown, 0)
