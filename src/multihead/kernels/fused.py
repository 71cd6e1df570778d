"""PyTorch's fused attention on the CPU with its logsumexp, and the layout of tensors that fused kernels read."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

# PyTorch has no public functions that return and take the logsumexp.
cpu_attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu  # noqa: SLF001
cpu_attention_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward  # noqa: SLF001


def has_supported_layout(tensor: Tensor) -> bool:
    """Whether a fused kernel reads the strides of a tensor (batch, heads, length, dim) as they are.

    The kernels assume a last stride of 1, also for tensors that they allocate with the strides of their inputs; with a
    stride of 0 the order of their axes would be undefined. On CUDA the kernels read 16 aligned bytes at a time.
    """
    strides = tensor.stride()
    if tensor.is_neg() or strides[-1] != 1 or 0 in strides:
        return False
    # Joined by "or", these numbers are a multiple of a power of two if each of them is.
    joined = tensor.storage_offset() | strides[0] | strides[1] | strides[2]
    return not tensor.is_cuda or joined * tensor.itemsize % 16 == 0


def with_supported_layout(tensor: Tensor) -> Tensor:
    """Return a tensor (batch, heads, length, dim), copied if a fused kernel would misread its strides."""
    if has_supported_layout(tensor):
        return tensor
    return tensor.resolve_neg().clone(memory_format=torch.contiguous_format)


def forward(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, mask: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """Return output (batch, heads, queries, dim) and logsumexp (batch, heads, queries)."""
    found = cpu_attention(q, k, v, 0.0, causal, attn_mask=mask, scale=scale)
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
    found = cpu_attention_backward(*given, logsumexp, 0.0, causal, attn_mask=mask, scale=scale)
    return cast("tuple[Tensor, Tensor, Tensor]", found)
