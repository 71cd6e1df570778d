"""Packed documents: a query sees the keys of its own document.

`Documents` depends on positions, so it needs `query_start` if there are fewer queries than keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from multihead.masks.base import Mask, Sequences, Shifted, row_of_sample
from multihead.masks.counts import CountsMask, IntTuples, check_counts, counts_as_tensor, device_of_counts
from multihead.masks.distance import Full
from multihead.masks.positions import SampleSpan
from multihead.masks.texts import RowTexts
from multihead.tensors.tracing import is_intercepted


@dataclass(frozen=True, eq=False, repr=False)
class Documents(CountsMask):
    """A sequence of consecutive documents; a query sees the keys of its own document, which is a text of its own.

    Args:
        lengths: numbers of tokens, ints or an integer tensor: (documents,) for all samples, or (batch, documents). A
            document of length 0 holds no tokens; at the end of a row of (batch, documents) it fills up the row. A query
            after the last document sees no key, and no query sees a key there.

    Raises:
        MaskError: a length is negative or not an integer, or the lengths have another number of dimensions.

    >>> from multihead import masks
    >>> print(masks.picture(Documents((2, 1, 1)), queries=5, keys=5))
    ■ ■ · · ·
    ■ ■ · · ·
    · · ■ · ·
    · · · ■ ·
    · · · · ·
    """

    lengths: IntTuples | Tensor
    counts = property(lambda mask: mask.lengths)
    holds_documents: ClassVar[bool] = True

    @cached_property
    def sequences(self) -> Sequences:  # type: ignore[override]
        return Sequences(documents=self.lengths)

    @property
    def row_texts(self) -> RowTexts | None:  # type: ignore[override]
        """The documents, each a text; with the keys that a cache has dropped."""
        known: RowTexts | None = self.__dict__.get("_known_texts")
        if known is None:
            known = RowTexts.of_lengths(counts_as_tensor(self.lengths, device_of_counts(self.lengths, 0)))
            # A tensor of lengths may be changed between two calls; a tensor made under a tracer is not for later calls.
            if isinstance(self.lengths, tuple) and not is_intercepted():
                object.__setattr__(self, "_known_texts", known)
        return known

    def __init__(self, lengths: Sequence[int] | Sequence[Sequence[int]] | Tensor) -> None:
        counts = check_counts(lengths, "Documents", "(documents,) or (batch, documents)", ragged=True)
        object.__setattr__(self, "lengths", counts)

    def visible(self, queries: Tensor, keys: Tensor) -> Tensor:
        ends = counts_as_tensor(self.lengths, keys.device).cumsum(-1)
        of_query = _document_of_positions(queries, ends)
        return (of_query == _document_of_positions(keys, ends)) & (of_query >= 0)

    def interval(self, queries: Tensor, keys: int | Tensor) -> tuple[Tensor, Tensor]:
        ends = counts_as_tensor(self.lengths, queries.device).cumsum(-1)
        ends = ends[None] if ends.dim() == 1 else ends
        rows = ends.shape[0] if queries.shape[0] == 1 else queries.shape[0]  # either may be 0
        position = queries.expand(rows, -1).contiguous()
        # Document d has the keys from edges[d] up to edges[d + 1].
        edges = torch.nn.functional.pad(ends, (1, 0)).expand(rows, -1).contiguous()
        index = torch.searchsorted(edges, position, right=True)
        outside = (index == 0) | (index == edges.shape[1])
        inside = index.masked_fill(outside, 1 if edges.shape[1] > 1 else 0)
        stop = edges.gather(1, inside).masked_fill(outside, 0)
        return edges.gather(1, (inside - 1).clamp(min=0)).masked_fill(outside, 0), stop

    def select_sample(self, index: int) -> Documents:
        lengths = counts_as_tensor(self.lengths, "cpu")
        return type(self)(row_of_sample(lengths, index) if lengths.dim() == 2 else lengths)

    def _drop_keys(self, count: int | Tensor) -> Documents:
        ends = counts_as_tensor(self.lengths, device_of_counts(self.lengths, count)).cumsum(-1)
        ends = (ends - (count[:, None] if isinstance(count, Tensor) else count)).clamp(min=0)
        left = type(self)(ends.diff(prepend=torch.zeros_like(ends[..., :1]), dim=-1))
        if (texts := self.row_texts) is not None:
            minus = -count if isinstance(count, Tensor) else -int(count)
            object.__setattr__(left, "_known_texts", texts.shifted(minus))
        return left

    def select_span(self, span: SampleSpan) -> Mask:
        documents, first_key = self.select_sample(span.sample), span.keys[0]
        starts = counts_as_tensor(documents.lengths, "cpu").cumsum(-1).tolist()
        # A query before the first key may belong to the document that the span cuts.
        if first_key and first_key not in starts:
            return Shifted(documents, first_key)
        return documents.after_dropping_keys(first_key)

    def restrict_to_first_keys(self, count: int) -> None:
        """Return None: documents may extend past the first `count` keys, and their later queries would be lost."""

    def without_documents(self) -> Mask:
        return Full()


@dataclass(frozen=True, eq=False, repr=False)
class Chunks(Documents):
    """Parts of one text that do not see each other, as in chunked attention: `Documents` that are no texts."""

    row_texts: ClassVar[None] = None

    def without_documents(self) -> Mask:
        return self


def _document_of_positions(positions: Tensor, ends: Tensor) -> Tensor:
    """Return the index of the document of each position, -1 outside all documents.

    Positions and result are (batch or 1, 1, n, 1) or (batch or 1, 1, 1, n); `ends`, one past the last token of each
    document, are (documents,) or (batch, documents).
    """
    rows = len(ends) if ends.dim() == 2 and len(positions) == 1 else len(positions)  # either may be 0
    flat, ends = positions.expand(rows, -1, -1, -1).flatten(1), ends.expand(rows, -1)
    index = torch.searchsorted(ends.contiguous(), flat.contiguous(), right=True)
    outside = (index >= ends.shape[-1]) | (flat < 0)
    return index.masked_fill(outside, -1).view(rows, *positions.shape[1:])
