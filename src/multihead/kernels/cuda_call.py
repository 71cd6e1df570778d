"""The short way of a call on CUDA: the kernel of PyTorch that computes it whole, without a request and a plan.

`kernels/native/short_call.py` asks it about calls on CUDA. It decides from numbers of Python and from dtypes, so no
call waits for a value of the device. A call is taken if its mask shows every query all keys, or all keys up to its own,
or if it has one query, which sees one interval of keys. Which kernel of PyTorch computes it, `fused_on_cuda.choose`
asks PyTorch. Other masks of sequences and a band go to `ragged.py`, once that is proven or asked for. The planned way,
the kernels `sdpa` and `ragged`, computes these calls by the same functions.

While torch.compile makes a graph, such a call becomes PyTorch's `scaled_dot_product_attention` in the graph.
"""

from __future__ import annotations

import os
from functools import cache
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from multihead.kernels import fused_on_cuda, head_changes, ragged, sequence_split
from multihead.kernels.call import AttentionArguments, Surroundings
from multihead.kernels.choose import KERNELS
from multihead.kernels.dense_tile import without_autocast
from multihead.kernels.fused import has_supported_layout, with_supported_layout
from multihead.kernels.native import kernel as native_kernel
from multihead.kernels.proven import UNPROVEN_VARIABLE, reason_to_wait
from multihead.tensors.shapes import MAX_POSITION
from multihead.tensors.tracing import constant_in_graphs, is_exporting


def attend(
    q: Tensor, k: Tensor, v: Tensor, arguments: AttentionArguments, around: Surroundings, *, logsumexp: bool
) -> tuple[Tensor, ...] | None:
    """Compute a call on CUDA; None if it needs a plan. The arguments are those of `functional.attention`, unchecked.

    Returns:
        the output (batch, heads, queries, value_dim); and if `logsumexp` is True, the logsumexp (batch, heads,
        queries).
    """
    mask, bias, softcap, sinks, scale, dropout, query_start = arguments
    sequences = getattr(mask, "sequences", None)  # `mask` is unchecked, so it may be any object
    if (
        sequences is None
        or bias is not None
        or sinks is not None
        or softcap is not None
        or around.listeners
        or head_changes.active_changes
        or sequence_split.active_split is not None
        or type(dropout) is not float
        or not 0 <= dropout < 1
        or not (scale is None or (type(scale) is float and scale > 0))
        or not (query_start is None or (type(query_start) is int and 0 <= query_start <= MAX_POSITION))
        or not type(q) is type(k) is type(v) is Tensor
        or not (k.is_cuda and v.is_cuda)
        or not (q.dtype is k.dtype is v.dtype and q.dtype in fused_on_cuda.DTYPES)
        or not q.dim() == k.dim() == v.dim() == 4
        or next(iter(KERNELS.values())) is not native_kernel  # `is_kernel_added`, without the time of a call
    ):
        return None
    (batch, heads, queries, head_dim), (_, kv_heads, keys, value_dim) = q.shape, v.shape
    if (
        k.shape != (batch, kv_heads, keys, head_dim)
        or v.shape[0] != batch
        or 0 in (batch, heads, kv_heads, queries, keys, head_dim)
        or heads % kv_heads
        or value_dim != head_dim  # the planned way pads such heads
        or head_dim % fused_on_cuda.HEAD_DIM_MULTIPLE
    ):
        return None
    _, _, documents, before, after = sequences
    if query_start is None and queries != keys and (before >= 0 or after >= 0 or documents is not None):
        return None
    first, scale = query_start or 0, head_dim**-0.5 if scale is None else scale
    band = mask.band
    seen = None if band is None else band.interval_of_queries(first, queries, keys)
    if seen is None:
        if around.intercepted or not _is_ragged_used(os.environ.get(UNPROVEN_VARIABLE)):
            return None
        return ragged.attend_unplanned(q, k, v, mask, first, scale, dropout, logsumexp=logsumexp)
    start, stop, causal = seen
    if stop - start != keys:
        k, v = k[:, :, start:stop], v[:, :, start:stop]
    if around.intercepted:
        return None if logsumexp else _attend_in_graph(q, k, v, causal=causal, dropout=dropout, scale=scale)
    if not (has_supported_layout(q) and has_supported_layout(k) and has_supported_layout(v)):
        q, k, v = with_supported_layout(q), with_supported_layout(k), with_supported_layout(v)
    call = fused_on_cuda.choose(q, k, v, causal=causal, dropout=dropout, scale=scale)
    return None if call is None else fused_on_cuda.attend(q, k, v, call, logsumexp=logsumexp)


@cache
def _is_ragged_used(asked: str | None) -> bool:
    """Whether the kernel `ragged` runs, given the value of the environment variable that asks for unproven kernels."""
    return reason_to_wait(ragged.GPU_PATH) is None


def _attend_in_graph(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, dropout: float, scale: float
) -> tuple[Tensor, ...] | None:
    """Compute the output by PyTorch's SDPA, which torch.compile records; None under other tracers and transforms."""
    if not torch.compiler.is_dynamo_compiling() or is_exporting():
        return None
    repeats = q.shape[1] // k.shape[1]
    way = _way_in_graph(q.device, q.dtype, grouped=repeats > 1, causal=causal)
    if way == "planned":
        return None
    if way == "repeated":
        k, v = fused_on_cuda.repeat_heads(k, v, repeats)
    q, k, v = (tensor if tensor.stride(-1) == 1 else tensor.contiguous() for tensor in (q, k, v))
    grouped = q.shape[1] != k.shape[1]
    with without_autocast(q.device):
        return (scaled_dot_product_attention(q, k, v, None, dropout, causal, scale=scale, enable_gqa=grouped),)


@constant_in_graphs  # a graph has no values of tensors, and PyTorch decides by the card, the dtype and what is allowed
def _way_in_graph(
    device: torch.device, dtype: torch.dtype, *, grouped: bool, causal: bool
) -> Literal["as given", "repeated", "planned"]:
    """Return whether a fused kernel computes a usual call: heads as they are given, k and v repeated, or not at all."""
    q, k = (_usual_tensor(device, dtype, heads) for heads in (2, 1 if grouped else 2))
    call = fused_on_cuda.choose(q, k, k, causal=causal, dropout=0.0, scale=0.125)
    return "planned" if call is None else "repeated" if call.repeats > 1 else "as given"


def _usual_tensor(device: torch.device, dtype: torch.dtype, heads: int) -> Tensor:
    """Return memory for q or k, (1, heads, 8, 64), of which every fused kernel takes the sizes."""
    return torch.empty(1, heads, 8, 64, dtype=dtype, device=device)
