"""Copy tensors from a GPU to the CPU without waiting: a call that is observed goes on while its statistics arrive.

Tensors that a kernel wrote side by side are copied together, on a stream of their own, to pinned memory, from which
they move to memory of the record when it is read. Pinned memory is limited: when it is full, the oldest copy is
awaited.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

MOST_BYTES = 256 << 20  # pinned memory of copies that nobody has awaited


@dataclass(eq=False)
class _Copy:
    """A copy under way.

    Attributes:
        source: the memory on the GPU, kept until the copy has ended.
        pinned: the pinned memory that receives it.
        target: the memory of the record, filled when the copy is awaited.
        event: what the stream reaches after the copy.
    """

    source: Tensor
    pinned: Tensor
    target: Tensor
    event: torch.cuda.Event
    arrived: bool = False

    def arrive(self) -> None:
        """Wait until the copy has ended, and move the numbers to the record."""
        if not self.arrived:
            self.event.synchronize()
            self.target[: len(self.pinned)].copy_(self.pinned)
            self.arrived = True
            del self.source, self.pinned


@dataclass(eq=False)
class HostCopies:
    """The copies of an observed model that are under way."""

    _under_way: deque[_Copy] = field(default_factory=deque)
    _bytes: int = 0
    _stream: torch.cuda.Stream | None = None

    def copy(self, tensors: Sequence[Tensor]) -> tuple[list[Tensor], Callable[[], None]]:
        """Begin to copy tensors of one GPU to the CPU.

        Returns:
            the tensors on the CPU, and a function that waits until they are filled.
        """
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

        def arrive() -> None:
            for copy in copies:
                copy.arrive()

        return [found[id(tensor)] for tensor in tensors], arrive

    def _begin(self, source: Tensor) -> _Copy:
        """Begin to copy contiguous bytes, after the work that writes them."""
        size = source.numel()
        while self._under_way and (self._under_way[0].arrived or self._bytes + size > MOST_BYTES):
            oldest = self._under_way.popleft()
            self._bytes -= oldest.target.numel()
            oldest.arrive()
        if self._stream is None:
            self._stream = torch.cuda.Stream()
        pinned, event = pinned_bytes(size), torch.cuda.Event()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            pinned.copy_(source, non_blocking=True)
            event.record(self._stream)
        target = torch.empty(-(-size // 8) * 8, dtype=torch.uint8)  # read as int64 too
        copy = _Copy(source, pinned, target, event)
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
