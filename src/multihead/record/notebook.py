"""HTML of records, samples and tables for notebooks, without scripts and with escaped texts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from multihead.probes.catalogue import statistic
from multihead.probes.probe import Statistic

ROWS = 24
"""Largest number of heads that a notebook shows; `print(record.table())` shows all."""


PLACES = ("layer", "head", "name")
"""Columns of a table that identify a head."""

WORDS = (*PLACES, "kind")
"""Columns of a table that are not statistics."""

CHANCE = "_chance"
"""Suffix of a column with the chance level of a statistic, after the name of the statistic."""

MAX_CHANCE_ROWS = 4
"""Largest number of rows with chance levels in a table; layers with different masks have different levels."""


class OneLine:
    """Base class whose repr contains the str of an object, so that a list of found heads is readable.

    >>> class Head(OneLine):
    ...     def __str__(self):
    ...         return "L0 H1: previous 88 %"
    >>> [Head()]
    [<Head L0 H1: previous 88 %>]
    """

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self}>"


def statistic_columns(names: Iterable[str], statistics: Mapping[str, Statistic] | None) -> list[Statistic]:
    """Return the columns of a table that are statistics, without chance levels."""
    return [statistic(name, statistics) for name in names if name not in WORDS and not name.endswith(CHANCE)]


def distinct_chances(rows: Sequence[Mapping[str, Any]], columns: Sequence[Statistic]) -> list[list[str]]:
    """Return the distinct chance levels of the rows: lists of one formatted number per column, "" if unknown."""
    found = dict.fromkeys(tuple(each.number(row.get(each.name + CHANCE)) for each in columns) for row in rows)
    shown = [["" if number == "-" else number for number in level] for level in found]
    return [level for level in shown if any(level)][:MAX_CHANCE_ROWS]


def html_of_table(
    title: str,
    caption: str,
    rows: Sequence[dict[str, Any]],
    places: Sequence[str],
    statistics: Mapping[str, Statistic] | None = None,
    *,
    rest: str = "print(record.table())",
) -> str:
    """Return HTML with a title, a caption, and a table with one row per head.

    Args:
        title: shown in bold; "" shows neither title nor caption.
        caption: one sentence without its full stop.
        rows: one dict per head: "layer", "head", "name", optionally "kind", and the statistics.
        places: which of "layer", "head" and "name" are columns; "kind" is a column if the rows have it.
        statistics: name -> statistic, for the statistics that are not built in.
        rest: Python expression that shows all rows, printed if there are more than `ROWS`.

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
    head = "".join(f"<th>{escape(heading)}</th>" for heading in [*places, *(each.heading for each in columns)])
    body = "".join(
        "<tr>"
        + "".join(f"<td>{escape(str(row[place]))}</td>" for place in places)
        + "".join(f"<td>{_format_number(each, row.get(each.name))}</td>" for each in columns)
        + "</tr>"
        for row in rows[:ROWS]
    )
    for level in distinct_chances(rows, columns):
        cells = "".join(f"<td>{number}</td>" for number in level)
        body += f'<tr><th colspan="{len(places)}">chance</th>{cells}</tr>'
    more = len(rows) - ROWS
    after = f"<p>{number_with_noun(more, 'head')} more: {rest}.</p>" if more > 0 else ""
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{after}"


def _format_number(shown: Statistic, value: float | None) -> str:
    return "–" if value is None or math.isnan(value) else shown.number(value)
