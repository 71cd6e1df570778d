"""Fast path to the native kernel: plain tensors or int8 keys, a mask with a `band`, and no bias or sinks.

Most calls are of this kind. They call a registered operator directly, which checks its arguments itself, because for
few queries each step in Python takes longer than the attention. For other calls the functions return None, and
`functional` plans the mask and chooses a kernel, or raises an error.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from multihead.kernels import head_changes, sequence_split
from multihead.kernels.call import AttentionArguments, AttentionRequest, active_listeners
from multihead.kernels.choose import PYTORCH_SPEEDUPS
from multihead.kernels.native import library
from multihead.kernels.native.call import OperatorCall, function_of_operator
from multihead.kernels.native.kernel import MAX_INT8_QUERIES, gradients
from multihead.kernels.native.operator import DTYPES
from multihead.kernels.native.statistics import PARTS_OF_ONE_PASS, statistics_of_one_pass
from multihead.kernels.parts import SPECIAL_MASS, PartName
from multihead.kernels.plan.bounds import bounds_of
from multihead.kernels.quantised import Int8Scales
from multihead.masks import Causal, Full, Lengths, Mask, Window
from multihead.masks.base import Band
from multihead.tensors.shapes import MAX_POSITION, AttentionShape
from multihead.tensors.tracing import is_intercepted

_eager_operator = function_of_operator("attention", overload="eager")
_grad_enabled = torch.is_grad_enabled
# The instruction sets with which some calls are slower than with PyTorch's kernel.
_SETS_SLOWER_THAN_PYTORCH = frozenset(name for name, _ in PYTORCH_SPEEDUPS)

EAGER_STATISTICS = statistics_of_one_pass(PARTS_OF_ONE_PASS - {SPECIAL_MASS.name})
"""The statistics that `statistics` measures: all of `PARTS_OF_ONE_PASS` except the weight on special keys."""


def attend(
    q: Tensor, k: Tensor, v: Tensor, terms: AttentionArguments, scales: Int8Scales | None = None
) -> tuple[Tensor, ...] | None:
    """Compute a call on the fast path; None if the call needs a plan, has listeners, or is invalid.

    The arguments are those of `functional.attention`, unchecked; `scales` are the factors of int8 k and v.

    Returns:
        the output (batch, heads, queries, value_dim), the logsumexp (batch, heads, queries), nats, and unused results.
    """
    band = _band_and_query_start(q, k, v, terms)
    if band is None:
        return None
    _, _, softcap, _, scale, _, _ = terms
    differentiable = _grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    if scales is not None and (differentiable or q.shape[2] > MAX_INT8_QUERIES):
        return None  # dequantising k and v once, which a planned call does, is faster
    try:
        if differentiable:
            return _DifferentiableOperator.apply(q, k, v, *band, scale, softcap)  # type: ignore[no-any-return, no-untyped-call]
        int8 = () if scales is None else (0, *scales)  # 0: no statistics
        return _eager_operator(q, k, v, *band, scale, softcap, *int8)  # type: ignore[no-any-return]
    except RuntimeError:  # invalid argument: `functional` raises an error that explains it
        return None


def statistics(q: Tensor, k: Tensor, terms: AttentionArguments) -> tuple[Tensor, dict[PartName, Tensor]] | None:
    """Measure the statistics of `EAGER_STATISTICS` on the fast path; None if it does not support the call.

    The arguments are those of `functional.statistics`, unchecked.

    Returns:
        the logsumexp and the statistics, (batch, heads, queries) each, without gradients.
    """
    band = _band_and_query_start(q, k, k, terms)
    if band is None:
        return None
    _, _, softcap, _, scale, _, _ = terms
    if _grad_enabled() and (q.requires_grad or k.requires_grad):
        q, k = q.detach(), k.detach()
    try:
        _, logsumexp, *results = _eager_operator(q, k, None, *band, scale, softcap, EAGER_STATISTICS.requested_bits)
    except RuntimeError:
        return None
    return logsumexp, EAGER_STATISTICS.name_results(*results)


def _band_and_query_start(
    q: Tensor, k: Tensor, v: Tensor, terms: AttentionArguments
) -> tuple[Tensor | None, int, int, int] | None:
    """Return the mask and query start as arguments of the operator `eager`; None if it does not support the call.

    Returns:
        lengths (batch,) or None; how many keys before and after its position a query sees (-1: all); query_start.
    """
    mask, bias, softcap, sinks, scale, dropout, query_start = terms
    if (
        bias is not None
        or sinks is not None
        or dropout != 0.0
        or type(dropout) is not float
        or is_intercepted()
        or active_listeners()
        or head_changes.active_changes
        or sequence_split.active_split is not None
        or _eager_operator is None
        or not type(q) is type(k) is type(v) is Tensor
        or not q.is_cpu
        or q.dtype not in DTYPES
        or (softcap is not None and not (type(softcap) is float and 0 < softcap < torch.inf))
        or (scale is not None and type(scale) is not float)
        or library.chosen_instruction_set().name in _SETS_SLOWER_THAN_PYTORCH
    ):
        return None
    band = getattr(mask, "band", None)  # `mask` is unchecked, so it may be any object
    if band is None:
        return None
    lengths, before, after = band
    if query_start is None:
        query_start = 0 if before < 0 and after < 0 else -1  # -1: the operator requires as many queries as keys
    elif type(query_start) is not int or not 0 <= query_start <= MAX_POSITION:
        return None
    return lengths, before, after, query_start


class _DifferentiableOperator(torch.autograd.Function):
    """Autograd function of the operator `eager`."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        lengths: Tensor | None,
        before: int,
        after: int,
        query_start: int,
        scale: float | None,
        softcap: float | None,
    ) -> tuple[Tensor, Tensor]:
        found = _eager_operator(q, k, v, lengths, before, after, query_start, scale, softcap)
        output, logsumexp = found[:2]
        ctx.save_for_backward(q, k, v, output, logsumexp)
        if lengths is not None:
            lengths = lengths.clone()  # the caller may modify them before the backward pass
        ctx.call = Band(lengths, before, after), max(query_start, 0), scale, softcap
        ctx.set_materialize_grads(False)
        return output, logsumexp

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor | None, grad_logsumexp: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, output, logsumexp = ctx.saved_tensors  # autograd raises if an input was modified
        band, query_start, scale, softcap = ctx.call
        shape = AttentionShape.from_tensors(q, k, v)
        scale = shape.head_dim**-0.5 if scale is None else scale
        request = AttentionRequest(q, k, v, shape, _mask_of_band(band), scale, query_start, softcap=softcap)
        job = OperatorCall(request, bounds_of(request))
        dq, dk, dv, *_ = gradients(job, (output, logsumexp), grad_output, grad_logsumexp, bias_wanted=False)
        return dq, dk, dv, None, None, None, None, None, None


def _mask_of_band(band: Band) -> Mask:
    """Return the mask that shows the same keys as a band; a side without a limit has none at any position."""
    mask: Mask = Full()
    if band.keys_before < 0 and band.keys_after == 0:
        mask = Causal()
    elif band.keys_before >= 0 or band.keys_after >= 0:
        size, after = (MAX_POSITION if count < 0 else count for count in (band.keys_before, band.keys_after))
        mask = Window(size + 1, after)
    return mask if band.lengths is None else mask & Lengths(band.lengths)
