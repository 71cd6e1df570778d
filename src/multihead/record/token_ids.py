"""The token ids of the queries and keys of an attention call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from multihead.kernels.call import AttentionRequest
from multihead.masks.positions import SampleSpan
from multihead.record.sample import SampleRecord
from multihead.record.texts import Text

if TYPE_CHECKING:
    from multihead.record.batch import SampleSpans


@dataclass(frozen=True, eq=False)
class CallTokenIds:
    """The token ids of one call.

    Attributes:
        queries: (batch, queries) int64, the ids of its queries, or None.
        keys: (batch, keys) int64, the ids of its keys if they are another text, or None.
        cross_attention: whether its keys come from another text (cross-attention).
        query_start: position of its first query among its keys; a tensor has one per sample.
        image: the tokens of each sample if they are patches of an image, which have no ids; else None.
    """

    queries: Tensor | None
    keys: Tensor | None
    cross_attention: bool
    query_start: int | Tensor
    image: Text | None = None

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
            sample.growing_query_text.append_ids(
                _row_of_ids(self.queries, span.sample, span.queries), start=sample.logsumexp.length
            )
            if not sample.calls:
                sample.growing_key_text.append_ids(_row_of_ids(self.keys, span.sample, span.keys), start=0)
            return
        if self.image is not None:
            sample.growing_key_text.complete_text = self.image
        start = self.query_start
        origin = offset + (int(start[span.sample]) if isinstance(start, Tensor) else start)
        first, stop = max(-origin, 0), max(offset + span.keys[1] - origin, 0)
        sample.growing_key_text.append_ids(_row_of_ids(self.queries, span.sample, (first, stop)), start=origin + first)


def ids_of_queries(ids: Tensor, request: AttentionRequest, sample_spans: SampleSpans) -> Tensor | None:
    """Return the token ids of the queries of a call, given those of the model's input.

    Args:
        ids: (samples, tokens) int64, on the CPU.
        request: the call.
        sample_spans: its samples.

    Returns:
        (batch, queries) int64; None if the ids do not fit the call.
    """
    size = request.shape.batch, request.shape.query_length
    places = request.known_origin.input_places
    if places is not None and ids.shape == places.shape and (places.padded_left or ids.shape != size):
        tokens = ids.flatten()[places.index.cpu()]
        found = ids.new_zeros(size)
        real = torch.ones(size, dtype=torch.bool) if size == (1, len(tokens)) else sample_spans.sample_of_queries() >= 0
        if int(real.sum()) != len(tokens):
            return None
        found[real] = tokens
        return found
    if ids.shape == size:
        return ids
    if sample_spans.texts is None or size[0] != 1 or len(ids) != len(sample_spans.spans):
        return None
    lengths = sample_spans.text_rows.ends.diff()  # a layer without padding, such as one of nested tensors
    real = torch.arange(ids.shape[1]) < lengths[:, None]
    return ids[real][None] if int(real.sum()) == size[1] else None


def is_among(ids: Tensor, wanted: Sequence[int]) -> Tensor:
    """Return which of the ids are in `wanted`: bool, of the shape of `ids`."""
    return torch.isin(ids, torch.tensor(wanted, device=ids.device))


def _row_of_ids(ids: Tensor | None, row: int, ends: tuple[int, int]) -> Tensor | None:
    return None if ids is None else ids[row, slice(*ends)]
