"""The native kernel as a registered operator of PyTorch, which torch.compile and torch.export put into graphs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from multihead.call import AttentionRequest
from multihead.errors import ArgumentError, DtypeError, ShapeError, refuse_unless_share
from multihead.kernels.native.call import contiguous_features
from multihead.kernels.native.kernel import Job, backward, forward, prepared, refusal
from multihead.masks import Full, Keep
from multihead.masks.base import KeyBounds
from multihead.masks.place import CallSize
from multihead.scores.bias import Bias, refuse_unless_bias_fits
from multihead.scores.relative import RelativeBias
from multihead.scores.sinks import refuse_unless_sinks_fit
from multihead.scores.softcap import refuse_unless_softcap
from multihead.shapes import AttentionShape
from multihead.tracing import untraced


@torch.library.custom_op("multihead::attention", mutates_args=(), device_types="cpu")
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    start: Tensor,
    stop: Tensor,
    seen: Tensor | None,
    bias: Tensor | None,
    relative: Tensor | None,
    sinks: Tensor | None,
    scale: float,
    softcap: float | None,
    dropout: float,
    seed: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Multi-head attention of the native kernel, of tensors and numbers alone: `torch.ops.multihead.attention`.

    It is what a graph calls. Code that is not compiled calls `multihead.attention`, which plans its mask and chooses
    its kernel. Output and logsumexp have gradients for q, k, v, bias and sinks, once.

    Args:
        q: (batch, heads, queries, head_dim), float32 or bfloat16, on the CPU.
        k: (batch, kv_heads, keys, head_dim); heads is a multiple of kv_heads.
        v: (batch, kv_heads, keys, value_dim).
        start: (batch or 1, queries) int64, the first key that a query may see.
        stop: (batch or 1, queries) int64, the key behind the last one; equal to start where none is seen.
        seen: (batch or 1, heads or 1, queries or 1, keys or 1) bool, what may be seen of these keys, or None for all.
        bias: added to the scores, broadcasting to (batch, heads, queries, keys), or None; -inf hides a key.
        relative: (batch or 1, heads or 1, queries + keys - 1), the values of a `scores.RelativeBias`, or None.
        sinks: (heads,), a logit a head that takes weight and gives no value, or None.
        scale: what q . k is multiplied by.
        softcap: c of c * tanh(scores / c), before the bias, or None.
        dropout: share of the weights dropped, 0 to 1.
        seed: () int64, which decides what is dropped: the same seed drops the same. None where nothing is.

    Returns: the output (batch, heads, queries, value_dim) in the dtype of q, and the logsumexp (batch, heads, queries)
        in float32, nats, -inf where a query sees no key.

    Raises:
        ShapeError, DtypeError, MaskError, ArgumentError: in words, before anything is computed.

    Source: arXiv:1706.03762, equation 1, computed as in arXiv:2205.14135.

    >>> q, k, v = torch.randn(3, 2, 8, 5, 16).unbind()
    >>> rows = torch.arange(5)[None]  # causal: query i sees the keys [0, i + 1)
    >>> fixed = (None, None, None, None, 0.25, None, 0.0, None)
    >>> output, logsumexp = torch.ops.multihead.attention(q, k, v, torch.zeros_like(rows), rows + 1, *fixed)
    >>> import multihead
    >>> bool((output == multihead.attention(q, k, v, mask=multihead.masks.Causal(), kernel="native")).all())
    True
    """
    with untraced():
        return forward(_job((q, k, v), (start, stop, seen), (bias, relative), sinks, (scale, softcap, dropout), seed))


@torch.library.custom_op("multihead::attention_backward", mutates_args=(), device_types="cpu")
def attention_backward(
    output: Tensor,
    logsumexp: Tensor,
    of_output: Tensor,
    of_logsumexp: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    start: Tensor,
    stop: Tensor,
    seen: Tensor | None,
    bias: Tensor | None,
    relative: Tensor | None,
    sinks: Tensor | None,
    scale: float,
    softcap: float | None,
    dropout: float,
    seed: Tensor | None,
    *,
    bias_wanted: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Compute the gradients of `attention`: `torch.ops.multihead.attention_backward`.

    Args:
        output: what `attention` gave.
        logsumexp: what `attention` gave.
        of_output: the gradient of the output, of its shape.
        of_logsumexp: the gradient of the logsumexp, of its shape, or None.
        q: and all that follow, as `attention` was given them.
        k: see `attention`.
        v: see `attention`.
        start: see `attention`.
        stop: see `attention`.
        seen: see `attention`.
        bias: see `attention`.
        relative: see `attention`.
        sinks: see `attention`.
        scale: see `attention`.
        softcap: see `attention`.
        dropout: see `attention`.
        seed: see `attention`.
        bias_wanted: whether the bias, or relative, has a gradient.

    Returns: the gradients of q, k, v, bias and sinks in their shapes and dtypes; those of bias and sinks are of no
        elements where nobody wants them.
    """
    biases, numbers = (bias, relative), (scale, softcap, dropout)
    job = _job((q, k, v), (start, stop, seen), biases, sinks, numbers, seed, bias_wanted=bias_wanted)
    _refuse_other_sizes(job.request.shape, output, logsumexp, of_output, of_logsumexp)
    ready = contiguous_features(output), logsumexp.contiguous()
    dq, dk, dv, dbias, dsinks = backward(
        job, ready, contiguous_features(of_output), of_logsumexp, bias_wanted=bias_wanted
    )
    written = bias if relative is None else relative
    if written is None or dbias is None:
        dbias = q.new_empty(0)
    elif written.shape[-1] != dbias.shape[-1]:  # one number for all keys
        dbias = dbias.sum(-1, keepdim=True).to(written.dtype)
    else:
        dbias = dbias.to(written.dtype)
    dsinks = q.new_empty(0) if sinks is None or dsinks is None else dsinks.to(sinks.dtype)
    return dq, dk, dv, dbias, dsinks


@attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    batch, heads, queries, _head_dim = q.shape
    output = q.new_empty((batch, queries, heads, v.shape[3])).transpose(1, 2)
    return output, q.new_empty((batch, heads, queries), dtype=torch.float32)


@attention_backward.register_fake
def _(
    output: Tensor, logsumexp: Tensor, of_output: Tensor, of_logsumexp: Tensor | None, *given: Any, bias_wanted: bool
) -> tuple[Tensor, ...]:
    q, k, v, _start, _stop, _seen, bias, relative, sinks, *_rest = given
    written = bias if relative is None else relative
    dq, dk, dv = (contiguous_features(torch.empty_like(contiguous_features(each))) for each in (q, k, v))
    dbias = written.new_empty(written.shape) if bias_wanted else q.new_empty(0)
    return dq, dk, dv, dbias, q.new_empty(0) if sinks is None else sinks.new_empty(sinks.shape)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.scale, ctx.softcap, ctx.dropout, seed = inputs
    ctx.save_for_backward(*output, *tensors, seed)
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, of_output: Tensor | None, of_logsumexp: Tensor | None) -> tuple[Tensor | None, ...]:
    if torch._ops._len_torch_dispatch_stack_pre_dispatch():  # noqa: SLF001 - torch has no public word for it
        raise ArgumentError(
            "The backward pass of torch.ops.multihead.attention is recorded before dispatch, where PyTorch makes "
            "constants of what the forward pass saved.",
            "Leave out pre_dispatch=True of make_fx, or the gradient in what torch.export is given.",
        )
    output, logsumexp, *tensors, seed = ctx.saved_tensors
    wanted = ctx.needs_input_grad
    if of_output is None:
        of_output = torch.zeros_like(output)
    numbers = (ctx.scale, ctx.softcap, ctx.dropout)
    dq, dk, dv, dbias, dsinks = attention_backward(
        output, logsumexp, of_output, of_logsumexp, *tensors, *numbers, seed, bias_wanted=wanted[6] or wanted[7]
    )
    nothing = (None,) * 3  # start, stop, seen
    of_scores = (dbias if wanted[6] else None, dbias if wanted[7] else None, dsinks if wanted[8] else None)
    return dq, dk, dv, *nothing, *of_scores, *(None,) * 4


def _refuse_second_derivative(ctx: Any, *gradients: Any) -> None:
    raise ArgumentError(
        "torch.ops.multihead.attention has no second derivative.", "Call multihead.attention(..., kernel='reference')."
    )


attention.register_autograd(_gradients, setup_context=_keep)
attention_backward.register_autograd(_refuse_second_derivative)


def _job(
    qkv: tuple[Tensor, Tensor, Tensor],
    visible: tuple[Tensor, Tensor, Tensor | None],
    biases: tuple[Tensor | None, Tensor | None],
    sinks: Tensor | None,
    numbers: tuple[float, float | None, float],
    seed: Tensor | None,
    *,
    bias_wanted: bool = False,
) -> Job:
    """Check what was given: an operator can be called by anybody, and the kernel reads memory by what it is told."""
    shape = AttentionShape.of(*qkv)
    scale, softcap, dropout = numbers
    start, stop, seen = visible
    for name, edge in (("start", start), ("stop", stop)):
        _refuse_unless_edge(name, edge, shape)
    cells, relative = biases
    if cells is not None and relative is not None:
        raise ArgumentError("There are a bias and a relative one.", "Add them up and give one.")
    bias: Bias | None = cells if relative is None else RelativeBias(relative)
    if bias is not None:
        refuse_unless_bias_fits(bias, shape)
    if sinks is not None:
        refuse_unless_sinks_fit(sinks, shape)
    if softcap is not None:
        refuse_unless_softcap(softcap)
    refuse_unless_share("dropout", dropout)
    if dropout and (seed is None or seed.numel() != 1 or seed.is_floating_point()):
        raise ArgumentError(f"dropout is {dropout!r} and seed is {seed!r}.", "Give a seed of one whole number.")
    mask = Full() if seen is None else Keep(seen)
    queries, keys = shape.query_length, shape.key_length
    mask.check_fits(CallSize(shape.batch, shape.num_heads, queries, keys))
    size = (max(start.shape[0], stop.shape[0]), shape.query_length)
    bounds = KeyBounds(start.expand(size).contiguous(), stop.expand(size).contiguous(), None if seen is None else mask)
    if isinstance(bias, Tensor) and bias_wanted:
        bias = bias.expand(-1, -1, -1, shape.key_length)  # its gradient has a column for each key
    request = AttentionRequest(*qkv, shape, mask, scale, 0, bias, softcap, sinks, dropout)
    reason = refusal(request, bounds)
    if reason is not None:
        raise ArgumentError(f"torch.ops.multihead.attention refuses: {reason}.", "Call multihead.attention.")
    return Job(prepared(request), bounds, None, 0 if seed is None else int(seed))


def _refuse_unless_edge(name: str, edge: Tensor, shape: AttentionShape) -> None:
    """Refuse a bound of another dtype or size."""
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


def _refuse_other_sizes(shape: AttentionShape, *outputs: Tensor | None) -> None:
    """Refuse what `attention` cannot have given: output and logsumexp, and their gradients."""
    rows = (shape.batch, shape.num_heads, shape.query_length)
    for name, tensor in zip(("output", "logsumexp", "of_output", "of_logsumexp"), outputs, strict=True):
        if tensor is None:
            continue
        wide = name.endswith("output")
        size, dtype = (*rows, shape.value_dim) if wide else rows, shape.dtype if wide else torch.float32
        if tuple(tensor.shape) != size or tensor.dtype != dtype or tensor.device != shape.device:
            raise ShapeError(
                f"{name} is a {tensor.dtype} tensor of shape {tuple(tensor.shape)} on {tensor.device}.",
                f"Give a {dtype} tensor of shape {size} on {shape.device}, as torch.ops.multihead.attention does.",
            )
