"""The token ids of the queries and keys of an attention call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from multihead.kernels.call import AttentionRequest
from multihead.masks.positions import SampleSpan
from multihead.record.sample import SampleRecord


@dataclass(frozen=True, eq=False)
class CallTokenIds:
    """The token ids of one call.

    Attributes:
        queries: (batch, queries) int64, the ids of its queries, or None.
        keys: (batch, keys) int64, the ids of its keys if they are another text, or None.
        cross_attention: whether its keys come from another text (cross-attention).
        query_start: position of its first query among its keys; a tensor has one per sample.
    """

    queries: Tensor | None
    keys: Tensor | None
    cross_attention: bool
    query_start: int | Tensor

    def key_ids(self, request: AttentionRequest) -> Tensor | None:
        """Return the token id of each key of the call, (batch, keys) int64; None if unknown."""
        ids = self.keys if self.cross_attention else self.queries
        if self.cross_attention or ids is None:
            return ids
        shape = request.shape
        if isinstance(request.query_start, Tensor) or request.query_start or shape.query_length != shape.key_length:
            return None
        return ids

    def special_keys(self, request: AttentionRequest, special_ids: Sequence[int]) -> Tensor | None:
        """Return which keys of the call are special tokens, (batch, keys) bool; None if unknown."""
        ids = self.key_ids(request) if special_ids else None
        return None if ids is None else is_among(ids, special_ids).to(request.shape.device)

    def append_to_sample(self, sample: SampleRecord, span: SampleSpan, offset: int) -> None:
        """Append the ids of one sample of the call to the sample's record.

        Args:
            sample: the record of the sample.
            span: ranges of the sample's queries and keys in the call.
            offset: index of the call's first key in the keys of the sample; negative if padding comes first.
        """
        if self.cross_attention:
            before = sample.calls[-1][0][1] if sample.calls else 0
            sample.growing_query_text.append_ids(_row_of_ids(self.queries, span.sample, span.queries), start=before)
            if not sample.calls:
                sample.growing_key_text.append_ids(_row_of_ids(self.keys, span.sample, span.keys), start=0)
            return
        start = self.query_start
        origin = offset + (int(start[span.sample]) if isinstance(start, Tensor) else start)
        first, stop = max(-origin, 0), max(offset + span.keys[1] - origin, 0)
        sample.growing_key_text.append_ids(_row_of_ids(self.queries, span.sample, (first, stop)), start=origin + first)


def is_among(ids: Tensor, wanted: Sequence[int]) -> Tensor:
    """Return which of the ids are in `wanted`: bool, of the shape of `ids`."""
    return torch.isin(ids, torch.tensor(wanted, device=ids.device))


def _row_of_ids(ids: Tensor | None, row: int, ends: tuple[int, int]) -> Tensor | None:
    return None if ids is None else ids[row, slice(*ends)]
