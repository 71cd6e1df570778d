"""The native kernel as a registered operator of PyTorch: `torch.ops.multihead.attention`.

Compiled and exported graphs call it, and so does `multihead.attention` where nothing is to be planned. The forward pass
is defined in `csrc/operator.cpp`; its backward pass and its derivatives are here.

Arguments, in this order or by name:

- q: (batch, heads, queries, head_dim), float32, bfloat16 or float16, on the CPU
- k: (batch, kv_heads, keys, head_dim); heads is a multiple of kv_heads
- v: (batch, kv_heads, keys, value_dim)
- start: (batch or 1, queries) int64, the first key that a query sees
- stop: (batch or 1, queries) int64, the key after the last one; equal to start where a query sees no key
- visible: (batch or 1, heads or 1, queries or 1, keys or 1) bool, which of these keys are visible, or None
- bias: added to the scores, broadcasting to (batch, heads, queries, keys), or None; -inf hides a key
- relative: (batch or 1, heads or 1, queries + keys - 1), the values of a `scores.RelativeBias`, or None
- sinks: (heads,), a logit per head that takes weight and has no value, or None
- scale: factor of q . k
- softcap: c of c * tanh(scores / c), before the bias, or None
- dropout: share of the weights that is dropped, 0 to 1
- seed: () int64, from which the dropped weights are drawn; None without dropout
- batch_start, head_start, query_start, key_start: where a part of a call lies in the whole call, and total_heads: the
  heads of the whole call (0 for those of the part). The part drops the weights that the whole call would drop.

Returns the output (batch, heads, queries, value_dim) in the dtype of q, and the logsumexp (batch, heads, queries) in
float32, nats, -inf where a query sees no key. Both have first derivatives with respect to q, k, v, bias, relative and
sinks. Raises RuntimeError where the arguments do not fit together.

Source: arXiv:1706.03762, equation 1, computed as in arXiv:2205.14135.

>>> q, k, v = torch.randn(3, 2, 8, 5, 16).unbind()
>>> rows = torch.arange(5)[None]  # causal: query i sees the keys [0, i + 1)
>>> fixed = (None, None, None, None, 0.25, None, 0.0, None)
>>> output, logsumexp = torch.ops.multihead.attention(q, k, v, torch.zeros_like(rows), rows + 1, *fixed)
>>> import multihead
>>> bool((output == multihead.attention(q, k, v, mask=multihead.masks.Causal(), kernel="native")).all())
True
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from multihead.call import AttentionRequest, DropoutPlace
from multihead.errors import ArgumentError, DtypeError, ShapeError, check_share
from multihead.kernels.native import library
from multihead.kernels.native.call import contiguous_features
from multihead.kernels.native.kernel import Job, backward, prepared, refusal
from multihead.masks import Full, Keep
from multihead.masks.base import KeyBounds
from multihead.masks.place import CallSize
from multihead.scores.bias import Bias, check_bias_fits
from multihead.scores.relative import RelativeBias
from multihead.scores.sinks import check_sinks_fit
from multihead.scores.softcap import check_softcap
from multihead.shapes import AttentionShape

# Schema of the arguments that the backward pass shares with the forward pass; see GENERAL in csrc/operator.cpp.
_ARGUMENTS = (
    "Tensor q, Tensor k, Tensor v, Tensor start, Tensor stop, Tensor? visible, Tensor? bias, Tensor? relative, "
    "Tensor? sinks, float scale, float? softcap, float dropout, Tensor? seed, int batch_start=0, int head_start=0, "
    "int total_heads=0, int query_start=0, int key_start=0"
)


@torch.library.custom_op(
    "multihead::attention_backward",
    mutates_args=(),
    device_types="cpu",
    schema=(
        f"(Tensor output, Tensor logsumexp, Tensor grad_output, Tensor? grad_logsumexp, {_ARGUMENTS}, *, "
        "bool bias_wanted) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
    ),
)
def attention_backward(
    output: Tensor,
    logsumexp: Tensor,
    grad_output: Tensor,
    grad_logsumexp: Tensor | None,
    *arguments: Any,
    bias_wanted: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Compute the gradients of `attention`: `torch.ops.multihead.attention_backward`.

    Args:
        output: the output of `attention`.
        logsumexp: its logsumexp.
        grad_output: the gradient of the output, in its shape.
        grad_logsumexp: the gradient of the logsumexp, in its shape, or None.
        *arguments: the arguments of `attention`.
        bias_wanted: whether bias, or relative, needs a gradient.

    Returns:
        The gradients of q, k, v, bias or relative, and sinks, in their shapes and dtypes; the last two are empty where
        there is nothing to compute.
    """
    job = _job(*arguments, bias_wanted=bias_wanted)
    _reject_other_sizes(job.request.shape, output, logsumexp, grad_output, grad_logsumexp)
    outputs = contiguous_features(output), logsumexp.contiguous()
    dq, dk, dv, dbias, dsinks = backward(
        job, outputs, contiguous_features(grad_output), grad_logsumexp, bias_wanted=bias_wanted
    )
    q, bias, sinks = arguments[0], _bias_argument(arguments), arguments[8]
    if bias is None or dbias is None:
        dbias = q.new_empty(0)
    elif bias.shape[-1] != dbias.shape[-1]:  # one number for all keys
        dbias = dbias.sum(-1, keepdim=True).to(bias.dtype)
    else:
        dbias = dbias.to(bias.dtype)
    dsinks = q.new_empty(0) if sinks is None or dsinks is None else dsinks.to(sinks.dtype)
    return dq, dk, dv, dbias, dsinks


def _bias_argument(arguments: tuple[Any, ...]) -> Tensor | None:
    """Return `bias` or `relative` of the arguments of `attention`, whichever is there."""
    bias, relative = arguments[6:8]
    return bias if relative is None else relative  # type: ignore[no-any-return]


@attention_backward.register_fake
def _(*arguments: Any, bias_wanted: bool) -> tuple[Tensor, ...]:
    q, k, v = arguments[4:7]
    bias, sinks = _bias_argument(arguments[4:]), arguments[12]
    dq, dk, dv = (contiguous_features(torch.empty_like(contiguous_features(each))) for each in (q, k, v))
    dbias = q.new_empty(0) if bias is None or not bias_wanted else bias.new_empty(bias.shape)
    return dq, dk, dv, dbias, q.new_empty(0) if sinks is None else sinks.new_empty(sinks.shape)


def _attention_fake(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    """Return empty outputs with the strides that csrc/operator.cpp gives them."""
    batch, heads, queries, head_dim = q.shape
    value_dim = v.shape[3]
    if value_dim == head_dim:
        output = torch.empty_like(contiguous_features(q))
    else:
        output = q.new_empty((batch, queries, heads, value_dim)).transpose(1, 2)
    return output, q.new_empty((batch, heads, queries), dtype=torch.float32)


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.scale, ctx.softcap, ctx.dropout, seed = inputs[:13]
    ctx.place = inputs[13:]
    ctx.save_for_backward(*output, *tensors, seed)
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, grad_output: Tensor | None, grad_logsumexp: Tensor | None) -> tuple[Tensor | None, ...]:
    if torch._ops._len_torch_dispatch_stack_pre_dispatch():  # noqa: SLF001 - torch has no public name for it
        raise ArgumentError(
            "The backward pass of torch.ops.multihead.attention is recorded before dispatch, where PyTorch turns the "
            "tensors saved by the forward pass into constants.",
            "Leave out pre_dispatch=True of make_fx, or the gradient in the function that torch.export records.",
        )
    output, logsumexp, *tensors, seed = ctx.saved_tensors
    wanted = ctx.needs_input_grad
    if grad_output is None:
        grad_output = torch.zeros_like(output)
    numbers = (ctx.scale, ctx.softcap, ctx.dropout, seed, *ctx.place)
    dq, dk, dv, dbias, dsinks = attention_backward(
        output, logsumexp, grad_output, grad_logsumexp, *tensors, *numbers, bias_wanted=wanted[6] or wanted[7]
    )
    nothing = (None,) * 3  # start, stop, visible
    of_scores = (dbias if wanted[6] else None, dbias if wanted[7] else None, dsinks if wanted[8] else None)
    return dq, dk, dv, *nothing, *of_scores, *(None,) * 9


def _reject_second_derivative(ctx: Any, *gradients: Any) -> None:
    raise ArgumentError(
        "torch.ops.multihead.attention has no second derivative.", "Call multihead.attention(..., kernel='reference')."
    )


attention_backward.register_autograd(_reject_second_derivative)
if library.absence() is None:  # loading the library registered the forward pass
    torch.library.register_fake("multihead::attention", _attention_fake)
    torch.library.register_autograd("multihead::attention", _gradients, setup_context=_save_for_backward)


def _job(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    start: Tensor,
    stop: Tensor,
    visible: Tensor | None,
    bias: Tensor | None,
    relative: Tensor | None,
    sinks: Tensor | None,
    scale: float,
    softcap: float | None,
    dropout: float,
    seed: Tensor | None,
    *place: int,
    bias_wanted: bool,
) -> Job:
    """Check the arguments of `attention`, because anyone may call the operator and the kernel reads raw memory."""
    shape = AttentionShape.of(q, k, v)
    for name, edge in (("start", start), ("stop", stop)):
        _check_edge(name, edge, shape)
    if bias is not None and relative is not None:
        raise ArgumentError("Both `bias` and `relative` are given.", "Pass one of them, or their sum.")
    score_bias: Bias | None = bias if relative is None else RelativeBias(relative)
    if score_bias is not None:
        check_bias_fits(score_bias, shape)
    if sinks is not None:
        check_sinks_fit(sinks, shape)
    if softcap is not None:
        check_softcap(softcap)
    check_share("dropout", dropout)
    if dropout and (seed is None or seed.numel() != 1 or seed.is_floating_point()):
        raise ArgumentError(f"dropout is {dropout!r} and seed is {seed!r}.", "Give a seed of one integer.")
    mask = Full() if visible is None else Keep(visible)
    queries, keys = shape.query_length, shape.key_length
    mask.check_fits(CallSize(shape.batch, shape.num_heads, queries, keys))
    size = (max(start.shape[0], stop.shape[0]), shape.query_length)
    remainder = None if visible is None else mask
    bounds = KeyBounds(start.expand(size).contiguous(), stop.expand(size).contiguous(), remainder)
    if isinstance(score_bias, Tensor) and bias_wanted:
        score_bias = score_bias.expand(-1, -1, -1, shape.key_length)  # the kernel writes a gradient for each key
    request = AttentionRequest(q, k, v, shape, mask, scale, 0, score_bias, softcap, sinks, dropout)
    reason = refusal(request, bounds)
    if reason is not None:
        raise ArgumentError(f"torch.ops.multihead.attention refuses: {reason}.", "Call multihead.attention.")
    return Job(prepared(request), bounds, None, 0 if seed is None else int(seed), DropoutPlace(*place))


def _check_edge(name: str, edge: Tensor, shape: AttentionShape) -> None:
    """Raise an error for a start or stop of another dtype or size."""
    if edge.dtype != torch.int64 or edge.device != shape.device:
        raise DtypeError(
            f"{name} is a {edge.dtype} tensor on {edge.device}.", f"Give a torch.int64 tensor on {shape.device}."
        )
    fits = edge.dim() == 2 and edge.shape[0] in (1, shape.batch) and edge.shape[1] == shape.query_length
    if not fits:
        raise ShapeError(
            f"{name} has shape {tuple(edge.shape)}.",
            f"Give (batch or 1, queries) = ({shape.batch} or 1, {shape.query_length}).",
        )


def _reject_other_sizes(shape: AttentionShape, *outputs: Tensor | None) -> None:
    """Raise an error for outputs or gradients of outputs that do not belong to such a call."""
    rows = (shape.batch, shape.num_heads, shape.query_length)
    for name, tensor in zip(("output", "logsumexp", "grad_output", "grad_logsumexp"), outputs, strict=True):
        if tensor is None:
            continue
        wide = name.endswith("output")
        size, dtype = (*rows, shape.value_dim) if wide else rows, shape.dtype if wide else torch.float32
        if tuple(tensor.shape) != size or tensor.dtype != dtype or tensor.device != shape.device:
            raise ShapeError(
                f"{name} is a {tensor.dtype} tensor of shape {tuple(tensor.shape)} on {tensor.device}.",
                f"Give a {dtype} tensor of shape {size} on {shape.device}, as torch.ops.multihead.attention does.",
            )
