"""Sum the weights in blocks of an attention map exactly, from q, k and the logsumexp.

The map is never stored: a second pass of the kernel computes strips of rows, over the keys that their queries may see.
Visible cells are counted separately, because the mean of a block is taken over its visible cells.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from multihead.errors import ArgumentError
from multihead.kernels.call import AttentionRequest
from multihead.kernels.dense_tile import scores, select_request_heads, visible_cells, without_autocast, working_dtype
from multihead.kernels.native import kernel
from multihead.kernels.native.statistics import sum_weights_per_key
from multihead.kernels.plan.bounds import bounds_of
from multihead.masks import Full, Keep
from multihead.masks.base import KeyBounds
from multihead.probes.pooling import count_cells_of_intervals, sum_over_blocks
from multihead.probes.tile import (
    RowLogsumexps,
    has_large_logsumexp,
    head_indices,
    logsumexp_of_rows,
    score_base,
    widen_request,
)
from multihead.scores.bias import bias_tile, slice_bias, values_of
from multihead.tensors.precision import widen, widest_float
from multihead.tensors.shapes import consecutive_slices, index_axes
from multihead.tensors.tracing import is_traced

SCORES_PER_STRIP = 1 << 24  # scores of one head per strip of rows; cancellation is checked before each strip
MAX_EXACT_BASE = 2.0**60  # above this base (see `score_base`) float64 rounds q . k away, so q . k is left out
SCORES_PER_DENSE_STRIP = 1 << 22  # scores per strip if visibility is evaluated cell by cell in PyTorch
MIN_NATIVE_SCORES = 1 << 18  # up to this many scores PyTorch is faster than preparing a call of the native kernel


class CancelledError(Exception):
    """Raised when the caller cancels a computation."""


@dataclass(frozen=True, eq=False)
class BlockSums:
    """Sums of attention weights over blocks of queries x keys, for a rectangle of the attention map.

    Attributes:
        sums: (heads, row blocks, column blocks), float64, sum of the weights.
        counts: (heads, row blocks, column blocks), int64, number of visible cells.
    """

    sums: Tensor
    counts: Tensor

    def means(self) -> Tensor:
        """Return (heads, row blocks, column blocks), float64: the mean weight, NaN where no cell is visible."""
        return self.sums / self.counts


def sum_weights_over_blocks(
    request: AttentionRequest,
    logsumexp: Tensor,
    *,
    heads: int | Sequence[int] | slice = slice(None),
    queries: slice = slice(None),
    keys: slice = slice(None),
    block: tuple[int, int],
    without_first_key: bool = False,
    cancelled: Callable[[], bool] | None = None,
    totals: RowLogsumexps | None = None,
) -> BlockSums:
    """Sum the weights in each block of a rectangle of an attention map, and count the visible cells.

    Blocks start at the first query and the first key of the rectangle; the last blocks may be smaller. Memory is used
    for the blocks and a strip of the map, never for queries x keys. A query whose logsumexp is NaN adds nothing.

    Blocks of one cell (single weights), and calls with a large logsumexp, are computed in float64 as in `tile`; other
    sums use the given logsumexp.

    Args:
        request: a call with a batch of one.
        logsumexp: (1, heads, queries) of the whole call, nats.
        heads: an index, several indices, or a slice.
        queries: the queries, a slice of step 1.
        keys: the keys, a slice of step 1.
        block: numbers of queries and keys per block.
        without_first_key: whether key 0 counts as hidden.
        cancelled: called before each strip of rows; if it returns True, the computation stops.
        totals: a cache for the logsumexp in float64, to be passed again with the same call.

    Raises:
        ArgumentError: a head that does not exist, a slice with steps, or an empty block.
        CancelledError: `cancelled` returned True.
    """
    rows = _check_slice_ends("queries", queries, request.shape.query_length)
    columns = _check_slice_ends("keys", keys, request.shape.key_length)
    if min(block) < 1:
        raise ArgumentError(f"block is {block}.", "Give the numbers of queries and keys per block, at least 1 each.")
    chosen = head_indices(heads, request.shape.num_heads).to(request.shape.device)
    size = [-(-(last - first) // each) for (first, last), each in zip((rows, columns), block, strict=True)]
    device = request.shape.device
    sums = torch.zeros(len(chosen), *size, dtype=widest_float(device), device=device)
    found = BlockSums(sums, torch.zeros_like(sums, dtype=torch.int64))
    if not found.sums.numel():
        return found
    bounds = bounds_of(request)
    hides = request.bias is not None and bool((values_of(request.bias) == -torch.inf).any())
    dense = hides or bounds.remainder is not None  # intervals of keys do not describe which cells are visible
    width = max(columns[1] - columns[0], 1)
    height = max((SCORES_PER_DENSE_STRIP if dense else SCORES_PER_STRIP) // width // block[0], 1) * block[0]
    exact = block == (1, 1) or has_large_logsumexp(logsumexp)
    base = score_base(request, logsumexp)
    totals = totals or RowLogsumexps()
    with torch.no_grad(), without_autocast(request.shape.device):
        for begin in range(*rows, height):
            strip = begin, min(begin + height, rows[1])
            if cancelled is not None and cancelled():
                raise CancelledError
            first = (begin - rows[0]) // block[0]
            shown = _clip_bounds(bounds, strip, columns, without_first_key=without_first_key)
            reached = _columns_seen_by_strip(shown, columns, block[1])
            # Skip hidden keys: half of the map under a causal mask, and nearly all under a window.
            shown = _clip_bounds(bounds, strip, reached, without_first_key=without_first_key)
            part = _slice_call(request, chosen, strip, reached)
            cells = _visible_cells(request, chosen, shown, strip, reached) if dense else None
            row = logsumexp[:, chosen, slice(*strip)].to(working_dtype(request.shape.dtype))
            if exact:
                row = logsumexp_of_rows(request, row, totals, chosen, slice(*strip), base)
                part = widen_request(part)
                if base is not None:
                    part = _subtract_base_from_bias(part, base[:, chosen, slice(*strip)])
            of_strip = _sum_strip(part, shown, cells, row, block)
            left = (reached[0] - columns[0]) // block[1]
            bottom, right = first + of_strip.sums.shape[1], left + of_strip.sums.shape[2]
            found.sums[:, first:bottom, left:right] = of_strip.sums
            found.counts[:, first:bottom, left:right] = of_strip.counts
    return found


def _check_slice_ends(name: str, chosen: slice, length: int) -> tuple[int, int]:
    first, stop, step = chosen.indices(length)
    if step != 1:
        raise ArgumentError(f"{name} is {chosen}, with steps.", "Give a slice of step 1, such as slice(0, 512).")
    return first, max(first, stop)


def _clip_bounds(
    bounds: KeyBounds, rows: tuple[int, int], columns: tuple[int, int], *, without_first_key: bool
) -> KeyBounds:
    """Slice the intervals of visible keys to some rows and columns, with keys numbered from the first column."""
    start = bounds.start[:1, slice(*rows)] - columns[0]
    stop = bounds.stop[:1, slice(*rows)] - columns[0]
    width = columns[1] - columns[0]
    start, stop = start.clamp(1 if without_first_key and not columns[0] else 0, width), stop.clamp(0, width)
    empty = start >= stop
    return KeyBounds(start.masked_fill(empty, 0).contiguous(), stop.masked_fill(empty, 0).contiguous())


def _columns_seen_by_strip(shown: KeyBounds, columns: tuple[int, int], block: int) -> tuple[int, int]:
    """Return the range of columns that any row of a strip sees, extended to whole blocks; at least one block."""
    seeing = shown.start < shown.stop
    if not bool(seeing.any()):
        return columns[0], min(columns[0] + block, columns[1])
    first = int(shown.start[seeing].min()) // block * block
    return columns[0] + first, min(columns[0] - int(-shown.stop.max() // block) * block, columns[1])


def _slice_call(
    request: AttentionRequest, heads: Tensor, rows: tuple[int, int], columns: tuple[int, int]
) -> AttentionRequest:
    """Slice a call to heads, rows and columns, without a mask; the caller applies the bounds."""
    shape, k = request.shape, request.k[:, :, slice(*columns)]
    part = replace(
        request,
        q=request.q[:, :, slice(*rows)],
        k=k,
        v=k,
        shape=shape._replace(
            query_length=rows[1] - rows[0], key_length=columns[1] - columns[0], value_dim=shape.head_dim
        ),
        mask=Full(),
        query_start=0,
        bias=None if request.bias is None else slice_bias(request.bias, shape.query_length, rows, columns),
        sinks=None,  # the logsumexp includes the sinks
        dropout=0.0,
        requested_statistics=frozenset(),
        origin=None,
    )
    every = len(heads) == shape.num_heads and bool((heads.diff() == 1).all())
    return part if every else select_request_heads(part, heads)


def _subtract_base_from_bias(part: AttentionRequest, base: Tensor) -> AttentionRequest:
    """Return a sliced call in float64 with `base`, (1, heads, rows), see `score_base`, subtracted from its bias."""
    assert part.bias is not None
    bias = bias_tile(part.bias, part.shape, slice(None), slice(None)) - base[..., None]
    return replace(part, q=part.q.masked_fill(base[..., None].abs() > MAX_EXACT_BASE, 0), bias=bias)


def _visible_cells(
    request: AttentionRequest, heads: Tensor, shown: KeyBounds, rows: tuple[int, int], columns: tuple[int, int]
) -> Tensor:
    """Return which cells of a strip are visible: (1, heads or 1, rows, columns) bool."""
    cells = index_axes(visible_cells(request, slice(*rows), slice(*columns)), {1: heads})
    key = torch.arange(columns[1] - columns[0], device=cells.device)
    return cells & ((key >= shown.start[0, :, None]) & (key < shown.stop[0, :, None]))


def _sum_strip(
    part: AttentionRequest, shown: KeyBounds, cells: Tensor | None, logsumexp: Tensor, block: tuple[int, int]
) -> BlockSums:
    """Sum and count the blocks of a strip over visible cells, (1, heads or 1, rows, columns), None: by the bounds."""
    shape = part.shape
    if cells is None:
        column_blocks = -(-shape.key_length // block[1])
        counts = count_cells_of_intervals(shown.start[0], shown.stop[0], column_blocks, block)[None]
    else:
        counts = sum_over_blocks(widen(cells[0]), block).long()
        part = replace(part, mask=Keep(cells))
        shown = replace(shown, remainder=part.mask)
    counts = counts.expand(shape.num_heads, -1, -1)
    num_scores = shape.num_heads * shape.query_length * shape.key_length
    if num_scores > MIN_NATIVE_SCORES and not is_traced() and kernel.refusal(part, shown) is None:
        _, sums = sum_weights_per_key(part, shown, logsumexp, cell=block)
        if sums is not None:
            return BlockSums(widen(sums[0]), counts)
    return BlockSums(_sum_strip_in_torch(part, shown, logsumexp, block), counts)


def _sum_strip_in_torch(part: AttentionRequest, shown: KeyBounds, logsumexp: Tensor, block: tuple[int, int]) -> Tensor:
    """Sum the blocks of a strip in PyTorch, some rows at a time: (heads, row blocks, column blocks), float64."""
    width = part.shape.num_heads * part.shape.key_length
    height = max(SCORES_PER_DENSE_STRIP // width // block[0], 1) * block[0]
    key = torch.arange(part.shape.key_length, device=part.shape.device)
    found = []
    for rows in consecutive_slices(part.shape.query_length, height):
        inside = (key >= shown.start[:, rows, None]) & (key < shown.stop[:, rows, None])
        row = logsumexp[:, :, rows, None]  # (1, heads, rows, 1)
        counted = inside[:, None] & visible_cells(part, rows) & (row != -torch.inf) & ~row.isnan()
        weights = (scores(part, rows) - row).exp_().masked_fill_(~counted, 0)
        found.append(sum_over_blocks(widen(weights[0]), block))
    return torch.cat(found, 1)
