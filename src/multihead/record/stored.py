"""q and k of a record that stay in its file, and are read head by head where they are needed."""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from collections.abc import Collection

import torch
from torch import Tensor

from multihead.files import Parts
from multihead.record.segments import Rows

HELD = 1 << 30
"""Bytes of q and k of one record that are held at once, those read longest ago go first; unless one layer of a text
takes more."""


class Held:
    """The tensors of one file of which some heads are in memory.

    Args:
        parts: the file.
        most: bytes that they take together.
    """

    def __init__(self, parts: Parts, most: int = HELD) -> None:
        self.parts = parts
        self.most = most
        self.lock = threading.Lock()
        self.newest_last: OrderedDict[StoredRows, None] = OrderedDict()

    def make_room(self, more: int) -> None:
        """Let go of what was read longest ago, until some bytes more fit."""
        while self.newest_last and sum(each.num_bytes for each in self.newest_last) + more > self.most:
            self.newest_last.popitem(last=False)[0].forget()


class StoredRows(Rows):
    """A tensor (1, heads, rows, width) of a file that others may cut or write into: then reading it is an error.

    Args:
        held: what of its file is in memory.
        place: where it begins in the file, bytes.
        shape: its sizes.
        dtype: of its numbers.
    """

    def __init__(self, held: Held, place: int, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        super().__init__(2)
        self.held, self.place, self.shape, self.dtype = held, place, shape, dtype
        self._length = shape[2]
        self._size = math.prod(shape[2:]) * dtype.itemsize  # bytes of a head
        self._heads: set[int] = set()  # those that are in memory
        self._numbers: Tensor | None = None

    def add(self, chunk: Tensor) -> None:
        """Refuse rows: what is in a file does not grow."""
        raise TypeError("The rows of a file do not grow.")

    def whole(self) -> Tensor:
        """Read all heads.

        Raises:
            InputError: the file was cut, or something was written into it.
        """
        return self.of(range(self.shape[1]))

    def between(self, start: int, stop: int, *, heads: Collection[int] | None = None) -> Tensor:
        """Return the rows from one place to another, see `of`; None is all heads."""
        numbers = self.whole() if heads is None else self.of(heads)
        return numbers.narrow(2, start, max(min(stop, self.length) - start, 0))

    def of(self, heads: Collection[int]) -> Tensor:
        """Read some heads; in the tensor of all, the numbers of others are of no meaning.

        Raises:
            InputError: the file was cut, or something was written into it.
        """
        with self.held.lock:
            self.held.newest_last[self] = None
            self.held.newest_last.move_to_end(self)
            self.held.make_room(self._size * len(set(heads) - self._heads))
            if self._numbers is None:
                # Memory that nobody has written to takes no room.
                self._numbers = torch.empty(self.shape, dtype=self.dtype)
                self.held.newest_last[self] = None
            for head in sorted(set(heads) - self._heads):
                self.held.parts.read_into(self.place + head * self._size, bytes_of(self._numbers[0, head]))
                self._heads.add(head)
            return self._numbers

    @property
    def num_bytes(self) -> int:
        """Bytes of it that are in memory."""
        return self._size * len(self._heads)

    def forget(self) -> None:
        """Let go of what was read; a computation that is under way keeps it until its end."""
        self._numbers = None
        self._heads.clear()


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the memory of a tensor whose numbers lie one after the other."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data
