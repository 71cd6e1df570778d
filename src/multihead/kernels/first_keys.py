"""The first key that each query of a call sees, and the first that any query of a sample sees."""

from __future__ import annotations

from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from multihead.kernels.call import AttentionRequest
from multihead.kernels.dense_tile import seen
from multihead.masks.base import KeyBounds
from multihead.tensors.tracing import intercepted

ROWS, COLUMNS = 256, 64  # queries and keys of the first tile where visibility is evaluated cell by cell
CELLS = 1 << 22  # cells of a tile, at most, unless the first one has more

_OF_PLANS: WeakKeyDictionary[KeyBounds, Tensor] = WeakKeyDictionary()


def first_keys(request: AttentionRequest, bounds: KeyBounds) -> Tensor:
    """Return the first key that some query of each sample sees: (batch or 1,), -1 where no query sees a key."""
    found = _OF_PLANS.get(bounds) if request.bias is None else None  # a bias is no part of a plan
    if found is None:
        none = request.shape.key_length
        padded = torch.nn.functional.pad(first_seen(request, bounds), (1, 0), value=none)  # so that no row is empty
        found = padded.amin(1)
        found = found.masked_fill(found == none, -1)
        # A mode that replaces the tensors made under it must not reach the calls after it.
        if request.bias is None and not intercepted():
            _OF_PLANS[bounds] = found
    return found


def first_seen(request: AttentionRequest, bounds: KeyBounds) -> Tensor:
    """Return the first key that each query sees in some head: (batch or 1, queries), the number of keys for none.

    An interval begins with it, unless a remainder or a bias of -inf hides that key.
    """
    none = request.shape.key_length
    first = bounds.start.masked_fill(bounds.sees_nothing, none)
    if (bounds.remainder is None and request.bias is None) or not request.shape.batch:
        return first
    queries = request.shape.query_length
    found = [_in_rows(request, bounds, slice(row, min(row + ROWS, queries))) for row in range(0, queries, ROWS)]
    samples = max((each.shape[0] for each in found), default=1)  # not those of the call: others share its plan
    return torch.cat([each.expand(samples, -1) for each in found], 1) if found else first


def _in_rows(request: AttentionRequest, bounds: KeyBounds, rows: slice) -> Tensor:
    """Return `first_seen` of some queries: tiles of keys are evaluated until each query has found its first."""
    shape = request.shape
    start, stop = bounds.start[:, rows], bounds.stop[:, rows]
    left = start < stop
    found = torch.full_like(start, shape.key_length)
    column, width = int(start.masked_fill(~left, shape.key_length).min()), COLUMNS
    while bool(left.any()):
        end = min(column + width, shape.key_length)
        cells = seen(request, rows, slice(column, end))  # (batch or 1, heads or 1, rows or 1, keys or 1)
        cells = cells.any(1).expand(-1, rows.stop - rows.start, end - column)
        here = left & cells.any(-1)
        found = torch.where(here, cells.int().argmax(-1) + column, found)
        left = left & ~here & (stop > end)
        column = end
        width = max(COLUMNS, min(2 * width, CELLS // (ROWS * shape.batch * shape.num_heads)))
    return found
