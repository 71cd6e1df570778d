"""Show records, samples, tables and found heads in a notebook; HTML has no scripts, and every text in it is escaped."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from multihead.probes.catalogue import statistic
from multihead.probes.probe import Statistic

ROWS = 24
"""Heads that a notebook shows; `print(record.table())` shows all."""


PLACES = ("layer", "head", "name")
"""The columns of a table that say which head it is."""

WORDS = (*PLACES, "kind")
"""The columns that are no statistic."""

CHANCE = "_chance"
"""What follows the name of a statistic in the name of the column with its chance."""

MOST_LEVELS = 4
"""Lines of a table that list chance: layers with different masks have different levels."""


class OneLine:
    """A head that was found, whose repr is its line, so that a list of such heads can be read as it is shown.

    >>> class Head(OneLine):
    ...     def __str__(self):
    ...         return "L0 H1: previous 88 %"
    >>> [Head()]
    [<Head L0 H1: previous 88 %>]
    """

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self}>"


def statistic_columns(names: Iterable[str], statistics: Mapping[str, Statistic] | None) -> list[Statistic]:
    """Return the statistics among a table's columns, without the columns of chance."""
    return [statistic(name, statistics) for name in names if name not in WORDS and not name.endswith(CHANCE)]


def distinct_chances(rows: Sequence[Mapping[str, Any]], columns: Sequence[Statistic]) -> list[list[str]]:
    """Return the distinct chance levels of some rows as text: per level one number per column, "" if unknown."""
    found = dict.fromkeys(tuple(each.number(row.get(each.name + CHANCE)) for each in columns) for row in rows)
    shown = [["" if number == "-" else number for number in level] for level in found]
    return [level for level in shown if any(level)][:MOST_LEVELS]


def html_of_table(
    title: str,
    caption: str,
    rows: Sequence[dict[str, Any]],
    places: Sequence[str],
    statistics: Mapping[str, Statistic] | None = None,
    *,
    rest: str = "print(record.table())",
) -> str:
    """Return a title, a caption, and a table with one row per head.

    Args:
        title: shown in bold; "" shows neither title nor caption.
        caption: one sentence without its full stop.
        rows: one dict per head: "layer", "head", "name", and its statistics.
        places: which of "layer", "head" and "name" are columns; "kind" is one if the rows have it.
        statistics: label, unit and number format of the statistics that are not built in.
        rest: what returns the rows after the first `ROWS`.

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
