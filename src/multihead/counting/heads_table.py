"""The table of heads, of a shard and of a census: its columns, its sums, and its parquet file."""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from multihead.record.chance import Moments
from multihead.record.running_summary import SUMS_WITHOUT_QUERIES, StatisticSums

METADATA_KEY = b"multihead"
"""Key in the metadata of a parquet file under which the counts of the shard or census are stored as JSON."""

HASH_KEY = b"multihead.hash"
"""Key in the metadata of a parquet file under which the hash of its bytes is stored, taken with zeros in its place."""

_NO_HASH = b"0" * 32

CHANCE_COLUMNS = "chance", "texts", "excess", "excess_squares"
"""Columns about chance levels, null where no query counts or the chance level is unknown; missing in old files."""

BLOCK_COLUMNS = "blocks", "block_excess", "block_squares"
"""Columns with the moments of value - chance over blocks of queries, from which a standard error is computed where
there are too few texts; null where there are enough, or they are unknown, and missing in old files."""


def heads_schema() -> Any:
    """Return the pyarrow schema of a table of heads."""
    import pyarrow as pa

    example = pa.struct(
        [
            ("value", pa.float64()),
            ("shard", pa.int32()),
            ("text", pa.int64()),
            ("position", pa.int32()),
            ("token", pa.string()),
            ("key", pa.int32()),
            ("key_token", pa.string()),
            ("start", pa.int32()),
            ("tokens", pa.list_(pa.string())),
            ("values", pa.list_(pa.float32())),
        ]
    )
    return pa.schema(
        [
            ("layer", pa.int32()),
            ("name", pa.string()),
            ("head", pa.int32()),
            ("statistic", pa.string()),
            *((name, pa.from_numpy_dtype(type(value))) for name, value in SUMS_WITHOUT_QUERIES.items()),
            *zip(BLOCK_COLUMNS, (pa.int64(), pa.float64(), pa.float64()), strict=True),
            ("bin_value", pa.list_(pa.float64())),
            ("bin_count", pa.list_(pa.int64())),
            ("examples", pa.list_(example)),
        ]
    )


def add_missing_columns(table: Any) -> Any:
    """Add the columns that a table of heads of an earlier version lacks, filled with null."""
    import pyarrow as pa

    for at, column in enumerate(heads_schema()):
        if column.name not in table.column_names:
            table = table.add_column(at, column, pa.nulls(len(table), column.type))
    return table


def build_heads_table(
    rows: Sequence[tuple[int, str, str, int]],
    order: NDArray[np.int64],
    sums: StatisticSums,
    blocks: Moments | None,
    bins: tuple[NDArray[np.int64], Any, Any],
    examples: Any,
) -> Any:
    """Return a table of heads (pyarrow).

    Args:
        rows: per row of the table (number of the layer, name of the layer, statistic, head).
        order: (rows,), per row of the table the index of its row in `sums` and in `bins`.
        sums: the sums of each row.
        blocks: the moments of blocks of queries of each row, see `BLOCK_COLUMNS`, of which a number of NaN is unknown.
        bins: row, ascending, value and count of each histogram bin that is not empty: (bins,) each.
        examples: per row of the table the list of its strongest examples.
    """
    import pyarrow as pa

    sums = sums.rows(order)
    none = (sums.num_queries == 0).numpy()
    null_where = {**dict.fromkeys(CHANCE_COLUMNS, none | sums.excess.isnan().numpy()), "minimum": none, "maximum": none}
    columns: dict[str, Any] = dict(
        zip(("layer", "name", "statistic", "head"), map(list, zip(*rows, strict=True)), strict=True)
    )
    for name, values in zip(SUMS_WITHOUT_QUERIES, sums, strict=True):
        columns[name] = pa.array(values.numpy(), mask=null_where.get(name))
    for name, moments in zip(BLOCK_COLUMNS, blocks or [None] * len(BLOCK_COLUMNS), strict=True):
        unknown = blocks is None or blocks[0][order].isnan().numpy()
        columns[name] = pa.nulls(len(rows)) if moments is None else pa.array(moments[order].numpy(), mask=unknown)
    row_of_bin, columns["bin_value"], columns["bin_count"] = bins
    for name in ("bin_value", "bin_count"):
        columns[name] = group_values_by_row(row_of_bin, columns[name], order)
    return pa.Table.from_pydict(columns | {"examples": examples}, schema=heads_schema())


def sums_of_table(table: Any) -> StatisticSums:
    """Return the sums of each row of a table of heads."""
    has_no_query = table["count"].to_numpy() == 0
    sums = []
    for name, value in SUMS_WITHOUT_QUERIES.items():
        if isinstance(value, int):
            column = table[name].fill_null(value).to_numpy()
        else:  # null becomes NaN, which is an unknown chance, and without a query the value of such a row
            column = np.where(has_no_query, value, table[name].to_numpy())
        sums.append(torch.tensor(column))
    return StatisticSums(*sums)


def blocks_of_table(table: Any) -> Moments:
    """Return the moments of blocks of queries of each row of a table of heads; NaN where they are unknown."""
    number, mean, squares = (torch.tensor(table[name].to_numpy().astype(np.float64)) for name in BLOCK_COLUMNS)
    return number, mean, squares


def group_values_by_row(row: NDArray[np.int64], values: Any, order: NDArray[np.int64]) -> Any:
    """Return a pyarrow array: the list of values of each row in `order`; `row` has each value's row, ascending."""
    import pyarrow as pa

    first, stop = (np.searchsorted(row, order, side) for side in ("left", "right"))
    ends = np.cumsum(stop - first)
    offsets = np.append(0, ends)
    index = np.repeat(first - offsets[:-1], stop - first) + np.arange(offsets[-1])
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), values.take(pa.array(index)))


def table_to_parquet(table: Any, metadata: dict[str, Any]) -> bytes:
    """Return a table with metadata as the bytes of a parquet file; equal tables give equal bytes.

    The pages have checksums, which any reader can verify. They cover neither the footer nor the metadata, so a hash of
    the whole file is stored in the footer too.
    """
    import pyarrow.parquet as pq

    written = io.BytesIO()
    content = json.dumps(metadata, ensure_ascii=False, sort_keys=True).encode()
    table = table.replace_schema_metadata({METADATA_KEY: content})
    with pq.ParquetWriter(written, table.schema, compression="zstd", write_page_checksum=True) as writer:
        writer.write_table(table)
        writer.add_key_value_metadata({HASH_KEY.decode(): _NO_HASH.decode()})
    without_hash = written.getvalue()
    return _hash_of_file(without_hash).join(without_hash.rsplit(_NO_HASH, 1))


def table_from_parquet(content: bytes) -> Any:
    """Return the table (pyarrow) of the bytes of a parquet file; None if they are damaged.

    A file of an earlier version has no hash; then only damage that makes it unreadable is found.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        file = pq.ParquetFile(io.BytesIO(content), page_checksum_verification=True)
        found = (file.metadata.metadata or {}).get(HASH_KEY)
        if found is not None and _hash_of_file(_NO_HASH.join(content.rsplit(found, 1))) != found:
            return None
        table = file.read(use_threads=False)
        table.validate(full=True)
        read_metadata(table.schema)
    except (OSError, ValueError, RecursionError, pa.ArrowException):  # ValueError: metadata that is not JSON
        return None
    return table


def _hash_of_file(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=len(_NO_HASH) // 2).hexdigest().encode()


def read_metadata(schema: Any) -> dict[str, Any]:
    """Return the metadata that `table_to_parquet` wrote; empty if there is none."""
    content = (schema.metadata or {}).get(METADATA_KEY, b"{}")
    found = json.loads(content)
    return found if isinstance(found, dict) else {}
