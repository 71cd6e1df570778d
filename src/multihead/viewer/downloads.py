"""Write the table of all heads, or a part of an attention map, as CSV or JSON that is streamed while computed."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from multihead.errors import ArgumentError
from multihead.locale.escaping import CONTROL_CHARACTERS, escape_controls

if TYPE_CHECKING:
    from multihead.record.sample import SampleRecord

MAX_CELLS = 1 << 20
"""Maximum number of weights in one download."""

_BLOCK_CELLS = 1 << 16  # number of weights that are computed between two writes
_OPENS_A_FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n", "＝", "＋", "－", "＠")


def escape_for_spreadsheet(value: object) -> object:
    """Escape text that a spreadsheet would read as a formula: prefix it with an apostrophe.

    >>> escape_for_spreadsheet("=1+1"), escape_for_spreadsheet("cat"), escape_for_spreadsheet(-0.5)
    ("'=1+1", 'cat', -0.5)
    """
    return f"'{value}" if isinstance(value, str) and value.lstrip(" ").startswith(_OPENS_A_FORMULA) else value


def check_download_size(queries: slice, keys: slice) -> None:
    """Reject a download of too many weights.

    Raises:
        ArgumentError: the download has more than `MAX_CELLS` weights.
    """
    rows, columns = queries.stop - queries.start, keys.stop - keys.start
    if rows * columns > MAX_CELLS:
        raise ArgumentError(
            f"{rows:,} queries x {columns:,} keys are {rows * columns:,} weights; a download holds at most "
            f"{MAX_CELLS:,}.",
            "Choose a smaller part; `seen[layer].weights(...)` in Python is limited only by memory.",
        )


def _escape_cell(value: object) -> object:
    """Escape text for a spreadsheet, see `escape_for_spreadsheet`, and escape characters that act on a terminal."""
    return escape_for_spreadsheet(escape_controls(value)) if isinstance(value, str) else value


def table_csv(rows: Sequence[Mapping[str, Any]]) -> Iterator[bytes]:
    """Yield a CSV file: a header line and one line per head; characters that act on a terminal are escaped."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    # Unix tools expect lines to end with \n; no cell contains a line break that would need \r\n.
    yield from _csv_bytes([[_escape_cell(name) for name in names]], end="\n")
    yield from _csv_bytes(([_escape_cell(row.get(name, "")) for name in names] for row in rows), end="\n")


def table_json(rows: Sequence[Mapping[str, Any]]) -> Iterator[bytes]:
    """Yield a JSON list of objects, one per head; NaN and infinities become null."""
    plain = [{name: _none_if_not_finite(value) for name, value in row.items()} for row in rows]
    text = json.dumps(plain, indent=1, allow_nan=False, ensure_ascii=False)
    # A JSON reader decodes an escape to the same character, and a terminal does not act on an escape.
    escaped = CONTROL_CHARACTERS.sub(lambda found: found[0] if found[0] == "\n" else f"\\u{ord(found[0]):04x}", text)
    yield escaped.encode() + b"\n"


def weights_csv(
    sample: SampleRecord,
    head: int,
    *,
    queries: slice,
    keys: slice,
    query_tokens: Sequence[str] | None = None,
    key_tokens: Sequence[str] | None = None,
) -> Iterator[bytes]:
    """Yield a CSV file with one line per weight: query, key, their tokens if known, and the weight (empty if masked).

    Args:
        sample: one text in one layer.
        head: index of the head.
        queries: range of queries; start and stop are integers.
        keys: range of keys; start and stop are integers.
        query_tokens: the tokens of all queries.
        key_tokens: the tokens of all keys.
    """
    names = ["query", "key", *(["query_token"] if query_tokens else []), *(["key_token"] if key_tokens else [])]
    yield from _csv_bytes([[*names, "weight"]])
    ends = [_escape_cell(each) for each in key_tokens[keys]] if key_tokens else None
    for query, row in _formatted_rows_of_weights(sample, head, queries, keys):
        begins = [_escape_cell(query_tokens[query])] if query_tokens else []
        yield from _csv_bytes(
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
    """Yield a JSON object: the ranges, their tokens, and a list of weights per query; a masked weight is null.

    The arguments are those of `weights_csv`.
    """
    header = {
        "layer": sample.name,
        "head": head,
        "queries": [queries.start, queries.stop],
        "keys": [keys.start, keys.stop],
        "query_tokens": list(query_tokens[queries]) if query_tokens else None,
        "key_tokens": list(key_tokens[keys]) if key_tokens else None,
    }
    yield json.dumps(header).encode()[:-1] + b', "weights": ['
    separator = b"\n"
    for _, row in _formatted_rows_of_weights(sample, head, queries, keys):
        yield separator + b"[" + ",".join(weight or "null" for weight in row).encode() + b"]"
        separator = b",\n"
    yield b"\n]}\n"


def _formatted_rows_of_weights(
    sample: SampleRecord, head: int, queries: slice, keys: slice
) -> Iterator[tuple[int, list[str]]]:
    """Yield (query, its weights as text with all digits) for part of a map; the text of a masked weight is ""."""
    step = max(1, _BLOCK_CELLS // max(1, keys.stop - keys.start))
    digits = 17 if sample.dtype == torch.float64 else 9
    for first in range(queries.start, queries.stop, step):
        some = slice(first, min(first + step, queries.stop))
        shown = sample.visible(queries=some, keys=keys)
        shown = shown if shown.dim() == 2 else shown[head]
        weights = sample.weights(head, queries=some, keys=keys)
        for place, (row, seen) in enumerate(zip(weights.tolist(), shown.tolist(), strict=True)):
            # A NaN weight is written like a masked one, as "".
            known = (math.isfinite(weight) and one for weight, one in zip(row, seen, strict=True))
            yield (
                first + place,
                [f"{weight:.{digits}g}" if one else "" for weight, one in zip(row, known, strict=True)],
            )


def _csv_bytes(rows: Iterable[Sequence[object]], *, end: str = "\r\n") -> Iterator[bytes]:
    written = io.StringIO()
    csv.writer(written, lineterminator=end).writerows(rows)
    yield written.getvalue().encode("utf-8", "replace")  # UTF-8 cannot encode a lone surrogate


def _none_if_not_finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


TABLE_WRITERS = {"csv": table_csv, "json": table_json}
WEIGHT_WRITERS = {"csv": weights_csv, "json": weights_json}
