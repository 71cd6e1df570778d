"""Copy tensors from a GPU to the CPU without waiting: a call that is observed goes on while its statistics arrive.

Tensors that a kernel wrote side by side are copied together, on a stream of their own, to pinned memory, from which
they move to memory of the record when it is read. Pinned memory is limited, and so is the number of copies: when there
are more, the oldest one is awaited.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

MOST_BYTES = 256 << 20  # pinned memory of copies that nobody has awaited
MOST_COPIES = 2048  # copies that nobody has awaited, such as those of steps of decoding


@dataclass(eq=False)
class _Copy:
    """A copy under way.

    Attributes:
        source: the memory on the GPU, kept until the copy has ended.
        pinned: the pinned memory that receives it.
        target: the memory of the record, filled when the copy is awaited.
        event: what the stream reaches after the copy.
        size: number of bytes.
        make_room: called after the numbers have arrived because there was no room for more copies.
    """

    source: Tensor
    pinned: Tensor
    target: Tensor
    event: torch.cuda.Event
    size: int
    make_room: Callable[[], None] | None = None
    arrived: bool = False

    def arrive(self) -> None:
        """Wait until the copy has ended, and move the numbers to the record."""
        if not self.arrived:
            self.event.synchronize()
            self.target[: len(self.pinned)].copy_(self.pinned)
            self.arrived = True
            del self.source, self.pinned


class Copied(NamedTuple):
    """Tensors of a GPU that are copied to the CPU.

    Attributes:
        tensors: the tensors on the CPU, which are filled when `arrive` returns.
        copies: the copies that fill them, of which the last one began last.
    """

    tensors: list[Tensor]
    copies: list[_Copy]

    def arrive(self) -> None:
        """Wait until the tensors are filled."""
        for copy in self.copies:
            copy.arrive()

    def when_full(self, make_room: Callable[[], None]) -> None:
        """Call a function after the tensors were filled because there was no room for more copies."""
        self.copies[-1].make_room = make_room


@dataclass(eq=False)
class HostCopies:
    """The copies of an observed model that are under way."""

    _under_way: deque[_Copy] = field(default_factory=deque)
    _bytes: int = 0
    _stream: torch.cuda.Stream | None = None

    def copy(self, tensors: Sequence[Tensor]) -> Copied:
        """Begin to copy tensors of one GPU to the CPU."""
        groups: dict[int, list[Tensor]] = {}
        for tensor in tensors:
            groups.setdefault(_address(tensor), []).append(tensor)
        copies, found = [], {}
        for group in groups.values():
            source, first = _range_of(group)
            copy = self._begin(source)
            copies.append(copy)
            for tensor in group:
                place = tensor.storage_offset() - first // tensor.element_size()
                numbers = copy.target.view(tensor.dtype)
                found[id(tensor)] = torch.as_strided(numbers, tensor.size(), tensor.stride(), place)

        return Copied([found[id(tensor)] for tensor in tensors], copies)

    def _begin(self, source: Tensor) -> _Copy:
        """Begin to copy contiguous bytes, after the work that writes them."""
        size = source.numel()
        while self._under_way and (
            self._under_way[0].arrived or self._bytes + size > MOST_BYTES or len(self._under_way) >= MOST_COPIES
        ):
            oldest = self._under_way.popleft()
            self._bytes -= oldest.size
            oldest.arrive()
            if oldest.make_room is not None:
                oldest.make_room()
        if self._stream is None:
            self._stream = torch.cuda.Stream()
        pinned, event = pinned_bytes(size), torch.cuda.Event()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            pinned.copy_(source, non_blocking=True)
            event.record(self._stream)
        target = torch.empty(-(-size // 8) * 8, dtype=torch.uint8)  # read as int64 too
        copy = _Copy(source, pinned, target, event, size)
        self._under_way.append(copy)
        self._bytes += size
        return copy


def pinned_bytes(size: int) -> Tensor:
    """Allocate pinned memory of the CPU, (size,) uint8."""
    return torch.empty(size, dtype=torch.uint8, pin_memory=True)


def _address(tensor: Tensor) -> int:
    """Return the address of a tensor's storage, which tensors that a kernel wrote side by side share."""
    return tensor.untyped_storage().data_ptr()


def _range_of(tensors: Collection[Tensor]) -> tuple[Tensor, int]:
    """Return the bytes of a storage that hold some tensors of it, and the index of the first, a multiple of 8."""
    first, stop = [], []
    for tensor in tensors:
        last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
        first.append(tensor.storage_offset() * tensor.element_size())
        stop.append((tensor.storage_offset() + last + 1) * tensor.element_size())
    low, high = min(first) // 8 * 8, max(stop)
    finest = min(tensors, key=lambda tensor: tensor.element_size())
    numbers = torch.as_strided(finest, (high // finest.element_size(),), (1,), 0)
    return numbers.view(torch.uint8)[low:], low
