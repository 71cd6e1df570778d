"""How exact weights are: the sum of whole rows, and the error against float64 next to that of torch.softmax."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

SIZES = (1.0, 30.0, 400.0, 4e4)


@dataclass(frozen=True)
class Case:
    """Queries and keys whose scores have a size, and what is done to the scores."""

    q: Tensor  # (1, 4, queries, head_dim)
    k: Tensor  # (1, 2, keys, head_dim)
    bias: Tensor | None = None
    softcap: float | None = None
    sinks: Tensor | None = None
    shown: Tensor | None = None

    def softmax(self, dtype: torch.dtype) -> Tensor:
        """Compute the weights as the formula says, with torch.softmax: (1, 4, queries, keys)."""
        q, k = self.q.to(dtype), self.k.to(dtype).repeat_interleave(2, 1)
        scores = q @ k.mT * q.shape[-1] ** -0.5
        if self.softcap is not None:
            scores = self.softcap * torch.tanh(scores / self.softcap)
        if self.bias is not None:
            scores = scores + self.bias.to(dtype)
        if self.shown is not None:
            scores = scores.masked_fill(~self.shown, -torch.inf)
        if self.sinks is not None:
            sink = self.sinks.to(dtype).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
            scores = torch.cat([scores, sink], -1)
        return scores.softmax(-1)[..., : k.shape[2]].nan_to_num(0.0)


def drawn(
    size: float, *, queries: int = 70, keys: int = 90, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """Draw queries and keys of 2 and 1 heads a group, whose scores have a standard deviation of a size."""
    q, k = torch.randn(1, 4, queries, 64) * size, torch.randn(1, 2, keys, 64)
    return q.to(dtype), k.to(dtype)


def check_exact(weights: Tensor, case: Case, *, whole: bool = True) -> None:
    """Fail unless rows sum to 1 within 1e-5, and the error is at most 4 times that of torch.softmax in float32."""
    exact = case.softmax(torch.float64)
    weights = weights.double().reshape(exact.shape)
    if whole:
        assert (weights.sum(-1) - exact.sum(-1)).abs().max() <= 1e-5
    of_torch = (case.softmax(torch.float32).double() - exact).abs().max()
    # Half a rounding of a weight of 1 is always granted: at large scores torch's rows can be exactly 0 and 1.
    assert (weights - exact).abs().max() <= max(4 * float(of_torch), 2.0**-24)
