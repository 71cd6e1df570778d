"""Compute the Jensen-Shannon divergence between the attention weights of heads on the same text, tile by tile."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from multihead.errors import ArgumentError, ShapeError
from multihead.kernels.call import AttentionRequest
from multihead.kernels.dense_tile import without_autocast
from multihead.probes.tile import head_indices, tile
from multihead.tensors.precision import widen, widest_float
from multihead.tensors.shapes import consecutive_slices

MAX_WEIGHTS_AT_ONCE = 1 << 21  # maximum number of weights of pairs of heads that are compared at once
HeadSelection = int | Sequence[int] | slice


def divergence(
    request: AttentionRequest,
    logsumexp: Tensor,
    other: AttentionRequest | None = None,
    other_logsumexp: Tensor | None = None,
    *,
    heads: HeadSelection = slice(None),
    other_heads: HeadSelection = slice(None),
    queries: slice = slice(None),
) -> Tensor:
    """Return the Jensen-Shannon divergence of attention weights between each of `heads` and each of `other_heads`.

    Args:
        request: a call of one sample.
        logsumexp: (1, heads, queries) of `request`, nats.
        other: another call of one sample with as many queries and keys; None: `request`.
        other_logsumexp: (1, heads, queries) of `other`, nats.
        heads: which heads of `request`.
        other_heads: which heads of `other`.
        queries: which queries; slice(None, None, 16) compares every sixteenth.

    Returns:
        (heads, other_heads), float64, nats: the mean over queries that see a key in both calls; 0 = equal weights,
        ln 2 = no key in common, NaN if there is no such query. A learned sink counts as one more key.

    Raises:
        ArgumentError: a call has several samples, no query is selected, or a head does not exist.
        ShapeError: the calls differ in their number of queries or keys.

    Source: JS(p, r) = H((p + r) / 2) - (H(p) + H(r)) / 2, Lin 1991; between heads, arXiv:1906.04341, section 6.

    >>> from multihead.functional import request_of
    >>> q = torch.zeros(1, 2, 3, 4)
    >>> divergence(request_of(q, q, q), torch.full((1, 2, 3), 3.0).log())
    tensor([[0., 0.],
            [0., 0.]], dtype=torch.float64)
    """
    if other is None or other_logsumexp is None:
        other, other_logsumexp = request, logsumexp
    _check_same_lengths(request, other)
    device = request.shape.device
    first = head_indices(heads, request.shape.num_heads)
    second = head_indices(other_heads, other.shape.num_heads)
    rows = range(request.shape.query_length)[queries]
    if rows.step < 0:
        raise ArgumentError(f"queries runs backwards by {-rows.step}.", "Give a slice whose step is positive.")
    if not rows:
        raise ArgumentError(f"queries is {queries!r}, which selects no query.", "Give a slice that selects some.")
    total = torch.zeros(len(first), len(second), dtype=widest_float(device), device=device)
    count = torch.zeros_like(total)
    step = max(1, MAX_WEIGHTS_AT_ONCE // (request.shape.key_length * (len(first) + len(second))))
    with torch.no_grad(), without_autocast(device):
        for begin in range(0, len(rows), step):
            part = rows[begin : begin + step]
            some = slice(part.start, part.stop, part.step)
            p, sees = _weights_of_rows(request, logsumexp, first, some)
            r, also = _weights_of_rows(other, other_logsumexp, second, some)
            _add_divergences(total, count, (p, sees), (r, also))
    return total / count


def _weights_of_rows(request: AttentionRequest, logsumexp: Tensor, heads: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
    """Return the weights of some rows on all keys and the sink, and which rows see a key.

    Returns:
        (heads, rows, keys + 1), with the weight of the sink in the last column; and (heads, rows) bool.
    """
    chosen = heads.tolist()
    cells = tile(request, logsumexp, heads=chosen, queries=rows)[0]
    row = logsumexp[0, chosen][:, rows]  # (heads, rows)
    sees = ~(row.isnan() | (row == -torch.inf))
    sink = torch.zeros_like(row)
    if request.sinks is not None:
        sink = (request.sinks.detach().to(row.dtype)[chosen][:, None] - row.masked_fill(~sees, torch.inf)).exp()
    return torch.cat([cells.masked_fill(~sees[..., None], 0), sink[..., None]], -1), sees


def _add_divergences(total: Tensor, count: Tensor, one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> None:
    """Add the divergences of some rows to `total` and their number to `count`, in place."""
    (p, sees), (r, also) = one, other
    entropy_p, entropy_r = entropy_of(p), entropy_of(r)
    step = max(1, MAX_WEIGHTS_AT_ONCE // r.numel())
    for some in consecutive_slices(len(p), step):
        middle = entropy_of((p[some, None] + r) / 2)  # (some heads, other heads, rows)
        apart = middle - (entropy_p[some, None] + entropy_r) / 2
        both = sees[some, None] & also
        total[some] += (apart.clamp(min=0) * both).sum(-1)  # rounding can give -1e-7 for equal weights
        count[some] += both.sum(-1)


def entropy_of(weights: Tensor) -> Tensor:
    """Return -sum p ln p over the last axis, nats, in float64.

    >>> entropy_of(torch.tensor([0.5, 0.0, 0.5])).exp()
    tensor(2.0000, dtype=torch.float64)
    """
    # The clamp gives 0 ln 0 = 0; torch.special.entr is several times slower.
    logs = weights.clamp(min=torch.finfo(weights.dtype).tiny).log_()
    return -widen((logs * weights).sum(-1))


def _check_same_lengths(request: AttentionRequest, other: AttentionRequest) -> None:
    for each in (request, other):
        if each.shape.batch != 1:
            raise ArgumentError(f"A call of {each.shape.batch} samples was given.", "Give a call of one sample.")
    sizes = [(each.shape.query_length, each.shape.key_length) for each in (request, other)]
    if sizes[0] != sizes[1]:
        raise ShapeError(
            f"The calls have {sizes[0][0]} and {sizes[1][0]} queries, and {sizes[0][1]} and {sizes[1][1]} keys.",
            "Give two calls over the same text.",
        )
