"""Packed documents: a query sees the keys of its own document.

`Documents` depends on positions, so it needs `query_start` if there are fewer queries than keys.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from multihead.masks.base import Mask, Shifted
from multihead.masks.counts import (
    IntOrInts,
    as_tensor,
    check_counts,
    check_counts_within_keys,
    check_rows_per_sample,
    device_of_counts,
    repr_of_value,
    shape_of_counts,
)
from multihead.masks.distance import Full
from multihead.masks.positions import CallSize, SampleSpan


@dataclass(frozen=True, eq=False)
class Documents(Mask):
    """A sequence of consecutive documents; a query sees the keys of its own document.

    Args:
        lengths: numbers of tokens, ints or an integer tensor: (documents,) for all samples, or (batch, documents). A
            document of length 0 holds no tokens. A query after the last document sees no key, and no query sees a key
            there.

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

    lengths: IntOrInts | Tensor

    def __init__(self, lengths: Sequence[int] | Sequence[Sequence[int]] | Tensor) -> None:
        counts = check_counts(lengths, "Documents", "(documents,) or (batch, documents)", ragged=True)
        object.__setattr__(self, "lengths", counts)

    def __repr__(self) -> str:
        return f"Documents({repr_of_value(self.lengths)})"

    def check_fits(self, size: CallSize) -> None:
        shape = shape_of_counts(self.lengths)
        if len(shape) == 2:
            check_rows_per_sample(self, shape, size)
        check_counts_within_keys(self, self.lengths, size, summed=True)

    def visible(self, queries: Tensor, keys: Tensor) -> Tensor:
        lengths = as_tensor(self.lengths, keys.device)
        of_query = document_of(queries, lengths)
        return (of_query == document_of(keys, lengths)) & (of_query >= 0)

    def interval(self, queries: Tensor, keys: int | Tensor) -> tuple[Tensor, Tensor]:
        ends = as_tensor(self.lengths, queries.device).cumsum(-1)
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
        lengths = as_tensor(self.lengths, "cpu")
        return Documents(lengths[index if len(lengths) > 1 else 0] if lengths.dim() == 2 else lengths)

    def select_heads(self, select: Callable[[Tensor], Tensor]) -> Documents:
        return self  # all heads share the counts

    def after_dropping_keys(self, count: int | Tensor) -> Mask:
        if not isinstance(count, Tensor) and not count:
            return self
        ends = as_tensor(self.lengths, device_of_counts(self.lengths, count)).cumsum(-1)
        ends = (ends - (count[:, None] if isinstance(count, Tensor) else count)).clamp(min=0)
        return Documents(ends.diff(prepend=torch.zeros_like(ends[..., :1]), dim=-1))

    def select_span(self, span: SampleSpan) -> Mask:
        documents, first_key = self.select_sample(span.sample), span.keys[0]
        starts = as_tensor(documents.lengths, "cpu").cumsum(-1).tolist()
        if (
            first_key and first_key not in starts
        ):  # a query before the first key may belong to the document that the span cuts
            return Shifted(documents, first_key)
        return documents.after_dropping_keys(first_key)

    def restrict_to_first_keys(self, count: int) -> None:
        """Return None: documents may extend past the first `count` keys, and their later queries would be lost."""

    def without_documents(self) -> Full:
        return Full()


def document_of(positions: Tensor, lengths: Tensor) -> Tensor:
    """Return the index of the document of each position, -1 outside all documents.

    Positions and result are (batch or 1, 1, n, 1) or (batch or 1, 1, 1, n); lengths, in tokens, are (documents,) or
    (batch, documents).
    """
    ends = lengths.cumsum(-1)
    rows = len(ends) if ends.dim() == 2 and len(positions) == 1 else len(positions)  # either may be 0
    flat = positions.expand(rows, -1, -1, -1).flatten(1)
    bounds = ends.expand(rows, -1) if ends.dim() == 2 else ends.expand(rows, ends.shape[0])
    index = torch.searchsorted(bounds.contiguous(), flat.contiguous(), right=True)
    outside = (index >= bounds.shape[-1]) | (flat < 0)
    return index.masked_fill(outside, -1).view(rows, *positions.shape[1:])
