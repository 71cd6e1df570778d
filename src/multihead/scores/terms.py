"""The softcap of the scores, and the attention sinks of the softmax."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import softplus

from multihead.errors import ArgumentError, DtypeError, ShapeError
from multihead.tensors.shapes import AttentionShape


def check_softcap(softcap: object) -> None:
    """Reject a softcap that is not a positive number."""
    if isinstance(softcap, bool) or not isinstance(softcap, (int, float)) or not 0 < softcap < float("inf"):
        raise ArgumentError(f"softcap is {softcap!r}.", "Give a positive number, for example 50.0, or None.")


def apply_softcap(scores: Tensor, softcap: float | None) -> Tensor:
    """Bound scores to (-softcap, softcap) by c tanh(s / c). Source: Gemma 2, arXiv:2408.00118, section 2."""
    if softcap is None:
        return scores
    # Near the limits of the dtype c or 1 / c is not finite; c tanh(s / c) is s for a huge c, and 0 for a tiny c.
    limits = torch.finfo(scores.dtype)
    cap = min(max(softcap, 16 * limits.tiny), limits.max / 16)
    return cap * (scores / cap).tanh()


def check_sinks_fit(sinks: object, shape: AttentionShape) -> None:
    """Reject sinks that are not a floating point tensor with one logit per head."""
    if not isinstance(sinks, Tensor) or not sinks.is_floating_point() or sinks.device != shape.device:
        given = (
            f"a {sinks.dtype} tensor on {sinks.device}" if isinstance(sinks, Tensor) else f"a {type(sinks).__name__}"
        )
        raise DtypeError(f"sinks is {given}.", f"Give a floating point tensor of logits on {shape.device}.")
    if tuple(sinks.shape) != (shape.num_heads,):
        raise ShapeError(
            f"sinks has shape {tuple(sinks.shape)}, and there are {shape.num_heads} heads.",
            f"Give one logit per head: shape ({shape.num_heads},).",
        )


def add_sinks(output: Tensor, logsumexp: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Add each head's sink (heads,) to output (batch, heads, queries, value_dim) and logsumexp (batch, heads, queries).

    With L the logsumexp over the keys and s the sink, the output is multiplied by exp(L) / (exp(L) + exp(s)) =
    sigmoid(L - s), as the weights are. A query that sees no key keeps the output 0 and the logsumexp -inf. Other
    queries become NaN if the sink is NaN or inf.

    Source: GPT-OSS, arXiv:2508.10925; the identity is L' = log(exp(L) + exp(s)).
    """
    sink = sinks.masked_fill(sinks == torch.inf, torch.nan).to(logsumexp.dtype)[:, None]
    empty = logsumexp == -torch.inf
    finite = logsumexp.masked_fill(empty, 0)
    apart = finite - sink
    share = apart.sigmoid().masked_fill(empty, 1)
    # The expression is logaddexp(L, s); torch.logaddexp has a NaN second derivative if its arguments are far apart.
    joined = torch.maximum(finite, sink) + softplus(-apart.abs())
    return output * share[..., None].to(output.dtype), joined.masked_fill(empty, -torch.inf)
