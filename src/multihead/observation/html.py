"""Show a record in a notebook: a table that is read without scripts, every text in it escaped."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from multihead.observation.table import HEADINGS, HeadTable

if TYPE_CHECKING:
    from multihead.observation.record import Record
    from multihead.observation.sample import SampleRecord

ROWS = 24
"""Heads that a notebook shows; `print(record.table())` shows all."""


def of_record(record: Record) -> str:
    """Show a record: what was watched, and a row a head.

    >>> from multihead.observation.record import Record
    >>> of_record(Record(title="<b>"))
    '<div><p><strong>&lt;b&gt;</strong>: nothing was seen yet.</p></div>'
    """
    title = f"<strong>{escape(record.title or 'Record')}</strong>"
    if not record.layers:
        return f"<div><p>{title}: nothing was seen yet.</p></div>"
    heads = [layer.num_heads for layer in record.layers]
    samples = max(layer.num_samples for layer in record.layers)
    tokens = max((one.num_keys for layer in record.layers for one in layer.samples), default=0)
    said = f"{_many(len(heads), 'layer')}, {_many(sum(heads), 'head')}, {_many(samples, 'text')}"
    said += f" of up to {_many(tokens, 'token')}" if tokens else ""
    kept = "" if record.keeps_weights else "; statistics only" if tokens else "; sums only"
    return f"<div><p>{title}: {said}{kept}.</p>{of_table(record.table())}</div>"


def of_sample(sample: SampleRecord) -> str:
    """Show a sample in a layer: a row a head, its means."""
    said = f"{_many(sample.num_queries, 'query')} and {_many(sample.num_keys, 'key')}"
    rows = [
        {"layer": "", "head": head, "name": sample.name}
        | {name: float(value[head]) for name, value in sample.means.items()}
        for head in range(sample.num_heads)
    ]
    return f"<div><p><strong>{escape(sample.name)}</strong>: {said}.</p>{_drawn(rows, ['head'])}</div>"


def of_table(table: HeadTable) -> str:
    """Show a table of heads, the first of them."""
    return _drawn(table.rows, ["layer", "head", "name"])


def _drawn(rows: Sequence[dict[str, Any]], places: Sequence[str]) -> str:
    names = list(dict.fromkeys(name for row in rows for name in row if name not in ("layer", "head", "name")))
    head = "".join(f"<th>{escape(HEADINGS.get(name, name))}</th>" for name in [*places, *names])
    body = "".join(
        "<tr>"
        + "".join(f"<td>{escape(str(row[place]))}</td>" for place in places)
        + "".join(f"<td>{_number(row.get(name))}</td>" for name in names)
        + "</tr>"
        for row in rows[:ROWS]
    )
    more = len(rows) - ROWS
    rest = f"<p>{_many(more, 'head')} more: print(record.table()).</p>" if more > 0 else ""
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{rest}"


def _number(value: float | None) -> str:
    return "–" if value is None or math.isnan(value) else f"{value:.3f}"


def _many(number: int, name: str) -> str:
    plural = f"{name[:-1]}ies" if name.endswith("y") and name != "key" else f"{name}s"
    return f"{number:,} {name if number == 1 else plural}"
