"""Blocks of a sample's attention map: sum the weights of each over segments; check slices and head indices."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor

from multihead.errors import ArgumentError
from multihead.errors.arguments import check_slice
from multihead.kernels.call import AttentionRequest
from multihead.probes.blocks import BlockSums, sum_weights_over_blocks
from multihead.record.segments import Segment
from multihead.tensors.shapes import consecutive_slices

MAX_TILE_CELLS = 1 << 20
"""Largest number of heads x queries x keys in a tile: 8 MB in float64, to fit into a CPU cache."""


def sum_blocks(
    parts: Iterable[tuple[Segment, AttentionRequest, Tensor]],
    *,
    heads: Sequence[int],
    rows: tuple[int, int],
    columns: tuple[int, int],
    block: tuple[int, int],
    without_first_key: bool = False,
    cancelled: Callable[[], bool] | None = None,
) -> BlockSums:
    """Sum the weights of each block of a rectangle of an attention map, and count the visible cells of the block.

    If a segment starts within a block, its rows up to the end of the block are summed separately.

    Args:
        parts: the segments, each with a request that has q and k, and the logsumexp (1, heads, queries).
        heads: which heads.
        rows: range of the queries, [first, stop).
        columns: range of the keys, [first, stop).
        block: numbers of queries and keys per block.
        without_first_key: whether key 0 counts as hidden.
        cancelled: called before each strip of rows; if it returns True, `CancelledError` is raised.
    """
    size = [-(-(last - first) // each) for (first, last), each in zip((rows, columns), block, strict=True)]
    sums = torch.zeros(len(heads), *size, dtype=torch.float64)
    found = BlockSums(sums, torch.zeros_like(sums, dtype=torch.int64))
    for segment, request, logsumexp in parts:
        for row, upright in _split_at_grid((segment.row_start, segment.row_stop), rows, block[0]):
            for column, across in _split_at_grid((segment.key_start, segment.key_stop), columns, block[1]):
                part = sum_weights_over_blocks(
                    request,
                    logsumexp,
                    heads=heads,
                    queries=_shift_range(upright, segment.row_start),
                    keys=_shift_range(across, segment.key_start),
                    block=block,
                    without_first_key=without_first_key and segment.key_start == 0,
                    cancelled=cancelled,
                    totals=segment.row_logsumexps,
                )
                target = slice(row, row + part.sums.shape[1]), slice(column, column + part.sums.shape[2])
                found.sums[:, target[0], target[1]] += part.sums.cpu()
                found.counts[:, target[0], target[1]] += part.counts.cpu()
    return found


def query_blocks(num_queries: int, cells_per_query: int) -> Iterator[slice]:
    """Return slices of queries with at most `MAX_TILE_CELLS` cells each, but at least one query.

    >>> list(query_blocks(5, 1 << 19))
    [slice(0, 2, None), slice(2, 4, None), slice(4, 5, None)]
    """
    return consecutive_slices(num_queries, max(1, MAX_TILE_CELLS // max(1, cells_per_query)))


def checked_slice_indices(chosen: slice, length: int, name: str) -> tuple[int, int, int]:
    """Return the start, stop and step of a slice for a given length.

    Raises:
        ArgumentError: `chosen` is not a slice, or its step is negative.
    """
    check_slice(name, chosen)
    return chosen.indices(length)


def checked_slice_ends(chosen: slice, length: int, name: str = "A part of the map") -> tuple[int, int]:
    """Return the start and stop of a slice of step 1 for a given length.

    Raises:
        ArgumentError: `chosen` is not a slice, or has another step.
    """
    first, stop, step = checked_slice_indices(chosen, length, name)
    if step != 1:
        raise ArgumentError(f"{name} has steps of {step}.", "Give slices without steps.")
    return first, max(first, stop)


def index_of_heads(head: int | None, num_heads: int) -> int | slice:
    """Return an index for the dimension of heads: `head` itself, or a slice of all heads for None.

    Raises:
        ArgumentError: `head` is not an integer.
    """
    if head is None:
        return slice(None)
    if isinstance(head, bool) or not isinstance(head, int):
        mend = f"Give one head, an integer from 0 to {num_heads - 1}, or None for all and index the result."
        raise ArgumentError(f"head is {head!r}.", mend)
    return head


def number_pair(name: str, given: int | tuple[int, int]) -> tuple[int, int]:
    """Return a pair (for queries, for keys); a single number is used for both.

    Raises:
        ArgumentError: `given` is a sequence whose length is not two.
    """
    if not isinstance(given, (tuple, list)):
        return given, given
    if len(given) != 2:
        raise ArgumentError(f"{name} is {given!r}.", "Give one number, or one for the queries and one for the keys.")
    return given[0], given[1]


def _split_at_grid(
    available: tuple[int, int], wanted: tuple[int, int], size: int
) -> Iterator[tuple[int, tuple[int, int]]]:
    """Split the overlap of two ranges at the first multiple of `size`: yield the block index and range of each part.

    >>> list(_split_at_grid((3, 20), (0, 18), 8))
    [(0, (3, 8)), (1, (8, 18))]
    """
    first, stop = max(available[0], wanted[0]), min(available[1], wanted[1])
    line = wanted[0] + -(-(first - wanted[0]) // size) * size
    if first < min(line, stop):
        yield (first - wanted[0]) // size, (first, min(line, stop))
    if line < stop:
        yield (line - wanted[0]) // size, (line, stop)


def _shift_range(ends: tuple[int, int], start: int) -> slice:
    return slice(ends[0] - start, ends[1] - start)
