"""The short way of a call: one operator, which plans the mask itself, instead of a request and a plan in Python.

Most calls are of its kind: plain tensors or int8 keys, a mask with a `band`, and no bias, sinks or dropout. For few
queries each step in Python takes longer than the attention, so the operator `attention.short_call` checks its arguments
itself. `takes` is the one place that decides which calls go this way. All others, and those that the operator rejects,
are computed by the function `otherwise` of the caller, which builds a request, or raises an error that explains what is
wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from multihead.kernels import cuda_call, head_changes, sequence_split
from multihead.kernels.call import AttentionArguments, AttentionRequest, Surroundings
from multihead.kernels.choose import KERNELS, PYTORCH_SPEEDUPS, is_kernel_added
from multihead.kernels.native import kernel, library
from multihead.kernels.native.call import OperatorCall, function_of_operator
from multihead.kernels.native.kernel import MAX_INT8_QUERIES, gradients
from multihead.kernels.native.library import default_instruction_set, forced_instruction_set
from multihead.kernels.native.operator import DTYPES
from multihead.kernels.native.statistics import PARTS_OF_ONE_PASS, statistics_of_one_pass
from multihead.kernels.parts import SPECIAL_MASS, PartName
from multihead.kernels.plan.bounds import bounds_of
from multihead.kernels.quantised import Int8Scales
from multihead.masks import Causal, Full, Lengths, Mask, Window
from multihead.masks.base import Band
from multihead.tensors.shapes import MAX_POSITION, AttentionShape

Context = TypeVar("Context")
Measured = TypeVar("Measured")
Planned = Callable[[Tensor, Tensor, "Tensor | None", AttentionArguments, Surroundings, Context], Measured]
"""A function that computes a call by a plan, from q, k, v, the other arguments, what runs around the call, a context.

The context is what else the function needs; it is an argument, because a closure would be made in every call.
"""

_operator = function_of_operator("attention", overload="short_call")
_grad_enabled = torch.is_grad_enabled
# The instruction sets with which some calls are slower than with PyTorch's kernel.
_SETS_SLOWER_THAN_PYTORCH = frozenset(name for name, _ in PYTORCH_SPEEDUPS)

MEASURED_STATISTICS = statistics_of_one_pass(PARTS_OF_ONE_PASS - {SPECIAL_MASS.name})
"""The statistics that `measure` measures: all of `PARTS_OF_ONE_PASS` except the weight on special keys."""


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    arguments: AttentionArguments,
    around: Surroundings,
    otherwise: Planned[Context, tuple[Tensor, ...]],
    context: Context,
    scales: Int8Scales | None = None,
    *,
    logsumexp: bool = False,
) -> tuple[Tensor, ...]:
    """Compute a call by the short operator, on CUDA by a kernel of PyTorch, or by `otherwise` if neither takes it.

    The arguments are those of `functional.attention`, unchecked; `scales` are the factors of int8 k and v. `logsumexp`
    is whether the caller needs more than the output.

    Returns:
        the output (batch, heads, queries, value_dim), the logsumexp (batch, heads, queries), nats, and unused results;
        perhaps the output alone if `logsumexp` is False.
    """
    taken = takes(q, k, v, arguments, around, scales)
    if taken is not None:
        try:
            if _grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
                return _DifferentiableOperator.apply(q, k, v, *taken)  # type: ignore[no-any-return, no-untyped-call]
            int8 = () if scales is None else (0, *scales)  # 0: no statistics
            return _operator(q, k, v, *taken, *int8)  # type: ignore[no-any-return]
        except RuntimeError:  # an argument does not fit: a request is checked, and the error explains it
            pass
    elif type(q) is Tensor and q.is_cuda and scales is None:
        found = cuda_call.attend(q, k, v, arguments, around, logsumexp=logsumexp)
        if found is not None:
            return found
    return otherwise(q, k, v, arguments, around, context)


def measure(
    q: Tensor,
    k: Tensor,
    arguments: AttentionArguments,
    around: Surroundings,
    finish: Callable[[Tensor, dict[PartName, Tensor]], Measured | None],
    otherwise: Planned[Context, Measured],
    context: Context,
) -> Measured:
    """Measure the statistics of `MEASURED_STATISTICS` by the short operator, or by `otherwise` if it does not take it.

    The arguments are those of `functional.statistics`, unchecked. `finish` computes the result from the logsumexp and
    the measured statistics, (batch, heads, queries) each; it returns None if they must be measured otherwise.
    """
    found, taken = None, takes(q, k, k, arguments, around)
    if taken is not None:
        plain = (q.detach(), k.detach()) if _grad_enabled() and (q.requires_grad or k.requires_grad) else (q, k)
        try:
            results = _operator(*plain, None, *taken, MEASURED_STATISTICS.requested_bits)
        except RuntimeError:  # as in `attend`
            taken = None
    if taken is not None:
        found = finish(results[1], MEASURED_STATISTICS.name_results(*results[2:]))
    return otherwise(q, k, None, arguments, around, context) if found is None else found


def takes_request(request: AttentionRequest) -> bool:
    """Whether the short operator takes the call of a request, which is then computed by the native kernel."""
    terms = (request.mask, request.bias, request.softcap, request.sinks, request.scale, request.dropout)
    arguments = (*terms, request.query_start)
    return takes(request.q, request.k, request.v, arguments, request.surroundings, request.scales) is not None


def reason_against_all() -> str | None:
    """Return why the short operator takes no call at all here, in one sentence; None if it takes some."""
    if _operator is None:
        return library.reason_of_absence()
    if is_kernel_added():
        return f"the kernel {next(iter(KERNELS))} comes before the native one"
    name = library.chosen_instruction_set().name
    if name in _SETS_SLOWER_THAN_PYTORCH:
        return f"with the instruction set {name}, PyTorch's fused kernel is faster for some calls"
    return None


def takes(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    arguments: AttentionArguments,
    around: Surroundings,
    scales: Int8Scales | None = None,
) -> tuple[Tensor | None, int, int, int, float | None, float | None] | None:
    """Decide whether the short operator takes a call, and return the operator's arguments after q, k and v.

    Returns:
        lengths (batch,) or None, how many keys before and after its position a query sees (-1: all), query_start, scale
        and softcap; None if the call needs a plan.
    """
    mask, bias, softcap, sinks, scale, dropout, query_start = arguments
    if bias is not None or sinks is not None or around.intercepted or around.listeners:
        return None
    band = getattr(mask, "band", None)  # `mask` is unchecked, so it may be any object
    if (
        band is None
        or dropout != 0.0
        or type(dropout) is not float
        or head_changes.active_changes
        or sequence_split.active_split is not None
        or _operator is None
        or not type(q) is type(k) is type(v) is Tensor
        or not q.is_cpu
        or q.dtype not in DTYPES
        or (softcap is not None and not (type(softcap) is float and 0 < softcap < torch.inf))
        or (scale is not None and type(scale) is not float)
        or next(iter(KERNELS.values())) is not kernel  # `is_kernel_added`, without the time of a call
        or (forced_instruction_set() or default_instruction_set()).name in _SETS_SLOWER_THAN_PYTORCH
    ):
        return None
    lengths, before, after = band
    if query_start is None:
        query_start = 0 if before < 0 and after < 0 else -1  # -1: the operator requires as many queries as keys
    elif type(query_start) is not int or not 0 <= query_start <= MAX_POSITION:
        return None
    if scales is not None and (
        q.shape[2] > MAX_INT8_QUERIES or (_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad))
    ):
        return None  # dequantising k and v once, which a planned call does, is faster
    return lengths, before, after, query_start, scale, softcap


class _DifferentiableOperator(torch.autograd.Function):
    """Autograd function of the operator `attention.short_call`."""

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
        found = _operator(q, k, v, lengths, before, after, query_start, scale, softcap)
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
