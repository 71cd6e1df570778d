"""Compute tiles of attention weights from q and k, exact for scores of any size, in O(tile) memory.

Weights are computed in float64 from q and k, each row divided by its own sum. In float32, exp(s - L) turns the rounding
of L into an error of every weight of the row, and s itself depends on the order of summation: rows with scores of 400
summed to 1 within 1e-3, and rows with scores of 4e4 within 0.1. Keeping the maximum and the sum separately does not
help if the scores are recomputed in other shapes. In float64 both errors vanish: rows sum to 1 within 1e-6 at any
score, and a tile equals the same part of the whole map to the last digit of float32. A tile with part of the keys
streams its rows over all keys once; a record keeps the sum of each row it has needed (`RowLogsumexps`, 8 bytes per
query and head). float64 takes 2 to 3 times as long as float32. A logsumexp that the caller passes is used only if it
differs by more than rounding, which means that it covers more keys than the call has.

Sums of many weights (blocks of several cells, attention received, weight on a set of keys) are computed in float32 by
the kernel. They are computed in float64 only if the absolute value of a logsumexp is above 1024 (`LARGE_LOGSUMEXP`);
below this limit float32 is exact to four digits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from operator import index

import torch
from torch import Tensor

from multihead.errors import ArgumentError
from multihead.errors.arguments import check_slice
from multihead.kernels.call import AttentionRequest
from multihead.kernels.dense_tile import scores, select_request_heads, visible_cells, without_autocast, working_dtype
from multihead.kernels.plan.bounds import bounds_of
from multihead.scores.bias import bias_tile, values_of, with_values
from multihead.tensors.precision import widen, widest_float
from multihead.tensors.shapes import consecutive_slices, index_axes
from multihead.tensors.tracing import is_traced

MAX_SCORES_PER_BLOCK = 1 << 20  # scores in float64 at a time, unless MIN_ROWS rows of one head are more
MIN_ROWS_PER_BLOCK = 32  # minimum number of queries per conversion of the keys to float64
MIN_BLOCK_KEYS = 512  # minimum number of keys per block when a logsumexp is computed in blocks
# Above this logsumexp, rounding of float32 scores and logsumexps changes the fourth digit of a weight.
LARGE_LOGSUMEXP = 1024.0
# Above this logsumexp, as with a bias of the lowest float, even float64 rounds the logarithm of a sum away.
HUGE_LOGSUMEXP = 2.0**33


class RowLogsumexps:
    """A cache of the float64 logsumexp of each query of one call, which is computed when it is first needed.

    exp(s - L) is only as exact as s and L: float32 rounds a logsumexp of 400 by 1.5e-5, and scores of 400 that are
    summed in another order differ by 1e-4. In float64 neither error is visible, whatever the shape of the tile.
    """

    def __init__(self) -> None:
        self._logsumexps: Tensor | None = None  # (batch, heads, queries), NaN for queries that are not computed yet

    def logsumexp_of_rows(
        self, request: AttentionRequest, heads: Tensor, rows: slice, base: Tensor | None = None
    ) -> Tensor:
        """Return the logsumexp of some rows: (batch, heads, rows), nats, minus `base`.

        Args:
            request: the call, the same one for each use of this object.
            heads: indices of the heads.
            rows: which queries.
            base: (batch, heads, queries) from `score_base`, or None.
        """
        if self._logsumexps is None:
            shape = request.shape
            size = (shape.batch, shape.num_heads, shape.query_length)
            self._logsumexps = torch.full(size, torch.nan, dtype=widest_float(shape.device), device=shape.device)
        known = self._logsumexps[:, heads, rows]
        if bool(known.isnan().any()):
            known = _logsumexp_block_by_block(request, heads, rows, base)
            self._logsumexps[:, heads, rows] = known
        return known


def tile(
    request: AttentionRequest,
    logsumexp: Tensor,
    *,
    heads: int | Sequence[int] | slice = slice(None),
    queries: slice = slice(None),
    keys: slice = slice(None),
    totals: RowLogsumexps | None = None,
) -> Tensor:
    """Compute p_ij = exp(s_ij - L_i) for some heads, queries and keys, with s and L in float64.

    L is recomputed: from the tile if it has all keys that its queries see, else over these keys in blocks. If the given
    logsumexp differs by more than rounding, it is used instead: it is over more keys than the call has, or over sinks
    that an older record did not store.

    Args:
        request: the attention call.
        logsumexp: (batch, heads, queries) of the whole call, nats; -inf for queries without keys, NaN for queries that
            see NaN.
        heads: an index, several indices, or a slice.
        queries: which queries.
        keys: which keys.
        totals: a cache for L, to be passed again with the same call.

    Returns:
        (batch, heads, queries, keys) of the tile, in the dtype of the logsumexp; 0 where a key is hidden, NaN in the
        visible cells of queries that see NaN.

    Raises:
        ArgumentError: a head does not exist.
    """
    shape, chosen = request.shape, head_indices(heads, request.shape.num_heads)
    base = score_base(request, logsumexp)
    rows, columns = range(shape.query_length)[queries], range(shape.key_length)[keys]
    of_head = max(1, shape.batch * len(columns))
    num_heads = max(1, min(MAX_SCORES_PER_BLOCK // (MIN_ROWS_PER_BLOCK * of_head), len(chosen)))
    num_rows = max(MIN_ROWS_PER_BLOCK, MAX_SCORES_PER_BLOCK // (of_head * num_heads))
    found = []
    large = is_traced() or has_large_logsumexp(logsumexp)  # rounding may make s - L positive
    with torch.no_grad(), without_autocast(shape.device):
        for some_heads in chosen.to(shape.device).split(num_heads):
            parts = []
            for first in range(0, max(len(rows), 1), num_rows):
                part = _slice_of_range(rows[first : first + num_rows])
                cells, shown = _subtract_base_from_scores(request, some_heads, part, _slice_of_range(columns), base)
                row = logsumexp[:, some_heads][:, :, part]  # (batch, heads, rows)
                begin, end = _range_of_visible_keys(request, part)
                if columns.step == 1 and columns.start <= begin and end <= columns.stop:
                    own = _add_sinks(_logsumexp_of_cells(cells, logsumexp.dtype), request, some_heads, part, base)
                elif totals is not None:
                    own = totals.logsumexp_of_rows(request, some_heads, part, base)
                else:
                    own = _logsumexp_block_by_block(request, some_heads, part, base)
                own = _computed_or_recorded_logsumexp(own, row, request, some_heads, part, base)
                own = own.masked_fill(row == -torch.inf, torch.inf)[..., None]  # exp(s - inf) = 0: an empty row
                logs = (cells - own).to(logsumexp.dtype)
                weights = (logs.clamp_(max=0) if large else logs).exp_()
                # Hidden cells are 0 for queries that see NaN too.
                parts.append(weights if shown is None else weights.masked_fill_(~shown, 0))
            found.append(parts[0] if len(parts) == 1 else torch.cat(parts, 2))
    return found[0] if len(found) == 1 else torch.cat(found, 1)


def logsumexp_of_rows(
    request: AttentionRequest,
    logsumexp: Tensor,
    totals: RowLogsumexps,
    heads: Tensor,
    rows: slice,
    base: Tensor | None = None,
) -> Tensor:
    """Compute the logsumexp of some rows in float64, as in `tile`: (batch, heads, rows), minus `base`.

    Args:
        request: the call.
        logsumexp: (batch, heads, rows), recorded for these rows.
        totals: cache of the results.
        heads: indices of the heads.
        rows: which queries.
        base: (batch, heads, queries) from `score_base`, or None.
    """
    with torch.no_grad(), without_autocast(request.shape.device):
        return _computed_or_recorded_logsumexp(
            totals.logsumexp_of_rows(request, heads, rows, base), logsumexp, request, heads, rows, base
        )


def score_base(request: AttentionRequest, logsumexp: Tensor) -> Tensor | None:
    """Return a base to subtract from huge scores before their logsumexp, (batch, heads, queries) float64.

    If |L| > HUGE_LOGSUMEXP, the base of a query is its largest visible bias, else 0: exp(s - L) = exp((s - base) - (L -
    base)). Returns None if no L is that large.
    """
    if request.bias is None or is_traced() or is_finite_and_small(logsumexp):
        return None
    huge = (logsumexp.abs() > HUGE_LOGSUMEXP) & logsumexp.isfinite()
    if not bool(huge.any()):
        return None
    found = []
    for rows in consecutive_slices(request.shape.query_length, MIN_ROWS_PER_BLOCK):
        bias = bias_tile(request.bias, request.shape, rows, slice(None)).detach()
        largest = bias.masked_fill(~visible_cells(request, rows), -torch.inf).amax(-1)
        found.append(largest.expand_as(huge[:, :, rows]))
    return torch.cat(found, 2).to(widest_float(huge.device)).masked_fill(~huge, 0)


def is_finite_and_small(logsumexp: Tensor) -> bool:
    """Whether no logsumexp is NaN or larger than LARGE_LOGSUMEXP, so that each query sees a key and no NaN."""
    if not logsumexp.numel():
        return True
    least, most = logsumexp.aminmax()
    return least.item() >= -LARGE_LOGSUMEXP and most.item() <= LARGE_LOGSUMEXP  # neither holds for NaN


def has_large_logsumexp(logsumexp: Tensor) -> bool:
    """Whether some finite logsumexp L is larger than LARGE_LOGSUMEXP, so that exp(s - L) is inexact in float32."""
    if is_finite_and_small(logsumexp):
        return False
    return bool((logsumexp.abs() > LARGE_LOGSUMEXP).logical_and(logsumexp.isfinite()).any())


def widen_request(request: AttentionRequest) -> AttentionRequest:
    """Convert all tensors of a call to float64, or to float32 if its device does not support float64."""
    bias, sinks = request.bias, request.sinks
    return replace(
        request,
        q=widen(request.q),
        k=widen(request.k),
        v=widen(request.v),
        shape=request.shape._replace(dtype=widest_float(request.shape.device)),
        bias=None if bias is None else with_values(bias, widen(values_of(bias))),
        sinks=None if sinks is None else widen(sinks),
    )


def _subtract_base_from_scores(
    request: AttentionRequest, heads: Tensor, queries: slice, keys: slice, base: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Compute the scores of a tile in float64 minus `base`, and which of them are visible.

    Returns:
        (batch, heads, queries, keys), -inf where hidden; and a bool tensor that broadcasts to it, True = visible, or
        None if all cells are visible.
    """
    precise = widest_float(request.shape.device)
    # q and k are sliced before heads are selected, because selecting copies, and a tile is smaller than all keys.
    q, k = request.q[:, :, queries], request.k[:, :, keys]
    narrow = select_request_heads(replace(request, q=q, k=k, v=k, bias=None), heads)
    cells = scores(replace(narrow, q=narrow.q.to(precise), k=narrow.k.to(precise)))
    if request.bias is not None:
        added = bias_tile(request.bias, request.shape, queries, keys).to(precise)
        cells = cells + index_axes(added, {1: heads})
    if base is not None:
        cells = cells - base[:, heads][:, :, queries, None]
    if _is_all_visible(request, queries, keys):
        return cells, None
    shown = index_axes(visible_cells(request, queries, keys), {1: heads})
    return cells.masked_fill(~shown, -torch.inf), shown  # scores of hidden keys may be NaN or inf


def _is_all_visible(request: AttentionRequest, queries: slice, keys: slice) -> bool:
    """Whether each of the queries certainly sees each of the keys, by the intervals of visible keys."""
    if is_traced() or request.bias is not None:
        return False
    bounds, columns = bounds_of(request), range(request.shape.key_length)[keys]
    if bounds.remainder is not None or not columns:
        return False
    start, stop = bounds.start[:, queries], bounds.stop[:, queries]
    return bool(start.numel()) and int(start.max()) <= columns[0] and columns[-1] < int(stop.min())


def _logsumexp_of_cells(cells: Tensor, dtype: torch.dtype) -> Tensor:
    """Compute the logsumexp over the last axis; -inf over no keys.

    The exponentials, which are at most 1, are computed in `dtype`: float32 is exact enough, and several times faster
    than float64.
    """
    if not cells.shape[-1]:
        return cells.new_full(cells.shape[:-1], -torch.inf)
    largest = cells.amax(-1, keepdim=True)
    hidden = largest == -torch.inf
    # exp(-80) changes no sum whose largest term is 1; denormal numbers would make the exponentials ten times slower.
    terms = (cells - largest.masked_fill(hidden, 0)).to(dtype).clamp(min=-80).exp_()
    return (largest + terms.sum(-1, keepdim=True, dtype=cells.dtype).log()).masked_fill(hidden, -torch.inf)[..., 0]


def _add_sinks(
    total: Tensor, request: AttentionRequest, heads: Tensor, rows: slice, base: Tensor | None = None
) -> Tensor:
    """Add the sinks of a call to a logsumexp from which `base` is subtracted: (batch, heads, queries)."""
    if request.sinks is None:
        return total
    sinks = request.sinks[heads].to(total.dtype)[:, None]
    return total.logaddexp(sinks if base is None else sinks - base[:, heads][:, :, rows])


def _logsumexp_block_by_block(
    request: AttentionRequest, heads: Tensor, queries: slice, base: Tensor | None = None
) -> Tensor:
    """Compute the logsumexp of some rows over their visible keys in blocks: (batch, heads, queries)."""
    shape, rows = request.shape, range(request.shape.query_length)[queries]
    dtype = working_dtype(shape.dtype)
    of_row = max(1, shape.batch * len(heads))
    num_rows = max(MIN_ROWS_PER_BLOCK, MAX_SCORES_PER_BLOCK // (of_row * MIN_BLOCK_KEYS))
    found = []
    for first in range(0, max(len(rows), 1), num_rows):
        part = _slice_of_range(rows[first : first + num_rows])
        begin, end = _range_of_visible_keys(request, part)
        width = max(MIN_BLOCK_KEYS, MAX_SCORES_PER_BLOCK // (of_row * num_rows))
        total = _logsumexp_of_cells(_subtract_base_from_scores(request, heads, part, slice(0, 0))[0], dtype)
        for key in range(begin, end, width):
            cells, _ = _subtract_base_from_scores(request, heads, part, slice(key, min(key + width, end)), base)
            total = total.logaddexp(_logsumexp_of_cells(cells, dtype))
        found.append(total)
    return _add_sinks(torch.cat(found, 2), request, heads, queries, base)


def _range_of_visible_keys(request: AttentionRequest, rows: slice) -> tuple[int, int]:
    """Return the range [first, stop) of the keys that any of the queries sees."""
    if is_traced():
        return 0, request.shape.key_length
    bounds = bounds_of(request)
    start, stop = bounds.start[:, rows], bounds.stop[:, rows]
    seeing = start < stop
    return (int(start[seeing].min()), int(stop[seeing].max())) if bool(seeing.any()) else (0, 0)


def _computed_or_recorded_logsumexp(
    own: Tensor, recorded: Tensor, request: AttentionRequest, heads: Tensor, rows: slice, base: Tensor | None = None
) -> Tensor:
    """Return the computed logsumexp `own`, or the recorded one where they differ by more than rounding."""
    if not request.shape.key_length:
        return recorded.to(own.dtype)
    relative = recorded.to(own.dtype) if base is None else recorded - base[:, heads][:, :, rows]
    apart, rounding = (own - relative).abs(), 16 * torch.finfo(recorded.dtype).eps
    near = apart <= rounding * (1 + recorded.abs())
    if is_traced() or not bool(near.all()):
        # A score may be smaller than its terms, so its rounding error is bounded by the product of the norms.
        q = request.q[:, heads][:, :, rows].to(own.dtype)
        k = request.k[:, heads // request.shape.heads_per_kv_head].to(own.dtype)
        norms = k.norm(dim=-1).nan_to_num(nan=0, posinf=0)  # keys with NaN or inf are hidden from these queries
        size = q.norm(dim=-1) * norms.amax(-1, keepdim=True) * abs(request.scale)
        near = apart <= rounding * (1 + recorded.abs() + size)
    return torch.where(near, own, relative)


def _slice_of_range(places: range) -> slice:
    return slice(places.start, places.stop, places.step)


def head_indices(heads: int | Sequence[int] | slice, num_heads: int) -> Tensor:
    """Return the indices of the chosen heads: (chosen,), int64.

    >>> head_indices(slice(0, 8, 2), 8)
    tensor([0, 2, 4, 6])
    """
    if isinstance(heads, slice):
        check_slice("heads", heads)
        wanted = list(range(num_heads)[heads])
    else:
        chosen = heads.tolist() if isinstance(heads, Tensor) else heads
        wanted = list(chosen) if isinstance(chosen, Sequence) and not isinstance(chosen, str) else [chosen]
    if not wanted:
        raise ArgumentError("No head was chosen.", f"Give heads from 0 to {num_heads - 1}.")
    for head in wanted:
        if isinstance(head, bool) or not hasattr(head, "__index__"):
            raise ArgumentError(f"heads holds {head!r}.", f"Give integers from 0 to {num_heads - 1}, or a slice.")
        if not -num_heads <= head < num_heads:
            raise ArgumentError(f"There is no head {head}.", f"Give heads from 0 to {num_heads - 1}.")
    return torch.tensor([index(head) % num_heads for head in wanted])
