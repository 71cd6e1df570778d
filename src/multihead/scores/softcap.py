"""Softcap: bound the scores by c * tanh(scores / c)."""

from __future__ import annotations

import torch
from torch import Tensor

from multihead.errors import ArgumentError


def check_softcap(softcap: object) -> None:
    """Reject a softcap that is not a positive number."""
    if isinstance(softcap, bool) or not isinstance(softcap, (int, float)) or not 0 < softcap < float("inf"):
        raise ArgumentError(f"softcap is {softcap!r}.", "Give a positive number, for example 50.0, or None.")


def softcapped(scores: Tensor, softcap: float | None) -> Tensor:
    """Bound scores to (-softcap, softcap). Source: Gemma 2, arXiv:2408.00118, section 2."""
    if softcap is None:
        return scores
    limits = torch.finfo(scores.dtype)  # beyond them neither c nor 1 / c is finite; c tanh(s / c) is s there, or 0
    cap = min(max(softcap, 16 * limits.tiny), limits.max / 16)
    return cap * (scores / cap).tanh()
