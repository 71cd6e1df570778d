"""PyTorch's three fused kernels on CUDA: FlashAttention, cuDNN and the memory-efficient one, for full and causal calls.

PyTorch chooses among them by the tensors, the card, and what the user allows (`sdpa_kernel`, `enable_flash_sdp`).
`choose` asks it, and the kernel that it names computes the call. So a call takes the kernel of
`scaled_dot_product_attention`, on every card and on ROCm. Where PyTorch names its math kernel, which holds queries x
keys, `choose` returns None, after asking again for k and v repeated for the heads of q: the memory-efficient kernel has
no grouped heads.
"""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch
import torch.nn.attention
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from multihead.kernels.call import AttentionRequest
from multihead.kernels.fused import with_supported_layout
from multihead.kernels.plan.bounds import bounds_of
from multihead.kernels.reference import differentiable_gradients
from multihead.masks import Causal, Full
from multihead.tensors.shapes import AttentionShape

MATH, FLASH, EFFICIENT, CUDNN = range(
    4
)  # the results of `torch._fused_sdp_choice`; others are kernels of other devices
DTYPES = frozenset({torch.float16, torch.bfloat16, torch.float32})
HEAD_DIM_MULTIPLE = 8  # the kernels compute heads of a multiple of this number of columns
MAX_HEAD_DIM = 256  # largest head_dim that the kernels support
LOGSUMEXP_MULTIPLE = 32  # the memory-efficient kernel pads the logsumexp to a multiple of this number of queries
# PyTorch has no public functions that return and take the logsumexp, or return which kernel it would choose.
_choose = torch._fused_sdp_choice  # noqa: SLF001
_flash = torch.ops.aten._scaled_dot_product_flash_attention  # noqa: SLF001
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_backward  # noqa: SLF001
_cudnn = torch.ops.aten._scaled_dot_product_cudnn_attention  # noqa: SLF001
_cudnn_backward = torch.ops.aten._scaled_dot_product_cudnn_attention_backward  # noqa: SLF001
_efficient = torch.ops.aten._scaled_dot_product_efficient_attention  # noqa: SLF001
_efficient_backward = torch.ops.aten._scaled_dot_product_efficient_attention_backward  # noqa: SLF001
_current_implementation = getattr(torch.nn.attention, "current_flash_attention_impl", None)
_grad_enabled, _autocast_enabled = torch.is_grad_enabled, torch.is_autocast_enabled


class FusedCall(NamedTuple):
    """How a fused kernel computes a call.

    Attributes:
        kernel: FLASH, EFFICIENT or CUDNN.
        repeats: how often each head of k and v is repeated before the call.
        causal: whether query i sees the keys up to i only; else all.
        dropout: fraction of the attention weights dropped.
        scale: factor of q . k, more than 0.
    """

    kernel: int
    repeats: int
    causal: bool
    dropout: float
    scale: float


def choose(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, dropout: float, scale: float) -> FusedCall | None:
    """Return the fused call that PyTorch would choose; None if it would take its math kernel.

    q, k and v are (batch, heads or kv_heads, length, dim), with a supported layout.
    """
    groups = q.shape[1] // k.shape[1]
    # With as many heads of q as of k, PyTorch answers as for repeated k and v.
    for repeats in (1,) if groups == 1 else (1, groups):
        few = q if repeats == 1 else q[:, : k.shape[1]]
        try:
            kernel = _choose(few, k, v, None, dropout, causal, scale=scale, enable_gqa=groups > repeats)
        except RuntimeError:  # no kernel computes it, and the user switched the math kernel off
            continue
        if kernel in (FLASH, EFFICIENT, CUDNN):
            return FusedCall(kernel, repeats, causal, dropout, scale)
    return None


def state_of_choice() -> tuple[object, ...]:
    """Return what `choose` depends on besides the tensors and the card: what the user allows, and in which order."""
    state = torch._C  # noqa: SLF001 - PyTorch's public functions take longer
    return (
        state._get_flash_sdp_enabled(),  # noqa: SLF001
        state._get_mem_efficient_sdp_enabled(),  # noqa: SLF001
        state._get_cudnn_sdp_enabled(),  # noqa: SLF001
        *state._get_sdp_priority_order(),  # noqa: SLF001
        torch.are_deterministic_algorithms_enabled(),
    )


def attend(
    q: Tensor, k: Tensor, v: Tensor, call: FusedCall, *, logsumexp: bool, as_written: bool = False
) -> tuple[Tensor, ...]:
    """Compute a call that `choose` returned for these tensors.

    Returns:
        the output (batch, heads, queries, value_dim); and if `logsumexp` is True, the logsumexp (batch, heads,
        queries), float32, NaN for a query that is NaN or sees a NaN; if `as_written`, perhaps inf there.
    """
    kernel, repeats, causal, dropout, scale = call
    if repeats > 1:
        k, v = repeat_heads(k, v, repeats)
    try:
        if _grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
            found = _DifferentiableCall.apply(q, k, v, call)  # type: ignore[no-untyped-call]
        elif logsumexp or _autocast_enabled("cuda"):  # under autocast SDPA itself would round float32 to half precision
            found = _forward(q, k, v, call)
        else:
            grouped = q.shape[1] != k.shape[1]
            found = (scaled_dot_product_attention(q, k, v, None, dropout, causal, scale=scale, enable_gqa=grouped),)
    except RuntimeError as error:
        if kernel != FLASH or isinstance(error, torch.OutOfMemoryError) or activated_flash_attention() is None:
            raise
        # An activated FlashAttention refuses what its card or version lacks, such as dropout. SDPA would choose it
        # again, so the operator of the other kernel is called.
        other = FusedCall(EFFICIENT, q.shape[1] // k.shape[1], causal, dropout, scale)
        found = attend(q, k, v, other, logsumexp=True)
        return found if logsumexp else found[:1]
    if not logsumexp:
        return found[:1]  # type: ignore[no-any-return]
    return found[0], with_nan_for_inf(found[1]) if kernel == FLASH and not as_written else found[1]


def with_nan_for_inf(logsumexp: Tensor) -> Tensor:
    """Return a logsumexp of FlashAttention, which writes inf for a query that sees a NaN, with NaN there."""
    return logsumexp.nan_to_num(torch.nan, torch.nan, -torch.inf)


def activated_flash_attention() -> str | None:
    """Return the name of the FlashAttention that the user activated in the place of PyTorch's own, or None."""
    return None if _current_implementation is None else _current_implementation()


def repeat_heads(k: Tensor, v: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Repeat each head of k and v (batch, kv_heads, length, dim), by one copy each: (batch, kv_heads * count, ...)."""
    k = k[:, :, None].expand(-1, -1, count, -1, -1).flatten(1, 2)
    v = v[:, :, None].expand(-1, -1, count, -1, -1).flatten(1, 2)
    return k.contiguous(), v.contiguous()  # one head is flattened to a view, with a stride that the kernels do not read


def _forward(q: Tensor, k: Tensor, v: Tensor, call: FusedCall) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return output, logsumexp (batch, heads, queries), and the two tensors that say what dropout dropped."""
    kernel, _, causal, dropout, scale = call
    if kernel == FLASH:
        output, logsumexp, _, _, _, _, seed, offset, _ = _flash(q, k, v, dropout, causal, scale=scale)
    elif kernel == CUDNN:
        output, logsumexp, _, _, _, _, seed, offset, _ = _cudnn(q, k, v, None, True, dropout, causal, scale=scale)  # noqa: FBT003
        logsumexp = logsumexp[..., 0]
    else:
        output, logsumexp, seed, offset = _efficient(q, k, v, None, True, dropout, causal, scale=scale)  # noqa: FBT003
        logsumexp = logsumexp[..., : q.shape[2]]
    return output, logsumexp, seed, offset


def _backward(
    grad_output: Tensor, tensors: tuple[Tensor, ...], rng: list[Tensor], call: FusedCall
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v; `tensors` are q, k, v, the output and the logsumexp.

    `rng` holds the two tensors that say what dropout dropped; it is empty without dropout.
    """
    q, k, v, output, logsumexp = tensors
    kernel, _, causal, dropout, scale = call
    if not rng:
        rng = [torch.zeros((), dtype=torch.int64, device=q.device)] * 2
    given = with_supported_layout(grad_output), q, k, v, output
    queries, keys = q.shape[2], k.shape[2]
    if kernel == EFFICIENT:
        padded = pad(logsumexp, (0, -queries % LOGSUMEXP_MULTIPLE), value=torch.inf)
        wanted = [True, True, True, False]
        found = _efficient_backward(*given[:4], None, output, padded, *rng, dropout, wanted, causal, scale=scale)
    elif kernel == CUDNN:
        stats, no_bias = logsumexp.contiguous()[..., None], None
        sizes = (None, None, queries, keys, dropout, causal)
        found = _cudnn_backward(*given, stats, *rng, no_bias, *sizes, scale=scale)
    else:
        sizes = (None, None, queries, keys, dropout, causal)
        found = _flash_backward(*given, logsumexp.contiguous(), *sizes, *rng, scale=scale)
    return cast("tuple[Tensor, Tensor, Tensor]", tuple(found[:3]))


class _DifferentiableCall(torch.autograd.Function):
    """Autograd function of a fused call; output and logsumexp are differentiable, the second time by `reference`."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, call: FusedCall) -> tuple[Tensor, Tensor]:
        output, logsumexp, *rng = _forward(q, k, v, call)
        ctx.save_for_backward(q, k, v, output, logsumexp, *(rng if call.dropout else ()))
        ctx.call = call
        ctx.set_materialize_grads(False)
        return output, logsumexp

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor | None, grad_logsumexp: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, output, logsumexp, *rng = ctx.saved_tensors  # autograd raises if an input was modified
        call: FusedCall = ctx.call
        if torch.is_grad_enabled():
            # The code below is not differentiable: a gradient penalty would silently be a constant.
            request = _request_of(q, k, v, call)
            return (
                *differentiable_gradients("sdpa", request, bounds_of(request), grad_output, grad_logsumexp)[:3],
                None,
            )
        dq, dk, dv = (
            (torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v))
            if grad_output is None
            else _backward(grad_output, (q, k, v, output, logsumexp), rng, call)
        )
        if grad_logsumexp is not None:
            # dL_i / ds_ij = p_ij, so dq = scale * g_i (P K)_i and dk = scale * P^T (g q): P K is an attention call with
            # v = k, and P^T (g q) is the gradient of its v. Dropout comes after the logsumexp.
            kept = call._replace(dropout=0.0)
            weighted_keys, again, *_ = _forward(q, k, k, kept)
            g = (grad_logsumexp.resolve_neg() * call.scale)[..., None]
            dq = (dq.float() + g * weighted_keys).to(q.dtype)
            tensors = (q, k, k, weighted_keys, again)
            of_keys = _backward((g * q).to(q.dtype), tensors, [], kept)[2]
            dk = (dk.float() + of_keys).to(k.dtype)
        return dq, dk, dv, None


def _request_of(q: Tensor, k: Tensor, v: Tensor, call: FusedCall) -> AttentionRequest:
    """Return the request of a call, for the reference kernel."""
    mask = Causal() if call.causal else Full()
    return AttentionRequest(q, k, v, AttentionShape.from_tensors(q, k, v), mask, call.scale, dropout=call.dropout)
