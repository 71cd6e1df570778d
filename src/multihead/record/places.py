"""The places in pictures that the tokens of a model come from, as tables: key -> picture, view and box."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple

import torch
from torch import Tensor

NO_PICTURE = -1
"""The `picture` of a key that depends on no picture, such as a class token, a register or a word."""
NO_PLACE = -2
"""The `picture` of a key that depends on pictures, but on no place of its own in one."""


LONGEST_SIDE = 640
"""Pixels of the longer side of the copy of a picture that a record keeps, at most."""


class Box(NamedTuple):
    """A rectangle in a picture, in pixels from its upper left corner; fractions of pixels are kept."""

    left: float
    top: float
    right: float
    bottom: float


class Cell(NamedTuple):
    """A cell of the grid that the tokens of a view form, by its row and column, from 0."""

    row: int
    column: int


class Place(NamedTuple):
    """The place of a token in a picture.

    Attributes:
        picture: number of the picture, from 0.
        view: number of the view of the picture, from 0. A picture that a model reads whole and in tiles has two, the
            one of fewer parts first. Boxes of one view do not overlap.
        patch: number of the first patch of the picture that belongs to the token, in the order of the model's input.
        box: the rectangle in the picture; None if it is unknown.
        cell: its row and column among the tokens of the view; None if these form no grid.
    """

    picture: int
    view: int
    patch: int
    box: Box | None
    cell: Cell | None


class View(NamedTuple):
    """A view of a picture whose keys a layer reads.

    Attributes:
        picture: number of the picture.
        view: number of the view of the picture.
        rows: number of rows of its grid; 0 if its keys form none.
        columns: number of columns of its grid; 0 if its keys form none.
    """

    picture: int
    view: int
    rows: int
    columns: int


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


@dataclass(frozen=True, eq=False)
class PlaceTable:
    """The places of the keys of an attention layer.

    Attributes:
        picture: (..., keys) int64, number of the picture of each key; `NO_PICTURE` or `NO_PLACE` without one.
        view: (..., keys) int64, number of the view of the picture; -1 without a place.
        patch: (..., keys) int64, number of the first patch of the key in its picture; -1 without a place.
        box: (..., keys, 4) float32, left, top, right and bottom in pixels of the picture; NaN where it is unknown.
        cell: (..., keys, 4) int64, row, column, and the numbers of rows and columns of the view; -1 without a grid.

    >>> table = PlaceTable.without_places(1, 3)
    >>> table[0, 2] is None, table.has_places
    (True, False)
    """

    picture: Tensor
    view: Tensor
    patch: Tensor
    box: Tensor
    cell: Tensor

    @staticmethod
    def without_places(*sizes: int, picture: int = NO_PICTURE) -> PlaceTable:
        """Return a table of keys without a place; `sizes` are the sizes of `picture`."""
        nothing = torch.full(sizes, -1)
        four = (*sizes, 4)
        return PlaceTable(
            torch.full(sizes, picture), nothing, nothing, torch.full(four, torch.nan), torch.full(four, -1)
        )

    def __getitem__(self, key: int | tuple[int, ...]) -> Place | None:
        """Return the place of one key, by its row in the batch and its number in the row; None without a place."""
        picture = int(self.picture[key])
        if picture < 0:
            return None
        box, (row, column, *_) = self.box[key].tolist(), self.cell[key].tolist()
        known = Box(*box) if box[0] == box[0] else None  # NaN is not equal to itself
        cell = None if row < 0 else Cell(row, column)
        return Place(picture, int(self.view[key]), int(self.patch[key]), known, cell)

    @property
    def has_places(self) -> bool:
        """Whether any key has a place."""
        return bool((self.picture >= 0).any())

    @property
    def views(self) -> list[View]:
        """The views of pictures that have keys, in order."""
        of_view = torch.cat([self.picture[..., None], self.view[..., None], self.cell[..., 2:].clamp(min=0)], -1)
        return [View(*each) for each in of_view[self.picture >= 0].unique(dim=0).tolist()]

    @property
    def grid(self) -> tuple[int, int] | None:
        """Numbers of rows and columns, if all places are of one view of one picture and form a grid; else None."""
        views = self.views
        return (views[0].rows, views[0].columns) if len(views) == 1 and views[0].rows > 0 else None

    def names(self) -> list[str | None]:
        """Return the names of the keys of a table of one row; None for a key that comes from no picture.

        >>> places = PlaceTable.without_places(2, picture=NO_PLACE)
        >>> places.names()
        ['no place 1', 'no place 2']
        """
        several = len(self.picture[self.picture >= 0].unique()) > 1
        found: list[str | None] = []
        columns = (self.picture, self.view, self.patch, self.cell, self.box)
        for key, (picture, view, patch, cell, box) in enumerate(zip(*(each.tolist() for each in columns), strict=True)):
            parts = [f"picture {picture + 1}"] * several + ["tiles"] * (view > 0)
            if picture == NO_PICTURE:
                found.append(None)
            elif picture == NO_PLACE:
                found.append(f"no place {key + 1}")
            elif cell[0] >= 0:
                found.append(" ".join([*parts, f"r{cell[0] + 1} c{cell[1] + 1}"]))
            elif box[0] == box[0]:  # NaN is not equal to itself
                found.append(" ".join([*parts, f"x{box[0]:.0f} y{box[1]:.0f}"]))
            else:
                found.append(" ".join([*parts, f"patch {patch + 1}"]))
        return found

    @property
    def columns(self) -> list[Tensor]:
        """The attributes, in their order."""
        return [getattr(self, each.name) for each in fields(self)]

    def select(self, index: Tensor | slice | int) -> PlaceTable:
        """Return the table of some rows, or of some keys of a table of one row."""
        return PlaceTable(*(each[index] for each in self.columns))

    def reshape(self, *sizes: int) -> PlaceTable:
        """Return a table of the same keys in other rows."""
        picture, view, patch = (each.reshape(sizes) for each in (self.picture, self.view, self.patch))
        return PlaceTable(picture, view, patch, self.box.reshape(*sizes, 4), self.cell.reshape(*sizes, 4))

    def where(self, placed: Tensor) -> PlaceTable:
        """Return a table in which the keys that are not `placed`, (..., keys) bool, have no place."""
        return PlaceTable(
            self.picture.masked_fill(~placed, NO_PLACE),
            self.view.masked_fill(~placed, -1),
            self.patch.masked_fill(~placed, -1),
            self.box.masked_fill(~placed[..., None], torch.nan),
            self.cell.masked_fill(~placed[..., None], -1),
        )

    @staticmethod
    def join(tables: Sequence[PlaceTable]) -> PlaceTable:
        """Concatenate tables of one row."""
        return PlaceTable(*(torch.cat(parts) for parts in zip(*(each.columns for each in tables), strict=True)))

    def __repr__(self) -> str:
        """Return one line: the numbers of keys with a place, without one, and outside of pictures."""
        placed, outside = int((self.picture >= 0).sum()), int((self.picture == NO_PICTURE).sum())
        pictures = len(self.picture[self.picture >= 0].unique())
        return (
            f"<PlaceTable: {placed} keys in {pictures} pictures, {outside} outside, "
            f"{self.picture.numel() - placed - outside} without a place>"
        )
