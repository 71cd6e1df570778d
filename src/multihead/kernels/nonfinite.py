"""Keep NaN and inf in hidden keys, values and biases from affecting queries.

These functions run before a kernel is called, except for kernels that handle NaN and inf themselves
(`HANDLES_NONFINITE`). The norms of q, k and v usually show that all values are finite and no score can overflow,
because the dot product of two rows is at most the product of their norms. Finite numbers so large that a hidden score
may overflow are computed by the reference kernel, with a warning, since a kernel that hides a score by adding -inf
would get inf - inf. Otherwise keys with non-finite values are set to zero, and the output rows of queries that see such
a key are set to NaN afterwards. An inf that a query sees counts as NaN, because 0 * inf and inf - inf turn most such
rows into NaN anyway.

On CUDA values are not read, and replacing them would take longer than attention itself at short lengths. So non-finite
values are replaced on CUDA only where a mask can hide padding: with lengths, documents or tensors. A mask that depends
on distances alone hides no key from all queries, and a NaN in a key is then a result of the model. The kernel `flex`
replaces them itself, in its compiled call (`flex.py`).
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from multihead.kernels.call import AttentionRequest, AttentionResult
from multihead.kernels.dense_tile import visible_cells, working_dtype
from multihead.masks.base import KeyBounds
from multihead.scores.bias import Bias, bias_tile, values_of, with_values
from multihead.tensors.precision import widest_float
from multihead.tensors.shapes import consecutive_slices
from multihead.tensors.tracing import can_read_values

QUERIES_PER_BLOCK = 256  # queries per step if the mask is evaluated densely, in O(keys) memory


def replace_nonfinite(request: AttentionRequest, bounds: KeyBounds) -> tuple[AttentionRequest, Tensor | None]:
    """Replace non-finite entries by 0, and return which queries see one, (batch, heads, queries) bool, or None.

    0 * NaN is NaN: a hidden key's NaN would reach every query of the same matrix product, forward and backward. Norms,
    which read each tensor once, usually show that all entries are finite. If values cannot be read (a graph), entries
    are always replaced.
    """
    q, k, v, bias = request.q, request.k, request.v, request.bias
    if not hides_padding(request):
        return request, None
    numbers = None if request.bias_values is None else request.bias_values.detach()
    bad_numbers = None if numbers is None else _is_nan_or_positive_inf(numbers)
    bad_sinks = None if request.sinks is None else _is_nan_or_positive_inf(request.sinks.detach())  # (heads,)
    fits = can_read_values(request.shape.device) and not may_overflow(request)
    if fits and not any(bool(bad.any()) for bad in (bad_numbers, bad_sinks) if bad is not None):
        return request, None
    bad_queries = _has_nonfinite(q)  # (batch, heads, queries)
    bad_keys = _has_nonfinite(k) | _has_nonfinite(v)  # (batch, kv_heads, keys)
    zero = v.new_zeros(())
    cleaned = replace(request, v=torch.where(bad_keys[..., None], zero, v))
    # Without gradients a NaN in q and k may stay on CUDA, where the kernels overwrite hidden scores.
    if request.qkv_need_gradient or request.shape.device.type != "cuda":
        q, k = torch.where(bad_queries[..., None], zero, q), torch.where(bad_keys[..., None], zero, k)
        cleaned = replace(cleaned, q=q, k=k)
    bad_bias = None
    if bias is not None and bad_numbers is not None:
        cleaned = replace(cleaned, bias=with_values(bias, values_of(bias).masked_fill(bad_numbers, 0)))
        bad_bias = with_values(bias, bad_numbers.float())
    bad_keys = bad_keys.repeat_interleave(request.shape.heads_per_kv_head, 1)  # (batch, heads, keys)
    sees_any = _queries_seeing_nonfinite(cleaned, bounds, torch.ones_like(bad_keys), None)  # (batch, heads, queries)
    if request.sinks is not None and bad_sinks is not None:
        cleaned = replace(cleaned, sinks=request.sinks.masked_fill(bad_sinks, 0))
        bad_queries = bad_queries | bad_sinks[:, None]
    return cleaned, (bad_queries & sees_any) | _queries_seeing_nonfinite(cleaned, bounds, bad_keys, bad_bias)


def hides_padding(request: AttentionRequest) -> bool:
    """Whether NaN and inf in hidden keys are kept from queries: not on CUDA where only distances hide keys."""
    by_distance = request.mask.translation_invariant and request.bias is None
    return request.shape.device.type != "cuda" or not by_distance


def _has_nonfinite(tensor: Tensor) -> Tensor:
    """Return which rows of (batch, heads, length, dim) hold NaN or inf, by their sums: (batch, heads, length) bool."""
    widest = widest_float(tensor.device)
    if tensor.dtype == widest:
        return ~tensor.detach().isfinite().all(-1)
    wide = widest if tensor.dtype == torch.float32 else torch.float32
    return ~tensor.detach().sum(-1, dtype=wide).isfinite()


def _is_nan_or_positive_inf(numbers: Tensor) -> Tensor:
    """Return where biases or sinks are NaN or inf, which make the output NaN (-inf hides a key): bool, same shape."""
    return numbers.isnan() | (numbers == torch.inf)


def may_overflow(request: AttentionRequest) -> bool:
    """Whether q, k or v has a non-finite entry or could overflow in q . k; False if values cannot be read.

    |q . k| is at most the product of the rows' norms (Cauchy-Schwarz), which are at most the norms of the tensors. A
    kernel that adds -inf to hide a score needs finite scores: inf - inf is NaN.
    """
    if not can_read_values(request.shape.device):
        return False
    dtype = working_dtype(request.shape.dtype)
    tensors = [tensor.detach() for tensor in (request.q, request.k, request.v)]
    norms = torch.stack([torch.linalg.vector_norm(tensor, dtype=dtype) for tensor in tensors])
    largest = norms.max().item()
    return not largest * largest * max(abs(request.scale), 1.0) < torch.finfo(dtype).max / 4  # also True for NaN


def make_rows_nan(attended: AttentionResult, rows: Tensor) -> AttentionResult:
    """Set output and logsumexp to NaN in the queries `rows`, (batch, heads, queries) bool; gradients are unchanged."""
    nan = torch.zeros_like(attended.logsumexp).masked_fill(rows, torch.nan)
    return replace(
        attended,
        output=attended.output + nan[..., None].to(attended.output.dtype),
        kernel_logsumexp=attended.logsumexp + nan,
        finish=None,
    )


def _queries_seeing_nonfinite(
    request: AttentionRequest, bounds: KeyBounds, bad_keys: Tensor, bad_bias: Bias | None
) -> Tensor:
    """Return which queries see a non-finite key or bias: (batch, heads, queries) bool."""
    shape = request.shape
    if bounds.remainder is None and request.bias is None:
        counts = torch.nn.functional.pad(bad_keys.long().cumsum(-1), (1, 0))  # (batch, heads, keys + 1)
        size = (shape.batch, shape.num_heads, shape.query_length)
        start, stop = (edge[:, None].expand(size) for edge in (bounds.start, bounds.stop))
        return counts.gather(2, stop) > counts.gather(2, start)
    found = []
    for rows in consecutive_slices(shape.query_length, QUERIES_PER_BLOCK):
        bad = bad_keys[:, :, None]  # (batch, heads, 1, keys)
        if bad_bias is not None:
            bad = bad | (bias_tile(bad_bias, shape, rows, slice(None)) != 0)
        found.append((bad & visible_cells(request, rows)).any(-1).expand(shape.batch, shape.num_heads, -1))
    return torch.cat(found, 2) if found else bad_keys[..., :0]
