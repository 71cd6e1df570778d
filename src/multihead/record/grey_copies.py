"""Small grey copies of the pictures that a model has read, which a record keeps for its pages."""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass

import torch
from torch import Tensor

LONGEST_SIDE = 640
"""Pixels of the longer side of the copy of a picture that a record keeps, at most."""


@dataclass(frozen=True, eq=False)
class Picture:
    """A small grey copy of a picture that a model has read.

    Attributes:
        grey: (rows, columns) uint8, from black to white, with at most `LONGEST_SIDE` rows and columns.
        width: width of the picture itself, in the pixels in which boxes are given.
        height: its height.

    >>> Picture.from_levels(torch.rand(3, 1280), 1280, 3)
    <Picture: 1280 x 3 pixels, kept as 640 x 2>
    """

    grey: Tensor
    width: int
    height: int

    @staticmethod
    def from_levels(levels: Tensor, width: int, height: int, *, span: tuple[float, float] | None = None) -> Picture:
        """Make the copy of a picture from its grey levels.

        Args:
            levels: (rows, columns), in any unit.
            width: width of the picture in pixels.
            height: height of the picture in pixels.
            span: the levels of black and white; None takes the lowest and the highest.
        """
        levels = levels.float()
        longest = max(levels.shape)
        if longest > LONGEST_SIDE:
            rows, columns = (-(-each * LONGEST_SIDE // longest) for each in levels.shape)
            levels = torch.nn.functional.adaptive_avg_pool2d(levels[None], (rows, columns))[0]
        levels = levels.nan_to_num(0, 0, 0)
        low, high = (float(levels.amin()), float(levels.amax())) if span is None else span
        grey = (levels - low) * (255 / (high - low) if high > low else 0.0)
        return Picture(grey.clamp(0, 255).round().to(torch.uint8), width, height)

    def png(self) -> bytes:
        """Return the copy as a PNG file."""
        rows, columns = self.grey.shape
        lines = torch.nn.functional.pad(self.grey, (1, 0))  # each line begins with its filter, 0
        header = struct.pack(">IIBBBBB", columns, rows, 8, 0, 0, 0, 0)  # 8 bits of grey
        parts = {b"IHDR": header, b"IDAT": zlib.compress(lines.numpy().tobytes(), 9), b"IEND": b""}
        chunks = (
            struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
            for name, data in parts.items()
        )
        return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)

    def __repr__(self) -> str:
        """Return one line: the sizes of the picture and of the copy."""
        rows, columns = self.grey.shape
        return f"<Picture: {self.width} x {self.height} pixels, kept as {columns} x {rows}>"
