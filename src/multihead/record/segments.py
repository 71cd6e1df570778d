"""Where the calls of one sample stand, and the rows that grow as they come."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from multihead.call import AttentionRequest
from multihead.masks import Causal, Mask
from multihead.probes.tile import RowTotals


class Rows:
    """A tensor that grows along one axis: what comes stands behind what is there.

    Chunks are put together when they are read and not when they come, so that a decoding of many steps copies
    each row once.

    Args:
        axis: the axis that grows.
        chunks: what is there.
    """

    __slots__ = ("_chunks", "_length", "axis")

    def __init__(self, axis: int, chunks: Iterable[Tensor] = ()) -> None:
        """Begin with some chunks; a sample has a dozen of these, so this is as short as can be."""
        self.axis = axis
        self._chunks = list(chunks)
        self._length = 0
        for chunk in self._chunks:
            self._length += chunk.shape[axis]

    @property
    def length(self) -> int:
        """How many rows there are."""
        return self._length

    @property
    def has_chunks(self) -> bool:
        """Whether anything was added, be it a tensor without rows."""
        return bool(self._chunks)

    def add(self, chunk: Tensor) -> None:
        """Put rows behind those that are there."""
        self._chunks.append(chunk)
        self._length += chunk.shape[self.axis]

    def whole(self) -> Tensor:
        """Return all rows."""
        if len(self._chunks) > 1:
            self._chunks = [torch.cat(self._chunks, self.axis)]
        return self._chunks[0]

    def between(self, start: int, stop: int, *, heads: Collection[int] | None = None) -> Tensor:
        """Return the rows from one place to another; of other heads than those named they may have no meaning."""
        return self.whole().narrow(self.axis, start, max(min(stop, self.length) - start, 0))


def grow_keys(rows: Rows, k: Tensor, *, start: int, device: torch.device) -> None:
    """Take the keys that are new out of a call's keys (1, kv_heads, keys, head_dim), whose first stands at `start`."""
    missing = start - rows.length
    if missing > 0:  # keys that no query at hand may see: a cache had dropped them
        rows.add(torch.zeros(*k.shape[:2], missing, k.shape[3], dtype=k.dtype, device=device))
    if start + k.shape[2] > rows.length or not rows.has_chunks:  # the keys of an empty sample have a shape too
        rows.add(kept(k[:, :, rows.length - start :], device))


def kept(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy what a model may write over, its numbers one after the other."""
    return tensor.detach().to(device, copy=True, memory_format=torch.contiguous_format)


@dataclass(frozen=True, eq=False)
class Segment:
    """One call, or several that are as good as one, cut to one sample and free of padding.

    Fields:
        request: what was asked, with a batch of one; its q, k and v are empty.
        key_start: where its first key stands among the keys of the sample.
        row_start: where its first query stands among the queries of the sample.
        totals: the logsumexp of its rows in float64, as far as a tile has needed it; a changed piece begins anew.
    """

    request: AttentionRequest
    key_start: int = 0
    row_start: int = 0
    totals: RowTotals = field(init=False, default_factory=RowTotals)

    @property
    def num_queries(self) -> int:
        """How many queries it has."""
        return self.request.shape.query_length

    @property
    def row_stop(self) -> int:
        """The place behind its last query, among the queries of the sample."""
        return self.row_start + self.num_queries

    @property
    def key_stop(self) -> int:
        """The place behind its last key, among the keys of the sample."""
        return self.key_start + self.request.shape.key_length

    @property
    def query_start(self) -> int:
        """Where its first query stands among the keys of the sample."""
        return self.key_start + int(self.request.query_start)

    def only(self, head: int | None) -> tuple[tuple[int, ...] | None, tuple[int, ...] | None]:
        """Return what a head is among the query heads, and among the key heads; None, of all or of no head, is all."""
        shape = self.request.shape
        if head is None or not -shape.num_heads <= head < shape.num_heads:
            return None, None
        return (head % shape.num_heads,), (head % shape.num_heads // shape.group,)

    def cut(self, rows: tuple[int, int], keys: tuple[int, int]) -> Segment:
        """Keep some of its queries and keys, counted in the sample; it is one call, or was joined from calls."""
        if rows == (self.row_start, self.row_stop) and keys == (self.key_start, self.key_stop):
            return self
        shape = replace(self.request.shape, query_length=rows[1] - rows[0], key_length=keys[1] - keys[0])
        start = self.query_start + rows[0] - self.row_start - keys[0]
        return Segment(replace(self.request, shape=shape, query_start=start), keys[0], rows[0])


def joined(segment: Segment, later: Segment) -> Segment | None:
    """Join a piece and the one that goes on from it, where one mask says what both may see; else None.

    So it is in most decodings: each query sees its own key and those before it, whatever is asked in one call.
    """
    first, second = segment.request, later.request
    mask = _of_both(segment, later)
    if mask is None or first.bias is not None or second.bias is not None:
        return None
    if (first.scale, first.softcap) != (second.scale, second.softcap) or not _sees_from(mask, segment, later):
        return None
    if not _same_sinks(first.sinks, second.sinks):
        return None
    if later.query_start != segment.query_start + segment.num_queries or later.key_stop < segment.key_stop:
        return None
    shape = replace(
        first.shape,
        query_length=segment.num_queries + later.num_queries,
        key_length=later.key_stop - segment.key_start,
    )
    return replace(segment, request=replace(first, shape=shape, mask=mask))


def _same_sinks(sinks: Tensor | None, others: Tensor | None) -> bool:
    return sinks is others if sinks is None or others is None else torch.equal(sinks, others)


def _sees_from(mask: Mask, segment: Segment, later: Segment) -> bool:
    """Whether the later queries see no key before their call's first one, if they are given those of both calls."""
    if later.key_start == segment.key_start:
        return True
    lookback = mask.lookback
    return lookback is not None and segment.key_start <= later.key_start <= later.query_start - lookback + 1


def _of_both(segment: Segment, later: Segment) -> Mask | None:
    """Return the mask of two pieces, if it hides from the first what came with the second."""
    masks = [_plain(each.request) for each in (segment, later)]
    within = all(
        int(each.request.query_start) + each.num_queries <= each.request.shape.key_length for each in (segment, later)
    )
    return masks[0] if within and masks[0] == masks[1] and _spans_calls(masks[0]) else None


def _plain(request: AttentionRequest) -> Mask:
    """Call it causal where one query at the end of its keys sees them all."""
    at_end = request.shape.query_length == 1 and int(request.query_start) + 1 == request.shape.key_length
    return Causal() if at_end and request.mask.hides_nothing else request.mask


def _spans_calls(mask: Mask) -> bool:
    """Whether the mask of one call says what a later call sees too: by distance alone, and no later key."""
    return mask.translation_invariant and mask.sees_no_later_key
