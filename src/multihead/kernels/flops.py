"""Count the floating point operations of attention, for `torch.utils.flop_counter.FlopCounterMode`.

FLOPs are counted over the visible (query, key) pairs, which are read from the values of the plan. If values cannot be
read, all pairs count, as in PyTorch's own formulas. PyTorch has no formula for its fused CPU attention, which `sdpa`
calls; importing multihead registers PyTorch's formula for other devices for it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry, register_flop_formula, sdpa_backward_flop, sdpa_flop

from multihead.kernels.fused import cpu_attention, cpu_attention_backward
from multihead.kernels.native import (
    library,
    operator,  # noqa: F401 - importing it registers the operators
)
from multihead.tensors.tracing import is_traced


def forward_flops(q: Tensor, k: Tensor, v: Tensor, *call: Any, out_val: Any = None, **_: Any) -> int:
    """Count q . k and p . v, a multiplication and an addition each, over the cells that may be seen.

    Scores that only a bias of -inf hides are counted, because they are computed.
    """
    return 2 * _count_visible_cells(q, k, *call[:3]) * (q.shape[3] + v.shape[3])


def backward_flops(
    output: Tensor,
    logsumexp: Tensor,
    grad_output: Tensor,
    grad_logsumexp: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *call: Any,
    out_val: Any = None,
    **_: Any,
) -> int:
    """Count the five matrix products of a backward pass: q . k again, dO . v, dq, dk and dv."""
    return 2 * _count_visible_cells(q, k, *call[:3]) * (3 * q.shape[3] + 2 * v.shape[3])


if library.reason_of_absence() is None:  # without the library the operators do not exist
    register_flop_formula(torch.ops.multihead.attention, get_raw=True)(forward_flops)
    register_flop_formula(torch.ops.multihead.attention_backward, get_raw=True)(backward_flops)


# PyTorch has formulas for its fused kernels of other devices, but not for the CPU kernel that "sdpa" calls.
for _operator, _formula in ((cpu_attention, sdpa_flop), (cpu_attention_backward, sdpa_backward_flop)):
    flop_registry.setdefault(_operator, _formula)


def _count_visible_cells(q: Tensor, k: Tensor, start: Tensor, stop: Tensor, visible: Tensor | None) -> int:
    """Count the visible (query, key) pairs over batch and heads; all pairs if values cannot be read (meta, fake).

    Each query sees the keys [start, stop), (batch or 1, queries), where `visible`, (batch or 1, heads or 1, queries or
    1, keys or 1) bool, is True; None = all of them.
    """
    (batch, heads, queries, _), keys = q.shape, k.shape[2]
    if is_traced() or any(tensor is not None and type(tensor) is not Tensor for tensor in (start, stop, visible)):
        return batch * heads * queries * keys
    if visible is None:
        counts = (stop - start).clamp(min=0)[:, None]  # (batch or 1, 1, queries)
    else:
        key = torch.arange(keys, device=start.device)
        within = (key >= start[..., None]) & (key < stop[..., None])  # (batch or 1, queries, keys)
        counts = (within[:, None] & visible).sum(-1)  # (batch or 1, heads or 1, queries)
    return int(counts.sum()) * (batch // counts.shape[0]) * (heads // counts.shape[1])
