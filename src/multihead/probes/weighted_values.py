"""Compute weighted sums of numbers per key by an attention call whose values are these numbers.

For the weight on a set of tokens the number of a key is 1 or 0, for the norm of contributions it is a norm. One call
computes any number of such columns, in linear memory.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from multihead.kernels.choose import KERNELS
from multihead.kernels.dense_tile import working_dtype
from multihead.kernels.nonfinite import may_overflow
from multihead.probes.measured_call import MeasuredCall
from multihead.probes.streaming import measure_in_tiles


def key_set_as_values(call: MeasuredCall, flags: Tensor) -> Tensor:
    """Convert a set of keys, (batch, keys) bool, to values 0 and 1: (batch, kv_heads, keys, 1)."""
    return flags.to(working_dtype(call.request.shape.dtype))[:, None, :, None].expand(
        -1, call.request.shape.num_kv_heads, -1, -1
    )


def projected_value_norms(call: MeasuredCall, output_weight: Tensor) -> Tensor:
    """Return ||W_O^h v_j|| for each head h that uses a key/value head: (batch, kv_heads, keys, group).

    Infinite norms are replaced by finite numbers, because 0 * inf would be NaN for queries that do not see the key.
    """
    shape = call.request.shape
    factors = _factors_of_projection(call, output_weight).unflatten(
        0, (shape.num_kv_heads, -1)
    )  # (kv_heads, group, rank, dim)
    v = call.request_without_nonfinite.v.detach().to(factors.dtype)
    found = [_norm_of_vectors(v @ factors[:, index].mT) for index in range(shape.heads_per_kv_head)]
    most = torch.finfo(factors.dtype).max
    return torch.stack(found, -1).nan_to_num(nan=most, posinf=most)


def select_own_columns(call: MeasuredCall, weighed: Tensor) -> Tensor:
    """Select each head's own column: (batch, heads, queries, group) -> (batch, heads, queries)."""
    shape = call.request.shape
    own = torch.arange(shape.num_heads, device=shape.device) % shape.heads_per_kv_head
    return weighed.gather(-1, own[:, None, None].expand(*weighed.shape[:3], 1))[..., 0]


def output_norms(call: MeasuredCall, output_weight: Tensor) -> Tensor:
    """Return the norm of each head's contribution to the layer's output: (batch, heads, queries)."""
    factors = _factors_of_projection(call, output_weight)
    if call.result is None or call.request.dropout or call.result.head_factors is not None:
        output = attention_weighted_sums(call, call.request_without_nonfinite.v.detach())
    else:
        output = call.result.output
    return _norm_of_vectors(output.detach().to(factors.dtype) @ factors.mT)


def norms_of_changed_heads(call: MeasuredCall, norms: Tensor, output_weight: Tensor) -> Tensor:
    """Return the norms, (batch, heads, queries), of heads whose output was scaled, or replaced by another vector.

    Args:
        call: a call whose result has `head_factors`.
        norms: norms of the heads' own outputs, or of the outputs' parts.
        output_weight: the weight of the output projection.
    """
    assert call.result is not None
    assert call.result.head_factors is not None
    matrices = _factors_of_projection(call, output_weight)
    written = _norm_of_vectors(call.result.output.detach().to(matrices.dtype) @ matrices.mT)
    factors = call.result.head_factors.to(norms.dtype)
    return torch.where(factors.isnan(), written.to(norms.dtype), norms * factors.abs())


def attention_weighted_sums(call: MeasuredCall, columns: Tensor) -> Tensor:
    """Compute attention-weighted sums of numbers per key: (P c)_i = sum_j p_ij c_j.

    Args:
        call: the call.
        columns: (batch, kv_heads, keys, n), n numbers c_j per key.

    Returns:
        (batch, heads, queries, n).

    P c is attention with values c, so a kernel computes it; the tiles do if only the reference kernel could.
    """
    request = call.request_without_nonfinite
    dtype = working_dtype(request.shape.dtype)
    wide = replace(
        request,
        q=request.q.detach().to(dtype),  # half precision would round the sums
        k=request.k.detach().to(dtype),
        v=columns.to(dtype),
        shape=request.shape._replace(value_dim=columns.shape[-1], dtype=dtype),
        dropout=0.0,
        requested_statistics=frozenset(),
    )
    # If sdpa pads few columns to head_dim, the tiles are faster.
    padding = columns.shape[-1] * 2 < request.shape.head_dim
    for name in ("native", "sdpa"):
        kernel = KERNELS[name]
        if kernel.refusal(wide, call.bounds) is not None or (name == "sdpa" and padding):
            continue
        if kernel.HANDLES_NONFINITE or not may_overflow(wide):
            return kernel.attend(wide, call.bounds).output
    _, found = measure_in_tiles(call, (), columns)
    assert found is not None
    return found


def _factors_of_projection(call: MeasuredCall, output_weight: Tensor) -> Tensor:
    """Return R_h of the QR decomposition W_O^h = Q_h R_h, (heads, rank, value_dim); ||W_O^h v|| = ||R_h v||."""
    shape = call.request.shape
    weight = output_weight.detach().to(device=shape.device, dtype=working_dtype(shape.dtype)).contiguous()
    heads = weight.view(-1, shape.num_heads, shape.value_dim).transpose(0, 1)  # (heads, embed_dim, value_dim)
    if shape.value_dim >= heads.shape[1]:
        return heads
    reduced: Tensor = torch.linalg.qr(heads, mode="r").R
    return reduced


def _norm_of_vectors(vectors: Tensor) -> Tensor:
    """Compute the norms of vectors, (..., dim) -> (...), scaled so that squares do not overflow."""
    if not vectors.shape[-1]:
        return vectors.new_zeros(vectors.shape[:-1])
    largest = vectors.abs().amax(-1)
    found: Tensor = torch.linalg.vector_norm(vectors / largest.masked_fill(largest == 0, 1)[..., None], dim=-1)
    return found * largest
