"""Split the features of a tensor into heads, and merge heads."""

from __future__ import annotations

import math
from typing import Literal

from torch import SymInt, Tensor

from multihead.errors import ArgumentError, DtypeError, ShapeError
from multihead.tensors.shapes import format_head_counts
from multihead.tensors.tracing import hide_from_jit_trace

__all__ = ["head_counts", "head_dim_of", "merge_heads", "split_heads"]

# At most this many head counts are listed in an error message.
MAX_LISTED_COUNTS = 12


def head_counts(embed_dim: int) -> tuple[int, ...]:
    """Return all numbers of heads that divide embed_dim, ascending.

    >>> head_counts(6)
    (1, 2, 3, 6)
    """
    _check_at_least_one("embed_dim", embed_dim)
    small = [count for count in range(1, math.isqrt(embed_dim) + 1) if embed_dim % count == 0]
    return tuple(sorted({*small, *(embed_dim // count for count in small)}))


def head_dim_of(embed_dim: int, num_heads: int, *, name: str = "embed_dim") -> int:
    """Return embed_dim / num_heads; raise an ArgumentError about `name` if num_heads does not divide embed_dim.

    >>> head_dim_of(512, 8)
    64
    """
    _check_at_least_one(name, embed_dim)
    _check_at_least_one("num_heads", num_heads)
    if embed_dim % num_heads != 0:
        raise ArgumentError(
            f"{name} is {embed_dim}, and {num_heads} heads do not divide it.",
            f"Give {_list_nearest_head_counts(embed_dim, num_heads)}, or a width that is a multiple of {num_heads}.",
        )
    return embed_dim // num_heads


def split_heads(x: Tensor, num_heads: int) -> Tensor:
    """Split the columns into heads, as a view that copies nothing.

    Head ``h`` has the columns from ``h * head_dim`` up to ``(h + 1) * head_dim``. The columns
    are split first and the axes swapped after; a bare ``reshape`` to the same shape would mix
    positions (see ``docs/split-of-heads.md``).

    Args:
        x: (batch, length, heads * head_dim), any dtype.
        num_heads: number of heads.

    Returns:
        (batch, heads, length, head_dim), a view of ``x``.

    Raises:
        ShapeError: if ``x`` does not have three axes.
        DtypeError: if ``x`` is not a tensor.
        ArgumentError: if ``num_heads`` is below 1 or does not divide the last axis; the error
            lists the head counts that fit.

    Source: Vaswani et al. 2017, section 3.2.2, arXiv:1706.03762.

    >>> import torch
    >>> x = torch.arange(36).reshape(2, 3, 6)
    >>> x_heads = split_heads(x, 3)
    >>> x_heads.shape
    torch.Size([2, 3, 3, 2])
    >>> x_heads[0, 0].tolist()
    [[0, 1], [6, 7], [12, 13]]
    """
    if not isinstance(x, Tensor):
        raise DtypeError(f"x is a {type(x).__name__}, and must be a tensor.", "Convert it: torch.as_tensor(x).")
    if x.dim() != 3:
        raise ShapeError(
            f"x has the shape {tuple(x.shape)}, and must be (batch, length, heads * head_dim).",
            "Give a tensor with three axes.",
        )
    batch, length, width = x.shape
    if isinstance(width, Tensor):  # a size that torch.jit.trace records
        with hide_from_jit_trace():
            width = x.shape[2]
    head_dim = head_dim_of(width, num_heads, name="The last axis of x")
    x_split = x.view(batch, length, num_heads, head_dim)  # (batch, length, heads, head_dim)
    return x_split.transpose(1, 2)  # (batch, heads, length, head_dim)


def merge_heads(x_heads: Tensor, *, merge: Literal["concat", "mean"] = "concat") -> Tensor:
    """Concatenate the heads, or average them.

    Args:
        x_heads: (batch, heads, length, head_dim), floating point if ``merge`` is ``"mean"``.
        merge: ``"concat"`` concatenates the heads' columns and undoes ``split_heads``; ``"mean"``
            averages the heads, so that the width stays ``head_dim``.

    Returns:
        (batch, length, heads * head_dim) for ``"concat"``, (batch, length, head_dim) for
        ``"mean"``.

    Raises:
        ShapeError: if ``x_heads`` does not have four axes.
        ArgumentError: if ``merge`` is another value.

    Source: concatenation, arXiv:1706.03762, section 3.2.2; mean, arXiv:1710.10903, equation 6.

    >>> import torch
    >>> x = torch.arange(36).reshape(2, 3, 6)
    >>> torch.equal(merge_heads(split_heads(x, 3)), x)
    True
    """
    if not isinstance(x_heads, Tensor):
        raise DtypeError(
            f"x_heads is a {type(x_heads).__name__}, and must be a tensor.", "Convert it: torch.as_tensor(x_heads)."
        )
    if x_heads.dim() != 4:
        raise ShapeError(
            f"x_heads has the shape {tuple(x_heads.shape)}, and must be (batch, heads, length, head_dim).",
            "Give a tensor with four axes, such as split_heads returns.",
        )
    if merge == "concat":
        return x_heads.transpose(1, 2).flatten(2)  # (batch, length, heads * head_dim)
    if merge == "mean":
        return x_heads.mean(dim=1)  # (batch, length, head_dim)
    raise ArgumentError(
        f"merge is {merge!r}, and must be 'concat' or 'mean'.",
        "Give 'concat' to join the heads' columns, or 'mean' to average the heads.",
    )


def _check_at_least_one(name: str, value: int) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, SymInt)) or value < 1:
        raise ArgumentError(
            f"{name} is {value!r}, and must be a whole number of at least 1.",
            "Give 1 or more.",
        )


def _list_nearest_head_counts(embed_dim: int, num_heads: int) -> str:
    """List the head counts that divide embed_dim, as text; only those nearest to num_heads if there are many."""
    counts = head_counts(embed_dim)
    nearest = sorted(counts, key=lambda count: abs(count - num_heads))[:MAX_LISTED_COUNTS]
    heads = format_head_counts(sorted(nearest))
    return heads if len(nearest) == len(counts) else f"{heads} (the nearest that fit)"
