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
from multihead.viewer.page import round_for_json
from multihead.viewer.tiles import visible_weights

if TYPE_CHECKING:
    from multihead.record.sample import SampleRecord

MAX_WEIGHTS_PER_DOWNLOAD = 1 << 20
"""Maximum number of weights in one download."""

_WEIGHTS_PER_WRITE = 1 << 16  # number of weights that are computed between two writes
_FORMULA_PREFIXES = ("=", "+", "-", "@", "＝", "＋", "－", "＠")  # after tabs and line breaks are escaped


def escape_cell(value: object) -> object:
    """Escape text that acts on a terminal; text that a spreadsheet would read as a formula gets an apostrophe first.

    >>> escape_cell("=1+1"), escape_cell("cat"), escape_cell(-0.5)
    ("'=1+1", 'cat', -0.5)
    """
    if not isinstance(value, str):
        return value
    escaped = escape_controls(value)
    return f"'{escaped}" if escaped.lstrip(" ").startswith(_FORMULA_PREFIXES) else escaped


def check_download_size(queries: slice, keys: slice) -> None:
    """Reject a download of too many weights.

    Raises:
        ArgumentError: the download has more than `MAX_WEIGHTS_PER_DOWNLOAD` weights.
    """
    rows, columns = queries.stop - queries.start, keys.stop - keys.start
    if rows * columns > MAX_WEIGHTS_PER_DOWNLOAD:
        raise ArgumentError(
            f"{rows:,} queries x {columns:,} keys are {rows * columns:,} weights; a download holds at most "
            f"{MAX_WEIGHTS_PER_DOWNLOAD:,}.",
            "Choose a smaller part; `seen[layer].weights(...)` in Python is limited only by memory.",
        )


def table_csv(rows: Sequence[Mapping[str, Any]]) -> Iterator[bytes]:
    """Yield a CSV file: a header line and one line per head; characters that act on a terminal are escaped."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    # Unix tools expect lines to end with \n; no cell contains a line break that would need \r\n.
    yield from _encode_csv([[escape_cell(name) for name in names]], end="\n")
    yield from _encode_csv(([escape_cell(row.get(name, "")) for name in names] for row in rows), end="\n")


def table_json(rows: Sequence[Mapping[str, Any]]) -> Iterator[bytes]:
    """Yield a JSON list of objects, one per head; NaN and infinities become null."""
    plain = [
        {name: round_for_json(value) if isinstance(value, float) else value for name, value in row.items()}
        for row in rows
    ]
    text = json.dumps(plain, indent=1, allow_nan=False, ensure_ascii=False)
    # A JSON reader decodes an escape to the same character, and a terminal does not act on an escape.
    escaped = CONTROL_CHARACTERS.sub(lambda found: found[0] if found[0] == "\n" else f"\\u{ord(found[0]):04x}", text)
    yield escaped.encode() + b"\n"


def weights_csv(sample: SampleRecord, head: int, *, queries: slice, keys: slice) -> Iterator[bytes]:
    """Yield a CSV file with one line per weight: query, key, their tokens if known, and the weight (empty if masked).

    Args:
        sample: one text in one layer.
        head: index of the head.
        queries: range of queries; start and stop are integers.
        keys: range of keys; start and stop are integers.
    """
    query_tokens, key_tokens = sample.query_text.tokens, sample.text.tokens
    names = ["query", "key", *(["query_token"] if query_tokens else []), *(["key_token"] if key_tokens else [])]
    yield from _encode_csv([[*names, "weight"]])
    ends = [escape_cell(each) for each in key_tokens[keys]] if key_tokens else None
    for query, row in _formatted_rows_of_weights(sample, head, queries, keys):
        begins = [escape_cell(query_tokens[query])] if query_tokens else []
        yield from _encode_csv(
            [query, key, *begins, *([ends[place]] if ends else []), weight]
            for place, (key, weight) in enumerate(zip(range(keys.start, keys.stop), row, strict=True))
        )


def weights_json(sample: SampleRecord, head: int, *, queries: slice, keys: slice) -> Iterator[bytes]:
    """Yield a JSON object: the ranges, their tokens, and a list of weights per query; a masked weight is null.

    The arguments are those of `weights_csv`.
    """
    query_tokens, key_tokens = sample.query_text.tokens, sample.text.tokens
    header = {
        "layer": sample.name,
        "head": head,
        "queries": [queries.start, queries.stop],
        "keys": [keys.start, keys.stop],
        "query_tokens": query_tokens[queries] if query_tokens else None,
        "key_tokens": key_tokens[keys] if key_tokens else None,
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
    """Yield (query, its weights as text with all digits) for part of a map; "" for a masked or NaN weight."""
    step = max(1, _WEIGHTS_PER_WRITE // max(1, keys.stop - keys.start))
    digits = 17 if sample.dtype == torch.float64 else 9
    for first in range(queries.start, queries.stop, step):
        some = slice(first, min(first + step, queries.stop))
        weights = visible_weights(sample, head, queries=some, keys=keys)
        for query, row in enumerate(weights.tolist(), first):
            yield query, [f"{weight:.{digits}g}" if math.isfinite(weight) else "" for weight in row]


def _encode_csv(rows: Iterable[Sequence[object]], *, end: str = "\r\n") -> Iterator[bytes]:
    written = io.StringIO()
    csv.writer(written, lineterminator=end).writerows(rows)
    yield written.getvalue().encode("utf-8", "replace")  # UTF-8 cannot encode a lone surrogate


TABLE_WRITERS = {"csv": table_csv, "json": table_json}
WEIGHT_WRITERS = {"csv": weights_csv, "json": weights_json}
