"""A table with one row per head and one column per statistic."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from operator import itemgetter
from typing import Any

from torch import Tensor

from multihead.errors import ArgumentError
from multihead.locale.escaping import escape_controls
from multihead.probes.probe import Statistic
from multihead.record import notebook
from multihead.record.notebook import HEAD_COLUMNS, TEXT_COLUMNS, distinct_chances, statistic_columns


@dataclass(frozen=True, repr=False)
class HeadTable:
    """A table with one row per head; `str()` returns aligned columns.

    Attributes:
        rows: one dict per head: layer, head, name, and the mean (or another summary) of each statistic. With kinds also
            `kind`, the kinds of the head joined by "+", and the chance level `{name}_chance` of statistics that have
            one.
        statistics: name -> statistic, for the statistics that are not built in.

    >>> print(HeadTable.from_rows([{"layer": 0, "head": 1, "name": "attention", "entropy": 1.25}]))
    layer  head  entropy (nats)  name
        0     1            1.25  attention
    """

    rows: list[dict[str, Any]]
    statistics: Mapping[str, Statistic] = field(default_factory=dict, repr=False, compare=False)

    @staticmethod
    def from_rows(
        rows: Sequence[dict[str, Any]],
        *,
        sort: str = "layer",
        top: int | None = None,
        statistics: Mapping[str, Statistic] | None = None,
    ) -> HeadTable:
        """Create a table from sorted rows.

        Args:
            rows: one dict per head.
            sort: column to sort by: "layer", "head", "name" and "kind" ascending, statistics descending.
            top: number of rows to keep after sorting; None keeps all.
            statistics: name -> statistic, for the statistics that are not built in.

        Raises:
            ArgumentError: there is no column `sort`, or `top` is less than 1.
        """
        if top is not None and (isinstance(top, bool) or not isinstance(top, int) or top < 1):
            raise ArgumentError(f"top is {top!r}.", "Give an integer of at least 1, or None for all heads.")
        columns = list(dict.fromkeys(chain.from_iterable(rows))) or [*HEAD_COLUMNS]
        if sort not in columns:
            raise ArgumentError(f"There is no column {sort!r}.", f"Sort by one of {', '.join(columns)}.")
        ordered = sorted(rows, key=itemgetter("layer", "head"))
        if sort in TEXT_COLUMNS[1:]:
            ordered.sort(key=itemgetter(sort))
        elif sort != "layer":
            ordered.sort(key=lambda row: _descending_sort_key(row.get(sort)))
        return HeadTable(ordered[:top], statistics or {})

    def __repr__(self) -> str:
        """Return one line with the number of heads; `print` shows the table."""
        return f"<HeadTable of {notebook.number_with_noun(len(self.rows), 'head')}>"

    def _repr_html_(self) -> str:
        """Return the table as HTML for a notebook."""
        return notebook.html_of_table("", "", self.rows, HEAD_COLUMNS, self.statistics)

    def __str__(self) -> str:
        names = list(dict.fromkeys(chain.from_iterable(self.rows)))
        columns = statistic_columns(names, self.statistics)
        kind = ["kind"] if "kind" in names else []
        lines = [["layer", "head", *kind, *[escape_controls(each.heading) for each in columns], "name"]]
        for row in self.rows:
            numbers = [each.number(row.get(each.name)) for each in columns]
            words = [escape_controls(row[each]) for each in kind]
            lines.append([str(row["layer"]), str(row["head"]), *words, *numbers, escape_controls(row["name"])])
        lines += [["chance", "", *[""] * len(kind), *level, ""] for level in distinct_chances(self.rows, columns)]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        widths[-1] = 0  # the last column has names, which need no padding
        return "\n".join(["  ".join(map(str.rjust, line, widths)).rstrip() for line in lines])


def head_rows(layer: int, name: str, num_heads: int, summary: Mapping[str, Tensor]) -> list[dict[str, Any]]:
    """Return a table row for each head of a layer.

    Args:
        layer: number of the layer.
        name: name of the layer.
        num_heads: number of heads of the layer.
        summary: name of a statistic -> (heads,).

    >>> import torch
    >>> head_rows(3, "attention", 2, {"entropy": torch.tensor([0.5, 1.5])})[1]
    {'layer': 3, 'head': 1, 'name': 'attention', 'entropy': 1.5}
    """
    return [
        {"layer": layer, "head": head, "name": name, **{each: float(values[head]) for each, values in summary.items()}}
        for head in range(num_heads)
    ]


def _descending_sort_key(value: float | None) -> float:
    """Return a sort key for descending order; missing values and NaN come last."""
    return math.inf if value is None or math.isnan(value) else -value
