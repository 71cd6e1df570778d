"""Segments of a sample: an attention call, or several merged calls.

A window or image of a sample is a segment (`Segment.is_window`) that is measured as a separate call: positions begin at
0 in each window, its first key counts as the first key, and chance levels are measured per window. Windows are recorded
from two kinds of calls. Some models make one call per window, whose q and k directly follow those of the layer's
previous call in memory (`LayerNamer._is_further_window`; the tensors are kept until the next call, so that no other
tensor is allocated in their memory). Other models make one call with a batch of windows. The batch of such a call is a
multiple of the batch of the innermost Hugging Face model (`rows_per_sample`), no input of that model has as many rows,
and consecutive rows belong to one sample. In models that are not from Hugging Face each row of a call's batch is a
sample, because the first axis of the model's inputs need not be the batch.

A record keeps the sinks of a call, because its weights are divided by their own sum. Files of earlier versions have no
sinks: the logsumexp that they store includes the weight of the sinks, and is used unchanged.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from multihead.kernels.call import AttentionRequest
from multihead.masks import Causal, Mask
from multihead.probes.tile import RowLogsumexps


def copy_contiguous(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a contiguous copy on `device`, because a model may overwrite the original."""
    return tensor.detach().to(device, copy=True, memory_format=torch.contiguous_format)


@dataclass(frozen=True, eq=False)
class Segment:
    """One attention call of a sample, or several consecutive calls that are merged, without padding.

    Attributes:
        request: the call, with a batch of one and empty q, k and v.
        key_start: index of the segment's first key in the keys of the sample.
        row_start: index of the segment's first query in the queries of the sample.
        is_window: whether the segment is a window or image that shares no keys with other segments, and is measured
            separately.
        row_logsumexps: cache of the float64 logsumexp of the segment's queries; `replace` starts with an empty cache.
    """

    request: AttentionRequest
    key_start: int = 0
    row_start: int = 0
    is_window: bool = False
    row_logsumexps: RowLogsumexps = field(init=False, default_factory=RowLogsumexps)

    @property
    def num_queries(self) -> int:
        """Number of queries."""
        return self.request.shape.query_length

    @property
    def row_stop(self) -> int:
        """Index after the segment's last query, in the queries of the sample."""
        return self.row_start + self.num_queries

    @property
    def key_stop(self) -> int:
        """Index after the segment's last key, in the keys of the sample."""
        return self.key_start + self.request.shape.key_length

    @property
    def query_start(self) -> int:
        """Position of the segment's first query, counted from the sample's first key."""
        return self.key_start + int(self.request.query_start)

    def head_indices(self, head: int | None) -> tuple[tuple[int, ...] | None, tuple[int, ...] | None]:
        """Return the indices of a head in q and in k; (None, None) for all heads, or a head that does not exist."""
        shape = self.request.shape
        if head is None or not -shape.num_heads <= head < shape.num_heads:
            return None, None
        return (head % shape.num_heads,), (head % shape.num_heads // shape.heads_per_kv_head,)

    def slice_rows_and_keys(self, rows: tuple[int, int], keys: tuple[int, int]) -> Segment:
        """Slice the segment to a range of queries and a range of keys, [first, stop) each, as indices in the sample."""
        if rows == (self.row_start, self.row_stop) and keys == (self.key_start, self.key_stop):
            return self
        shape = self.request.shape._replace(query_length=rows[1] - rows[0], key_length=keys[1] - keys[0])
        start = self.query_start + rows[0] - self.row_start - keys[0]
        request = replace(self.request, shape=shape, query_start=start)
        return Segment(request, keys[0], rows[0], is_window=self.is_window)


def join_segments(segment: Segment, later: Segment) -> Segment | None:
    """Merge two consecutive segments if one mask describes both; else return None.

    The calls of cached decoding can usually be merged, because each query sees its own key and earlier keys.
    """
    first, second = segment.request, later.request
    mask = None if later.is_window else _shared_mask(segment, later)
    if mask is None or first.bias is not None or second.bias is not None:
        return None
    if (first.scale, first.softcap) != (second.scale, second.softcap) or not _sees_only_own_keys(mask, segment, later):
        return None
    if not _have_same_sinks(first.sinks, second.sinks):
        return None
    if later.query_start != segment.query_start + segment.num_queries or later.key_stop < segment.key_stop:
        return None
    shape = first.shape._replace(
        query_length=segment.num_queries + later.num_queries,
        key_length=later.key_stop - segment.key_start,
    )
    return replace(segment, request=replace(first, shape=shape, mask=mask))


def _have_same_sinks(sinks: Tensor | None, others: Tensor | None) -> bool:
    return sinks is others if sinks is None or others is None else torch.equal(sinks, others)


def _sees_only_own_keys(mask: Mask, segment: Segment, later: Segment) -> bool:
    """Whether, under the merged mask, the queries of `later` see no key before its first key."""
    if later.key_start == segment.key_start:
        return True
    lookback = mask.lookback
    return lookback is not None and segment.key_start <= later.key_start <= later.query_start - lookback + 1


def _shared_mask(segment: Segment, later: Segment) -> Mask | None:
    """Return the mask of two segments if it is equal for both, depends on distances only and hides later keys."""
    mask, other = (_canonical_mask(each.request) for each in (segment, later))
    within = all(
        int(each.request.query_start) + each.num_queries <= each.request.shape.key_length for each in (segment, later)
    )
    return mask if within and mask == other and mask.translation_invariant and mask.sees_no_later_key else None


def _canonical_mask(request: AttentionRequest) -> Mask:
    """Return the mask of a call, or `Causal()` for a single query at the end of its keys with a full mask."""
    at_end = request.shape.query_length == 1 and int(request.query_start) + 1 == request.shape.key_length
    return Causal() if at_end and request.mask.hides_nothing else request.mask
