"""The coarse levels of a sample's maps: built once, head by head, and kept beside the record."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt
import torch

if TYPE_CHECKING:
    from multihead.observation.record import SampleRecord

TILE = 256
"""Cells a side of a tile, at every level."""

SIDE = 64
"""Most cells a side of the coarsest level."""

BASE = 6
"""The finest level that is kept: a cell of level k is a block of 2^k x 2^k weights. Finer ones are made when asked."""

STRIP = 1 << 24
"""Scores that are summed at a time; then whoever waits for a tile has the turn."""

Array = npt.NDArray[Any]


def count(queries: int, keys: int) -> int:
    """Say how many levels a map has: each halves its sides, and the last has at most `SIDE` cells a side.

    >>> count(64, 64), count(65, 3), count(8192, 8192), count(100_000, 100_000)
    (1, 2, 8, 12)
    """
    return max(0, math.ceil(math.log2(max(queries, keys, 1) / SIDE))) + 1


def cells(length: int, level: int) -> int:
    """Say how many cells of a level a side of some length has.

    >>> cells(100, 0), cells(100, 6)
    (100, 2)
    """
    return -(-length // (1 << level))


class LayerLevels:
    """The levels from `BASE` on of all heads of one layer, for one sample.

    What is kept of each block is the sum of its weights without the first key, and how many of its cells may be
    seen; the first key's column stands apart, so that it can be left out or not. The means that follow are exact.

    Args:
        sample: one text in one layer, which kept q and k.
        file: where the levels are kept; None keeps them in memory.
        of: what the file must say of itself, the record's id above all; one that says something else is replaced.
    """

    def __init__(self, sample: SampleRecord, file: Path | None, of: dict[str, str]) -> None:
        self.sample = sample
        self.count = count(sample.num_queries, sample.num_keys)
        places = _places(sample, self.count)
        header = _header(places, of)
        size = len(header) + sum(_bytes(kind, shape) for kind, shape in places.values())
        whole = None if file is None else _opened(file, header, size)
        self.kept = whole is not None
        """Whether they are in a file; else they are in memory."""
        self._whole: Array = np.zeros(size, np.uint8) if whole is None else whole
        self._arrays: dict[str, Array] = {}
        place = len(header)
        for name, (kind, shape) in places.items():
            behind = place + _bytes(kind, shape)
            self._arrays[name] = self._whole[place:behind].view(kind).reshape(shape)
            place = behind

    def has(self, head: int) -> bool:
        """Whether a head's levels are built."""
        return bool(self._arrays["done"][head])

    def build(self, head: int) -> Iterator[float]:
        """Build a head's levels strip by strip; yields the share that is done."""
        if self.has(head):
            return
        queries, keys = self.sample.num_queries, self.sample.num_keys
        sums, counts, alone, seen = (self._arrays[f"{name}.{BASE}"][head] for name in _NAMES)
        rows, side = len(sums), 1 << BASE
        height = max(1, STRIP // max(1, keys * side))
        for first in range(0, rows, height):
            strip = slice(first, first + height)
            taken = slice(first * side, min((first + height) * side, queries))
            found = self.sample.blocks(head, queries=taken, keys=slice(0, keys), block=side, without_first_key=True)
            column = self.sample.blocks(head, queries=taken, keys=slice(0, 1), block=(side, 1))
            sums[strip], counts[strip] = found.sums[0].numpy(), found.counts[0].numpy()
            alone[strip], seen[strip] = column.sums[0, :, 0].numpy(), column.counts[0, :, 0].numpy()
            yield min(first + height, rows) / rows
        for level in range(BASE + 1, self.count):
            for name in _NAMES:
                _halve(self._arrays[f"{name}.{level - 1}"][head], self._arrays[f"{name}.{level}"][head])
        # The mark goes to the disk after what it stands for, should the machine stop in between.
        self._flush()
        self._arrays["done"][head] = 1
        self._flush()

    def means(
        self, head: int, level: int, rows: slice = slice(None), columns: slice = slice(None), *, sink: bool = True
    ) -> Array:
        """Read the cells of a level: (rows, columns) float32, NaN where none of a block may be seen.

        Args:
            head: which head; its levels are built.
            level: from `BASE` on.
            rows: which cells, down.
            columns: which cells, across; from the first on.
            sink: whether the first key counts.
        """
        sums, counts, alone, seen = (self._arrays[f"{name}.{level}"][head] for name in _NAMES)
        total = np.asarray(sums[rows, columns], np.float64)
        number = np.asarray(counts[rows, columns], np.float64)
        if sink and not columns.start and total.shape[1]:
            total[:, 0] += alone[rows]
            number[:, 0] += seen[rows]
        with np.errstate(invalid="ignore"):
            means: Array = (total / number).astype(np.float32)
        return means

    def tile(self, head: int, level: int, row: int, column: int, *, sink: bool = True) -> Array:
        """Read a tile: (rows, columns) float32, at most `TILE` a side, NaN = absent; see `means`."""
        rows, columns = (slice(each * TILE, (each + 1) * TILE) for each in (row, column))
        return self.means(head, level, rows, columns, sink=sink)

    def _flush(self) -> None:
        if isinstance(self._whole, np.memmap):
            self._whole.flush()


_NAMES = ("sums", "counts", "first_sums", "first_counts")


def _places(sample: SampleRecord, levels: int) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Lay out what is kept: name -> (type, shape), wide types first, so that each stands on a multiple of its size."""
    real = "<f8" if sample.dtype == torch.float64 else "<f4"
    found: dict[str, tuple[str, tuple[int, ...]]] = {}
    for sums, counts, whole in (("sums", "counts", True), ("first_sums", "first_counts", False)):
        for name, kind in ((sums, real), (counts, "<i4")):
            for level in range(BASE, levels):
                sides = cells(sample.num_queries, level), cells(sample.num_keys, level)
                found[f"{name}.{level}"] = kind, (sample.num_heads, *(sides if whole else sides[:1]))
    found["done"] = "|u1", (sample.num_heads,)
    return dict(sorted(found.items(), key=lambda item: -np.dtype(item[1][0]).itemsize))


def _bytes(kind: str, shape: tuple[int, ...]) -> int:
    return np.dtype(kind).itemsize * math.prod(shape)


def _header(places: dict[str, tuple[str, tuple[int, ...]]], of: dict[str, str]) -> bytes:
    """Write the head of a safetensors file: its length in eight bytes, then what stands where."""
    names = {"<f8": "F64", "<f4": "F32", "<i4": "I32", "|u1": "U8"}
    said: dict[str, Any] = {"__metadata__": {"format": "multihead levels", "version": "1", **of}}
    place = 0
    for name, (kind, shape) in places.items():
        behind = place + _bytes(kind, shape)
        said[name] = {"dtype": names[kind], "shape": list(shape), "data_offsets": [place, behind]}
        place = behind
    text = json.dumps(said, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _halve(fine: Array, coarse: Array) -> None:
    """Add up 2 x 2 cells (2 of a column) of one level into one of the next, some rows at a time."""
    for first in range(0, len(coarse), 256):
        rows = np.asarray(fine[2 * first : 2 * (first + 256)], np.float64)
        rows = np.add.reduceat(rows, np.arange(0, len(rows), 2), 0)
        if rows.ndim == 2:
            rows = np.add.reduceat(rows, np.arange(0, rows.shape[1], 2), 1)
        coarse[first : first + 256] = rows


def _opened(file: Path, header: bytes, size: int) -> Array | None:
    """Map a file of levels, made anew unless it is this record's; None where it can be neither read nor written."""
    try:
        if not _fits(file, header, size):
            _lay_out(file, header, size)
        return _mapped(file, "r+")
    except OSError:
        try:
            # A finished file in a place that may not be written serves as well.
            whole = _mapped(file, "r") if _fits(file, header, size) else None
        except OSError:
            return None
        heads = int(json.loads(header[8:])["done"]["shape"][0])
        return whole if whole is not None and bool(whole[-heads:].all()) else None


def _mapped(file: Path, mode: Literal["r", "r+"]) -> Array:
    return np.memmap(file, np.uint8, mode)


def _fits(file: Path, header: bytes, size: int) -> bool:
    """Whether a file is whole and says of itself, byte by byte, what it should."""
    if not file.is_file() or file.stat().st_size != size:
        return False
    with file.open("rb") as read:
        return read.read(len(header)) == header


def _lay_out(file: Path, header: bytes, size: int) -> None:
    """Make a file with nothing built, under its name only once it is whole."""
    file.parent.mkdir(exist_ok=True)
    part = file.with_name(f".{file.name}.{os.getpid()}.part")
    try:
        with part.open("wb") as made:
            made.write(header)
            made.flush()
            if hasattr(os, "posix_fallocate"):
                # Without room for it, writing to the mapped file would end the process: refused here instead.
                os.posix_fallocate(made.fileno(), 0, size)
            made.truncate(size)
        part.replace(file)
    finally:
        part.unlink(missing_ok=True)
