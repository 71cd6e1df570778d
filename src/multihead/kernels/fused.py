"""PyTorch's fused attention with its logsumexp: one kernel on the CPU, and three on CUDA, among which PyTorch chooses.

The kernels on CUDA are FlashAttention and cuDNN in half precision, and the memory-efficient kernel in float32. They get
no mask: a call on CUDA is full or causal.
"""

from __future__ import annotations

from functools import cache
from typing import cast

import torch
from torch import Tensor
from torch.nn.functional import pad

from multihead.tensors.shapes import AttentionShape

HALF_PRECISION_DTYPES = (torch.float16, torch.bfloat16)
MAX_HEAD_DIM = 256  # largest head_dim that the fused kernels on CUDA support
CUDNN_KERNEL_NUMBER = 3  # the result of `torch._fused_sdp_choice` if PyTorch would choose cuDNN
LOGSUMEXP_MULTIPLE = 32  # the memory-efficient kernel pads the logsumexp to a multiple of this number of queries
# PyTorch has no public functions that return and take the logsumexp, or return which kernel it would choose.
cpu_attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu  # noqa: SLF001
cpu_attention_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward  # noqa: SLF001
_flash_attention = torch.ops.aten._scaled_dot_product_flash_attention  # noqa: SLF001
_flash_attention_backward = torch.ops.aten._scaled_dot_product_flash_attention_backward  # noqa: SLF001
_cudnn_attention = torch.ops.aten._scaled_dot_product_cudnn_attention  # noqa: SLF001
_cudnn_attention_backward = torch.ops.aten._scaled_dot_product_cudnn_attention_backward  # noqa: SLF001
_efficient_attention = torch.ops.aten._scaled_dot_product_efficient_attention  # noqa: SLF001
_efficient_attention_backward = torch.ops.aten._scaled_dot_product_efficient_attention_backward  # noqa: SLF001
_choose_fused_kernel = torch._fused_sdp_choice  # noqa: SLF001


def refusal_on_cuda(shape: AttentionShape) -> str | None:
    """Return why no fused kernel on CUDA computes tensors of these sizes, in one sentence, or None."""
    if shape.dtype == torch.float32 and shape.heads_per_kv_head > 1:
        return "PyTorch's fused CUDA kernel for float32 has no grouped heads"
    if shape.dtype not in (*HALF_PRECISION_DTYPES, torch.float32):
        return f"PyTorch has no fused CUDA kernel for {str(shape.dtype).split('.')[-1]}"
    if max(shape.head_dim, shape.value_dim) > MAX_HEAD_DIM:
        return f"PyTorch's fused CUDA kernels support at most {MAX_HEAD_DIM} columns a head"
    if 0 in (shape.batch, shape.query_length, shape.key_length):
        return "PyTorch's fused CUDA kernels need at least one sample, query and key"
    if _compute_capability(shape.device) < (8, 0):
        return "PyTorch's fused CUDA kernels need a device of compute capability 8.0"
    return None


@cache
def _compute_capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def with_supported_layout(tensor: Tensor) -> Tensor:
    """Return a tensor (batch, heads, length, dim), copied if a fused kernel would misread its strides.

    The kernels assume a last stride of 1, also for tensors that they allocate with the strides of their inputs; with a
    stride of 0 the order of their axes would be undefined. On CUDA the kernels read 16 aligned bytes at a time.
    """
    tensor = tensor.resolve_neg()
    strides = tensor.stride()
    if strides[-1] == 1 and 0 not in strides:
        # Joined by "or", these numbers are a multiple of a power of two if each of them is.
        joined = tensor.storage_offset() | strides[0] | strides[1] | strides[2]
        if not tensor.is_cuda or joined * tensor.itemsize % 16 == 0:
            return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


def forward(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, mask: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """Return output (batch, heads, queries, dim) and logsumexp (batch, heads, queries); `mask` is None on CUDA."""
    if not q.is_cuda:
        found = cpu_attention(q, k, v, 0.0, causal, attn_mask=mask, scale=scale)
    elif q.dtype == torch.float32:
        output, logsumexp, *_ = _efficient_attention(
            q, k, v, None, compute_log_sumexp=True, is_causal=causal, scale=scale
        )
        found = output, logsumexp[..., : q.shape[2]]
    elif _chooses_cudnn(q, k, v, causal=causal, scale=scale):
        output, logsumexp, *_ = _cudnn_attention(q, k, v, None, compute_log_sumexp=True, is_causal=causal, scale=scale)
        found = output, logsumexp[..., 0]
    else:
        found = _flash_attention(q, k, v, is_causal=causal, scale=scale)[:2]
    return cast("tuple[Tensor, Tensor]", found)


def backward(
    grad_output: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    output: Tensor,
    logsumexp: Tensor,
    *,
    causal: bool,
    mask: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v; the logsumexp may include more keys than k has."""
    given = with_supported_layout(grad_output), q, k, v, output
    if not q.is_cuda:
        return cast(
            "tuple[Tensor, Tensor, Tensor]",
            cpu_attention_backward(*given, logsumexp, 0.0, causal, attn_mask=mask, scale=scale),
        )
    seed = torch.zeros((), dtype=torch.int64, device=q.device)  # seed and offset of the dropout, unused here
    queries, keys = q.shape[2], k.shape[2]
    if q.dtype == torch.float32:
        padded = pad(logsumexp, (0, -queries % LOGSUMEXP_MULTIPLE), value=torch.inf)
        needs_gradient = [True, True, True, False]
        found = _efficient_attention_backward(
            *given[:4], None, output, padded, seed, seed, 0.0, needs_gradient, causal, scale=scale
        )
    elif _chooses_cudnn(q, k, v, causal=causal, scale=scale):
        stats = logsumexp.contiguous()[..., None]
        found = _cudnn_attention_backward(
            *given, stats, seed, seed, None, None, None, queries, keys, 0.0, causal, scale=scale
        )
    else:
        stats = logsumexp.contiguous()
        found = _flash_attention_backward(
            *given, stats, None, None, queries, keys, 0.0, causal, seed, seed, scale=scale
        )
    return cast("tuple[Tensor, Tensor, Tensor]", tuple(found[:3]))


def _chooses_cudnn(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> bool:
    """Whether PyTorch would choose cuDNN for this call, as it does where that is faster."""
    grouped = q.shape[1] != k.shape[1]
    return _choose_fused_kernel(q, k, v, None, 0.0, causal, scale=scale, enable_gqa=grouped) == CUDNN_KERNEL_NUMBER
