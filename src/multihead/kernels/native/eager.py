"""Calls of the native kernel that need no plan: plain tensors, a mask that is arithmetic, and no other terms.

Most calls are of this kind. They go to the registered operator at once, which checks its arguments itself, because for
few queries every step in Python takes longer than the attention. All other calls are left to `functional.attend`, which
plans the mask and chooses a kernel, or says what is wrong.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from multihead import sequence_split
from multihead.call import AttentionRequest
from multihead.kernels.native import library
from multihead.kernels.native.call import DTYPES
from multihead.kernels.native.kernel import Job, gradients
from multihead.kernels.native_vs_sdpa import LOST
from multihead.listeners import active
from multihead.masks import Full, Lengths, Mask, Window
from multihead.masks.base import Band
from multihead.masks.counts import FURTHEST
from multihead.plan.bounds import bounds_of
from multihead.scores.bias import Bias
from multihead.shapes import AttentionShape
from multihead.tracing import intercepted

# `OpOverload.__call__` only passes its arguments on to this function.
_operator = None if library.absence() else torch.ops.multihead.attention.eager._op  # noqa: SLF001
_grad_enabled = torch.is_grad_enabled


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask,
    bias: Bias | None,
    softcap: float | None,
    sinks: Tensor | None,
    scale: float | None,
    dropout: float,
    query_start: int | Tensor | str | None,
) -> tuple[Tensor, Tensor] | None:
    """Compute a call, or return None where it needs a plan, an observer or an error.

    The arguments are those of `functional.attention`, and nothing about them has been checked.

    Returns:
        the output (batch, heads, queries, value_dim), and the logsumexp (batch, heads, queries) in nats.
    """
    if (
        bias is not None
        or sinks is not None
        or dropout != 0.0
        or type(dropout) is not float
        or intercepted()
        or active()
        or sequence_split.active is not None
        or library.absence() is not None
        or not type(q) is type(k) is type(v) is Tensor
        or not q.is_cpu
        or q.dtype not in DTYPES
        or (softcap is not None and not (type(softcap) is float and 0 < softcap < torch.inf))
        or (scale is not None and type(scale) is not float)
        or (library.chosen().name, q.dtype) in LOST
    ):
        return None
    band = getattr(mask, "band", None)  # anything may be given as a mask
    if band is None:
        return None
    lengths, before, after = band
    if query_start is None:
        query_start = 0 if before < 0 and after < 0 else -1  # -1: the operator wants as many queries as keys
    elif type(query_start) is not int or query_start < 0:
        return None
    try:
        if _grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
            return _Differentiable.apply(q, k, v, band, query_start, scale, softcap)  # type: ignore[no-any-return, no-untyped-call]
        return _operator(q, k, v, lengths, before, after, query_start, scale, softcap)  # type: ignore[misc, no-any-return]
    except RuntimeError:  # something does not fit: the usual way finds out what
        return None


class _Differentiable(torch.autograd.Function):
    """The operator as a function that autograd can differentiate."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        band: Band,
        query_start: int,
        scale: float | None,
        softcap: float | None,
    ) -> tuple[Tensor, Tensor]:
        output, logsumexp = _operator(q, k, v, *band, query_start, scale, softcap)  # type: ignore[misc]
        ctx.save_for_backward(q, k, v, output, logsumexp)
        if band.lengths is not None:
            band = band._replace(lengths=band.lengths.clone())  # the caller may write to them before the backward pass
        ctx.call = band, max(query_start, 0), scale, softcap
        ctx.set_materialize_grads(False)
        return output, logsumexp

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor | None, grad_logsumexp: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, output, logsumexp = ctx.saved_tensors  # raises if an input was modified since
        band, query_start, scale, softcap = ctx.call
        shape = AttentionShape.of(q, k, v)
        scale = shape.head_dim**-0.5 if scale is None else scale
        request = AttentionRequest(q, k, v, shape, _mask_of(band), scale, query_start, softcap=softcap)
        job = Job(request, bounds_of(request), None, 0)
        dq, dk, dv, *_ = gradients(job, (output, logsumexp), grad_output, grad_logsumexp, bias_wanted=False)
        return dq, dk, dv, None, None, None, None


def _mask_of(band: Band) -> Mask:
    """Return a mask that shows what a band shows."""
    mask: Mask = Full()
    if band.before >= 0 or band.after >= 0:
        size, after = (FURTHEST if count < 0 else count for count in (band.before, band.after))
        mask = Window(size + 1, after)
    return mask if band.lengths is None else mask & Lengths(band.lengths)
