"""Per-head output gates, and the learned extra key (add_bias_kv)."""

from __future__ import annotations

import torch
from torch import Tensor

from multihead.errors import DtypeError, ShapeError


def gate(output: Tensor, gates: Tensor) -> Tensor:
    """Multiply the output of each head by its gate.

    Args:
        output: (batch, heads, queries, value_dim).
        gates: (heads,), or broadcasting to (batch, heads, queries).

    Raises:
        ShapeError, DtypeError: the gates are neither.

    Source: gates on heads, arXiv:1905.09418 and arXiv:1905.10650.

    >>> gate(torch.ones(1, 2, 1, 3), torch.tensor([1.0, 0.0]))[0, :, 0]
    tensor([[1., 1., 1.],
            [0., 0., 0.]])
    """
    heads = output.shape[1]
    if not isinstance(gates, Tensor):
        raise DtypeError(
            f"head_gates is a {type(gates).__name__}.", f"Give a tensor with one factor per head: ({heads},)."
        )
    if gates.dim() == 1 and gates.shape[0] == heads:
        return output * gates[:, None, None].to(output.dtype)
    sizes = tuple(output.shape[:3])
    if gates.dim() != 3 or any(given not in (1, size) for given, size in zip(gates.shape, sizes, strict=True)):
        raise ShapeError(
            f"head_gates has shape {tuple(gates.shape)}, and there are {heads} heads.",
            f"Give one factor per head: shape ({heads},), or one that broadcasts to (batch, heads, queries) = {sizes}.",
        )
    return output * gates[..., None].to(output.dtype)


def prepend(key: Tensor, x_heads: Tensor) -> Tensor:
    """Insert one learned row before all others in each sample.

    Args:
        key: (kv_heads, dim).
        x_heads: (batch, kv_heads, keys, dim).

    Returns:
        (batch, kv_heads, 1 + keys, dim).
    """
    row = key[None, :, None].expand(x_heads.shape[0], -1, -1, -1)
    return torch.cat([row.to(x_heads.dtype), x_heads], 2)
