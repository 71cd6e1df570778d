"""Kernel that calls PyTorch's fused attention, on the CPU and on CUDA, on rectangles that cover the visible keys.

The rectangles are chosen in `plan/rectangles.py`. Rows (queries) with the same interval form one full rectangle. Rows
whose interval grows by one key per row form a full rectangle and a causal triangle, merged by their logsumexp. A window
is divided into blocks of rows with a small mask each. The backward pass calls PyTorch's fused gradient on the same
rectangles: with the logsumexp of the whole row, the weights of each rectangle are those of the whole row. The gradient
of the logsumexp is an attention whose values are the keys. Value dims that differ from head dims are padded with zeros,
which change no score; sinks multiply the output by sigmoid(L - sink), where L is the logsumexp of the row.

On CUDA a call is computed if its mask is one rectangle of all queries: full or causal attention, a decoding step. This
is decided from Python numbers, so that no call waits for a value of the device, and the kernel is the one that PyTorch
chooses (`fused_on_cuda.py`). Other masks would take several fused calls on CUDA, and flex_attention is faster than
these. Most of these calls need no plan, and are computed by `cuda_call.py`, before a request is made.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from multihead.kernels import fused, fused_on_cuda
from multihead.kernels.call import AttentionRequest, AttentionResult, WorkEstimate
from multihead.kernels.dense_tile import visibility_tensors, visible_cells, without_qkv, working_dtype
from multihead.kernels.fused import has_supported_layout, with_supported_layout
from multihead.kernels.plan.bounds import bounds_of
from multihead.kernels.plan.rectangles import Rectangle, cover_with_rectangles
from multihead.kernels.proven import GpuPath
from multihead.kernels.reference import differentiable_gradients
from multihead.masks.base import KeyBounds
from multihead.scores.bias import bias_tile
from multihead.scores.terms import add_sinks

HANDLES_NONFINITE = False
GPU_PATH = GpuPath("sdpa", ("kernels/sdpa.py", "kernels/fused_on_cuda.py"), in_use_before_rows=True)


def refusal(request: AttentionRequest, bounds: KeyBounds) -> str | None:
    """Return why this kernel refuses a request, in one sentence; None if it accepts the request."""
    device = request.shape.device
    if device.type not in ("cpu", "cuda"):
        return f"it calls PyTorch's fused kernels for the CPU and CUDA, and the tensors are on {device}"
    if request.surroundings.traced:
        return "it reads tensor values, which is impossible in a graph or a transform of torch.func"
    if request.dropout and (device.type == "cpu" or request.dropout_slice is not None):
        return "PyTorch's fused kernels are called without dropout"
    if request.softcap is not None:
        return "PyTorch's fused kernels have no softcap"
    if request.bias_values is not None and request.bias_values.requires_grad and torch.is_grad_enabled():
        return "PyTorch's fused kernels have no gradient for a bias"
    return _refusal_on_cuda(request) if device.type == "cuda" else None


def _refusal_on_cuda(request: AttentionRequest) -> str | None:
    """Return why PyTorch's fused kernels on CUDA do not compute a request, in one sentence, or None."""
    if request.bias is not None:
        return "PyTorch's fused CUDA kernels are called without a bias"
    shape = request.shape
    if shape.dtype not in fused_on_cuda.DTYPES:
        return f"PyTorch has no fused CUDA kernel for {str(shape.dtype).split('.')[-1]}"
    if max(shape.head_dim, shape.value_dim) > fused_on_cuda.MAX_HEAD_DIM:
        return f"PyTorch's fused CUDA kernels support at most {fused_on_cuda.MAX_HEAD_DIM} columns a head"
    if 0 in (shape.batch, shape.query_length, shape.key_length):
        return "PyTorch's fused CUDA kernels need at least one sample, query and key"
    if request.mask.band is None and _bounds_on_cpu(request) is None:
        return "the mask or query_start holds tensors, which are not read on CUDA"
    seen = _keys_on_cuda(request)
    if seen is None:
        return "PyTorch's fused CUDA kernels have no such mask"
    if _choose_on_cuda(request, *_tensors_on_cuda(request, seen, described=True), causal=seen[2]) is None:
        return "no fused kernel of PyTorch that is switched on computes such tensors on this GPU"
    return None


def _bounds_on_cpu(request: AttentionRequest) -> KeyBounds | None:
    """Compute the bounds of a request on CUDA from Python numbers; None where the mask or query_start holds tensors."""
    if isinstance(request.query_start, Tensor) or request.mask.holds_tensors:
        return None
    return bounds_of(request, "cpu")


def _keys_on_cuda(request: AttentionRequest) -> tuple[int, int, bool] | None:
    """Return the interval of keys that all queries see, and whether query i sees its first i + 1 keys; None if none."""
    shape, band, first = request.shape, request.mask.band, request.query_start
    if band is not None and band.lengths is None and not isinstance(first, Tensor):
        return band.interval_of_queries(first, shape.query_length, shape.key_length)
    bounds = _bounds_on_cpu(request)
    rectangles = () if bounds is None or bounds.remainder is not None else cover_with_rectangles(bounds)
    if len(rectangles) != 1 or rectangles[0].sample is not None or rectangles[0].kind == "partial":
        return None
    only = rectangles[0]
    return (*only.columns, only.kind == "causal") if only.rows == (0, shape.query_length) else None


def _tensors_on_cuda(
    request: AttentionRequest, seen: tuple[int, int, bool], *, described: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k and v as the fused kernels read them: the keys that are seen, a supported layout, heads padded.

    All but the memory-efficient kernel need equal widths, and all need multiples of 8. Zeros appended to q and k change
    no score; zeros appended to v are cut off the output. If `described` is True, memory without values, which takes no
    launch, stands for a tensor that would be copied.
    """
    shape, keys = request.shape, slice(seen[0], seen[1])
    width = max(shape.head_dim, shape.value_dim)
    width += -width % fused_on_cuda.HEAD_DIM_MULTIPLE
    found = []
    for tensor in (request.q, request.k[:, :, keys], request.v[:, :, keys]):
        missing = width - tensor.shape[-1]
        if described and (missing or not has_supported_layout(tensor)):
            found.append(tensor.new_empty((*tensor.shape[:3], width), requires_grad=tensor.requires_grad))
        else:
            found.append(with_supported_layout(pad(tensor, (0, missing)) if missing else tensor))
    return found[0], found[1], found[2]


def _choose_on_cuda(
    request: AttentionRequest, q: Tensor, k: Tensor, v: Tensor, *, causal: bool
) -> fused_on_cuda.FusedCall | None:
    """Return the fused call that PyTorch chooses for the tensors of `_tensors_on_cuda`."""
    scale = request.scale if request.scale > 0 else 1.0
    return fused_on_cuda.choose(q, k, v, causal=causal, dropout=request.dropout, scale=scale)


def _attend_on_cuda(request: AttentionRequest) -> AttentionResult:
    """Compute a request whose queries see one interval of keys; the output has as many columns as `v` is padded to."""
    seen = _keys_on_cuda(request)
    assert seen is not None  # such a request is refused
    q, k, v = _tensors_on_cuda(request, seen)
    call = _choose_on_cuda(request, q, k, v, causal=seen[2])
    assert call is not None
    output, logsumexp = fused_on_cuda.attend(q, k, v, call, logsumexp=True, as_written=True)
    finish = fused_on_cuda.with_nan_for_inf if call.kernel == fused_on_cuda.FLASH else None
    return AttentionResult(output, logsumexp, finish=finish)


def _rectangles_of(request: AttentionRequest, bounds: KeyBounds) -> tuple[Rectangle, ...]:
    """Return the rectangles that cover the bounds of a request."""
    known = bounds if request.shape.device.type == "cpu" else _bounds_on_cpu(request)
    assert known is not None  # such a request is refused
    return cover_with_rectangles(known, biased=request.bias is not None)


def reads_int8(request: AttentionRequest) -> bool:
    """Return False: int8 keys and values are dequantised before this kernel runs."""
    return False


def attend(request: AttentionRequest, bounds: KeyBounds) -> AttentionResult:
    """Compute each rectangle with a fused call, and merge their results by the logsumexp."""
    if request.scale <= 0:
        # The fused kernel adds -inf before it scales: -inf * 0 is NaN, and -inf * -1 would show only hidden keys.
        request = replace(request, q=request.q * request.scale, scale=1.0)
    on_cuda = request.shape.device.type == "cuda"
    found = _attend_on_cuda(request) if on_cuda else AttentionResult(*_attend_on_cpu(request, bounds))
    if found.output.shape[-1] > request.shape.value_dim:
        found = replace(found, output=found.output[..., : request.shape.value_dim])
    if request.sinks is not None:
        found = AttentionResult(*add_sinks(found.output, found.logsumexp, request.sinks))
    return found


def _attend_on_cpu(request: AttentionRequest, bounds: KeyBounds) -> tuple[Tensor, Tensor]:
    """Compute the output, with as many columns as the wider of q and v, and the logsumexp."""
    cover = _RectangleCover(request, bounds, _rectangles_of(request, bounds))
    # The fused kernel needs equal dims. Zeros appended to q and k change no score; zeros appended to v are cut off the
    # output.
    width = max(request.shape.head_dim, request.shape.value_dim)
    q, k, v = (
        with_supported_layout(tensor if tensor.shape[-1] == width else pad(tensor, (0, width - tensor.shape[-1])))
        for tensor in (request.q, request.k, request.v)
    )
    if request.qkv_need_gradient:
        return _FusedRectangles.apply(q, k, v, cover)  # type: ignore[no-any-return, no-untyped-call]
    return _attend_rectangles(q, k, v, cover)


def estimate_work(request: AttentionRequest, bounds: KeyBounds) -> WorkEstimate:
    """Estimate the scores computed, and the memory of output, logsumexp and the largest mask."""
    shape = request.shape
    rectangles = _rectangles_of(request, bounds)
    heads_samples = {True: shape.batch * shape.num_heads, False: shape.num_heads}
    cells = sum(_count_computed_cells(rectangle) * heads_samples[rectangle.sample is None] for rectangle in rectangles)
    masked = max((rectangle.num_cells for rectangle in rectangles if rectangle.kind == "partial"), default=0)
    if bounds.remainder is not None or request.bias is not None:
        masked *= shape.batch * shape.num_heads
    size, wide = shape.dtype.itemsize, working_dtype(shape.dtype).itemsize
    return WorkEstimate(cells, shape.num_rows * (max(shape.value_dim, shape.head_dim) * size + wide) + masked * wide)


def _count_computed_cells(rectangle: Rectangle) -> int:
    """Count the scores of a rectangle that the fused kernel computes: with is_causal it skips whole blocks.

    A block has 32, 64 or 256 queries by 512 keys; blocks up to the one with the last visible key are computed (PyTorch,
    aten/src/ATen/native/cpu/FlashAttentionKernel.cpp).
    """
    if rectangle.kind != "causal":
        return rectangle.num_cells
    height, width = rectangle.rows[1] - rectangle.rows[0], rectangle.columns[1] - rectangle.columns[0]
    block = 256 if height >= 768 else 64 if height >= 192 else 32
    stops = (min(first + block, height) for first in range(0, height, block))
    return sum(
        min(block, height - first) * min(-(-min(stop, width) // 512) * 512, width)
        for first, stop in zip(range(0, height, block), stops, strict=True)
    )


@dataclass(frozen=True, eq=False)
class _RectangleCover:
    """A request and the rectangles that cover its visible keys; methods slice tensors and mask to a rectangle."""

    request: AttentionRequest
    bounds: KeyBounds
    rectangles: tuple[Rectangle, ...]

    def sample_slice(self, rectangle: Rectangle) -> slice:
        return slice(None) if rectangle.sample is None else slice(rectangle.sample, rectangle.sample + 1)

    def slice_tensors(self, rectangle: Rectangle, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if self.is_whole(rectangle):
            return q, k, v
        samples, rows, columns = self.sample_slice(rectangle), slice(*rectangle.rows), slice(*rectangle.columns)
        return q[samples, :, rows], k[samples, :, columns], v[samples, :, columns]

    def is_whole(self, rectangle: Rectangle) -> bool:
        """Whether a rectangle consists of all queries and keys of all samples."""
        shape = self.request.shape
        return (rectangle.sample, rectangle.rows, rectangle.columns) == (
            None,
            (0, shape.query_length),
            (0, shape.key_length),
        )

    def needs_mask(self, rectangle: Rectangle) -> bool:
        """Whether a rectangle needs a dense additive mask."""
        return rectangle.kind == "partial" or self.request.bias is not None

    def additive_mask(self, rectangle: Rectangle) -> Tensor | None:
        """Return the additive mask of a rectangle: -inf where hidden, else the bias or 0; None where all are 0."""
        request, rows, columns = self.request, slice(*rectangle.rows), slice(*rectangle.columns)
        if not self.needs_mask(rectangle):
            return None
        dtype = working_dtype(request.shape.dtype)
        hidden = ~visible_cells(request, rows, columns)  # (batch or 1, heads or 1, rows, columns)
        if request.bias is None:
            added = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, -torch.inf)
        else:
            added = bias_tile(request.bias, request.shape, rows, columns).detach().to(dtype)
            added = added.masked_fill(hidden, -torch.inf)
        added = added[self.sample_slice(rectangle)] if added.shape[0] > 1 else added
        batch = request.shape.batch if rectangle.sample is None else 1
        return added.expand(batch, request.shape.num_heads, -1, -1)


def _attend_rectangles(q: Tensor, k: Tensor, v: Tensor, cover: _RectangleCover) -> tuple[Tensor, Tensor]:
    """Compute output (batch, heads, queries, dim) and logsumexp (batch, heads, queries) from all rectangles."""
    shape = cover.request.shape
    size = (shape.batch, shape.query_length, shape.num_heads)
    only = cover.rectangles[0] if len(cover.rectangles) == 1 else None
    if only is not None and only.sample is None and only.rows == (0, shape.query_length):
        return _attend_rectangle(q, k, v, cover, only)
    output = q.new_zeros(*size, v.shape[-1]).transpose(1, 2)  # in this layout, heads merge without a copy
    logsumexp = torch.full(size, -torch.inf, dtype=working_dtype(q.dtype), device=q.device).transpose(1, 2)
    written: tuple[int | None, int] = (None, 0)  # sample index, and one past the last row written in this sample
    for rectangle in cover.rectangles:
        part, part_logsumexp = _attend_rectangle(q, k, v, cover, rectangle)
        place = (cover.sample_slice(rectangle), slice(None), slice(*rectangle.rows))
        if written[0] == rectangle.sample and rectangle.rows[0] < written[1]:
            # Two rectangles over the same rows: weight each by exp(its logsumexp - the joint logsumexp).
            joined = torch.logaddexp(logsumexp[place], part_logsumexp)
            shares = (logsumexp[place] - joined).exp()[..., None], (part_logsumexp - joined).exp()[..., None]
            part = (output[place] * shares[0] + part * shares[1]).to(q.dtype)  # the product has the dtype of the shares
            part_logsumexp = joined
        output[place], logsumexp[place] = part, part_logsumexp
        written = (rectangle.sample, rectangle.rows[1])
    return output, logsumexp


def _attend_rectangle(
    q: Tensor, k: Tensor, v: Tensor, cover: _RectangleCover, rectangle: Rectangle
) -> tuple[Tensor, Tensor]:
    """Compute the output (samples, heads, rows, dim) and logsumexp (samples, heads, rows) of one rectangle."""
    mask = cover.additive_mask(rectangle)
    output, logsumexp = fused.forward(
        *cover.slice_tensors(rectangle, q, k, v),
        causal=rectangle.kind == "causal",
        mask=mask,
        scale=cover.request.scale,
    )
    if mask is not None:
        # The fused kernel returns a logsumexp of 0.0 for a row without visible keys.
        logsumexp = logsumexp.masked_fill((mask == -torch.inf).all(-1), -torch.inf)
    return output, logsumexp


class _FusedRectangles(torch.autograd.Function):
    """Autograd function of attention over all rectangles; output and logsumexp are differentiable."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, cover: _RectangleCover) -> tuple[Tensor, Tensor]:
        output, logsumexp = _attend_rectangles(q, k, v, cover)
        again = (
            visibility_tensors(cover.request)
            if any(cover.needs_mask(rectangle) for rectangle in cover.rectangles)
            else ()
        )
        ctx.save_for_backward(q, k, v, output, logsumexp, *again)
        ctx.cover = replace(cover, request=without_qkv(cover.request))
        ctx.set_materialize_grads(False)
        return output, logsumexp

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor | None, grad_logsumexp: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, output, logsumexp, *_ = ctx.saved_tensors  # autograd raises if an input was modified
        if torch.is_grad_enabled():
            # The code below is not differentiable: a gradient penalty would silently be a constant.
            request = replace(ctx.cover.request, q=q, k=k, v=v, sinks=None)  # sinks are added after this function
            return (*differentiable_gradients("sdpa", request, ctx.cover.bounds, grad_output, grad_logsumexp)[:3], None)
        grad_logsumexp = None if grad_logsumexp is None else grad_logsumexp.resolve_neg()
        # In a row without visible keys, P = exp(-inf - L) is 0 for any finite L, and NaN for L = -inf.
        finite = logsumexp.masked_fill(logsumexp == -torch.inf, 0)
        dq, dk, dv = (
            (torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v))
            if grad_output is None
            else _sum_rectangle_gradients(grad_output, (q, k, v, output), finite, ctx.cover)
        )
        if grad_logsumexp is not None:
            # dL_i / ds_ij = p_ij, so dq = scale * g_i (P K)_i and dk = scale * P^T (g q): P K is an attention call with
            # v = k, and P^T (g q) is the gradient of its v.
            weighted_keys, _ = _attend_rectangles(q, k, k, ctx.cover)
            g = grad_logsumexp.masked_fill(logsumexp == -torch.inf, 0)[..., None].to(q.dtype) * ctx.cover.request.scale
            dq = dq.to(working_dtype(q.dtype)) + g * weighted_keys
            of_keys = _sum_rectangle_gradients(g * q, (q, k, k, weighted_keys), finite, ctx.cover)[2]
            dk = dk.to(working_dtype(q.dtype)) + of_keys
        return dq.to(q.dtype), dk.to(q.dtype), dv.to(q.dtype), None


def _sum_rectangle_gradients(
    grad_output: Tensor,
    tensors: tuple[Tensor, Tensor, Tensor, Tensor],
    logsumexp: Tensor,
    cover: _RectangleCover,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v, summed over the rectangles.

    The logsumexp L is that of all keys of a query, so P = exp(s - L) are its attention weights.
    """
    q, k, v, output = tensors
    is_whole = any(map(cover.is_whole, cover.rectangles))
    # Gradients are accumulated in this dtype: half precision would lose small contributions of many rectangles.
    wide = working_dtype(q.dtype)
    dq, dk, dv = (q, k, v) if is_whole else (torch.zeros_like(tensor, dtype=wide) for tensor in (q, k, v))
    for rectangle in cover.rectangles:
        samples, rows, columns = cover.sample_slice(rectangle), slice(*rectangle.rows), slice(*rectangle.columns)
        of_q, of_k, of_v = fused.backward(
            grad_output[samples, :, rows],
            *cover.slice_tensors(rectangle, q, k, v),
            output[samples, :, rows],
            logsumexp[samples, :, rows],
            causal=rectangle.kind == "causal",
            mask=cover.additive_mask(rectangle),
            scale=cover.request.scale,
        )
        if is_whole:  # it is the only rectangle
            return of_q, of_k, of_v
        dq[samples, :, rows] += of_q
        dk[samples, :, columns] += of_k
        dv[samples, :, columns] += of_v
    return dq, dk, dv
