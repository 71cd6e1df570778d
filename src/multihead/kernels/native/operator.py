"""Fake results and derivatives of the native operators, `torch.ops.multihead.*`, defined in `csrc/operator.cpp`.

All calls of the kernel go through these operators: plain calls, and calls of compiled and exported graphs. This module
imports no module of this package that imports torch, because it is imported as soon as torch is (see
`multihead/__init__.py`). `schemas.txt` has the operators' schemas. The schemas are a file format: exported programs
contain them, so new arguments come last, with defaults.

- `attention`: the forward pass. Its overload `short_call` takes a mask as a `Mask.band`. No function of this library
  calls it while a graph is recorded, so exported programs do not contain it.
- `attention_backward`: the gradients of `attention`.
- `key_sums`: the sum of the weights over queries, per key and per cell of a coarse map.
- `workspace`: the bytes of memory that `attention` allocates besides its results.

`places`, which finds the tokens of a padded batch, is defined here, because a graph needs it as one operator.

Arguments of `attention`, in this order or by name:

- q: (batch, heads, queries, head_dim), float32, bfloat16 or float16, on the CPU
- k: (batch, kv_heads, keys, head_dim); heads is a multiple of kv_heads
- v: (batch, kv_heads, keys, value_dim), or None for an output of 0 features
- start: (batch or 1, queries) int64, the first key that a query sees
- stop: (batch or 1, queries) int64, one past the last key that a query sees; equal to start if it sees no key
- visible: (batch or 1, heads or 1, queries or 1, keys or 1) bool, which of these keys are visible, or None
- bias: added to the scores, broadcasting to (batch, heads, queries, keys), or None; -inf hides a key
- relative: (batch or 1, heads or 1, queries + keys - 1), the values of a `scores.RelativeBias`, or None
- sinks: (heads,), a logit per head that takes part in the softmax and has no value, or None
- scale: factor of q . k
- softcap: c of c * tanh(scores / c), before the bias, or None
- dropout: fraction of the attention weights dropped, 0 to 1
- seed: () int64, from which the dropped weights are drawn; None without dropout
- batch_start, head_start, query_start, key_start: start of these tensors in a larger call, so that the same weights are
  dropped as in the larger call; total_heads: number of heads of the larger call, 0 = heads
- k_scales, v_scales: (batch, kv_heads, keys) float32, the factors of the rows of int8 k and v; or None
- statistics: the sum of flags: 1 entropy, 2 largest weight, 4 mean distance, 8 standard deviation of the distance,
  16 weights at the offsets 0, -1 and 1, 32 weight on the target key, 64 weight on the special keys, 128 largest key,
  256 sum of the weights at the offsets -3 to 3
- positions: (batch,) int64, the position among the keys of query 0 of the (larger) call, for distances; None = 0
- target_keys: (batch,) int64, the target key per sample, -1 for none; special_keys: (batch, keys) bool; or None

Returns the output (batch, heads, queries, value_dim) in the dtype of q; the logsumexp (batch, heads, queries) in
float32, nats, -inf where a query sees no key; the statistics in the order of their flags (number, batch, heads,
queries), float32; and the largest key (batch, heads, queries), int64, or (0) if it is not measured. Output and
logsumexp have first derivatives with respect to q, k, v, bias, relative and sinks. Raises a RuntimeError if the
arguments do not fit each other.

Source: arXiv:1706.03762, equation 1, computed as in arXiv:2205.14135.

>>> q, k, v = torch.randn(3, 2, 8, 5, 16).unbind()
>>> rows = torch.arange(5)[None]  # causal: query i sees the keys [0, i + 1)
>>> fixed = (None, None, None, None, 0.25, None, 0.0, None)
>>> output, logsumexp, *_ = torch.ops.multihead.attention(q, k, v, torch.zeros_like(rows), rows + 1, *fixed)
>>> import multihead
>>> bool((output == multihead.attention(q, k, v, mask=multihead.masks.Causal(), kernel="native")).all())
True

Plain calls get their gradients from an `autograd.Function` of this library, and graphs from
`torch.library.register_autograd`, whose gradients take several times as long and which also slows calls without
gradients. Plain calls of `attention` skip PyTorch's autograd key, which halves their time.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from multihead.errors import ArgumentError
from multihead.kernels.native import library

DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16})  # `enum class Dtype` in csrc/call.h


def _make_features_contiguous(tensor: Tensor) -> Tensor:
    """Return the tensor, or a copy if the stride of its last dimension is not 1."""
    return tensor if tensor.stride(-1) == 1 or tensor.shape[-1] == 1 else tensor.contiguous()


def _fake_results(
    q: Tensor, k: Tensor, v: Tensor | None, statistics: int, *, always: bool
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Return uninitialised results of `attention` with the strides that csrc/operator.cpp gives them."""
    if k.device != q.device or (v is not None and v.device != q.device):  # one tensor is on the meta device
        raise RuntimeError("q, k and v are on different devices. Move them to one.")
    batch, heads, queries, head_dim = q.shape
    value_dim = 0 if v is None else v.shape[3]
    output = torch.empty_like(_make_features_contiguous(q))
    if value_dim != head_dim or _make_features_contiguous(output) is not output:
        output = q.new_empty((batch, queries, heads, value_dim)).transpose(1, 2)
    logsumexp = q.new_empty((batch, heads, queries), dtype=torch.float32)
    if not statistics and not always:
        return output, logsumexp, None, None
    # flag 16 has three rows, one per offset, and 128 is the largest key
    count = (statistics & ~128).bit_count() + (2 if statistics & 16 else 0)
    measured = logsumexp.new_empty((count, batch, heads, queries))
    largest_key = logsumexp.new_empty(logsumexp.shape if statistics & 128 else (0,), dtype=torch.int64)
    return output, logsumexp, measured, largest_key


def _attention_fake(q: Tensor, k: Tensor, v: Tensor | None, *arguments: Any, statistics: int = 0, **_: Any) -> Any:
    statistics = arguments[17] if len(arguments) > 17 else statistics
    return _fake_results(q, k, v, statistics, always=True)


def _short_call_fake(q: Tensor, k: Tensor, v: Tensor | None, *arguments: Any, statistics: int = 0, **_: Any) -> Any:
    statistics = arguments[6] if len(arguments) > 6 else statistics
    return _fake_results(q, k, v, statistics, always=False)


def _backward_fake(*arguments: Any, bias_wanted: bool) -> tuple[Tensor, ...]:
    q, k, v = arguments[4:7]
    bias, relative, sinks = arguments[10:13]
    bias = bias if relative is None else relative
    dq, dk, dv = (_make_features_contiguous(torch.empty_like(_make_features_contiguous(each))) for each in (q, k, v))
    dbias = q.new_empty(0) if bias is None or not bias_wanted else bias.new_empty(bias.shape)
    return dq, dk, dv, dbias, q.new_empty(0) if sinks is None else sinks.new_empty(sinks.shape)


def _key_sums_fake(logsumexp: Tensor, pool_rows: int, pool_keys: int, q: Tensor, k: Tensor, *_: Any) -> Any:
    (batch, heads, queries), keys = logsumexp.shape, k.shape[2]
    cells = (batch, heads, -(-queries // pool_rows), -(-keys // pool_keys)) if pool_rows else (0,)
    return logsumexp.new_empty((batch, heads, keys)), logsumexp.new_empty(cells)


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, ctx.scale, ctx.softcap, ctx.dropout, seed = inputs[:13]
    ctx.place = inputs[13:18]
    ctx.save_for_backward(*output[:2], *tensors, seed)
    ctx.mark_non_differentiable(*output[2:])
    ctx.set_materialize_grads(False)


def _gradients_of_attention(
    ctx: Any, grad_output: Tensor | None, grad_logsumexp: Tensor | None, *_: Any
) -> tuple[Tensor | None, ...]:
    if torch._ops._len_torch_dispatch_stack_pre_dispatch():  # noqa: SLF001 - torch has no public name for it
        raise ArgumentError(
            "The backward pass of torch.ops.multihead.attention is recorded before dispatch, where PyTorch turns the "
            "tensors saved by the forward pass into constants.",
            "Leave out pre_dispatch=True of make_fx, or the gradient in the function that torch.export records.",
        )
    output, logsumexp, *tensors, seed = ctx.saved_tensors
    of_bias, of_relative, of_sinks = ctx.needs_input_grad[6:9]
    if grad_output is None:
        grad_output = torch.zeros_like(output)
    numbers = (ctx.scale, ctx.softcap, ctx.dropout, seed, *ctx.place)
    dq, dk, dv, dbias, dsinks = torch.ops.multihead.attention_backward(
        output, logsumexp, grad_output, grad_logsumexp, *tensors, *numbers, bias_wanted=of_bias or of_relative
    )
    nothing = (None,) * 3  # start, stop, visible
    of_scores = (dbias if of_bias else None, dbias if of_relative else None, dsinks if of_sinks else None)
    return dq, dk, dv, *nothing, *of_scores, *(None,) * 15


def _reject_second_derivative(ctx: Any, *gradients: Any) -> None:
    raise ArgumentError(
        "torch.ops.multihead.attention has no second derivative.", "Call multihead.attention(..., kernel='reference')."
    )


if library.reason_of_absence() is None:  # the library is loaded, so the operators exist
    for _name, _fake in (
        ("attention", _attention_fake),
        ("attention.short_call", _short_call_fake),
        ("attention_backward", _backward_fake),
        ("key_sums", _key_sums_fake),
    ):
        torch.library.register_fake(f"multihead::{_name}", _fake)
    torch.library.register_autograd("multihead::attention", _gradients_of_attention, setup_context=_save_for_backward)
    torch.library.register_autograd("multihead::attention_backward", _reject_second_derivative)


def indices_of_tokens(lengths: Tensor, length: int, left: bool) -> Tensor:  # noqa: FBT001 - an operator's arguments
    """Return the indices, (tokens,) int64, of the tokens that are not padding in a flattened (batch, length).

    Sample i has `lengths[i]` tokens; `left` means that padding comes before tokens.
    """
    column = torch.arange(length, device=lengths.device)
    inside = column >= (length - lengths)[:, None] if left else column < lengths[:, None]  # (batch, length)
    return inside.flatten().nonzero().flatten()


# One operator, because the number of tokens depends on the values of the lengths, which a graph cannot know.
_TOKEN_INDICES_SCHEMA = "(Tensor lengths, SymInt length, bool left) -> Tensor"
_token_indices_operator = torch.library.custom_op(
    "multihead::places", indices_of_tokens, mutates_args=(), schema=_TOKEN_INDICES_SCHEMA
)


@_token_indices_operator.register_fake
def _token_indices_fake(lengths: Tensor, length: int, left: bool) -> Tensor:  # noqa: FBT001 - an operator's arguments
    return lengths.new_empty(torch.library.get_ctx().new_dynamic_size())
