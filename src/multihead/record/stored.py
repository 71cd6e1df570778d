"""q and k that stay in the file of a record and are read head by head when they are needed."""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from collections.abc import Collection

import torch
from torch import Tensor

from multihead.files import RandomAccessFile
from multihead.record.segments import Rows

HELD = 1 << 30
"""Limit of the bytes of q and k of one record in memory, least recently used first out; one sample of one layer may
take more."""


class HeadCache:
    """The heads of one file's tensors that are in memory (an LRU cache).

    Args:
        parts: the file that heads are read from.
        most: limit of the bytes in memory.
    """

    def __init__(self, parts: RandomAccessFile, most: int = HELD) -> None:
        self.parts = parts
        self.most = most
        self.lock = threading.Lock()
        self.newest_last: OrderedDict[StoredRows, None] = OrderedDict()

    def make_room(self, more: int) -> None:
        """Drop the least recently used tensors until `more` bytes fit."""
        while self.newest_last and sum(each.num_bytes for each in self.newest_last) + more > self.most:
            self.newest_last.popitem(last=False)[0].forget()


class StoredRows(Rows):
    """A tensor (1, heads, rows, width) in a file; reading raises InputError if the file was changed.

    Args:
        held: the cache of the file.
        place: offset in the file, bytes.
        shape: its shape.
        dtype: its dtype.
    """

    def __init__(self, held: HeadCache, place: int, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        super().__init__(2)
        self.held, self.place, self.shape, self.dtype = held, place, shape, dtype
        self._length = shape[2]
        self._size = math.prod(shape[2:]) * dtype.itemsize  # bytes of a head
        self._heads: set[int] = set()  # heads in memory
        self._numbers: Tensor | None = None

    def add(self, chunk: Tensor) -> None:
        """Raise TypeError: a tensor in a file does not grow."""
        raise TypeError("The rows of a file do not grow.")

    def whole(self) -> Tensor:
        """Read all heads.

        Raises:
            InputError: the file was truncated or written to.
        """
        return self.read_heads(range(self.shape[1]))

    def between(self, start: int, stop: int, *, heads: Collection[int] | None = None) -> Tensor:
        """Return the rows from `start` to `stop` of some heads, or of all heads; see `read_heads`."""
        numbers = self.whole() if heads is None else self.read_heads(heads)
        return numbers.narrow(2, start, max(min(stop, self.length) - start, 0))

    def read_heads(self, heads: Collection[int]) -> Tensor:
        """Read some heads; the values of other heads in the returned tensor are undefined.

        Raises:
            InputError: the file was truncated or written to.
        """
        with self.held.lock:
            self.held.newest_last[self] = None
            self.held.newest_last.move_to_end(self)
            self.held.make_room(self._size * len(set(heads) - self._heads))
            if self._numbers is None:
                # Heads that are never read take no memory: pages are allocated when written.
                self._numbers = torch.empty(self.shape, dtype=self.dtype)
                self.held.newest_last[self] = None
            for head in sorted(set(heads) - self._heads):
                self.held.parts.read_into(self.place + head * self._size, bytes_of_tensor(self._numbers[0, head]))
                self._heads.add(head)
            return self._numbers

    @property
    def num_bytes(self) -> int:
        """Bytes of the heads in memory."""
        return self._size * len(self._heads)

    def forget(self) -> None:
        """Drop the values from memory; a running computation keeps its reference until it ends."""
        self._numbers = None
        self._heads.clear()


def bytes_of_tensor(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous tensor."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data
