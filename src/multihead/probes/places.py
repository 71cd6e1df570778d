"""The places in pictures that the tokens of a model come from, as tables: key -> picture, view and box."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple

import torch
from torch import Tensor

NO_PICTURE = -1
"""The `picture` of a key that depends on no picture, such as a class token, a register or a word."""
NO_PLACE = -2
"""The `picture` of a key that depends on pictures, but on no place of its own in one."""
PICTURE_GROUPS = ("picture", "class", "words")
"""The groups of the keys of a text with pictures: parts of pictures, the model's own tokens such as a class token and
registers, and words."""


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
    def has_cells(self) -> bool:
        """Whether any key has a row and a column."""
        return bool((self.cell[..., 0] >= 0).any())

    def groups(self, *, has_words: bool) -> Tensor:
        """Return the group of each key, an index in `PICTURE_GROUPS`: (..., keys) int64.

        Args:
            has_words: whether keys that come from no picture are words, not tokens of the model's own.
        """
        return (self.picture == NO_PICTURE).long() * PICTURE_GROUPS.index("words" if has_words else "class")

    def placed_at(self, keys: Tensor) -> Tensor:
        """Return whether some keys of a table of one row, given by int64 indices, have a place; none has after it."""
        inside = (keys >= 0) & (keys < len(self.picture))
        return inside & (self.picture[keys.clamp(0, len(self.picture) - 1)] >= 0)

    def between(self, start: int, stop: int) -> PlaceTable:
        """Return the keys [start, stop) of a table of one row; keys after its last have no place."""
        more = max(stop - len(self.picture), 0)
        longer = PlaceTable.join([self, PlaceTable.without_places(more)]) if more else self
        return longer.select(slice(start, stop))

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

    def where(self, placed: Tensor, picture: int = NO_PLACE) -> PlaceTable:
        """Return a table in which the keys that are not `placed`, (..., keys) bool, have no place, but a `picture`."""
        return PlaceTable(
            self.picture.masked_fill(~placed, picture),
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
