"""The native CPU kernel: attention and its gradients over the visible keys only, with statistics in the same pass."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from multihead.kernels.call import AttentionRequest, AttentionResult, WorkEstimate, concatenate_queries
from multihead.kernels.dense_tile import visibility_tensors, visible_in_mask, without_qkv
from multihead.kernels.native import library
from multihead.kernels.native.call import (
    ALL_QUERIES,
    OperatorCall,
    QueryBlock,
    backward,
    below_autograd,
    forward,
    iterate_query_blocks,
    operator_arguments,
    queries_per_block,
)
from multihead.kernels.native.operator import DTYPES
from multihead.kernels.native.statistics import choose_operator_statistics
from multihead.kernels.reference import differentiable_gradients
from multihead.masks.base import KeyBounds
from multihead.scores.bias import with_values

HANDLES_NONFINITE = True  # the library skips hidden keys one by one
GPU_PATH = None  # it runs on the CPU
MAX_INT8_QUERIES = 4  # with more queries, dequantising k and v once is faster than reading int8
_CPU = torch.device("cpu")


def refusal(request: AttentionRequest, bounds: KeyBounds) -> str | None:
    """Return why this kernel does not support a request, in one sentence; None if it does."""
    shape = request.shape
    if shape.device != _CPU:
        return f"it runs on the CPU, and the tensors are on {shape.device}"
    if shape.dtype not in DTYPES:
        return (
            f"it computes float32, bfloat16 and float16, and the tensors are {str(shape.dtype).removeprefix('torch.')}"
        )
    if not request.surroundings.traced:
        for tensor in () if _has_plain_tensors_only(request, bounds) else _tensors_read_by(request, bounds):
            if type(tensor) is not Tensor and type(tensor) is not torch.nn.Parameter:  # such as a fake tensor
                return f"it reads plain tensors, and one is a {type(tensor).__name__}"
    elif request.surroundings.transformed:
        return "it reads memory, and the tensors of a torch.func transform have none"
    return library.reason_of_absence()


def _has_plain_tensors_only(request: AttentionRequest, bounds: KeyBounds) -> bool:
    """Whether a call has no bias and no sinks, and only plain tensors (not fake or subclassed); this check is fast."""
    if request.bias is not None or request.sinks is not None or type(request.query_start) is not int:
        return False
    return type(request.q) is type(request.k) is type(request.v) is type(bounds.start) is type(bounds.stop) is Tensor


def _tensors_read_by(request: AttentionRequest, bounds: KeyBounds) -> tuple[Tensor, ...]:
    """Return the tensors whose memory the kernel reads; the statistics of distances read the query start."""
    read: tuple[Tensor, ...] = (request.q, request.k, request.v, bounds.start, bounds.stop)
    for term in (request.bias_values, request.sinks, request.query_start):
        if isinstance(term, Tensor):
            read += (term,)
    return read


def reads_int8(request: AttentionRequest) -> bool:
    """Whether there are so few queries that reading int8 k and v directly is faster than dequantising them first."""
    if request.shape.query_length > MAX_INT8_QUERIES or request.shape.dtype not in DTYPES:
        return False
    return not (request.surroundings.recorded or request.needs_gradient)


def attend(request: AttentionRequest, bounds: KeyBounds) -> AttentionResult:
    """Compute a request and the statistics that it requests in one pass over the keys."""
    job = operator_call_of(request, bounds)
    if request.surroundings.recorded:
        return _attend_in_graph(job)
    if request.needs_gradient:
        inputs = (request.q, request.k, request.v, request.bias_values, request.sinks)
        measured: dict[str, Any] = {}
        return AttentionResult(*_DifferentiableKernel.apply(*inputs, job, measured), **measured)  # type: ignore[no-untyped-call]
    return _attend_without_gradients(job)


def operator_call_of(request: AttentionRequest, bounds: KeyBounds) -> OperatorCall:
    """Return the operator call of a request; its dropout seed is drawn from torch's generator (torch.manual_seed)."""
    if request.dropout_slice is not None:
        return OperatorCall(
            request, bounds, torch.tensor(request.dropout_slice.seed, device="cpu"), request.dropout_slice.offset
        )
    return OperatorCall(request, bounds, torch.randint(1 << 62, (), device="cpu") if request.dropout else None)


def _attend_without_gradients(job: OperatorCall) -> AttentionResult:
    """Compute a call and its requested statistics without recording gradients."""
    if not job.request.requested_statistics:
        return AttentionResult(*forward(job)[:2])
    found, arguments = choose_operator_statistics(job.request, job.bounds, job.request.requested_statistics)
    output, logsumexp, *results = forward(job, arguments)
    return AttentionResult(output, logsumexp, found.name_results(*results))


def _attend_in_graph(job: OperatorCall) -> AttentionResult:
    """Call the operator with its registered gradient, so that tracers and dispatch modes can record the call."""
    operator = torch.ops.multihead.attention.default
    if job.request.surroundings.traced:
        remainder = job.bounds.remainder
        visible = None if remainder is None else visible_in_mask(remainder, job.request)
        return AttentionResult(*operator(*operator_arguments(job, QueryBlock(ALL_QUERIES, job.bounds, visible)))[:2])
    blocks = iterate_query_blocks(job.request, job.bounds)
    return concatenate_queries([AttentionResult(*operator(*operator_arguments(job, block))[:2]) for block in blocks])


def estimate_work(request: AttentionRequest, bounds: KeyBounds) -> WorkEstimate:
    """Return the number of scores in register tiles with a visible key, and the bytes that the call allocates."""
    shape = request.shape
    # The count is approximate if the kernel uses tiles with queries as columns.
    height, width = library.chosen_instruction_set().tile
    missing = -shape.query_length % height  # padding rows of the last tile, which see no key
    start = bounds.start.masked_fill(bounds.sees_nothing, shape.key_length)
    start = torch.nn.functional.pad(start, (0, missing), value=shape.key_length).unflatten(1, (-1, height)).amin(2)
    stop = torch.nn.functional.pad(bounds.stop, (0, missing)).unflatten(1, (-1, height)).amax(2)
    tiles = (stop + width - 1) // width - start // width
    cells = int(tiles.clamp(min=0).sum()) * height * width
    cells = min(cells, bounds.start.shape[0] * shape.query_length * shape.key_length)
    cells *= shape.num_heads * (shape.batch if bounds.is_shared_by_samples else 1)
    with below_autograd():
        held = torch.ops.multihead.workspace(
            *operator_arguments(OperatorCall(request, bounds), QueryBlock(ALL_QUERIES, bounds, None))
        )
    outputs = shape.num_rows * (shape.value_dim * shape.dtype.itemsize + 4)
    dense = 0
    if bounds.remainder is not None:
        dense = min(queries_per_block(request, bounds), shape.query_length) * shape.key_length * shape.batch
    return WorkEstimate(cells, held + outputs + dense)


class _DifferentiableKernel(torch.autograd.Function):
    """Autograd function of the native kernel, without second derivatives."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bias: Tensor | None,
        sinks: Tensor | None,
        job: OperatorCall,
        measured: dict[str, Any],
    ) -> tuple[Tensor, Tensor]:
        attended = _attend_without_gradients(job)
        measured["statistics"] = attended.statistics
        again = () if job.bounds.remainder is None else visibility_tensors(job.request)
        ctx.save_for_backward(q, k, v, bias, sinks, attended.output, attended.logsumexp, *again)
        ctx.job = job._replace(request=without_qkv(job.request))
        ctx.set_materialize_grads(False)
        return attended.output, attended.logsumexp

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor | None, grad_logsumexp: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, bias, sinks, output, logsumexp, *_ = ctx.saved_tensors  # autograd raises if an input was modified
        request = replace(ctx.job.request, q=q, k=k, v=v, sinks=sinks)
        if request.bias is not None and bias is not None:
            request = replace(request, bias=with_values(request.bias, bias))
        job = ctx.job._replace(request=request)
        found = gradients(job, (output, logsumexp), grad_output, grad_logsumexp, bias_wanted=ctx.needs_input_grad[3])
        return (*found, None, None)


def gradients(
    job: OperatorCall,
    outputs: tuple[Tensor, Tensor],
    grad_output: Tensor | None,
    grad_logsumexp: Tensor | None,
    *,
    bias_wanted: bool,
) -> tuple[Tensor | None, ...]:
    """Compute the gradients of q, k, v, bias and sinks inside a backward pass of autograd; see `call.backward`."""
    request = job.request
    if torch.is_grad_enabled():
        # The gradients of the kernel have no graph: in a gradient penalty they would silently be constants.
        return differentiable_gradients("native", request, job.bounds, grad_output, grad_logsumexp)
    if grad_output is None:
        grad_output = torch.zeros_like(outputs[0])
    dq, dk, dv, dbias, dsinks = backward(job, outputs, grad_output, grad_logsumexp, bias_wanted=bias_wanted)
    return dq, dk, dv, dbias if bias_wanted else None, None if request.sinks is None else dsinks
