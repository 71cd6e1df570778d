"""The coarse levels of detail of a sample's attention maps, built once, head by head, and stored next to the record.

The level with 64 x 64 weights per cell is computed once and stored next to the record; coarser levels are sums of its
blocks. The column of the first key is stored separately, so that hiding a sink is exact at every level. Levels that do
not fit on the disk take at most 1 GiB of memory; if that is too little, the page explains it, and finer levels still
work.

A file of levels is used only if its header, which has the id of the record, and its size are exactly what this record
would write. A build that was stopped is therefore continued, and a foreign or truncated file is built again.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from multihead.errors import InputError
from multihead.files import RandomAccessFile, open_atomically
from multihead.record.saving import safetensors_header

if TYPE_CHECKING:
    from multihead.record.sample import SampleRecord

TILE_SIDE = 256
"""Number of cells per side of a tile, at every level."""

MAX_COARSEST_SIDE = 64
"""Maximum cells per side of the coarsest level."""

FINEST_STORED_LEVEL = 6
"""The finest stored level: a cell of level k is a block of 2^k x 2^k weights. Finer levels are computed on request."""

SCORES_PER_STRIP = 1 << 24
"""Number of scores per strip of a map that is summed at a time; a request for a tile waits for one strip at most."""

MAX_LEVEL_BYTES_IN_MEMORY = 1 << 30
"""Maximum bytes of levels in memory if the disk has no room; the levels of a head take 27 MB at 100,000 tokens."""

Array = npt.NDArray[Any]


def number_of_levels(queries: int, keys: int) -> int:
    """Count the levels of a map: each halves its sides, and the last has at most `MAX_COARSEST_SIDE` cells per side.

    >>> (
    ...     number_of_levels(64, 64),
    ...     number_of_levels(65, 3),
    ...     number_of_levels(8192, 8192),
    ...     number_of_levels(100_000, 100_000),
    ... )
    (1, 2, 8, 12)
    """
    return max(0, math.ceil(math.log2(max(queries, keys, 1) / MAX_COARSEST_SIDE))) + 1


def cells_per_side(length: int, level: int) -> int:
    """Count the cells of a level along a side of the given length.

    >>> cells_per_side(100, 0), cells_per_side(100, 6)
    (100, 2)
    """
    return -(-length // (1 << level))


class LayerMapLevels:
    """The levels from `FINEST_STORED_LEVEL` on of all heads of one layer, for one sample.

    The sum of the weights without the first key, and the number of visible cells, are stored per block. The column of
    the first key is stored separately, so that means can include it or leave it out. Means computed from these sums are
    exact.

    Args:
        sample: one text in one layer, which kept q and k.
        file: the file of the levels; None keeps them in memory.
        metadata: metadata of the file, such as the record's id; a file with other metadata is replaced.
        memory_budget: budget of bytes for levels in memory, shared with other layers; None creates a budget for this
            layer alone.
    """

    def __init__(
        self,
        sample: SampleRecord,
        file: Path | None,
        metadata: dict[str, str],
        memory_budget: MemoryBudget | None = None,
    ) -> None:
        self.sample = sample
        self.num_levels = number_of_levels(sample.num_queries, sample.num_keys)
        self._layout = _layout_of_stored_arrays(sample, self.num_levels)
        self._file: RandomAccessFile | None = None
        self._memory_budget = memory_budget or MemoryBudget(MAX_LEVEL_BYTES_IN_MEMORY)
        self._levels_in_memory: dict[int, dict[str, Array]] = {}
        self._built_flags = np.zeros(sample.num_heads, np.uint8)
        if file is not None:
            metadata = {"format": "multihead levels", "version": "1", **metadata}
            header = safetensors_header(list(self._layout.items()), metadata)
            *starts, size = accumulate((each.nbytes for each in self._layout.values()), initial=len(header))
            self._array_offsets = dict(zip(self._layout, starts, strict=True))
            opened = _open_levels_file(file, header, size, sample.num_heads)
            if opened is not None:
                self._file, self._built_flags = opened

    @property
    def is_in_file(self) -> bool:
        """Whether the levels are stored in a file; if not, they are in memory."""
        return self._file is not None

    def is_built(self, head: int) -> bool:
        """Return whether a head's levels are built."""
        return bool(self._built_flags[head])

    def build_head(self, head: int) -> Iterator[float]:
        """Build a head's levels strip by strip; yields the share that is done, from 0 to 1.

        Raises:
            InputError: the levels are kept in memory, which has no more room; or their file was truncated.
        """
        if self.is_built(head):
            return
        made: dict[str, Array] = {
            name: torch.zeros_like(each[head], device="cpu").numpy()
            for name, each in self._layout.items()
            if name != "done"
        }
        if self._file is None:
            self._memory_budget.reserve(sum(each.nbytes for each in made.values()))
        queries, keys = self.sample.num_queries, self.sample.num_keys
        sums, counts, alone, seen = (made[f"{name}.{FINEST_STORED_LEVEL}"] for name in _ARRAY_NAMES)
        rows, side = len(sums), 1 << FINEST_STORED_LEVEL
        height = max(1, SCORES_PER_STRIP // max(1, keys * side))
        for first in range(0, rows, height):
            strip = slice(first, first + height)
            taken = slice(first * side, min((first + height) * side, queries))
            found = self.sample.blocks(head, queries=taken, keys=slice(0, keys), block=side, without_first_key=True)
            column = self.sample.blocks(head, queries=taken, keys=slice(0, 1), block=(side, 1))
            sums[strip], counts[strip] = found.sums[0].numpy(), found.counts[0].numpy()
            alone[strip], seen[strip] = column.sums[0, :, 0].numpy(), column.counts[0, :, 0].numpy()
            yield min(first + height, rows) / rows
        for level in range(FINEST_STORED_LEVEL + 1, self.num_levels):
            for name in _ARRAY_NAMES:
                _sum_to_next_level(made[f"{name}.{level - 1}"], made[f"{name}.{level}"])
        if self._file is None:
            self._levels_in_memory[head] = made
        else:
            # The flag "done" is written after the data, in case the machine stops in between.
            self._file.write({self._offset_of_head(name, head): _view_as_bytes(each) for name, each in made.items()})
            self._file.write({self._offset_of_head("done", head): memoryview(b"\1")})
        self._built_flags[head] = 1

    def block_means(
        self, head: int, level: int, rows: slice = slice(None), columns: slice = slice(None), *, sink: bool = True
    ) -> Array:
        """Read the cells of a level: (rows, columns) float32, NaN for a block without visible cells.

        Args:
            head: index of a head whose levels are built.
            level: the number of halvings, so that blocks are 2**level tokens wide; at least `FINEST_STORED_LEVEL`.
            rows: range of cells, down.
            columns: range of cells, across.
            sink: whether to include the first key.
        """
        total, number = (
            self._read_cells(f"{name}.{level}", head, rows)[:, columns].astype(np.float64)
            for name in ("sums", "counts")
        )
        if sink and not columns.start and total.shape[1]:
            total[:, 0] += self._read_cells(f"first_sums.{level}", head, rows)
            number[:, 0] += self._read_cells(f"first_counts.{level}", head, rows)
        with np.errstate(invalid="ignore"):
            means: Array = (total / number).astype(np.float32)
        return means

    def tile(self, head: int, level: int, row: int, column: int, *, sink: bool = True) -> Array:
        """Read a tile: (rows, columns) float32, at most `TILE_SIDE` each, NaN for a masked block; see `block_means`."""
        rows, columns = (slice(each * TILE_SIDE, (each + 1) * TILE_SIDE) for each in (row, column))
        return self.block_means(head, level, rows, columns, sink=sink)

    def _offset_of_head(self, name: str, head: int) -> int:
        """Return the offset in the file, in bytes, of a head's part of the array `name`."""
        return self._array_offsets[name] + self._layout[name][:head].nbytes

    def _read_cells(self, name: str, head: int, rows: slice = slice(None)) -> Array:
        """Read rows of a head's part of the array `name`, from memory or from the file."""
        if self._file is None:
            return self._levels_in_memory[head][name][rows]
        whole = self._layout[name][head]
        found: Array = torch.empty_like(whole[rows], device="cpu").numpy()
        before = whole[: rows.indices(len(whole))[0]].nbytes
        self._file.read_into(self._offset_of_head(name, head) + before, _view_as_bytes(found))
        return found


class MemoryBudget:
    """The number of bytes that levels in memory may still take."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = self.bytes_left = max_bytes

    def reserve(self, num_bytes: int) -> None:
        """Reserve some bytes.

        Raises:
            InputError: fewer bytes are left.
        """
        if num_bytes > self.bytes_left:
            raise InputError(
                "The disk has no room for the levels, and memory holds "
                f"{self.max_bytes - self.bytes_left:,} of at most {self.max_bytes:,} bytes.",
                "Free some space next to the record, and open it again.",
            )
        self.bytes_left -= num_bytes


def _view_as_bytes(numbers: Array) -> memoryview:
    return numbers.reshape(-1).view(np.uint8).data


_ARRAY_NAMES = ("sums", "counts", "first_sums", "first_counts")


def _layout_of_stored_arrays(sample: SampleRecord, levels: int) -> dict[str, Tensor]:
    """Return an empty tensor per stored array by name, wide types first, so that every array is aligned."""
    real = torch.float64 if sample.dtype == torch.float64 else torch.float32
    found: dict[str, Tensor] = {}
    for sums, counts, whole in (("sums", "counts", True), ("first_sums", "first_counts", False)):
        for name, dtype in ((sums, real), (counts, torch.int32)):
            for level in range(FINEST_STORED_LEVEL, levels):
                sides = cells_per_side(sample.num_queries, level), cells_per_side(sample.num_keys, level)
                shape = sample.num_heads, *(sides if whole else sides[:1])
                found[f"{name}.{level}"] = torch.empty(shape, dtype=dtype, device="meta")
    found["done"] = torch.empty(sample.num_heads, dtype=torch.uint8, device="meta")
    return dict(sorted(found.items(), key=lambda item: -item[1].itemsize))


def _sum_to_next_level(fine: Array, coarse: Array) -> None:
    """Sum blocks of 2 x 2 cells of `fine` (2 cells, if it has one dimension) into the cells of `coarse`."""
    for first in range(0, len(coarse), 256):
        rows = np.asarray(fine[2 * first : 2 * (first + 256)], np.float64)
        rows = np.add.reduceat(rows, np.arange(0, len(rows), 2), 0)
        if rows.ndim == 2:
            rows = np.add.reduceat(rows, np.arange(0, rows.shape[1], 2), 1)
        coarse[first : first + 256] = rows


def _open_levels_file(file: Path, header: bytes, size: int, heads: int) -> tuple[RandomAccessFile, Array] | None:
    """Open a file of levels; create the file anew unless it has the expected header and size.

    Returns:
        The file, and which heads are built, (heads,) uint8; None if the file can be neither read nor written.
    """
    done = np.zeros(heads, np.uint8)
    try:
        if not _has_expected_header(file, header, size):
            _create_levels_file(file, header, size)
        writable = os.access(file, os.W_OK)
        opened = RandomAccessFile(file)
        opened.read_into(size - heads, _view_as_bytes(done))  # the flags are the last array, one byte per head
    except (OSError, InputError):
        return None
    # A finished file is usable even if it is not writable.
    return (opened, done) if writable or bool(done.all()) else None


def _has_expected_header(file: Path, header: bytes, size: int) -> bool:
    """Return whether a file has the expected size and exactly the expected header."""
    if not file.is_file() or file.stat().st_size != size:
        return False
    with file.open("rb") as read:
        return read.read(len(header)) == header


def _create_levels_file(file: Path, header: bytes, size: int) -> None:
    """Create a levels file in which no head is built; the file is renamed to `file` once it has its full size."""
    file.parent.mkdir(exist_ok=True)
    with open_atomically(file) as made:
        made.write(header)
        made.flush()
        if hasattr(os, "posix_fallocate"):
            # Fail here if the disk has no room for the whole file, not in the middle of building.
            os.posix_fallocate(made.fileno(), 0, size)
        made.truncate(size)
