"""Tables with one row per head and one column per statistic: as text, and as HTML for notebooks, with escaped texts."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import chain
from operator import itemgetter
from typing import Any, TypeVar

from torch import Tensor

from multihead.errors import ArgumentError
from multihead.locale.escaping import escape_controls
from multihead.probes.catalogue import statistic
from multihead.probes.probe import Statistic

MAX_SHOWN_HEADS = 24
"""Largest number of heads that the table in a notebook shows."""

HEAD_COLUMNS = ("layer", "head", "name")
"""Columns of a table that identify a head."""

TEXT_COLUMNS = (*HEAD_COLUMNS, "kind")
"""Columns of a table that are not statistics."""

CHANCE_SUFFIX = "_chance"
"""Suffix of a column with the chance level of a statistic, after the name of the statistic."""

MAX_CHANCE_ROWS = 4
"""Largest number of rows with chance levels in a table; layers with different masks have different chance levels."""


class OneLineRepr:
    """Base class whose repr contains the str of an object, so that a list of found heads is readable.

    >>> class Head(OneLineRepr):
    ...     def __str__(self):
    ...         return "L0 H1: previous 88 %"
    >>> Head()
    <Head L0 H1: previous 88 %>
    """

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self}>"

    def cells(self) -> dict[str, str]:
        """Return the head as a row of a table in a notebook: heading -> text."""
        return {"head": str(self)}


@dataclass(frozen=True, repr=False)
class HeadOfLayer(OneLineRepr):
    """A head, by its place in the model; base class of what is found about a head.

    Attributes:
        layer: number of the layer.
        head: index of the head in the layer.
        name: name of the layer.
    """

    layer: int
    head: int
    name: str

    def place_cells(self) -> dict[str, str]:
        """Return the place of the head as the first cells of a row of a table: heading -> text."""
        return {name: str(getattr(self, name)) for name in HEAD_COLUMNS}


Found = TypeVar("Found", bound=OneLineRepr)


class HeadList(list[Found]):
    """A list of heads, shown as one line per head in a terminal, and as one table row per head in a notebook.

    >>> class Head(OneLineRepr):
    ...     def __str__(self):
    ...         return "L0 H1: previous 88 %"
    >>> HeadList([Head(), Head()])
    [<Head L0 H1: previous 88 %>,
     <Head L0 H1: previous 88 %>]
    """

    def __repr__(self) -> str:
        lines = ",\n ".join(map(repr, self))
        return f"[{lines}]"

    def _repr_html_(self) -> str:
        rows = [each.cells() for each in self]
        headings = dict.fromkeys(heading for row in rows for heading in row)
        return _html_table(headings, [[row.get(heading, "") for heading in headings] for row in rows])


def statistic_columns(names: Iterable[str], statistics: Mapping[str, Statistic] | None) -> list[Statistic]:
    """Return the columns of a table that are statistics, without chance levels."""
    return [
        statistic(name, statistics) for name in names if name not in TEXT_COLUMNS and not name.endswith(CHANCE_SUFFIX)
    ]


def distinct_chances(rows: Sequence[Mapping[str, Any]], columns: Sequence[Statistic]) -> list[list[str]]:
    """Return the distinct chance levels of the rows: lists of one formatted number per column, "" if unknown."""
    found = dict.fromkeys(tuple(each.number(row.get(each.name + CHANCE_SUFFIX)) for each in columns) for row in rows)
    shown = [["" if number == "-" else number for number in level] for level in found]
    return [level for level in shown if any(level)][:MAX_CHANCE_ROWS]


def html_of_table(
    title: str,
    caption: str,
    rows: Sequence[dict[str, Any]],
    places: Sequence[str],
    statistics: Mapping[str, Statistic] | None = None,
    *,
    rest: str = "table()",
) -> str:
    """Return HTML with a title, a caption, and a table with one row per head.

    Args:
        title: shown in bold; "" shows neither title nor caption.
        caption: one sentence without its full stop.
        rows: one dict per head: "layer", "head", "name", and its statistics.
        places: which of "layer", "head" and "name" are columns; "kind" is a column if the rows have kinds.
        statistics: label, unit and number format of the statistics that are not built in.
        rest: the call that returns all rows, which a line below the first `MAX_SHOWN_HEADS` rows names.

    >>> html_of_table("<b>", "nothing was recorded yet", [], [])
    '<div><p><strong>&lt;b&gt;</strong>: nothing was recorded yet.</p></div>'
    """
    heading = f"<p><strong>{escape(title)}</strong>: {escape(caption)}.</p>" if title else ""
    return f"<div>{heading}{_html_rows(rows, places, statistics, rest) if rows else ''}</div>"


def number_with_noun(number: int, noun: str) -> str:
    """Return a number with its noun in singular or plural.

    >>> number_with_noun(1, "head"), number_with_noun(2000, "query"), number_with_noun(3, "key")
    ('1 head', '2,000 queries', '3 keys')
    """
    plural = f"{noun[:-1]}ies" if noun.endswith("y") and noun != "key" else f"{noun}s"
    return f"{number:,} {noun if number == 1 else plural}"


def _html_rows(
    rows: Sequence[dict[str, Any]], places: Sequence[str], statistics: Mapping[str, Statistic] | None, rest: str
) -> str:
    names = dict.fromkeys(name for row in rows for name in row)
    places = [*places, *(["kind"] if "kind" in names else [])]
    columns = statistic_columns(names, statistics)
    cells = [
        [*(str(row[place]) for place in places), *(_format_number(each, row.get(each.name)) for each in columns)]
        for row in rows[:MAX_SHOWN_HEADS]
    ]
    levels = [["chance", *level] for level in distinct_chances(rows, columns)]
    more = len(rows) - MAX_SHOWN_HEADS
    after = f"<p>{number_with_noun(more, 'head')} more: {rest} has all.</p>" if more > 0 else ""
    return _html_table([*places, *(each.heading for each in columns)], cells, levels) + after


def _html_table(headings: Collection[str], rows: Iterable[Sequence[str]], last: Iterable[Sequence[str]] = ()) -> str:
    """Return an HTML table; each row of `last` begins with a heading that spans the columns it has no cell for."""
    head = "".join(f"<th>{escape(each)}</th>" for each in headings)
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    for name, *cells in last:
        numbers = "".join(f"<td>{escape(cell)}</td>" for cell in cells)
        wide = len(headings) - len(cells)
        body += f'<tr><th colspan="{wide}">{escape(name)}</th>{numbers}</tr>'
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _format_number(shown: Statistic, value: float | None) -> str:
    return "–" if value is None or math.isnan(value) else shown.number(value)


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
        return f"<HeadTable of {number_with_noun(len(self.rows), 'head')}>"

    def _repr_html_(self) -> str:
        """Return the table as HTML for a notebook."""
        return html_of_table("", "", self.rows, HEAD_COLUMNS, self.statistics)

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
