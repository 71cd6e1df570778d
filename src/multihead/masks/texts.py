"""The texts of each row of a call, as its mask describes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn.functional import pad


@dataclass(frozen=True, eq=False)
class RowTexts:
    """The consecutive texts of each row: a query sees the keys of its own text.

    Queries and keys of the row are the same tokens; with a cache, the queries are the last of them.

    Attributes:
        edges: (1 or batch, texts + 1) int64, the first key of each text and the key after the last text, counted from
            the first key of the call; negative if a cache dropped keys. One row is for all rows of the batch.
        num_texts: (1 or batch,) int64, the number of texts of each row; what follows in `edges` fills up the row.
    """

    edges: Tensor
    num_texts: Tensor

    @staticmethod
    def of_lengths(lengths: Tensor) -> RowTexts:
        """Create the texts of lengths (texts,) for all rows, or (batch, texts), where zeros at the end fill up a row.

        >>> texts = RowTexts.of_lengths(torch.tensor([[2, 3], [4, 0]]))
        >>> texts.edges.tolist(), texts.num_texts.tolist()
        ([[0, 2, 5], [0, 4, 4]], [2, 1])
        """
        rows = lengths if lengths.dim() == 2 else lengths[None]
        count = rows.new_full((1,), rows.shape[1])
        if lengths.dim() == 2:
            number = torch.arange(1, rows.shape[1] + 1, device=rows.device)
            count = pad(number.expand_as(rows).masked_fill(rows == 0, 0), (1, 0)).amax(1)
        return RowTexts(pad(rows.cumsum(1), (1, 0)), count)

    @staticmethod
    def intersect(found: Sequence[RowTexts]) -> RowTexts:
        """Return the texts of a row that several masks cut: each edge of each of them is an edge."""
        rows = max(len(each.edges) for each in found)
        begin, end = (torch.stack([each.edges[:, place].expand(rows) for each in found]) for place in (0, -1))
        edges = torch.cat([each.edges.expand(rows, -1) for each in found], 1).sort(1).values
        edges = edges.clamp(begin.amax(0)[:, None], end.amin(0)[:, None])
        lengths = edges.diff(dim=1)
        lengths = lengths.gather(1, (lengths == 0).int().argsort(dim=1, stable=True))
        texts = RowTexts.of_lengths(lengths)
        return texts.shifted(begin.amax(0))

    def shifted(self, offset: int | Tensor) -> RowTexts:
        """Add an offset, an int or (batch,), to all edges."""
        if isinstance(offset, Tensor):
            offset = offset.to(self.edges.device).view(-1, 1)
        edges = self.edges + offset
        return RowTexts(edges, self.num_texts)

    @cached_property
    def longest(self) -> int:
        """The number of tokens of the longest text."""
        return int(self.edges.diff(dim=1).amax()) if self.edges.numel() > len(self.edges) else 0

    def locate(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Find the text of tokens, given by their places among the keys of the call, (batch or 1, tokens) int64.

        Returns:
            the index of each token's text in its row, the number of texts in a row for a token in no text; and its
            index in the text: (batch or 1, tokens) int64 each.
        """
        rows = max(len(self.edges), len(tokens)) if len(self.edges) and len(tokens) else 0
        edges, tokens = self.edges.to(tokens.device).expand(rows, -1), tokens.expand(rows, -1)
        most = edges.shape[1] - 1
        text = torch.searchsorted(edges.contiguous(), tokens.contiguous(), right=True) - 1
        text = text.masked_fill(text < 0, most)
        return text, tokens - edges.gather(1, text)

    def number_of_tokens(self, tokens: Tensor, batch: int) -> tuple[Tensor, Tensor]:
        """Return what `locate` returns for each row of the batch, with texts numbered through all rows of the batch.

        A token in no text has the number 0 and the index -1.
        """
        text, place = (each.expand(batch, -1) for each in self.locate(tokens))
        count = self.num_texts.to(text.device).expand(batch)
        outside = text == self.edges.shape[1] - 1
        numbers = text + (count.cumsum(0) - count)[:, None]
        return numbers.masked_fill(outside, 0), place.masked_fill(outside, -1)

    def ranges(self, query_start: int | Tensor, *, batch: int, queries: int, keys: int) -> Tensor:
        """Return the row, the queries [first, stop) and the keys [first, stop) of each text: (5, texts) int64, CPU.

        A text whose tokens are in no key of the call yet has no queries and no keys.
        """
        edges, count = self.edges.cpu().expand(batch, -1), self.num_texts.cpu().expand(batch)
        kept = torch.arange(edges.shape[1] - 1) < count[:, None]
        row = kept.nonzero()[:, 0]
        first, stop = edges[:, :-1][kept], edges[:, 1:][kept]
        start = query_start.cpu()[row] if isinstance(query_start, Tensor) else query_start
        first_query, first_key = (first - start).clamp(min=0), first.clamp(min=0)
        stop_query = (stop - start).clamp(max=queries).maximum(first_query)
        return torch.stack([row, first_query, stop_query, first_key, stop.clamp(max=keys).maximum(first_key)])
