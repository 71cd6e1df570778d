"""Dense scores and visibility of one tile of the attention map, and the first visible key of queries."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from multihead.kernels.call import AttentionRequest
from multihead.masks import Mask
from multihead.masks.base import KeyBounds
from multihead.masks.positions import TilePositions
from multihead.scores.bias import bias_tile, index_bias
from multihead.scores.terms import apply_softcap
from multihead.tensors.shapes import consecutive_slices
from multihead.tensors.tracing import is_intercepted


def working_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which statistics and logsumexp are computed: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Disable autocast in a context: it would compute scores and statistics of float32 tensors in half precision."""
    if device.type == "meta" or not torch.is_autocast_enabled(device.type):  # autocast has no meta device
        return nullcontext()
    return torch.autocast(device.type, enabled=False)


def without_qkv(request: AttentionRequest) -> AttentionRequest:
    """Return the request without q, k and v, for an autograd context that saves q, k and v itself."""
    empty = request.q.new_empty(0)
    return replace(request, q=empty, k=empty, v=empty)


def scores(
    request: AttentionRequest,
    queries: slice = slice(None),
    keys: slice = slice(None),
    *,
    hidden: Tensor | None = None,
) -> Tensor:
    """Compute softcap(scale * q . k) + bias on a tile: (batch, heads, queries, keys), in `working_dtype`.

    Scores where `hidden` (bool, broadcasting) is True become -inf with gradient 0; None hides nothing.
    """
    dtype = working_dtype(request.q.dtype)
    q, k = request.q[:, :, queries].to(dtype), request.k[:, :, keys].to(dtype)
    grouped = q.unflatten(1, (request.shape.num_kv_heads, -1))  # (batch, kv_heads, group, queries, head_dim)
    # One matrix product per key/value head: the rows of its query heads are concatenated, so k is never repeated.
    # A scale above 1 is applied after the product: q * scale could overflow to inf, and inf * 0 (the gradient of a
    # hidden cell) is NaN.
    late_scale = max(1.0, abs(request.scale))
    product = (grouped.flatten(2, 3) * (request.scale / late_scale)) @ k.mT  # (batch, kv_heads, group * queries, keys)
    cells = product.unflatten(2, grouped.shape[2:4]).flatten(1, 2)  # (batch, heads, queries, keys)
    if late_scale > 1:
        cells = cells * late_scale
    if request.softcap is not None and hidden is not None:
        cells = cells.masked_fill(hidden, 0)  # the gradient of the softcap of a hidden NaN score would be NaN
    cells = apply_softcap(cells, request.softcap)
    if request.bias is not None:
        cells = cells + bias_tile(request.bias, request.shape, queries, keys).to(dtype)
    return cells if hidden is None else cells.masked_fill(hidden, -torch.inf)


def visible_cells(request: AttentionRequest, queries: slice = slice(None), keys: slice = slice(None)) -> Tensor:
    """Return where neither mask nor a bias of -inf hides a key: bool, broadcasting to (batch, heads, queries, keys)."""
    shown = visible_in_mask(request.mask, request, queries, keys)
    if request.bias is not None:
        shown = shown & (bias_tile(request.bias, request.shape, queries, keys) != -torch.inf)
    return shown


def visible_in_mask(
    mask: Mask, request: AttentionRequest, queries: slice = slice(None), keys: slice = slice(None)
) -> Tensor:
    """Return where a mask shows a key to a query of a request: bool, broadcasting to (batch, heads, queries, keys)."""
    shape = request.shape
    tile = TilePositions.from_sizes(
        shape.query_length,
        shape.key_length,
        query_start=request.query_start,
        device=shape.device,
        rows=queries,
        columns=keys,
    )
    return mask.tile(tile)


def hidden_cells(request: AttentionRequest) -> Tensor | None:
    """Return where keys are hidden, bool (batch or 1, heads or 1, queries, keys); None if all are visible."""
    return None if request.mask.hides_nothing and request.bias is None else ~visible_cells(request)


def visibility_tensors(request: AttentionRequest) -> tuple[Tensor, ...]:
    """Return the tensors that `visible_cells` reads, to be saved for a backward pass that calls it again.

    Autograd raises an error if a saved tensor was modified in place since the forward pass.
    """
    terms = (request.query_start, request.bias_values)
    return (*request.mask.tensors(), *(term for term in terms if isinstance(term, Tensor)))


def select_request_heads(request: AttentionRequest, heads: Tensor) -> AttentionRequest:
    """Select query heads of a request, each with its own copy of its key/value head.

    The mask still covers all heads: select from the result of `visible_cells` if its head axis is not 1.
    """
    kv_heads = heads // request.shape.heads_per_kv_head
    return replace(
        request,
        q=request.q[:, heads],
        k=request.k[:, kv_heads],
        v=request.v[:, kv_heads],
        shape=request.shape._replace(num_heads=len(heads), num_kv_heads=len(heads)),
        bias=index_bias(request.bias, {1: heads}),
        sinks=None if request.sinks is None else request.sinks[heads],
    )


FIRST_TILE_QUERIES, FIRST_TILE_KEYS = 256, 64  # queries and keys of the first tile in `_search_first_keys`
MAX_TILE_CELLS = 1 << 22  # largest number of cells of a later tile in `_search_first_keys`

# Without a bias, because KeyBounds, the keys, do not depend on it.
_FIRST_KEYS_OF_BOUNDS: WeakKeyDictionary[KeyBounds, Tensor] = WeakKeyDictionary()
_FIRST_KEYS_OF_TEXTS: WeakKeyDictionary[KeyBounds, Tensor] = WeakKeyDictionary()


def first_key_of_samples(request: AttentionRequest, bounds: KeyBounds) -> Tensor:
    """Return the smallest index of a key that some query sees, per sample: (batch or 1,), -1 if no query sees a key."""
    found = _FIRST_KEYS_OF_BOUNDS.get(bounds) if request.bias is None else None
    if found is None:
        none = request.shape.key_length
        # One value is padded before the first query, so that amin works on a call without queries.
        padded = torch.nn.functional.pad(first_key_of_queries(request, bounds), (1, 0), value=none)
        found = padded.amin(1)
        found = found.masked_fill(found == none, -1)
        # The result is not cached in a trace or under FakeTensorMode: later calls must not get traced or fake tensors.
        if request.bias is None and not is_intercepted():
            _FIRST_KEYS_OF_BOUNDS[bounds] = found
    return found


def first_key_of_queries(request: AttentionRequest, bounds: KeyBounds) -> Tensor:
    """Return the first key that each query sees in any head: (batch or 1, queries); the number of keys if it sees none.

    The first key is the start of the query's interval in `bounds`, unless a bias of -inf or `bounds.remainder` hides
    it.
    """
    none = request.shape.key_length
    first = bounds.start.masked_fill(bounds.sees_nothing, none)
    if (bounds.remainder is None and request.bias is None) or not request.shape.batch:
        return first
    found = [
        _search_first_keys(request, bounds, rows)
        for rows in consecutive_slices(request.shape.query_length, FIRST_TILE_QUERIES)
    ]
    # The results are not expanded to the batch size of the call: calls of other batch sizes share cached results.
    samples = max((each.shape[0] for each in found), default=1)
    return torch.cat([each.expand(samples, -1) for each in found], 1) if found else first


def first_key_of_texts(request: AttentionRequest, bounds: KeyBounds) -> Tensor:
    """Return the first key that some query of the same text sees, for a mask with `row_texts`: (batch or 1, queries).

    The result for a query in no text, or in one whose queries see no key, is the number of keys.
    """
    known = _FIRST_KEYS_OF_TEXTS.get(bounds) if request.bias is None else None
    if known is not None:
        return known
    texts, shape = request.mask.row_texts, request.shape
    assert texts is not None
    first = first_key_of_queries(request, bounds)
    text, _ = texts.locate(positions_of_queries(request))
    rows = max(len(first), len(text)) if len(first) and len(text) else 0
    first, text = first.expand(rows, -1), text.expand(rows, -1)
    of_text = first.new_full((rows, texts.edges.shape[1]), shape.key_length).scatter_reduce(1, text, first, "amin")
    found = of_text.gather(1, text).masked_fill(text == texts.edges.shape[1] - 1, shape.key_length)
    if request.bias is None and not is_intercepted():
        _FIRST_KEYS_OF_TEXTS[bounds] = found
    return found


def first_keys(request: AttentionRequest, bounds: KeyBounds) -> Tensor:
    """Return `first_key_of_texts` for a mask with `row_texts`, else `first_key_of_samples`."""
    per_text = bounds in _FIRST_KEYS_OF_TEXTS or request.mask.row_texts is not None
    return first_key_of_texts(request, bounds) if per_text else first_key_of_samples(request, bounds)


def positions_of_queries(request: AttentionRequest) -> Tensor:
    """Return the position of each query among the keys of a call: (batch or 1, queries) int64."""
    row = torch.arange(request.shape.query_length, device=request.shape.device)[None]
    start = request.query_start
    return row + (start.to(row.device)[:, None] if isinstance(start, Tensor) else start)


def _search_first_keys(request: AttentionRequest, bounds: KeyBounds, rows: slice) -> Tensor:
    """Return `first_key_of_queries` for some queries: evaluate tiles of keys until each query has its first key."""
    shape = request.shape
    start, stop = bounds.start[:, rows], bounds.stop[:, rows]
    left = start < stop
    found = torch.full_like(start, shape.key_length)
    column, width = int(start.masked_fill(~left, shape.key_length).min()), FIRST_TILE_KEYS
    while bool(left.any()):
        end = min(column + width, shape.key_length)
        cells = visible_cells(request, rows, slice(column, end))  # (batch or 1, heads or 1, rows or 1, keys or 1)
        cells = cells.any(1).expand(-1, rows.stop - rows.start, end - column)
        here = left & cells.any(-1)
        found = torch.where(here, cells.int().argmax(-1) + column, found)
        left = left & ~here & (stop > end)
        column = end
        width = max(
            FIRST_TILE_KEYS, min(2 * width, MAX_TILE_CELLS // (FIRST_TILE_QUERIES * shape.batch * shape.num_heads))
        )
    return found
