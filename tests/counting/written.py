"""Files of texts in every format, compressed or not, as bytes."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import feather, ipc

Value = str | bytes | None


def column_of(values: Sequence[Value]) -> pa.Array:
    """Return a column of strings, of which some may not be UTF-8."""
    coded = [each.encode() if isinstance(each, str) else each for each in values]
    return pa.array(coded, pa.binary()).view(pa.string())


def table_of(values: Sequence[Value], column: str) -> pa.Table:
    return pa.table({"number": pa.array(range(len(values))), column: column_of(values)})


def parquet_of(values: Sequence[Value], column: str) -> bytes:
    written = io.BytesIO()
    pq.write_table(table_of(values, column), written, row_group_size=25)
    return written.getvalue()


def arrow_of(values: Sequence[Value], column: str, *, new: Callable[..., Any]) -> bytes:
    written, table = io.BytesIO(), table_of(values, column)
    with new(written, table.schema) as writer:
        writer.write_table(table, max_chunksize=25)
    return written.getvalue()


def feather_of(values: Sequence[Value], column: str) -> bytes:
    written = io.BytesIO()
    feather.write_feather(table_of(values, column), written, chunksize=25)
    return written.getvalue()


def csv_of(values: Sequence[Value], column: str) -> bytes:
    rows = [b"" if each is None else each.encode() if isinstance(each, str) else each for each in values]
    lines = [b'%d,"%s"\r\n' % (number, row.replace(b'"', b'""')) for number, row in enumerate(rows)]
    return b"".join([f"number,{column}\r\n".encode(), *lines])


def jsonl_of(values: Sequence[Value], column: str) -> bytes:
    lines = [b'"%s"' % each if isinstance(each, bytes) else json.dumps({column: each}).encode() for each in values]
    return b"".join(line + b"\n" for line in lines)


def lines_of(values: Sequence[Value], column: str) -> bytes:
    return b"".join((each if isinstance(each, bytes) else (each or "").encode()) + b"\n" for each in values)


def flip_a_bit(content: bytes, draw: random.Random) -> bytes:
    """Return bytes of which one bit, drawn at random, is another."""
    flipped, place = bytearray(content), draw.randrange(8 * len(content))
    flipped[place // 8] ^= 1 << place % 8
    return bytes(flipped)


def zstandard(content: bytes) -> bytes:
    written = pa.BufferOutputStream()
    with pa.CompressedOutputStream(written, "zstd") as stream:
        stream.write(content)
    return bytes(written.getvalue())


_PLAIN: dict[str, Callable[[Sequence[Value], str], bytes]] = {
    "a.parquet": parquet_of,
    "a.arrow": partial(arrow_of, new=ipc.new_file),
    "stream.arrow": partial(arrow_of, new=ipc.new_stream),
    "a.feather": feather_of,
    "a.csv": csv_of,
    "a.jsonl": jsonl_of,
    "a.txt": lines_of,
}
COMPRESSED = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress, ".zst": zstandard}
FORMATS = {
    **_PLAIN,
    **{
        name + suffix: (lambda values, column, *, write=write, compress=compress: compress(write(values, column)))
        for name, write in _PLAIN.items()
        if name in ("a.csv", "a.jsonl", "a.txt")
        for suffix, compress in COMPRESSED.items()
    },
}
"""File name -> the bytes of a file of values under the name of a column."""
