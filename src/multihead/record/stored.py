"""Tensors (q and k) in the file of a record that are read head by head when needed, with an LRU cache.

The viewer maps no file into memory: truncating a mapped file kills the process that reads it (SIGBUS), and a viewer
runs for hours next to files that are overwritten. The rest of a record, about a tenth, is read when the record is
opened. At 100,000 tokens with 8 heads of 64 numbers, the first read of the q and k of a head, 51 MB, takes 0.1 s, and
0.03 s from a mapped file; later reads take the same time. `Record.load` maps files by default, so that a notebook opens
records larger than its memory.
"""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from collections.abc import Collection

import torch
from torch import Tensor

from multihead.files import RandomAccessFile
from multihead.record.text_table import RowsOfText

MAX_CACHED_BYTES = 1 << 30
"""Largest number of bytes of q and k of one record in memory; a single tensor may take more. The least recently used
tensors are dropped first."""


class HeadCache:
    """Least recently used cache of the q and k of one record file, which limits their bytes in memory.

    Args:
        file: the file.
        max_bytes: largest number of bytes in memory.
    """

    def __init__(self, file: RandomAccessFile, max_bytes: int = MAX_CACHED_BYTES) -> None:
        self.file = file
        self.max_bytes = max_bytes
        self.lock = threading.Lock()
        self.least_recent_first: OrderedDict[StoredRows, None] = OrderedDict()

    def evict_until_fits(self, more: int) -> None:
        """Drop the least recently used tensors until `more` bytes fit into the cache."""
        while (
            self.least_recent_first and sum(each.num_bytes for each in self.least_recent_first) + more > self.max_bytes
        ):
            self.least_recent_first.popitem(last=False)[0].drop_cached_heads()


class StoredRows(RowsOfText):
    """A tensor (1, heads, rows, width) in a file; reading raises InputError if the file has changed.

    Args:
        cache: cache of the file.
        place: offset of the tensor in the file, bytes.
        shape: shape of the tensor.
        dtype: dtype of the tensor.
        head_bytes: number of bytes from one head to the next one in the file; None if each head follows the other.
    """

    def __init__(
        self,
        cache: HeadCache,
        place: int,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        head_bytes: int | None = None,
    ) -> None:
        self.cache, self.place, self.shape, self.dtype = cache, place, shape, dtype
        self._size = math.prod(shape[2:]) * dtype.itemsize  # bytes per head
        self._head_bytes = self._size if head_bytes is None else head_bytes
        self._heads: set[int] = set()  # indices of the heads in memory
        self._numbers: Tensor | None = None

    @property
    def length(self) -> int:
        """Number of rows."""
        return self.shape[2]

    def slice_rows(self, start: int, stop: int) -> StoredRows:
        """Return the rows [start, stop) as a tensor of their own in the file."""
        place = self.place + start * math.prod(self.shape[3:]) * self.dtype.itemsize
        shape = (*self.shape[:2], stop - start, *self.shape[3:])
        return StoredRows(self.cache, place, shape, self.dtype, self._head_bytes)

    def rows_between(self, start: int, stop: int, *, heads: Collection[int] | None = None) -> Tensor:
        """Return the rows [start, stop); heads that are not in `heads` are undefined (None: all are defined).

        Raises:
            InputError: the file was truncated or written to.
        """
        numbers = self.read_heads(range(self.shape[1]) if heads is None else heads)
        return numbers.narrow(2, start, max(min(stop, self.length) - start, 0))

    def read_heads(self, heads: Collection[int]) -> Tensor:
        """Read some heads, and return the whole tensor, in which other heads are undefined.

        Raises:
            InputError: the file was truncated or written to.
        """
        with self.cache.lock:
            self.cache.least_recent_first[self] = None
            self.cache.least_recent_first.move_to_end(self)
            self.cache.evict_until_fits(self._size * len(set(heads) - self._heads))
            if self._numbers is None:
                # Heads that are never read take no memory, because memory pages are allocated when they are written.
                self._numbers = torch.empty(self.shape, dtype=self.dtype)
                self.cache.least_recent_first[self] = None
            for head in sorted(set(heads) - self._heads):
                self.cache.file.read_into(self.place + head * self._head_bytes, bytes_of_tensor(self._numbers[0, head]))
                self._heads.add(head)
            return self._numbers

    @property
    def num_bytes(self) -> int:
        """Number of bytes of the heads in memory."""
        return self._size * len(self._heads)

    def drop_cached_heads(self) -> None:
        """Free the tensor; a computation that uses it keeps its own reference."""
        self._numbers = None
        self._heads.clear()


def bytes_of_tensor(tensor: Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor as a memoryview, without a copy."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data
