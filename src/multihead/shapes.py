"""Read the shape of an attention call off q, k and v once, and refuse what does not fit."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from multihead.errors import ArgumentError, DtypeError, ShapeError

Q_AXES = "(batch, heads, queries, head_dim)"
K_AXES = "(batch, kv_heads, keys, head_dim)"
V_AXES = "(batch, kv_heads, keys, value_dim)"


@dataclass(frozen=True, eq=False)
class AttentionShape:
    """The sizes of one attention call.

    >>> q, k, v = torch.zeros(2, 8, 5, 64), torch.zeros(2, 2, 7, 64), torch.zeros(2, 2, 7, 32)
    >>> shape = AttentionShape.of(q, k, v)
    >>> shape.num_heads, shape.num_kv_heads, shape.key_length, shape.value_dim
    (8, 2, 7, 32)
    """

    batch: int
    num_heads: int
    num_kv_heads: int
    query_length: int
    key_length: int
    head_dim: int
    value_dim: int
    dtype: torch.dtype
    device: torch.device

    @property
    def group(self) -> int:
        """How many query heads share one key/value head."""
        return self.num_heads // self.num_kv_heads

    @property
    def cells(self) -> int:
        """How many weights the whole score matrix has, over batch and heads."""
        return self.batch * self.num_heads * self.query_length * self.key_length

    @staticmethod
    def of(q: Tensor, k: Tensor, v: Tensor) -> AttentionShape:
        """Read the shape.

        Args:
            q: (batch, heads, queries, head_dim).
            k: (batch, kv_heads, keys, head_dim).
            v: (batch, kv_heads, keys, value_dim).

        Raises:
            DtypeError: no floating point tensors, or of different dtypes or devices.
            ShapeError: the sizes do not fit each other.
        """
        _refuse_unless_alike(q, k, v)
        for name, tensor, axes in (("q", q, Q_AXES), ("k", k, K_AXES), ("v", v, V_AXES)):
            if tensor.dim() != 4:
                raise ShapeError(
                    f"{name} has shape {tuple(tensor.shape)}, and attention takes {axes}.",
                    "Split the heads first: mh.split_heads(x, num_heads).",
                )
        if not q.shape[0] == k.shape[0] == v.shape[0]:
            raise ShapeError(
                f"q, k and v have batches of {q.shape[0]}, {k.shape[0]} and {v.shape[0]} samples.",
                "Give all three the same batch.",
            )
        if q.shape[3] != k.shape[3]:
            raise ShapeError(
                f"q has head_dim {q.shape[3]} and k has head_dim {k.shape[3]}.", "Project both to the same head_dim."
            )
        if 0 in (q.shape[1], q.shape[3], k.shape[1], v.shape[3]):
            raise ShapeError(
                f"q has shape {tuple(q.shape)}, k {tuple(k.shape)} and v {tuple(v.shape)}.",
                "Give at least one head and one feature a head.",
            )
        if k.shape[1] != v.shape[1]:
            raise ShapeError(
                f"k has {k.shape[1]} heads and v has {v.shape[1]}.", "Give k and v the same number of heads."
            )
        if k.shape[2] != v.shape[2]:
            raise ShapeError(f"k has {k.shape[2]} keys and v has {v.shape[2]}.", "Give every key its one value.")
        if q.shape[1] % k.shape[1]:
            fitting = [str(n) for n in range(1, q.shape[1] + 1) if q.shape[1] % n == 0]
            raise ShapeError(
                f"k has {k.shape[1]} heads and q has {q.shape[1]}, and {q.shape[1]} is not a multiple of {k.shape[1]}.",
                f"Give k and v {_either(fitting)} (grouped-query attention, arXiv:2305.13245).",
            )
        return AttentionShape(
            q.shape[0], q.shape[1], k.shape[1], q.shape[2], k.shape[2], q.shape[3], v.shape[3], q.dtype, q.device
        )


def resolved_query_start(
    query_start: int | Tensor | str | None, *, speaks_of_positions: bool, batch: int, queries: int, keys: int
) -> int | Tensor:
    """Turn what the caller said of the first query's position into an int or one a sample.

    Args:
        query_start: an int, a tensor (batch,), "end", or None where the lengths are equal.
        speaks_of_positions: whether the mask's meaning depends on it.
        batch: number of samples.
        queries: number of queries.
        keys: number of keys.

    Raises:
        ArgumentError: it is left out where it matters, or out of range.
    """
    if query_start is None:
        if speaks_of_positions and queries != keys:
            raise ArgumentError(
                f"There are {queries} queries and {keys} keys, and the mask speaks of positions.",
                'Say where the first one is: query_start=0 (as torch\'s is_causal) or query_start="end" (decoding).',
            )
        return 0
    if isinstance(query_start, str):
        if query_start != "end":
            raise ArgumentError(
                f"query_start is {query_start!r}.", 'Give an int, a tensor with one int a sample, or "end".'
            )
        return keys - queries
    if isinstance(query_start, Tensor):
        if query_start.is_floating_point() or query_start.dtype == torch.bool or query_start.shape != (batch,):
            raise ArgumentError(
                f"query_start is a {query_start.dtype} tensor of shape {tuple(query_start.shape)}.",
                f"Give one int a sample: shape ({batch},).",
            )
        return query_start
    if not isinstance(query_start, int) or isinstance(query_start, bool) or query_start < 0:
        raise ArgumentError(f"query_start is {query_start!r}.", 'Give an int of 0 or more, one a sample, or "end".')
    return query_start


def _refuse_unless_alike(q: Tensor, k: Tensor, v: Tensor) -> None:
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if not isinstance(tensor, Tensor):
            raise DtypeError(f"{name} is a {type(tensor).__name__}, and no tensor.", "Give torch tensors.")
        if not tensor.is_floating_point():
            raise DtypeError(
                f"{name} has dtype {tensor.dtype}, and attention needs floating point.",
                f"Convert it, for example {name}.float().",
            )
    if not q.dtype == k.dtype == v.dtype:
        raise DtypeError(
            f"q, k and v have dtypes {q.dtype}, {k.dtype} and {v.dtype}.",
            "Convert them to one dtype, for example k.to(q.dtype).",
        )
    if not q.device == k.device == v.device:
        raise DtypeError(
            f"q, k and v are on {q.device}, {k.device} and {v.device}.",
            "Move them to one device, for example k.to(q.device).",
        )


def _either(words: list[str]) -> str:
    return f"{words[0]} head" if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]} heads"
