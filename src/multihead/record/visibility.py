"""Describe the visible keys of a sample."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from multihead.errors import MaskError
from multihead.record.sample import SampleRecord
from multihead.tensors.shapes import consecutive_slices

MAX_TILE_CELLS = 1 << 20
"""Largest number of heads x queries x keys in a tile: 8 MB in float64, to fit into a CPU cache."""


@dataclass(frozen=True, eq=False)
class Visibility:
    """The visible keys of the queries of one sample in one layer.

    Attributes:
        pattern: "full", "causal", "window", "causal window", or "other".
        before: number of tokens before the query in a window; 0 without a window.
        after: number of tokens after the query in a window; 0 without a window.
        hides_keys: whether any key is hidden from any query.
        blind_queries: number of queries without visible keys, in the head with the most such queries.
        mean_keys: (heads,) float64, mean number of visible keys of the queries that see a key.
        largest_entropy: (heads,) float64, nats: mean of ln(number of visible keys) over the queries that see a key: the
            entropy of a head with even weights.
    """

    pattern: str
    before: int
    after: int
    hides_keys: bool
    blind_queries: int
    mean_keys: Tensor
    largest_entropy: Tensor


def query_blocks(num_queries: int, cells_per_query: int) -> Iterator[slice]:
    """Return slices of queries with at most `MAX_TILE_CELLS` cells each, but at least one query.

    >>> list(query_blocks(5, 1 << 19))
    [slice(0, 2, None), slice(2, 4, None), slice(4, 5, None)]
    """
    return consecutive_slices(num_queries, max(1, MAX_TILE_CELLS // max(1, cells_per_query)))


def visibility_of(sample: SampleRecord) -> Visibility:
    """Describe the visible keys of a sample's queries, from intervals if possible, else from tiles of its mask."""
    try:
        count, start, stop = _count_seen_keys(sample)
    except MaskError:  # the mask's class is not defined in this process
        blind, unknown = _count_blind_queries(sample.sees), torch.full((sample.num_heads,), torch.nan).double()
        return Visibility(
            "other", 0, 0, hides_keys=True, blind_queries=blind, mean_keys=unknown, largest_entropy=unknown
        )
    pattern, before, after = _name_of_pattern(count, start, stop, sample.query_start, sample.num_keys)
    if pattern == "full" and all(segment.request.mask.sees_no_later_key for segment in sample.segments):
        pattern = "causal"  # the only queries are at the last key: one token, or a step of cached decoding
    count = count.expand(sample.num_heads, -1).double()
    sees = count > 0
    seeing = sees.sum(-1).double()
    per_query = torch.where(sees, count.clamp(min=1).log(), 0.0)
    return Visibility(
        pattern=pattern,
        before=before,
        after=after,
        hides_keys=bool((count < sample.num_keys).any()),
        blind_queries=_count_blind_queries(sees),
        mean_keys=count.sum(-1) / seeing.clamp(min=1),
        largest_entropy=per_query.sum(-1) / seeing.clamp(min=1),
    )


def _count_blind_queries(sees: Tensor) -> int:
    """Return the number of queries without visible keys in the head with most, given (heads, queries) bool."""
    return int((~sees).sum(-1).max()) if sees.numel() else 0


def _count_seen_keys(sample: SampleRecord) -> tuple[Tensor, Tensor, Tensor]:
    """Return per query the number of visible keys, the first, and the index after the last: (heads or 1, queries)."""
    intervals = sample.intervals()
    if intervals is not None:
        start, stop = (each[None] for each in intervals)
        return stop - start, start, stop
    starts, stops, counts = [], [], []
    for block in query_blocks(sample.num_queries, sample.num_heads * sample.num_keys):
        seen = sample.visible(queries=block)
        seen = seen[None] if seen.dim() == 2 else seen  # (heads or 1, rows, keys)
        counts.append(seen.sum(-1))
        starts.append(seen.int().argmax(-1))
        stops.append(sample.num_keys - seen.flip(-1).int().argmax(-1))
    return torch.cat(counts, -1), torch.cat(starts, -1), torch.cat(stops, -1)


def _name_of_pattern(count: Tensor, start: Tensor, stop: Tensor, query_start: int, keys: int) -> tuple[str, int, int]:
    """Return `pattern`, `before` and `after` of a mask, given the keys [start, stop) of each query that sees a key."""
    seen = count > 0
    if not bool(seen.any()) or not bool((count == stop - start)[seen].all()):
        return "other", 0, 0
    position = (torch.arange(count.shape[-1]) + query_start).expand_as(count)[seen]
    start, stop = start[seen], stop[seen]
    if bool(((start == 0) & (stop == keys)).all()):
        return "full", 0, 0
    after, before = int((stop - 1 - position).max()), int((position - start).max())
    ends_as_window = after >= 0 and before >= 0 and bool((stop == (position + after + 1).clamp(max=keys)).all())
    starts_at_first_key = bool((start == 0).all())
    if not ends_as_window or not (starts_at_first_key or bool((start == (position - before).clamp(min=0)).all())):
        return "other", 0, 0
    if after > 0:
        return "window", before, after
    return ("causal", 0, 0) if starts_at_first_key else ("causal window", before, 0)
