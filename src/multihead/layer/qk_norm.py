"""Query-key normalisation: normalise queries and keys before their product, which bounds the scores."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from multihead.errors import ArgumentError, ShapeError


@dataclass(frozen=True)
class QKNorm:
    """Options of the normalisation of queries and keys, after the projection and before the rotary embedding.

    "rms" divides features by their root mean square, so that queries and keys have the norm sqrt(head_dim): with the
    layer's default scale 1 / sqrt(head_dim), scores are bounded by sqrt(head_dim) times the learned weights. Each
    feature has a learned weight, which is initialised to 1 and multiplied unchanged (Qwen 3, OLMo 2; a Gemma 3
    checkpoint stores the weight minus 1).

    "l2" makes queries and keys unit vectors, so that a score is a cosine times a learned scale per head. The queries
    are multiplied by the learned scale and by sqrt(head_dim), which cancels the layer's default scale 1 /
    sqrt(head_dim): do not give the layer another scale.

    Args:
        kind: "rms" or "l2".
        eps: added to the mean square ("rms") or the sum of squares ("l2") before the root; a zero vector stays zero.
        learned: whether the weights ("rms") or scales ("l2") are learned.
        over: "head" normalises the features of each head separately; "all" normalises the features of all heads
            together, with a weight per feature ("rms" only).
        initial_scale: initial scale of each head, or the constant scale if it is not learned ("l2" only).

    Raises:
        ArgumentError: kind or over is unknown, or a number is out of range.

    Source: "rms" over a head: Qwen 3, arXiv:2505.09388; over all: OLMo 2, arXiv:2501.00656. "l2": arXiv:2010.04245,
        with a scale per head as in arXiv:2111.09883.

    >>> norms = QKNorm("rms").build(8, 2, 64)
    >>> q, k = norms(torch.randn(1, 8, 5, 64), torch.randn(1, 2, 5, 64))
    >>> torch.allclose(q.norm(dim=-1), torch.tensor(8.0))
    True
    """

    kind: Literal["rms", "l2"] = "rms"
    eps: float = 1e-6
    learned: bool = True
    over: Literal["head", "all"] = "head"
    initial_scale: float = 10.0

    def __post_init__(self) -> None:
        if self.kind not in ("rms", "l2"):
            raise ArgumentError(f"kind is {self.kind!r}.", 'Give "rms" or "l2".')
        if self.over not in ("head", "all"):
            raise ArgumentError(f"over is {self.over!r}.", 'Give "head" or "all".')
        if self.kind == "l2" and self.over == "all":
            raise ArgumentError('kind is "l2" and over is "all".', 'Give over="head": unit vectors are per head.')
        for name in ("eps", "initial_scale"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < float("inf"):
                raise ArgumentError(f"{name} is {value!r}.", "Give a number above 0.")

    def build(
        self,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> QKNorms:
        """Create the module that computes this normalisation, with new parameters."""
        return QKNorms(self, num_heads, num_kv_heads, head_dim, device=device, dtype=dtype)


class QKNorms(nn.Module):
    """The norms of one layer's queries and keys; created by `QKNorm.build`.

    The parameters are `q_weight` and `k_weight`, (head_dim,) or (heads * head_dim,) each, or `scale`, (heads,).
    """

    def __init__(
        self,
        qk_norm: QKNorm,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.qk_norm, self.num_heads, self.num_kv_heads, self.head_dim = qk_norm, num_heads, num_kv_heads, head_dim

        def weight(kind: str, size: int) -> nn.Parameter | None:
            learned = qk_norm.learned and qk_norm.kind == kind
            return nn.Parameter(torch.empty(size, device=device, dtype=dtype)) if learned else None

        together = qk_norm.over == "all"
        self.q_weight = weight("rms", num_heads * head_dim if together else head_dim)
        self.k_weight = weight("rms", num_kv_heads * head_dim if together else head_dim)
        self.scale = weight("l2", num_heads)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set weights to 1, and scales to their initial value."""
        for weight, value in ((self.q_weight, 1.0), (self.k_weight, 1.0), (self.scale, self.qk_norm.initial_scale)):
            if weight is not None:
                nn.init.constant_(weight, value)

    def forward(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Normalise queries and keys.

        Args:
            q: (batch, heads, queries, head_dim).
            k: (batch, kv_heads, keys, head_dim).

        Returns:
            the normalised q and k, with the same shapes, dtypes and memory layouts; computed in float32, or in
            float64 for float64.

        Raises:
            ShapeError: the number of heads or head_dim differs from the module's.
        """
        for name, x, heads in (("q", q, self.num_heads), ("k", k, self.num_kv_heads)):
            if x.dim() != 4 or x.shape[1] != heads or x.shape[3] != self.head_dim:
                raise ShapeError(
                    f"{name} has shape {tuple(x.shape)}.",
                    f"Give (batch, heads, length, head_dim) with {heads} heads of {self.head_dim} columns.",
                )
        if self.qk_norm.kind == "l2":
            scale: Tensor | float = self.qk_norm.initial_scale
            if self.scale is not None:
                scale = self.scale[:, None]  # (heads, 1)
            return self._to_unit_length(q, scale, 1.0), self._to_unit_length(k, 1.0, self.head_dim**-0.5)
        return self._normalise(q, self.q_weight), self._normalise(k, self.k_weight)

    def extra_repr(self) -> str:
        """Return the options as text, for `repr`."""
        return repr(self.qk_norm)

    def _normalise(self, x: Tensor, weight: Tensor | None) -> Tensor:
        columns = x.transpose(1, 2)  # (batch, length, heads, head_dim), the memory layout of a projection
        if self.qk_norm.over == "all":
            columns = columns.flatten(2)
        normed = _rms_norm(columns, self.qk_norm.eps, weight)
        if self.qk_norm.over == "all":
            normed = normed.unflatten(2, (-1, self.head_dim))
        return normed.to(x.dtype).transpose(1, 2)

    def _to_unit_length(self, x: Tensor, scale: Tensor | float, factor: float) -> Tensor:
        # x / sqrt(sum + eps) = x / sqrt(mean + eps / head_dim) / sqrt(head_dim)
        normed = _rms_norm(x.transpose(1, 2), self.qk_norm.eps / self.head_dim, None)
        if isinstance(scale, Tensor):
            scale = scale.to(normed.dtype)
        return (normed * (scale * factor)).to(x.dtype).transpose(1, 2)


def _rms_norm(x: Tensor, eps: float, weight: Tensor | None) -> Tensor:
    """Divide x (..., features) by its root mean square, in float32 or float64, and multiply by the weight."""
    x = x if x.dtype == torch.float64 else x.float()
    if torch.compiler.is_compiling():
        # The rms_norm of torch 2.11 branches on the number of tokens, which may be symbolic in a graph.
        normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
        return normed if weight is None else normed * weight.to(x.dtype)
    return F.rms_norm(x, x.shape[-1:], None if weight is None else weight.to(x.dtype), eps)
