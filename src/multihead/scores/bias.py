"""A bias: a tensor added to the scores; -inf in it hides a key as a mask would."""

from __future__ import annotations

from torch import Tensor

from multihead.errors import DtypeError, ShapeError
from multihead.shapes import AttentionShape


def refuse_unless_bias_fits(bias: object, shape: AttentionShape) -> None:
    """Refuse a bias that is no floating point tensor broadcasting to (batch, heads, queries, keys)."""
    sizes = (shape.batch, shape.num_heads, shape.query_length, shape.key_length)
    if not isinstance(bias, Tensor) or not bias.is_floating_point():
        given = f"a {bias.dtype} tensor" if isinstance(bias, Tensor) else f"a {type(bias).__name__}"
        raise DtypeError(
            f"bias is {given}, and it is added to floating point scores.",
            "Give a floating point tensor; what hides keys is a mask, for example mask=masks.Keep(t).",
        )
    if bias.device != shape.device:
        raise DtypeError(f"bias is on {bias.device} and q is on {shape.device}.", "Move it: bias.to(q.device).")
    if bias.dim() != 4 or any(given not in (1, size) for given, size in zip(bias.shape, sizes, strict=True)):
        raise ShapeError(
            f"bias has shape {tuple(bias.shape)}, and it is added to (batch, heads, queries, keys) = {sizes}.",
            "Give four dimensions, each of that size or 1.",
        )


def bias_tile(bias: Tensor, queries: slice, keys: slice) -> Tensor:
    """Cut a tile out of a bias, keeping axes of size 1: (batch or 1, heads or 1, queries or 1, keys or 1)."""
    if bias.shape[2] > 1:
        bias = bias[:, :, queries]
    if bias.shape[3] > 1:
        bias = bias[:, :, :, keys]
    return bias
