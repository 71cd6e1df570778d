"""A table of all heads: one row per head, and one column per statistic."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from operator import itemgetter
from typing import Any

from torch import Tensor

from multihead.errors import ArgumentError
from multihead.locale.escaping import visible
from multihead.probes.probe import Statistic
from multihead.record import notebook
from multihead.record.notebook import PLACES, WORDS, distinct_chances, statistic_columns


@dataclass(frozen=True, repr=False)
class HeadTable:
    """One row per head; `str()` is the table in aligned columns.

    Attributes:
        rows: one dict per head: layer, head, name, and the mean of each statistic; with kinds also `kind`, the kinds of
            the head joined by "+", and `NAME_chance` of each statistic that has a chance.
        statistics: label, unit and number format of the statistics that are not built in.

    >>> print(HeadTable.of([{"layer": 0, "head": 1, "name": "attention", "entropy": 1.25}]))
    layer  head  entropy (nats)  name
        0     1            1.25  attention
    """

    rows: list[dict[str, Any]]
    statistics: Mapping[str, Statistic] = field(default_factory=dict, repr=False, compare=False)

    @staticmethod
    def of(
        rows: Sequence[dict[str, Any]],
        *,
        sort: str = "layer",
        top: int | None = None,
        statistics: Mapping[str, Statistic] | None = None,
    ) -> HeadTable:
        """Sort rows and keep the first.

        Args:
            rows: one dict per head.
            sort: the column: "layer", "head", "name" and "kind" in ascending order, a statistic from its largest value.
            top: how many rows to keep; None keeps all.
            statistics: label, unit and number format of the statistics that are not built in.

        Raises:
            ArgumentError: there is no such column, or top is less than 1.
        """
        if top is not None and (isinstance(top, bool) or not isinstance(top, int) or top < 1):
            raise ArgumentError(f"top is {top!r}.", "Give an integer of at least 1, or None for all heads.")
        columns = list(dict.fromkeys(chain.from_iterable(rows))) or [*PLACES]
        if sort not in columns:
            raise ArgumentError(f"There is no column {sort!r}.", f"Sort by one of {', '.join(columns)}.")
        ordered = sorted(rows, key=itemgetter("layer", "head"))
        if sort in WORDS[1:]:
            ordered.sort(key=itemgetter(sort))
        elif sort != "layer":
            ordered.sort(key=lambda row: _descending_sort_key(row.get(sort)))
        return HeadTable(ordered[:top], statistics or {})

    def __repr__(self) -> str:
        """Return one line; `print` shows the table."""
        return f"<HeadTable of {notebook.number_with_noun(len(self.rows), 'head')}>"

    def _repr_html_(self) -> str:
        """Show it in a notebook."""
        return notebook.html_of_table("", "", self.rows, PLACES, self.statistics)

    def __str__(self) -> str:
        names = list(dict.fromkeys(chain.from_iterable(self.rows)))
        columns = statistic_columns(names, self.statistics)
        kind = ["kind"] if "kind" in names else []
        lines = [["layer", "head", *kind, *[visible(each.heading) for each in columns], "name"]]
        for row in self.rows:
            numbers = [each.number(row.get(each.name)) for each in columns]
            words = [visible(row[each]) for each in kind]
            lines.append([str(row["layer"]), str(row["head"]), *words, *numbers, visible(row["name"])])
        lines += [["chance", "", *[""] * len(kind), *level, ""] for level in distinct_chances(self.rows, columns)]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        widths[-1] = 0  # the last column, names, is aligned on the left and needs no padding
        return "\n".join(["  ".join(map(str.rjust, line, widths)).rstrip() for line in lines])


def head_rows(layer: int, name: str, num_heads: int, summary: Mapping[str, Tensor]) -> list[dict[str, Any]]:
    """Return one row per head of a layer.

    Args:
        layer: the layer's number.
        name: the layer's name.
        num_heads: number of its heads.
        summary: statistic -> (heads,).

    >>> import torch
    >>> head_rows(3, "attention", 2, {"entropy": torch.tensor([0.5, 1.5])})[1]
    {'layer': 3, 'head': 1, 'name': 'attention', 'entropy': 1.5}
    """
    rows = []
    for head in range(num_heads):
        row: dict[str, Any] = {"layer": layer, "head": head, "name": name}
        for each, values in summary.items():
            row[each] = float(values[head])
        rows.append(row)
    return rows


def _descending_sort_key(value: float | None) -> float:
    """Return a key that sorts from the largest value on; missing values and NaN come last."""
    return math.inf if value is None or math.isnan(value) else -value
