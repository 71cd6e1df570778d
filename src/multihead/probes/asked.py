"""Ask the native kernel for statistics, where it takes the call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from multihead.call import AttentionRequest
from multihead.kernels import native
from multihead.kernels.native_statistics import ONE_PASS, SECOND_PASS, one_pass, second_pass
from multihead.kernels.tile import seen
from multihead.plan.bounds import KeyBounds
from multihead.probes.pooling import PooledMap
from multihead.scores.bias import values_of, with_values
from multihead.scores.relative import Relative

ROWS = 256  # queries whose cells are counted in one step, where each must be looked at


def takes(request: AttentionRequest, bounds: KeyBounds) -> bool:
    """Tell whether the native kernel can measure a call."""
    return native.refusal(request, bounds) is None


def asked(
    request: AttentionRequest,
    bounds: KeyBounds,
    logsumexp: Tensor,
    names: Sequence[str],
    *,
    special_keys: Tensor | None,
    map_size: int,
) -> dict[str, Tensor]:
    """Measure a call in one pass over its keys, and what each key receives in a second one.

    Args:
        request: the call; gradients are not followed.
        bounds: its plan.
        logsumexp: (batch, heads, queries), nats.
        names: which statistics.
        special_keys: (batch, keys) bool, or None.
        map_size: most rows and columns of the pooled map.
    """
    if request.bias is not None:
        values = values_of(request.bias).float()
        # The kernel reads numbers along a diagonal one after the other.
        values = values.contiguous() if isinstance(request.bias, Relative) else values
        request = replace(request, bias=with_values(request.bias, values))
    found = one_pass(request, bounds, names, special_keys) if ONE_PASS & set(names) else {}
    if SECOND_PASS & set(names):
        blank = _blank_map(request, map_size)
        cell = (blank.row_block, blank.column_block) if "pooled_map" in names else None
        found["received"], sums = second_pass(request, bounds, logsumexp, cell=cell)
        if sums is not None:
            means = [blank.sums]  # what an empty batch takes its shape from
            for sample in range(request.shape.batch):
                pooled = _blank_map(request, map_size)
                pooled.sums.copy_(sums[sample])
                _count(pooled, request, bounds, sample)
                means.append(pooled.means())
            found["pooled_map"] = torch.stack(means)[1:]
    return {name: found[name].float() if found[name].is_floating_point() else found[name] for name in names}


def _blank_map(request: AttentionRequest, map_size: int) -> PooledMap:
    """Lay out the map of one sample."""
    shape = request.shape
    return PooledMap.zero(
        shape.num_heads, shape.query_length, shape.key_length, size=map_size, device=torch.device("cpu")
    )


def _count(pooled: PooledMap, request: AttentionRequest, bounds: KeyBounds, sample: int) -> None:
    """Count the cells of one sample's map that may be seen."""
    if bounds.remainder is None and request.bias is None:
        row = 0 if bounds.shared else sample
        pooled.count_intervals(bounds.start[row], bounds.stop[row])
        return
    shape = request.shape
    for first in range(0, shape.query_length, ROWS):
        rows = slice(first, min(first + ROWS, shape.query_length))
        shown = seen(request, rows)
        shown = shown[sample if shown.shape[0] > 1 else 0]  # (heads or 1, rows, keys or 1)
        pooled.count_cells(shown.expand(-1, rows.stop - first, shape.key_length), rows, (0, shape.key_length))
