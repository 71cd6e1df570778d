"""Sum the weights on earlier occurrences of a query's token (duplicate), or on the keys after these (induction)."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from multihead.kernels.call import AttentionRequest
from multihead.kernels.dense_tile import working_dtype
from multihead.kernels.parts import PartName
from multihead.probes.measured_call import MeasuredCall
from multihead.scores.bias import RelativeBias
from multihead.scores.terms import apply_softcap
from multihead.tensors.precision import widen

MAX_WEIGHTS_AT_ONCE = 1 << 19  # weights that are computed at once, over all heads
# Part -> offset of the keys that it counts from an earlier occurrence of the query's token.
KEY_SHIFTS: dict[PartName, int] = {"duplicate_mass": 0, "induction_mass": 1}


@dataclass(frozen=True, eq=False)
class _TokenGroup:
    """Distinct tokens that occur about equally often, and their queries and keys.

    Attributes:
        queries: (tokens, n), int64, indices of the queries whose token is this one and occurred before; padded with -1.
        keys: (tokens, m), int64, indices of all keys with the token; padded with -1.
    """

    queries: Tensor
    keys: Tensor


def measure_repeats(call: MeasuredCall, parts: Collection[PartName]) -> dict[PartName, Tensor]:
    """Sum each query's weights on earlier occurrences of its token, or on the keys after them.

    Args:
        call: a call with token ids in its context, in which each query sees one interval of keys.
        parts: "duplicate_mass", "induction_mass" or both.

    Returns:
        part -> (batch, heads, queries). Only weights between equal tokens are computed, about 1 % of queries x keys in
        a text.
    """
    shape, ids = call.request.shape, call.context.ids
    assert ids is not None
    found = {part: torch.zeros_like(call.finite_logsumexp) for part in parts}
    for index in range(shape.batch):
        sample = call.request_of_sample(index)
        for token_group in _group_by_token(ids[index].to(shape.device), call.positions[index]):
            for chunk in _split_into_chunks_of_weights(token_group, shape.num_heads):
                if not bool((chunk.queries >= 0).any()):
                    continue  # the group has only padding
                chunk = _drop_hidden_keys(call, index, chunk)  # noqa: PLW2901
                for part, total in found.items():
                    queries = chunk.queries.flatten()
                    sums = _sum_weights_at_shift(call, sample, index, chunk, KEY_SHIFTS[part])  # (heads, tokens, n)
                    total[index].index_add_(1, queries.clamp(min=0), sums.flatten(1).to(total.dtype))
    return found


def _group_by_token(ids: Tensor, positions: Tensor) -> Iterator[_TokenGroup]:
    """Group queries and keys by token, and tokens by number of occurrences, rounded up to a power of two."""
    if not len(ids):
        return
    _, token, count = ids.unique(return_inverse=True, return_counts=True)
    order = token.argsort(stable=True)  # keys sorted by token, then by position
    begin = count.cumsum(0) - count
    rank = torch.empty_like(order)
    rank[order] = torch.arange(len(ids), device=ids.device) - begin.repeat_interleave(count)
    inside = (positions >= 0) & (positions < len(ids))
    place = positions.clamp(0, len(ids) - 1)
    repeating = (inside & (rank[place] > 0)).nonzero()[:, 0]  # queries whose token has occurred before
    of_query = token[place[repeating]]
    number = of_query.bincount(minlength=len(count))
    size = 2 ** torch.ceil(widen(count).log2()).long()
    by_token = repeating[of_query.argsort(stable=True)]
    number_begin = number.cumsum(0) - number
    for most in size[number > 0].unique().tolist():
        tokens = ((size == most) & (number > 0)).nonzero()[:, 0]
        width = int(number[tokens].max())
        queries = _slices_as_rows(by_token, number_begin[tokens], number[tokens], width)
        yield _TokenGroup(queries, _slices_as_rows(order, begin[tokens], count[tokens], most))


def _slices_as_rows(values: Tensor, begin: Tensor, count: Tensor, width: int) -> Tensor:
    """Return the slices values[begin : begin + count] as rows, padded with -1: (slices, width)."""
    column = torch.arange(width, device=values.device)
    index = (begin[:, None] + column).clamp(max=max(len(values) - 1, 0))
    return values[index].masked_fill(column >= count[:, None], -1)


def _split_into_chunks_of_weights(token_group: _TokenGroup, heads: int) -> Iterator[_TokenGroup]:
    """Split a group by tokens, and by queries if a token is frequent, into groups of at most MAX_WEIGHTS weights."""
    most = max(1, MAX_WEIGHTS_AT_ONCE // (heads * token_group.keys.shape[1]))  # queries at once
    rows = min(token_group.queries.shape[1], most)
    tokens = max(1, most // rows)
    for first in range(0, len(token_group.keys), tokens):
        some = slice(first, first + tokens)
        for row in range(0, token_group.queries.shape[1], rows):
            yield _TokenGroup(token_group.queries[some, row : row + rows], token_group.keys[some])


def _drop_hidden_keys(call: MeasuredCall, index: int, token_group: _TokenGroup) -> _TokenGroup:
    """Drop keys at or after all queries of a group, and keys before all their visible intervals."""
    queries, row = token_group.queries[token_group.queries >= 0], 0 if call.bounds.is_shared_by_samples else index
    last, first = int(call.positions[index, queries].max()), int(call.bounds.start[row, queries].min())
    keys = token_group.keys  # in ascending order, -1 at the end
    stop = int(((keys >= 0) & (keys < last)).sum(-1).max())
    before = int(((keys >= 0) & (keys + 1 < first)).sum(-1).min())
    return _TokenGroup(token_group.queries, keys[:, min(before, stop) : stop])


def _sum_weights_at_shift(
    call: MeasuredCall, sample: AttentionRequest, index: int, token_group: _TokenGroup, shift: int
) -> Tensor:
    """Sum each query's weights on the keys `shift` after an earlier occurrence of its token: (heads, tokens, queries).

    In the comments n is the number of queries of a token, and m the number of earlier occurrences of it.
    """
    shape, bounds = call.request.shape, call.bounds
    queries, earlier = token_group.queries.clamp(min=0), token_group.keys
    keys = (earlier + shift).clamp(0, shape.key_length - 1)
    dtype = working_dtype(shape.dtype)
    q = sample.q[0][:, queries].to(dtype).unflatten(0, (shape.num_kv_heads, -1))  # (kv_heads, group, tokens, n, dim)
    k = sample.k[0][:, keys].to(dtype)  # (kv_heads, tokens, m, head_dim)
    product = q.transpose(1, 2).flatten(2, 3) @ k.mT  # (kv_heads, tokens, group * n, m)
    product = product.unflatten(2, (shape.heads_per_kv_head, -1)).transpose(1, 2).flatten(0, 1)  # (heads, tokens, n, m)
    cells = apply_softcap(product * sample.scale, sample.softcap)
    row = 0 if bounds.is_shared_by_samples else index
    start, stop = bounds.start[row, queries][..., None], bounds.stop[row, queries][..., None]
    place = call.positions[index, queries][..., None]
    is_earlier = (earlier >= 0)[:, None] & (earlier[:, None] < place) & (token_group.queries >= 0)[..., None]
    shown = is_earlier & (earlier[:, None] + shift >= start) & (earlier[:, None] + shift < stop)
    if sample.bias is not None:
        added = _bias_of_pairs(sample.bias, shape.query_length, queries[:, :, None], keys[:, None]).to(dtype)
        shown = shown & (added != -torch.inf)  # inf - inf would be NaN
        cells = cells + added
    logs = call.log_weights(cells, (index, slice(None), queries))
    return logs.exp_().masked_fill_(~shown, 0).sum(-1)


def _bias_of_pairs(bias: Tensor | RelativeBias, rows: int, queries: Tensor, keys: Tensor) -> Tensor:
    """Look up the bias of one sample for pairs of queries and keys: (heads or 1, tokens, n, m)."""
    if isinstance(bias, RelativeBias):
        return bias.values[0][:, keys - queries + rows - 1]
    whole = bias[0]
    queries = queries if whole.shape[1] > 1 else torch.zeros_like(queries)
    keys = keys if whole.shape[2] > 1 else torch.zeros_like(keys)
    return whole[:, queries, keys]
