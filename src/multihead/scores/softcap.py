"""Softcap: bound the scores by c * tanh(scores / c)."""

from __future__ import annotations

from torch import Tensor

from multihead.errors import ArgumentError


def check_softcap(softcap: object) -> None:
    """Reject a softcap that is not a positive number."""
    if isinstance(softcap, bool) or not isinstance(softcap, (int, float)) or not 0 < softcap < float("inf"):
        raise ArgumentError(f"softcap is {softcap!r}.", "Give a positive number, for example 50.0, or None.")


def softcapped(scores: Tensor, softcap: float | None) -> Tensor:
    """Bound scores to (-softcap, softcap). Source: Gemma 2, arXiv:2408.00118, section 2."""
    return scores if softcap is None else softcap * (scores / softcap).tanh()
