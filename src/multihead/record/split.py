"""The heads and tokens that the record of one rank holds, and tensors joined from those of several ranks.

A record of a rank holds its queries and its keys only, and its samples have the request of the whole text. Statistics
that the kernel measures while it computes are merged in the ring: a part with the logsumexp l counts exp(l - L).
Joining (`record/merging.py`) reorders rows and concatenates heads; q and k stay in the files of the ranks and are read
head by head (`JoinedRows`).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from multihead.record.segments import Rows

Range = tuple[int, int]  # [first, stop)


class TokensOfRank(NamedTuple):
    """The tokens of a sample that one rank holds, where a sequence is split over ranks.

    Attributes:
        queries: the queries that this rank measured, as ranges of indices in the sample.
        keys: the keys that this rank keeps, as ranges of indices in the sample.
    """

    queries: tuple[Range, ...]
    keys: tuple[Range, ...]


class LayerPartOfRank(NamedTuple):
    """The part of a layer that one rank holds.

    Attributes:
        heads: range of the query heads of this rank; all heads if they are not split.
        num_heads: how many heads the layer has.
        kv_heads: range of the key/value heads of this rank.
        num_kv_heads: how many key/value heads the layer has.
        rank: the index of the rank among those that share the sequence.
        ranks: how many ranks share the sequence; 1 if it is not split.
    """

    heads: Range
    num_heads: int
    kv_heads: Range
    num_kv_heads: int
    rank: int = 0
    ranks: int = 1

    @property
    def is_whole(self) -> bool:
        """Whether this rank holds all heads and tokens."""
        return self.ranks == 1 and self.heads == (0, self.num_heads)

    def describe(self) -> str:
        """Describe the part in words, such as "heads 0 to 3 of 8, rank 1 of 2 of the sequence"."""
        first, stop = self.heads
        heads = f"head {first}" if stop == first + 1 else f"heads {first} to {stop - 1}"
        parts = [f"{heads} of {self.num_heads}"] if self.heads != (0, self.num_heads) else []
        parts += [f"rank {self.rank} of {self.ranks} of the sequence"] if self.ranks > 1 else []
        return ", ".join(parts)


def count_tokens(ranges: Sequence[Range]) -> int:
    """Return the number of tokens in some ranges.

    >>> count_tokens(((0, 2), (6, 8)))
    4
    """
    return sum(stop - first for first, stop in ranges)


class TensorPiece(NamedTuple):
    """Some heads and rows of a joined tensor, and the tensor that they are read from.

    Attributes:
        rows: the tensor that holds the values.
        source: range of rows in that tensor.
        first: the first of these rows in the joined tensor.
        heads: range of heads in the joined tensor; these are all heads of `rows`.
    """

    rows: Rows
    source: Range
    first: int
    heads: Range


class JoinedRows(Rows):
    """A tensor (1, heads, rows, width) whose heads and rows lie in other tensors, which are read when needed.

    Args:
        pieces: its parts; together they hold every head and row.
        heads: how many heads it has.
        length: how many rows.
        width: its last dimension.
        dtype: its dtype.
    """

    __slots__ = ("_recent", "_size", "pieces")

    def __init__(
        self, pieces: Sequence[TensorPiece], *, heads: int, length: int, width: int, dtype: torch.dtype
    ) -> None:
        super().__init__(2)
        self.pieces = tuple(pieces)
        self._length = length
        self._size = heads, width, dtype
        self._recent: tuple[object, Tensor] | None = None  # the newest result: a viewer reads many tiles of a head

    @property
    def has_chunks(self) -> bool:
        """True: a joined tensor has a shape even without rows."""
        return True

    def add(self, chunk: Tensor) -> None:
        """Raise TypeError: a joined tensor does not grow."""
        raise TypeError("Joined rows do not grow.")

    def whole(self) -> Tensor:
        """Return all heads and rows."""
        return self.between(0, self._length)

    def between(self, start: int, stop: int, *, heads: Collection[int] | None = None) -> Tensor:
        """Return the rows from `start` to `stop`; only `heads` are guaranteed to hold values, None for all."""
        count, width, dtype = self._size
        wanted = range(count) if heads is None else sorted(heads)
        stop = max(min(stop, self._length), start)
        key = start, stop, tuple(wanted)
        recent = self._recent  # read the attribute once, because another thread may replace it
        if recent is not None and recent[0] == key:
            return recent[1]
        found = torch.empty(1, count, stop - start, width, dtype=dtype)
        for piece in self.pieces:
            own = [head - piece.heads[0] for head in wanted if piece.heads[0] <= head < piece.heads[1]]
            low, high = max(start, piece.first), min(stop, piece.first + piece.source[1] - piece.source[0])
            if not own or low >= high:
                continue
            moved = piece.source[0] - piece.first
            part = piece.rows.between(low + moved, high + moved, heads=own)
            for head in own:
                found[0, head + piece.heads[0], low - start : high - start] = part[0, head]
        self._recent = key, found
        return found
