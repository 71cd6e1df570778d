"""Records of one layer with masks of every kind, and what a map's blocks are by definition."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

import multihead as mh
from multihead import masks
from multihead.observation.record import Record
from multihead.record.sample import SampleRecord


def watch(
    length: int = 37,
    *,
    mask: masks.Mask | None = None,
    heads: int = 2,
    kv_heads: int | None = None,
    memory: int | None = None,
    lengths: Sequence[int] | None = None,
    layers: int = 1,
    layers_kept: Sequence[int] | None = None,
    batch: int = 1,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    **options: Any,
) -> Record:
    """Watch layers whose weights are sharp enough to distinguish them."""
    torch.manual_seed(seed)
    stack = torch.nn.ModuleList(
        mh.MultiHeadAttention(embed_dim=8 * heads, num_heads=heads, num_kv_heads=kv_heads, dtype=dtype)
        for _ in range(layers)
    )
    batch = batch if lengths is None else len(lengths)
    x = torch.randn(batch, length, 8 * heads, dtype=dtype)
    other = None if memory is None else torch.randn(batch, memory, 8 * heads, dtype=dtype)
    with torch.no_grad():
        for layer in stack:
            layer.q_proj.weight.mul_(3)
            layer.k_proj.weight.mul_(3)
        with mh.observe(stack, layers=layers_kept, **options) as seen:
            for layer in stack:
                given = {} if mask is None else {"mask": mask}
                layer(
                    x,
                    *(() if other is None else (other,)),
                    **given,
                    **({} if lengths is None else {"lengths": lengths}),
                )
    return seen


def block_means(sample: SampleRecord, head: int, level: int, *, sink: bool = True) -> Tensor:
    """The mean of each block of 2^level x 2^level weights that may be seen, in float64 from the whole map."""
    shown = sample.visible()
    shown = (shown if shown.dim() == 2 else shown[head]).clone()
    if not sink:
        shown[:, 0] = False
    weights = sample.weights(head).double().masked_fill(~shown, 0)
    return summed(weights, 1 << level) / summed(shown.double(), 1 << level)


def summed(cells: Tensor, side: int) -> Tensor:
    rows = torch.nn.functional.pad(cells, (0, -cells.shape[1] % side, 0, -cells.shape[0] % side))
    return rows.unflatten(1, (-1, side)).sum(-1).unflatten(0, (-1, side)).sum(1)
