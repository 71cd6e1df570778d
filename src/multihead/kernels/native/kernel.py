"""The native CPU kernel: attention and its gradients over the visible keys only, with statistics in the same pass."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import profiler

from multihead.call import Attended, AttentionRequest, DropoutPlace, Work
from multihead.kernels.dense_tile import dense, tensors_seen_by, without_tensors
from multihead.kernels.double_backward import differentiable_gradients
from multihead.kernels.native import library
from multihead.kernels.native.bias_gradient import BiasGradient
from multihead.kernels.native.call import (
    DTYPES,
    WHOLE,
    Fields,
    Rows,
    bias_as_read,
    block_height,
    blocks,
    call_fields,
    contiguous_features,
    empty_float32,
    set_tensor,
    sinks_as_read,
)
from multihead.kernels.native.library import AT, STRIDES_AT
from multihead.kernels.native.statistics import Measurement
from multihead.masks.base import KeyBounds
from multihead.scores.bias import values_of, with_values
from multihead.scores.relative import RelativeBias
from multihead.tracing import intercepted, recorded, traced, transformed

HANDLES_NONFINITE = True  # inside the library, key by key
INT8_QUERIES = 4
_CPU = torch.device("cpu")
_NOTHING = nullcontext()
_OUTPUT, _LOGSUMEXP, _V = AT["output"], AT["logsumexp"], AT["v"]
_OUTPUT_STRIDES, _V_STRIDES = STRIDES_AT["output"], STRIDES_AT["v"]

Inputs = tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]  # q, k, v, bias, sinks


def refusal(request: AttentionRequest, bounds: KeyBounds) -> str | None:
    """Return why this kernel does not support a request, in one sentence, or None."""
    shape = request.shape
    if shape.device != _CPU:
        return f"it runs on the CPU, and the tensors are on {shape.device}"
    if shape.dtype not in DTYPES:
        return (
            f"it computes float32, bfloat16 and float16, and the tensors are {str(shape.dtype).removeprefix('torch.')}"
        )
    if not intercepted() or not traced():
        for tensor in () if _usual(request, bounds) else _read(request, bounds):
            if type(tensor) is not Tensor and type(tensor) is not torch.nn.Parameter:  # as those of a tracer
                return f"it reads plain tensors, and one is a {type(tensor).__name__}"
    elif transformed():
        return "it reads memory, and the tensors of a torch.func transform have none"
    return library.absence()


def _usual(request: AttentionRequest, bounds: KeyBounds) -> bool:
    """Whether this is a call without bias and sinks whose tensors are plain: a fast check for the usual call."""
    if request.bias is not None or request.sinks is not None or type(request.query_start) is not int:
        return False
    return type(request.q) is type(request.k) is type(request.v) is type(bounds.start) is type(bounds.stop) is Tensor


def _read(request: AttentionRequest, bounds: KeyBounds) -> tuple[Tensor, ...]:
    """Return the tensors whose memory the kernel reads."""
    read: tuple[Tensor, ...] = (request.q, request.k, request.v, bounds.start, bounds.stop)
    if request.bias is not None:
        read += (values_of(request.bias),)
    if request.sinks is not None:
        read += (request.sinks,)
    if isinstance(request.query_start, Tensor):  # for statistics of distances
        read += (request.query_start,)
    return read


def reads_int8(request: AttentionRequest) -> bool:
    """Whether the queries are so few that the kernel reads int8 as it is: for more, converting it once is faster."""
    if request.shape.query_length > INT8_QUERIES or request.shape.dtype not in DTYPES or recorded():
        return False
    return not (torch.is_grad_enabled() and _needs_gradient(request))


def attend(request: AttentionRequest, bounds: KeyBounds) -> Attended:
    """Compute a call and its wanted statistics in one pass over the keys."""
    if recorded():
        return _as_operator(request, bounds)
    ready = prepared(request)
    measurement = Measurement.of(request, bounds, request.wanted) if request.wanted else None
    seed = seed_of(request) if request.dropout else 0
    job = Job(ready, bounds, measurement, seed, _WHOLE_CALL if request.part is None else request.part.place)
    compute = _with_gradient if torch.is_grad_enabled() and _needs_gradient(ready) else forward
    if profiler._is_profiler_enabled:  # noqa: SLF001 - record_function checks it too, but takes microseconds
        with profiler.record_function("multihead::attention"):  # the operator's name
            output, logsumexp = compute(job)
    else:
        output, logsumexp = compute(job)
    if measurement is None:
        return Attended(output, logsumexp)
    return Attended(output, logsumexp, measurement.results())


def seed_of(request: AttentionRequest) -> int:
    """Return the seed of a call's dropout: from torch's generator, so that torch.manual_seed repeats it."""
    if request.part is not None:
        return request.part.seed
    return int(torch.randint(1 << 62, (), device="cpu")) if request.dropout else 0


def _with_gradient(job: Job) -> tuple[Tensor, Tensor]:
    """Compute `forward` as a differentiable function."""
    ready = job.request
    inputs = (ready.q, ready.k, ready.v, _bias_of(ready), ready.sinks)
    return _Differentiable.apply(*inputs, job)  # type: ignore[no-any-return, no-untyped-call]


def _as_operator(request: AttentionRequest, bounds: KeyBounds) -> Attended:
    """Call the registered operator (`kernels/native/operator.py`), which tracers and dispatch modes can record."""
    if request.part is not None:
        seed: Tensor | None = torch.tensor(request.part.seed, device="cpu")
        return Attended(*torch.ops.multihead.attention(*_operands(request, bounds, seed), *request.part.place))
    seed = torch.randint(1 << 62, (), device="cpu") if request.dropout else None
    if traced() or bounds.remainder is None or request.dropout:  # blocks would drop other weights
        output, logsumexp = torch.ops.multihead.attention(*_operands(request, bounds, seed))
        return Attended(output, logsumexp)
    parts = [torch.ops.multihead.attention(*_operands_of(request, rows)) for rows in blocks(request, bounds)]
    if len(parts) == 1:
        return Attended(*parts[0])
    outputs, logsumexps = zip(*parts, strict=True)
    return Attended(torch.cat(outputs, 2), torch.cat(logsumexps, 2))


def _operands(request: AttentionRequest, bounds: KeyBounds, seed: Tensor | None) -> tuple[Any, ...]:
    """Return the arguments of the registered operator."""
    visible = None if bounds.remainder is None else dense(bounds.remainder, request)
    relative = request.bias.values if isinstance(request.bias, RelativeBias) else None
    bias = request.bias if relative is None else None
    mask = (bounds.start, bounds.stop, visible)
    numbers = (request.scale, request.softcap, request.dropout)
    return request.q, request.k, request.v, *mask, bias, relative, request.sinks, *numbers, seed


def _operands_of(request: AttentionRequest, rows: Rows) -> tuple[Any, ...]:
    """Return the arguments of the registered operator for some queries, without a dense mask of all queries."""
    shape, bias = request.shape, request.bias
    if rows.rows is not WHOLE:
        if isinstance(bias, RelativeBias):
            bias = bias.part(shape.query_length, (rows.rows.start, rows.rows.stop), (0, shape.key_length))
        elif bias is not None and bias.shape[2] > 1:
            bias = bias[:, :, rows.rows]
    part = replace(request, q=rows.of(request.q), bias=bias)
    q, k, v, start, stop, _, *terms = _operands(part, replace(rows.bounds, remainder=None), None)
    return q, k, v, start, stop, rows.visible, *terms


def work(request: AttentionRequest, bounds: KeyBounds) -> Work:
    """Return the number of cells in visible register tiles, and the bytes that the call allocates."""
    shape = request.shape
    # Where the queries are the columns of the tiles, about as many cells are computed.
    height, width = library.chosen().tile
    missing = -shape.query_length % height  # rows of padding, which see no key
    start = bounds.start.masked_fill(bounds.sees_nothing, shape.key_length)
    start = torch.nn.functional.pad(start, (0, missing), value=shape.key_length).unflatten(1, (-1, height)).amin(2)
    stop = torch.nn.functional.pad(bounds.stop, (0, missing)).unflatten(1, (-1, height)).amax(2)
    tiles = (stop + width - 1) // width - start // width
    cells = int(tiles.clamp(min=0).sum()) * height * width
    cells = min(cells, bounds.start.shape[0] * shape.query_length * shape.key_length)
    cells *= shape.num_heads * (shape.batch if bounds.shared else 1)
    fields = _forward_fields(Job(prepared(request), bounds, None, 0), Rows(WHOLE, bounds, None))
    held = library.workspace(library.FORWARD, fields)
    rows = shape.batch * shape.num_heads * shape.query_length
    outputs = rows * (shape.value_dim * shape.dtype.itemsize + 4)
    dense = 0
    if bounds.remainder is not None:
        dense = min(block_height(request, bounds), shape.query_length) * shape.key_length * shape.batch
    return Work(cells, held + outputs + dense)


_WHOLE_CALL = DropoutPlace()


class Job(NamedTuple):
    """One call, prepared for the kernel.

    Attributes:
        request: the call, as returned by `prepared`.
        bounds: its plan.
        measurement: the wanted statistics, or None.
        seed: of its dropout.
        place: of its dropout.
    """

    request: AttentionRequest
    bounds: KeyBounds
    measurement: Measurement | None
    seed: int
    place: DropoutPlace = _WHOLE_CALL


def prepared(request: AttentionRequest) -> AttentionRequest:
    """Return the request with contiguous features, and bias and sinks in float32; every step is differentiable."""
    q, k, v, bias, sinks = request.q, request.k, request.v, request.bias, request.sinks
    negated = q.is_neg() or k.is_neg() or v.is_neg()
    if bias is None and sinks is None and not negated and q.stride(-1) == k.stride(-1) == v.stride(-1) == 1:
        return request  # the usual case
    q, k, v = contiguous_features(q), contiguous_features(k), contiguous_features(v)
    if bias is not None:
        bias = bias_as_read(bias)
        if isinstance(bias, Tensor) and bias.requires_grad:
            bias = bias.expand(-1, -1, -1, request.shape.key_length)  # the kernel writes a gradient for each key
    if sinks is not None:
        sinks = sinks_as_read(sinks)
    if q is request.q and k is request.k and v is request.v and bias is request.bias and sinks is request.sinks:
        return request
    return replace(request, q=q, k=k, v=v, bias=bias, sinks=sinks)


def _bias_of(request: AttentionRequest) -> Tensor | None:
    """Return the tensor that holds the bias."""
    return None if request.bias is None else values_of(request.bias)


def _needs_gradient(request: AttentionRequest) -> bool:
    """Whether some input requires a gradient."""
    if request.q.requires_grad or request.k.requires_grad or request.v.requires_grad:
        return True
    return any(tensor is not None and tensor.requires_grad for tensor in (_bias_of(request), request.sinks))


def forward(job: Job) -> tuple[Tensor, Tensor]:
    """Compute output (batch, heads, queries, value_dim) and logsumexp (batch, heads, queries)."""
    shape, measurement = job.request.shape, job.measurement
    output = torch.empty_like(job.request.q)  # with the strides of q: split heads merge without a copy
    if shape.value_dim != shape.head_dim or output.stride(-1) != 1:
        output = job.request.q.new_empty(shape.batch, shape.query_length, shape.num_heads, shape.value_dim)
        output = output.transpose(1, 2)
    logsumexp = empty_float32(shape.batch, shape.num_heads, shape.query_length)
    if job.bounds.remainder is None:
        _run(job, Rows(WHOLE, job.bounds, None), output, logsumexp, measurement)
        return output, logsumexp
    for rows in blocks(job.request, job.bounds):
        if rows.rows is WHOLE:
            _run(job, rows, output, logsumexp, measurement)
            break
        part, row_logsumexp = output[:, :, rows.rows], torch.empty_like(logsumexp[:, :, rows.rows])
        row_measurement = None if measurement is None else measurement.part(rows.rows)
        _run(job, rows, part, row_logsumexp, row_measurement)
        logsumexp[:, :, rows.rows] = row_logsumexp
        if measurement is not None and row_measurement is not None:
            measurement.store(row_measurement, rows.rows)
    return output, logsumexp


def _run(job: Job, rows: Rows, output: Tensor, logsumexp: Tensor, measurement: Measurement | None) -> None:
    """Run the forward pass over some rows."""
    fields = _forward_fields(job, rows)
    fields[_OUTPUT], fields[_LOGSUMEXP] = output.data_ptr(), logsumexp.data_ptr()
    fields[_OUTPUT_STRIDES] = output.stride()[:3]
    if measurement is not None:
        measurement.set_fields(fields)
    library.run(library.FORWARD, fields)


def _forward_fields(job: Job, rows: Rows) -> Fields:
    """Return the fields of the inputs of the forward pass."""
    request = job.request
    v = request.v
    fields = call_fields(request, rows, request.q, request.k)
    fields[_V], fields[_V_STRIDES] = v.data_ptr(), v.stride()[:3]
    if request.sinks is not None:
        fields[AT["sinks"]] = request.sinks.data_ptr()
    if request.scales is not None:
        for name, scales in (("k_scales", request.scales.k), ("v_scales", request.scales.v)):
            fields[AT[name]] = scales.data_ptr()
            fields[STRIDES_AT[name]] = (*scales.stride()[:2], 1)
    if request.dropout:
        fields[AT["dropout"]], fields[AT["seed"]] = request.dropout, job.seed
        for name in ("batch_start", "head_start", "total_heads", "key_start"):
            fields[AT[name]] = getattr(job.place, name)
        fields[AT["first_row"]] += job.place.query_start
    return fields


def backward(
    job: Job, outputs: tuple[Tensor, Tensor], grad_output: Tensor, grad_logsumexp: Tensor | None, *, bias_wanted: bool
) -> Inputs:
    """Compute the gradients of q, k, v, bias and sinks.

    Args:
        job: the call.
        outputs: its output and logsumexp.
        grad_output: the gradient of the output, with contiguous features.
        grad_logsumexp: the gradient of the logsumexp, or None.
        bias_wanted: whether the bias needs a gradient.
    """
    request, (output, logsumexp) = job.request, outputs
    dq, dk, dv = (torch.empty_like(tensor) for tensor in (request.q, request.k, request.v))
    dq, dk, dv = (contiguous_features(tensor) for tensor in (dq, dk, dv))
    dbias = BiasGradient.of(request) if bias_wanted and request.bias is not None else None
    delta = torch.empty_like(logsumexp)
    sums: tuple[Tensor, Tensor] | None = None
    for rows in blocks(request, job.bounds, height=None if dbias is None else dbias.height):
        fields = _forward_fields(job, rows)
        row_logsumexp = rows.of(logsumexp).contiguous()
        row_delta = delta if rows.rows is WHOLE else torch.empty_like(row_logsumexp)
        fields[_LOGSUMEXP], fields[AT["delta"]] = row_logsumexp.data_ptr(), row_delta.data_ptr()
        if grad_logsumexp is not None:
            row_grad_logsumexp = rows.of(grad_logsumexp).resolve_neg().contiguous()
            fields[AT["grad_logsumexp"]] = row_grad_logsumexp.data_ptr()
        set_tensor(fields, "output", rows.of(output))
        set_tensor(fields, "grad_output", rows.of(grad_output))
        set_tensor(fields, "dq", rows.of(dq))
        set_tensor(fields, "dk", dk)
        set_tensor(fields, "dv", dv)
        if dbias is not None:
            dbias.set_fields(fields, rows)
        library.run(library.BACKWARD, fields)
        if dbias is not None:
            dbias.add(rows)
        if rows.rows is not WHOLE:
            delta[:, :, rows.rows] = row_delta
            # In float32, because bfloat16 would lose small terms of the sum over blocks; a copy, because the next block
            # overwrites dk and dv.
            added = dk.to(torch.float32, copy=True), dv.to(torch.float32, copy=True)
            sums = added if sums is None else (sums[0] + added[0], sums[1] + added[1])
    if sums is not None:
        dk, dv = sums[0].to(dk.dtype), sums[1].to(dv.dtype)
    dsinks = None if request.sinks is None else _gradient_of_sinks(request.sinks, logsumexp, delta)
    return dq, dk, dv, None if dbias is None else dbias.values, dsinks


def _gradient_of_sinks(sinks: Tensor, logsumexp: Tensor, delta: Tensor) -> Tensor:
    """Return the gradient of the sinks (heads,): the sum of -p delta, with p = exp(sink - L) and delta = dO.O - dL."""
    weight = (sinks[:, None] - logsumexp).exp()  # (batch, heads, queries)
    return -torch.where(delta == 0, 0, weight * delta).sum((0, 2))  # in a row without keys delta is 0 and p inf


class _Differentiable(torch.autograd.Function):
    """The kernel as a function that autograd can differentiate once."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, sinks: Tensor | None, job: Job
    ) -> tuple[Tensor, Tensor]:
        output, logsumexp = forward(job)
        again = () if job.bounds.remainder is None else tensors_seen_by(job.request)
        ctx.save_for_backward(q, k, v, bias, sinks, output, logsumexp, *again)
        ctx.job = job._replace(request=without_tensors(job.request), measurement=None)
        ctx.set_materialize_grads(False)
        return output, logsumexp

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor | None, grad_logsumexp: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, bias, sinks, output, logsumexp, *_ = ctx.saved_tensors  # raises if an input was modified since
        request = replace(ctx.job.request, q=q, k=k, v=v, sinks=sinks)
        if request.bias is not None and bias is not None:
            request = replace(request, bias=with_values(request.bias, bias))
        job = ctx.job._replace(request=request)
        found = gradients(job, (output, logsumexp), grad_output, grad_logsumexp, bias_wanted=ctx.needs_input_grad[3])
        return (*found, None)


def gradients(
    job: Job,
    outputs: tuple[Tensor, Tensor],
    grad_output: Tensor | None,
    grad_logsumexp: Tensor | None,
    *,
    bias_wanted: bool,
) -> tuple[Tensor | None, ...]:
    """Compute the gradients of q, k, v, bias and sinks inside a backward pass of autograd; see `backward`."""
    if torch.is_grad_enabled():
        # The gradients of the kernel have no graph: in a gradient penalty they would silently be constants.
        return differentiable_gradients("native", job.request, job.bounds, grad_output, grad_logsumexp)
    if grad_output is None:
        grad_output = torch.zeros_like(outputs[0])
    if recorded():  # only the backward pass is recorded
        seed = torch.tensor(job.seed, device="cpu") if job.request.dropout else None
        operands = (*outputs, grad_output, grad_logsumexp, *_operands(job.request, job.bounds, seed), *job.place)
        dq, dk, dv, dbias, dsinks = torch.ops.multihead.attention_backward(*operands, bias_wanted=bias_wanted)
        return dq, dk, dv, dbias if bias_wanted else None, None if job.request.sinks is None else dsinks
    with profiler.record_function("multihead::attention_backward") if profiler._is_profiler_enabled else _NOTHING:  # noqa: SLF001
        return backward(job, outputs, contiguous_features(grad_output), grad_logsumexp, bias_wanted=bias_wanted)
