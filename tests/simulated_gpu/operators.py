"""PyTorch's attention operators for CUDA, as its source says: the assumptions that tools/on_gpu/questions.py checks.

Each function computes on CPU tensors and gets the arguments of the operator's schema by name. What is assumed:

- `_fused_sdp_choice` chooses FlashAttention in half precision and the memory-efficient kernel in float32 (Q6), if the
  user allows them, the card has them and they compute the tensors; else the math kernel.
- The seed that an operator returns says which weights dropout dropped; the logsumexp is that before dropout.
- A causal call of `_scaled_dot_product_*` is aligned at the start (the i-th query sees the i-th key last), a ragged one
  at the end of both sequences (Q4).
- Keys and values outside of their sequence reach no output, whatever they hold (Q1), and get gradients of 0 (Q2).
- FlashAttention gives a query without keys the output 0, and one that is NaN or sees a NaN the output NaN; the
  logsumexp of both is inf (Q3).
- FlashAttention takes all strides whose last one is 1, and a head_dim that is a multiple of 8 (Q5). A ragged call
  returns the logsumexp as (heads, tokens).
- Both can be captured in a graph (Q8).
- A compiled call of flex_attention is two launches, one of them for the logsumexp, and reads the block mask: hidden
  blocks are skipped, in partial ones its `mask_mod` is evaluated, in full ones not. What is computed of each row of q,
  and of each key, before it is at most one launch each.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

MATH, FLASH, EFFICIENT, CUDNN = range(4)
CAPABILITY = [9, 0]  # compute capability of the GPU
MARK = torch.finfo(torch.float32).max / 1.45  # a score that is not finite, in a call with gradients
LOGSUMEXP_MULTIPLE = 32  # the memory-efficient kernel pads the logsumexp to a multiple of this number of queries
_HALF = (torch.float16, torch.bfloat16)


def fused_sdp_choice(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, **_: Any,
) -> int:  # fmt: skip
    # aten/src/ATen/native/transformers/cuda/sdp_utils.cpp, select_sdp_backend: the first of the order that is enabled
    # and whose can_use_* is true.
    state, given = torch._C, (query, key, value)
    usable = {
        MATH: lambda: True,
        FLASH: lambda: state._get_flash_sdp_enabled() and attn_mask is None and _can_use_flash(*given, is_causal),
        EFFICIENT: lambda: state._get_mem_efficient_sdp_enabled() and _can_use_efficient(*given),
        CUDNN: lambda: state._get_cudnn_sdp_enabled() and query.dtype in _HALF and CAPABILITY >= [8, 0],
    }
    enabled = [kind for kind in state._get_sdp_priority_order() if kind != MATH or state._get_math_sdp_enabled()]
    found = next((kind for kind in enabled if kind in usable and usable[kind]()), None)
    if found is None:
        raise RuntimeError("No available kernel. Aborting execution.")
    return found


def _can_use_flash(query: Tensor, key: Tensor, value: Tensor, causal: bool) -> bool:
    # can_use_flash_attention: check_flash_attention_hardware_support, check_head_dim_size_flash, check_last_dim_stride,
    # check_flash_causal_non_square_seqlens, check_tensor_dtype.
    dims = {each.shape[-1] for each in (query, key, value)}
    square = not causal or query.shape[2] == key.shape[2]
    strides = all(each.stride(-1) == 1 for each in (query, key, value))
    return query.dtype in _HALF and CAPABILITY >= [8, 0] and len(dims) == 1 and max(dims) <= 256 and square and strides


def _can_use_efficient(query: Tensor, key: Tensor, value: Tensor) -> bool:
    # can_use_mem_efficient_attention: check_batch_size_and_num_heads without grouped heads, check_head_dim_size_mem_
    # efficient (alignment of 4 float32 or 8 half-precision numbers), check_last_dim_stride, check_tensor_dtype.
    given = (query, key, value)
    aligned = all(each.shape[-1] % (4 if each.dtype == torch.float32 else 8) == 0 for each in given)
    known = query.dtype in (torch.float32, torch.float16) or (query.dtype == torch.bfloat16 and CAPABILITY >= [8, 0])
    return known and aligned and query.shape[1] == key.shape[1] and all(each.stride(-1) == 1 for each in given)


# ---- calls of (batch, heads, length, head_dim)


def flash(
    query: Tensor, key: Tensor, value: Tensor, dropout_p: float = 0.0, is_causal: bool = False,
    scale: float | None = None, **_: Any,
) -> Any:  # fmt: skip
    _check_layout(query, key, value)
    hidden, seed = _start_aligned(query, key, is_causal), _new_seed(dropout_p)
    output, logsumexp = _attend(query, key, value, hidden, scale, dropout_p, seed)
    logsumexp = _without_numbers_as_inf(logsumexp)
    sizes = query.shape[2], key.shape[2]
    return _tokens_first(output), logsumexp, None, None, *sizes, seed, seed[:0], output[..., :0]


def cudnn(
    query: Tensor, key: Tensor, value: Tensor, dropout_p: float = 0.0, is_causal: bool = False,
    scale: float | None = None, **_: Any,
) -> Any:  # fmt: skip
    hidden, seed = _start_aligned(query, key, is_causal), _new_seed(dropout_p)
    output, logsumexp = _attend(query, key, value, hidden, scale, dropout_p, seed)
    sizes = query.shape[2], key.shape[2]
    return _tokens_first(output), logsumexp[..., None], None, None, *sizes, seed, seed[:0], output[..., :0]


def efficient(
    query: Tensor, key: Tensor, value: Tensor, attn_bias: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, **_: Any,
) -> Any:  # fmt: skip
    assert attn_bias is None
    assert query.shape[1] == key.shape[1]
    hidden, seed = _start_aligned(query, key, is_causal), _new_seed(dropout_p)
    output, logsumexp = _attend(query, key, value, hidden, scale, dropout_p, seed)
    logsumexp = torch.nn.functional.pad(logsumexp, (0, -query.shape[2] % LOGSUMEXP_MULTIPLE), value=torch.inf)
    return _tokens_first(output), logsumexp, seed, seed[:0]


def fused_backward(
    query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor, philox_seed: Tensor,
    dropout_p: float = 0.0, is_causal: bool = False, scale: float | None = None, **rest: Any,
) -> Any:  # fmt: skip
    grad = rest["grad_out_"] if "grad_out_" in rest else rest["grad_out"]
    logsumexp = logsumexp[..., 0] if logsumexp.dim() == 4 else logsumexp[..., : query.shape[2]]
    hidden = _start_aligned(query, key, is_causal)
    grads = _gradients(grad, query, key, value, out, logsumexp, hidden, scale, dropout_p, philox_seed)
    return (*grads, None) if "grad_input_mask" in rest else grads


# ---- ragged calls of (tokens, heads, head_dim)


def ragged(
    query: Tensor, key: Tensor, value: Tensor, cum_seq_q: Tensor, cum_seq_k: Tensor, max_q: int, max_k: int,
    dropout_p: float = 0.0, is_causal: bool = False, scale: float | None = None, window_size_left: int | None = None,
    window_size_right: int | None = None, seqused_k: Tensor | None = None, **_: Any,
) -> Any:  # fmt: skip
    # aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp, mha_varlen_fwd: memory of tokens outside of all
    # sequences is allocated and not written.
    _check_layout(query, key, value)
    output = torch.full_like(query, torch.nan, memory_format=torch.contiguous_format)
    logsumexp = torch.full((query.shape[1], query.shape[0]), torch.nan)
    seed = _new_seed(dropout_p)
    for rows, columns in _sequences(cum_seq_q, cum_seq_k, seqused_k):
        assert rows.stop - rows.start <= max_q
        assert columns.stop - columns.start <= max_k
        q, k, v = (each.transpose(0, 1)[None] for each in (query[rows], key[columns], value[columns]))
        hidden = _end_aligned(q, k, is_causal, window_size_left, window_size_right)
        part, of_part = _attend(q, k, v, hidden, scale, dropout_p, seed)
        output[rows] = part[0].transpose(0, 1)
        logsumexp[:, rows] = _without_numbers_as_inf(of_part[0])
    return output, logsumexp, seed, seed[:0], output[:0]


def ragged_backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor, cum_seq_q: Tensor,
    cum_seq_k: Tensor, rng_state: Tensor, dropout_p: float = 0.0, is_causal: bool = False, scale: float | None = None,
    window_size_left: int | None = None, window_size_right: int | None = None, **_: Any,
) -> Any:  # fmt: skip
    # flash_api.cpp, mha_varlen_bwd: gradients of tokens outside of all sequences are allocated and not written; those
    # of keys without queries, and of queries without keys, are written as 0.
    given = (query, key, value)
    grads = tuple(torch.full_like(each, torch.nan, memory_format=torch.contiguous_format) for each in given)
    for rows, columns in _sequences(cum_seq_q, cum_seq_k, None):
        mine, theirs = (grad_out[rows], query[rows], out[rows]), (key[columns], value[columns])
        grad, q, o, k, v = (each.transpose(0, 1)[None] for each in (*mine, *theirs))
        hidden = _end_aligned(q, k, is_causal, window_size_left, window_size_right)
        parts = _gradients(grad, q, k, v, o, logsumexp[None, :, rows], hidden, scale, dropout_p, rng_state)
        for whole, place, part in zip(grads, (rows, columns, columns), parts, strict=True):
            whole[place] = part[0].transpose(0, 1)
    return grads


def _check_layout(*tensors: Tensor) -> None:
    if any(each.stride(-1) != 1 for each in tensors):
        raise RuntimeError("Input tensor must have contiguous last dimension")
    if tensors[0].shape[-1] % 8:
        raise RuntimeError("head_size must be a multiple of 8, this is ensured by padding!")


def _without_numbers_as_inf(logsumexp: Tensor) -> Tensor:
    """Return FlashAttention's logsumexp: inf if the sum of a row is 0 or NaN."""
    return logsumexp.masked_fill(logsumexp.isnan() | (logsumexp == -torch.inf), torch.inf)


def _sequences(cum_seq_q: Tensor, cum_seq_k: Tensor, used: Tensor | None) -> list[tuple[slice, slice]]:
    """Return the rows of queries and of keys of each sequence."""
    q, k = cum_seq_q.tolist(), cum_seq_k.tolist()
    stops = k[1:] if used is None else [start + count for start, count in zip(k, used.tolist(), strict=False)]
    return [(slice(q[n], q[n + 1]), slice(k[n], stops[n])) for n in range(len(q) - 1)]


# ---- flex_attention


def flex(
    q: Tensor, k: Tensor, v: Tensor, *, score_mod: Callable[..., Tensor] | None, block_mask: Any, scale: float
) -> tuple[Tensor, Tensor]:
    """Compute output and logsumexp; `score_mod` and the block mask get and hold CPU tensors."""
    batch, heads, queries, keys = *q.shape[:3], k.shape[2]
    b, h, i, j = torch.meshgrid(*(torch.arange(n) for n in (batch, heads, queries, keys)), indexing="ij")
    partial = _cells_of_blocks(block_mask.kv_num_blocks, block_mask.kv_indices, block_mask.BLOCK_SIZE, (b, h, i, j))
    visible = partial & block_mask.mask_mod(b, h, i, j)
    if block_mask.full_kv_num_blocks is not None:
        lists = block_mask.full_kv_num_blocks, block_mask.full_kv_indices
        visible = visible | _cells_of_blocks(*lists, block_mask.BLOCK_SIZE, (b, h, i, j))
    k, v = (each.repeat_interleave(heads // each.shape[1], 1) for each in (k, v))
    # A kernel overwrites the scores of hidden keys, and multiplies values by weights of 0.
    scores = q.float() @ k.float().mT * scale
    scores = scores if score_mod is None else score_mod(scores, b, h, i, j)
    output, logsumexp = _softmax(scores.masked_fill(~visible, -torch.inf), v, q.dtype)
    # torch/_inductor/kernel/flex/flex_attention.py: the output has the order of axes of q (infer_dense_strides).
    return _tokens_first(output) if q.transpose(1, 2).is_contiguous() else output, logsumexp


def with_nan_in_whole_rows(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k and v as the compiled call makes them before flex_attention, so that NaN of hidden keys stays out."""
    bad_keys = ~(k.isfinite().all(-1) & v.isfinite().all(-1))[..., None]
    bad_queries = ~q.isfinite().all(-1)[..., None]
    k, v = k.masked_fill(bad_keys, torch.nan), v.masked_fill(bad_keys, 0.0)
    return _tokens_first(q.masked_fill(bad_queries, torch.nan)), k, v


def with_marked_scores(
    q: Tensor, k: Tensor, v: Tensor, score_mod: Callable[..., Tensor] | None
) -> tuple[tuple[Tensor, Tensor, Tensor], Callable[..., Tensor]]:
    """Return q, k and v without what is not finite, and the function of scores of a compiled call with gradients."""
    rows, keys = q.isfinite().all(-1), k.isfinite().all(-1) & v.isfinite().all(-1)
    heads_per_kv_head = q.shape[1] // k.shape[1]

    def marked(scores: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        scores = scores if score_mod is None else score_mod(scores, b, h, i, j)
        bad = ~keys[b, h // heads_per_kv_head, j] | ~(scores < torch.inf)
        return scores.masked_fill(bad & (scores != -torch.inf), MARK)

    k, v = (each.masked_fill(~keys[..., None], 0.0) for each in (k, v))
    return (_tokens_first(q.masked_fill(~rows[..., None], 0.0)), k, v), marked


def with_nan_in_bad_rows(q: Tensor, output: Tensor, logsumexp: Tensor) -> tuple[Tensor, Tensor]:
    """Return the results of such a call: NaN where a row of q is not finite and sees a key, or saw a mark."""
    bad = (~q.isfinite().all(-1) & (logsumexp > -torch.inf)) | (logsumexp > MARK / 1.01)
    return output.masked_fill(bad[..., None], torch.nan), logsumexp.masked_fill(bad, torch.nan)


def _cells_of_blocks(counts: Tensor, indices: Tensor, size: tuple[int, int], cells: tuple[Tensor, ...]) -> Tensor:
    """Return which cells are in a listed block: (batch, heads, queries, keys) bool."""
    listed = torch.arange(indices.shape[-1]) < counts[..., None]
    found = torch.zeros(*indices.shape[:3], indices.shape[-1] + 1, dtype=torch.bool)
    found.scatter_(3, torch.where(listed, indices.long(), indices.shape[-1]), value=True)
    b, h, i, j = cells
    return found[b * (found.shape[0] > 1), h * (found.shape[1] > 1), i // size[0], j // size[1]]


# ---- the definition


def _attend(
    q: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None, scale: float | None, dropout: float = 0.0,
    seed: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    k, v = (each.repeat_interleave(q.shape[1] // each.shape[1], 1) for each in (k, v))
    scores = q.float() @ k.float().mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    scores = scores if hidden is None else scores.masked_fill(hidden, -torch.inf)
    return _softmax(scores, v, q.dtype, _kept_factors(scores, dropout, seed))


def _softmax(scores: Tensor, v: Tensor, dtype: torch.dtype, kept: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return output and logsumexp (float32) of scores in which hidden keys have -inf; a row without keys is 0."""
    logsumexp = scores.logsumexp(-1)
    empty = (scores == -torch.inf).all(-1)
    weights = (scores - logsumexp[..., None]).exp().masked_fill(empty[..., None], 0.0)
    weights = weights if kept is None else weights * kept
    return (weights @ v.float()).to(dtype), logsumexp


def _new_seed(dropout: float) -> Tensor:
    return torch.randint(1 << 30, (1,)) if dropout else torch.zeros(1, dtype=torch.int64)


def _kept_factors(scores: Tensor, dropout: float, seed: Tensor | None) -> Tensor | None:
    """Return the factors of the weights: 0 where dropped, else 1 / (1 - dropout); None without dropout."""
    if not dropout:
        return None
    assert seed is not None
    drawn = torch.rand(scores.shape, generator=torch.Generator().manual_seed(int(seed.flatten()[0])))
    return (drawn >= dropout).float() / (1 - dropout)


def _gradients(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, output: Tensor, logsumexp: Tensor, hidden: Tensor | None,
    scale: float | None, dropout: float = 0.0, seed: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    factor, groups = q.shape[-1] ** -0.5 if scale is None else scale, q.shape[1] // k.shape[1]
    wide_k, wide_v = (each.float().repeat_interleave(groups, 1) for each in (k, v))
    scores = q.float() @ wide_k.mT * factor
    scores = scores if hidden is None else scores.masked_fill(hidden, -torch.inf)
    weights = (scores - logsumexp[..., None]).exp()
    kept = _kept_factors(scores, dropout, seed)
    kept = torch.ones(()) if kept is None else kept
    of_weights = kept * (grad.float() @ wide_v.mT) - (grad.float() * output.float()).sum(-1, keepdim=True)
    of_scores = weights * of_weights * factor
    dq, dk, dv = of_scores @ wide_k, of_scores.mT @ q.float(), (weights * kept).mT @ grad.float()
    dk, dv = (each.unflatten(1, (-1, groups)).sum(2) for each in (dk, dv))
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def _start_aligned(q: Tensor, k: Tensor, causal: bool) -> Tensor | None:
    if not causal:
        return None
    return torch.arange(k.shape[2]) > torch.arange(q.shape[2])[:, None]


def _end_aligned(q: Tensor, k: Tensor, causal: bool, left: int | None, right: int | None) -> Tensor:
    """Return which keys a sequence hides: later ones if causal, and those outside of the window."""
    distance = torch.arange(k.shape[2]) - torch.arange(q.shape[2])[:, None] - (k.shape[2] - q.shape[2])
    hidden = torch.zeros_like(distance, dtype=torch.bool)
    right = 0 if causal else right
    if right is not None and right >= 0:
        hidden |= distance > right
    if left is not None and left >= 0:
        hidden |= distance < -left
    return hidden


def _tokens_first(output: Tensor) -> Tensor:
    """Return an output (batch, heads, queries, head_dim) in the memory layout (batch, queries, heads, head_dim)."""
    return output.transpose(1, 2).contiguous().transpose(1, 2)


OPERATORS: dict[str, Callable[..., Any]] = {
    "_fused_sdp_choice": fused_sdp_choice,
    "_scaled_dot_product_flash_attention": flash,
    "_scaled_dot_product_flash_attention_backward": fused_backward,
    "_scaled_dot_product_cudnn_attention": cudnn,
    "_scaled_dot_product_cudnn_attention_backward": fused_backward,
    "_scaled_dot_product_efficient_attention": efficient,
    "_scaled_dot_product_efficient_attention_backward": fused_backward,
    "_flash_attention_forward": ragged,
    "_flash_attention_backward": ragged_backward,
}
