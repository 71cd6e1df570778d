"""Numbers to take along: the table of all heads and a part of a map, as CSV and JSON, written as they are computed."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from multihead.errors import ArgumentError

if TYPE_CHECKING:
    from multihead.record.sample import SampleRecord

MOST_CELLS = 1 << 20
"""Weights that one download may hold."""

_ROWS_AT_ONCE = 1 << 16  # weights that are computed between two writes
_OPENS_A_FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n", "＝", "＋", "－", "＠")


def cell(value: object) -> object:
    """Write text so that no spreadsheet takes it for a formula: behind an apostrophe if it could be one.

    >>> cell("=1+1"), cell("cat"), cell(-0.5)
    ("'=1+1", 'cat', -0.5)
    """
    return f"'{value}" if isinstance(value, str) and value.lstrip(" ").startswith(_OPENS_A_FORMULA) else value


def refuse_unless_moderate(queries: slice, keys: slice) -> None:
    """Refuse more weights than a download holds.

    Raises:
        ArgumentError: it would be more than `MOST_CELLS`.
    """
    rows, columns = queries.stop - queries.start, keys.stop - keys.start
    if rows * columns > MOST_CELLS:
        raise ArgumentError(
            f"{rows:,} queries x {columns:,} keys are {rows * columns:,} weights.",
            f"Ask for {MOST_CELLS:,} at most; `seen[layer].weights(...)` gives as many as fit the memory.",
        )


def table_csv(rows: Sequence[Mapping[str, Any]]) -> Iterator[bytes]:
    """Write a line a head under a line of names."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    yield from _lines([[cell(name) for name in names]])
    yield from _lines([cell(row.get(name, "")) for name in names] for row in rows)


def table_json(rows: Sequence[Mapping[str, Any]]) -> Iterator[bytes]:
    """Write a list of objects, one a head; what is no number is null."""
    plain = [{name: _known(value) for name, value in row.items()} for row in rows]
    yield json.dumps(plain, indent=1, allow_nan=False).encode() + b"\n"


def weights_csv(
    sample: SampleRecord,
    head: int,
    *,
    queries: slice,
    keys: slice,
    query_tokens: Sequence[str] | None = None,
    key_tokens: Sequence[str] | None = None,
) -> Iterator[bytes]:
    """Write a line a weight: query, key, their tokens where they are known, weight; a hidden key has none.

    Args:
        sample: one text in one layer.
        head: which head.
        queries: which queries; start and stop are numbers.
        keys: which keys; start and stop are numbers.
        query_tokens: the tokens of all queries.
        key_tokens: the tokens of all keys.
    """
    names = ["query", "key", *(["query_token"] if query_tokens else []), *(["key_token"] if key_tokens else [])]
    yield from _lines([[*names, "weight"]])
    ends = [cell(each) for each in key_tokens[keys]] if key_tokens else None
    for query, row in _rows(sample, head, queries, keys):
        begins = [cell(query_tokens[query])] if query_tokens else []
        yield from _lines(
            [query, key, *begins, *([ends[place]] if ends else []), weight]
            for place, (key, weight) in enumerate(zip(range(keys.start, keys.stop), row, strict=True))
        )


def weights_json(
    sample: SampleRecord,
    head: int,
    *,
    queries: slice,
    keys: slice,
    query_tokens: Sequence[str] | None = None,
    key_tokens: Sequence[str] | None = None,
) -> Iterator[bytes]:
    """Write one object: which queries and keys, their tokens, and a list of weights a query; hidden ones are null.

    Its arguments are those of `weights_csv`.
    """
    told = {
        "layer": sample.name,
        "head": head,
        "queries": [queries.start, queries.stop],
        "keys": [keys.start, keys.stop],
        "query_tokens": list(query_tokens[queries]) if query_tokens else None,
        "key_tokens": list(key_tokens[keys]) if key_tokens else None,
    }
    yield json.dumps(told).encode()[:-1] + b', "weights": ['
    between = b"\n"
    for _, row in _rows(sample, head, queries, keys):
        yield between + b"[" + ",".join(weight or "null" for weight in row).encode() + b"]"
        between = b",\n"
    yield b"\n]}\n"


def _rows(sample: SampleRecord, head: int, queries: slice, keys: slice) -> Iterator[tuple[int, list[str]]]:
    """Compute the rows of a part of a map, some at a time; each weight has all the digits it has, a hidden one none."""
    step = max(1, _ROWS_AT_ONCE // max(1, keys.stop - keys.start))
    digits = 17 if sample.dtype == torch.float64 else 9
    for first in range(queries.start, queries.stop, step):
        some = slice(first, min(first + step, queries.stop))
        shown = sample.visible(queries=some, keys=keys)
        shown = shown if shown.dim() == 2 else shown[head]
        weights = sample.weights(head, queries=some, keys=keys)
        for place, (row, seen) in enumerate(zip(weights.tolist(), shown.tolist(), strict=True)):
            # A weight that is no number (NaN in the model) is left out as a hidden one is.
            known = (math.isfinite(weight) and one for weight, one in zip(row, seen, strict=True))
            yield (
                first + place,
                [f"{weight:.{digits}g}" if one else "" for weight, one in zip(row, known, strict=True)],
            )


def _lines(rows: Iterable[Sequence[object]]) -> Iterator[bytes]:
    written = io.StringIO()
    csv.writer(written, lineterminator="\r\n").writerows(rows)
    yield written.getvalue().encode("utf-8", "replace")  # a lone surrogate has no place in UTF-8


def _known(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


TABLES = {"csv": table_csv, "json": table_json}
WEIGHTS = {"csv": weights_csv, "json": weights_json}
