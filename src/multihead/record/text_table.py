"""The texts of a layer as one ragged table: a row per query, text after text without padding; keys have their own rows.

Attention calls append rows of one or more texts. The rows of a text are put together when they are first read, in the
order of the calls and once for all texts (`RaggedRows`), so that cached decoding copies each row only once. A sample is
a view of the rows of its text (`RowsOfText`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from multihead.record.segments import copy_contiguous


class LaterRows(Protocol):
    """Rows that are copied when they are read, see `KeptRows`."""

    def read(self) -> Tensor:
        """Return the rows, (heads, rows, ...)."""


class RowsOnTheirWay:
    """Rows of a call of a GPU, (heads, rows, ...), which a function waits for and returns."""

    __slots__ = ("read",)

    def __init__(self, read: Callable[[], Tensor]) -> None:
        self.read = read

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the rows themselves."""
        return _as_read, (self.read(),)


def _as_read(rows: Tensor) -> Tensor:
    return rows


class _Chunk(NamedTuple):
    """Rows that a call appended: (heads, rows, ...), and the text and number of rows of each piece of them."""

    rows: Tensor | LaterRows
    pieces: Sequence[tuple[int, int]]


class RowCounts:
    """Numbers of rows and of pieces of each text, in columns to which each call appends the same pieces.

    Attributes:
        rows: text -> its number of rows.
        pieces: text -> how many pieces were appended to it, those without rows included.
    """

    __slots__ = ("pieces", "rows")

    def __init__(self) -> None:
        self.rows: dict[int, int] = {}
        self.pieces: dict[int, int] = {}

    def add(self, pieces: Sequence[tuple[int, int]]) -> None:
        """Count pieces: the text and number of rows of each."""
        for text, length in pieces:
            self.rows[text] = self.rows.get(text, 0) + length
            self.pieces[text] = self.pieces.get(text, 0) + 1


class RaggedRows:
    """One column of a table, (heads, rows, ...), with the rows of each text one after another.

    Args:
        counts: the counts of several columns, which the table counts once for all of them; None if the column has its
            own.
    """

    __slots__ = ("_chunks", "_counts_itself", "_ordered", "counts")

    def __init__(self, counts: RowCounts | None = None) -> None:
        self.counts = RowCounts() if counts is None else counts
        self._counts_itself = counts is None
        self._chunks: list[_Chunk] = []
        # text -> a tensor in which its rows follow each other, the first of them, and their number; None after a call
        # appended rows
        self._ordered: dict[int, tuple[Tensor, int, int]] | None = None

    def append(self, rows: Tensor | LaterRows, pieces: Sequence[tuple[int, int]]) -> None:
        """Append the rows of a call.

        Args:
            rows: (heads, rows, ...).
            pieces: the text and number of rows of each piece of `rows`.
        """
        self._chunks.append(_Chunk(rows, pieces))
        self._ordered = None
        if self._counts_itself:
            self.counts.add(pieces)

    def length(self, text: int) -> int:
        """Return the number of rows of a text."""
        return self.counts.rows.get(text, 0)

    def rows_of(self, text: int) -> Tensor:
        """Return the rows of a text, (heads, rows, ...), a view of the table; a piece of it must have been appended."""
        whole, first, length = (self._ordered or self._put_in_order())[text]
        return whole.narrow(1, first, length)

    def _put_in_order(self) -> dict[int, tuple[Tensor, int, int]]:
        of_texts: dict[int, list[Tensor]] = {}
        chunks, found = self._chunks, list[_Chunk]()  # read once, because another thread may put the same in order
        for rows, pieces in chunks:
            read = rows if isinstance(rows, Tensor) else rows.read()
            found.append(_Chunk(read, pieces))
            parts = read.split([length for _, length in pieces], 1) if len(pieces) > 1 else [read]
            for (text, _), part in zip(pieces, parts, strict=True):
                of_texts.setdefault(text, []).append(part)
        texts = [text for _, pieces in found for text, _ in pieces]
        if len(found) > 1 or texts != sorted(texts):
            groups: dict[object, list[int]] = {}  # texts of equal dtypes, such as those read under autocast
            for text in sorted(of_texts):
                groups.setdefault(frozenset((part.dtype, part.device) for part in of_texts[text]), []).append(text)
            found = [
                _Chunk(
                    torch.cat([part for text in group for part in of_texts[text]], 1),
                    [(text, sum(part.shape[1] for part in of_texts[text])) for text in group],
                )
                for group in groups.values()
            ]
        ordered: dict[int, tuple[Tensor, int, int]] = {}
        for rows, pieces in found:
            first = 0
            for text, length in pieces:
                assert isinstance(rows, Tensor)
                whole, start, before = ordered.get(text, (rows, first, 0))
                ordered[text] = whole, start, before + length
                first += length
        self._chunks, self._ordered = found, ordered
        return ordered


def append_new_keys(column: RaggedRows, text: int, k: Tensor, *, start: int, device: torch.device) -> None:
    """Append a copy of the new keys of a text to a column.

    Args:
        column: the keys of the texts.
        text: the number of the text.
        k: (kv_heads, keys, head_dim), keys of the text.
        start: index of the first of these keys in the text.
        device: device of the copy.
    """
    missing = start - column.length(text)
    if missing > 0:  # zeros for the keys that a cache dropped, which the mask of this call hides
        zeros = torch.zeros(k.shape[0], missing, k.shape[2], dtype=k.dtype, device=device)
        column.append(zeros, [(text, missing)])
    # also without new keys: the shape becomes known
    if start + k.shape[1] > column.length(text) or text not in column.counts.pieces:
        new = copy_contiguous(k[:, column.length(text) - start :], device)
        column.append(new, [(text, new.shape[1])])


class RowsOfText:
    """The rows of one text, (1, heads, rows, ...), which are read when they are needed."""

    __slots__ = ()

    @property
    def length(self) -> int:
        """Number of rows."""
        raise NotImplementedError

    def all_rows(self) -> Tensor:
        """Return all rows as one tensor."""
        return self.rows_between(0, self.length)

    def rows_between(self, start: int, stop: int, *, heads: Collection[int] | None = None) -> Tensor:
        """Return the rows [start, stop); some classes leave heads that are not in `heads` undefined (None: all)."""
        raise NotImplementedError


class RowsInTable(RowsOfText):
    """The rows of one text in a column of a table.

    Args:
        column: the column.
        text: the number of the text in the table.
    """

    __slots__ = ("column", "text")

    def __init__(self, column: RaggedRows, text: int) -> None:
        self.column, self.text = column, text

    @property
    def length(self) -> int:
        """Number of rows."""
        return self.column.length(self.text)

    def rows_between(self, start: int, stop: int, *, heads: Collection[int] | None = None) -> Tensor:
        """Return the rows [start, stop) of all heads, a view of the table."""
        return self.column.rows_of(self.text)[None, :, start : max(min(stop, self.length), start)]


class RowsInTensor(RowsOfText):
    """The rows of one text that a tensor holds, (1, heads, rows, ...)."""

    __slots__ = ("tensor",)

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    @property
    def length(self) -> int:
        """Number of rows."""
        return self.tensor.shape[2]

    def rows_between(self, start: int, stop: int, *, heads: Collection[int] | None = None) -> Tensor:
        """Return the rows [start, stop) of all heads."""
        return self.tensor[:, :, start : max(min(stop, self.length), start)]


class TextTable:
    """The numbers of the texts that a layer has read; a text is known by its number.

    Attributes:
        logsumexp: (heads, rows), nats, a row per query.
        q: (heads, rows, head_dim), a row per query; no rows if only statistics are kept.
        k: (kv_heads, rows, head_dim), a row per key; no rows if only statistics are kept.
        statistics: name -> (heads, rows), a row per query, of the statistics that have one number per query.
    """

    def __init__(self) -> None:
        self._queries = RowCounts()
        self.logsumexp, self.q, self.k = RaggedRows(self._queries), RaggedRows(self._queries), RaggedRows()
        self.statistics: dict[str, RaggedRows] = {}
        self._texts_without: dict[str, set[int]] = {}  # name of a statistic -> the texts of which a call lacks it
        self._read: dict[int, dict[str, Tensor]] = {}  # text -> its statistics; emptied by each call

    def append(
        self,
        pieces: Sequence[tuple[int, int]],
        logsumexp: Tensor | LaterRows,
        statistics: Mapping[str, Tensor | LaterRows],
        q: Tensor | LaterRows | None,
    ) -> None:
        """Append the queries of a call, see `RaggedRows.append`; tensors as in the columns of the table."""
        columns, self._read = self.statistics, {}
        for name in statistics:
            if name not in columns:
                columns[name], self._texts_without[name] = RaggedRows(self._queries), set(self._queries.pieces)
        for name in columns.keys() - statistics.keys():
            self._texts_without[name].update(text for text, _ in pieces)
        self._queries.add(pieces)
        self.logsumexp.append(logsumexp, pieces)
        if q is not None:
            self.q.append(q, pieces)
        for name, values in statistics.items():
            columns[name].append(values, pieces)

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_read": {}}  # each view would be stored with all rows

    def statistics_of(self, text: int) -> dict[str, Tensor]:
        """Return the statistics of a text that were measured in all of its calls: name -> (heads, queries)."""
        if text not in self._queries.pieces:
            return {}
        read, lacking = self._read, self._texts_without
        if text not in read:
            of_columns = self.statistics.items()
            read[text] = {name: column.rows_of(text) for name, column in of_columns if text not in lacking[name]}
        return read[text]
