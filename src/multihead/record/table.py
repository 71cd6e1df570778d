"""A table of all heads: one row a head, and a column a statistic."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from multihead.errors import ArgumentError
from multihead.escaping import visible

PLACES = ("layer", "head", "name")  # told in their own order; statistics are told from the largest
HEADINGS = {
    "entropy": "entropy (nats)",
    "effective_keys": "keys",
    "mean_distance": "distance (tokens)",
    "distance_spread": "spread (tokens)",
    "self_mass": "self",
    "previous_mass": "previous",
    "next_mass": "next",
    "first_mass": "first",
    "special_mass": "special",
    "largest_weight": "largest",
    "sink_mass": "sink",
    "duplicate_mass": "duplicate",
    "induction_mass": "induction",
    "contribution": "contribution",
    "output_norm": "output norm",
}


@dataclass(frozen=True)
class HeadTable:
    """One row a head; `str()` is the table in aligned columns.

    Fields:
        rows: a dict a head: layer, head, name, and the mean of each statistic.

    >>> print(HeadTable.of([{"layer": 0, "head": 1, "name": "attention", "entropy": 1.25}]))
    layer  head  entropy (nats)  name
        0     1           1.250  attention
    """

    rows: list[dict[str, Any]]

    @staticmethod
    def of(rows: Sequence[dict[str, Any]], *, sort: str = "layer", top: int | None = None) -> HeadTable:
        """Sort rows and keep the first.

        Args:
            rows: a dict a head.
            sort: the column: "layer", "head" and "name" rise, statistics fall, so that the largest is on top.
            top: how many rows to keep; None keeps all.

        Raises:
            ArgumentError: there is no such column, or top is less than 1.
        """
        if top is not None and (isinstance(top, bool) or not isinstance(top, int) or top < 1):
            raise ArgumentError(f"top is {top!r}.", "Give an integer of at least 1, or None for all heads.")
        columns = list(dict.fromkeys(name for row in rows for name in row)) or [*PLACES]
        if sort not in columns:
            raise ArgumentError(f"There is no column {sort!r}.", f"Sort by one of {', '.join(columns)}.")
        ordered = sorted(rows, key=lambda row: (row["layer"], row["head"]))
        if sort in ("head", "name"):
            ordered.sort(key=lambda row: row[sort])
        elif sort != "layer":
            ordered.sort(key=lambda row: _falling(row.get(sort)))
        return HeadTable(ordered[:top])

    def __str__(self) -> str:
        names = list(dict.fromkeys(name for row in self.rows for name in row if name not in PLACES))
        head = ["layer", "head", *(visible(HEADINGS.get(name, name)) for name in names), "name"]
        lines = [
            [str(row["layer"]), str(row["head"]), *(_number(row.get(name)) for name in names), visible(row["name"])]
            for row in self.rows
        ]
        widths = [max(len(line[column]) for line in [head, *lines]) for column in range(len(head))]
        return "\n".join(
            "  ".join([*(cell.rjust(width) for cell, width in zip(line[:-1], widths, strict=False)), line[-1]])
            for line in [head, *lines]
        )


def _falling(value: float | None) -> float:
    """Order from the largest; what is missing or NaN comes last."""
    return math.inf if value is None or math.isnan(value) else -value


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
