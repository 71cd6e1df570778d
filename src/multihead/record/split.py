"""Which heads and tokens a rank recorded, and tensors that are joined from the records of several ranks.

The record of a rank holds only the queries and keys of this rank, but its samples have the request of the whole text.
Statistics that the kernel measures during ring attention are merged over parts of the keys: a part of the keys with the
logsumexp l has the factor exp(l - L), where L is the logsumexp over all keys. Joining (`record/merging.py`) reorders
rows and concatenates heads; q and k stay in the files of the ranks and are read head by head (`JoinedRows`).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from multihead.record.text_table import RowsOfText

IndexRange = tuple[int, int]  # [first, stop)


class TokensOfRank(NamedTuple):
    """The tokens of a sample that one rank recorded, if a sequence is split over ranks.

    Attributes:
        queries: queries of this rank, as ranges of indices in the sample.
        keys: keys of this rank, as ranges of indices in the sample.
    """

    queries: tuple[IndexRange, ...]
    keys: tuple[IndexRange, ...]


class LayerPartOfRank(NamedTuple):
    """The heads and tokens of a layer that one rank computed.

    Attributes:
        heads: range of the query heads of this rank; all heads if they are not split.
        num_heads: number of query heads of the whole layer.
        kv_heads: range of the key/value heads of this rank.
        num_kv_heads: number of key/value heads of the whole layer.
        rank: index of this rank among the ranks that split the sequence.
        ranks: number of ranks that split the sequence; 1 if it is not split.
    """

    heads: IndexRange
    num_heads: int
    kv_heads: IndexRange
    num_kv_heads: int
    rank: int = 0
    ranks: int = 1

    @property
    def is_whole(self) -> bool:
        """Whether this rank computed all heads and tokens."""
        return self.ranks == 1 and self.heads == (0, self.num_heads)

    def describe(self) -> str:
        """Return a phrase such as "heads 0 to 3 of 8, rank 1 of 2 of the sequence"."""
        first, stop = self.heads
        heads = f"head {first}" if stop == first + 1 else f"heads {first} to {stop - 1}"
        parts = [f"{heads} of {self.num_heads}"] if self.heads != (0, self.num_heads) else []
        parts += [f"rank {self.rank} of {self.ranks} of the sequence"] if self.ranks > 1 else []
        return ", ".join(parts)


def count_tokens(ranges: Sequence[IndexRange]) -> int:
    """Return the total number of tokens in ranges.

    >>> count_tokens(((0, 2), (6, 8)))
    4
    """
    return sum(stop - first for first, stop in ranges)


class TensorPiece(NamedTuple):
    """A block of heads and rows in a `JoinedRows`, and the tensor from which it is read.

    Attributes:
        source_tensor: tensor with the values.
        source_rows: range of rows in `source_tensor`.
        first_row: index in the joined tensor of the first row of `source_rows`.
        heads: range of heads in the joined tensor; `source_tensor` has exactly these heads.
    """

    source_tensor: RowsOfText
    source_rows: IndexRange
    first_row: int
    heads: IndexRange


class JoinedRows(RowsOfText):
    """A tensor (1, heads, rows, width) that is joined from other tensors, which are read when needed.

    Args:
        pieces: blocks that together have every head and row.
        heads: number of heads.
        length: number of rows.
        width: size of the last dimension.
        dtype: dtype of the tensor.
    """

    __slots__ = ("_length", "_newest_result", "_size", "pieces")

    def __init__(
        self, pieces: Sequence[TensorPiece], *, heads: int, length: int, width: int, dtype: torch.dtype
    ) -> None:
        self.pieces = tuple(pieces)
        self._length = length
        self._size = heads, width, dtype
        # the newest result of `rows_between`, because a viewer reads many tiles of one head
        self._newest_result: tuple[object, Tensor] | None = None

    @property
    def length(self) -> int:
        """Number of rows."""
        return self._length

    def rows_between(self, start: int, stop: int, *, heads: Collection[int] | None = None) -> Tensor:
        """Return the rows [start, stop); heads that are not in `heads` are undefined (None: all are defined)."""
        count, width, dtype = self._size
        wanted = range(count) if heads is None else sorted(heads)
        stop = max(min(stop, self._length), start)
        key = start, stop, tuple(wanted)
        recent = self._newest_result  # read the attribute once, because another thread may replace it
        if recent is not None and recent[0] == key:
            return recent[1]
        found = torch.empty(1, count, stop - start, width, dtype=dtype)
        for piece in self.pieces:
            own = [head - piece.heads[0] for head in wanted if piece.heads[0] <= head < piece.heads[1]]
            low, high = (
                max(start, piece.first_row),
                min(stop, piece.first_row + piece.source_rows[1] - piece.source_rows[0]),
            )
            if not own or low >= high:
                continue
            moved = piece.source_rows[0] - piece.first_row
            part = piece.source_tensor.rows_between(low + moved, high + moved, heads=own)
            for head in own:
                found[0, head + piece.heads[0], low - start : high - start] = part[0, head]
        self._newest_result = key, found
        return found
