"""Merge the files of shards into one table of heads, in the order of the plan, so that equal shards give equal bytes.

Shards are merged in the order of the plan because sums of floating-point numbers depend on the order of their terms.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from multihead.counting.heads_table import (
    add_missing_columns,
    blocks_of_table,
    build_heads_table,
    group_values_by_row,
    heads_schema,
    read_metadata,
    sums_of_table,
    table_from_parquet,
    table_to_parquet,
)
from multihead.counting.plan import Plan
from multihead.files import write_atomically
from multihead.record.chance import MIN_OBSERVATIONS, Moments
from multihead.record.running_summary import StatisticSums, concatenate_moments, merge_moments, no_moments

HEADS_FILE = "heads.parquet"
SHARDS_FILE = "shards.parquet"

IntArray = NDArray[np.int64]


@dataclass(eq=False)
class MergedSums:
    """The sums of all shards so far: one row per layer, statistic and head.

    Attributes:
        examples: number of strongest examples that are kept per row.
        row_of_head: (number of a layer, statistic, head) -> index of its row.
        names: number of a layer -> its name.
        shards: the metadata of each shard's file: how many rows, texts and tokens were read.
        sums: the sums of each row; the chance is NaN if it is unknown in a shard.
        blocks: the moments of blocks of queries of each row, see `BLOCK_COLUMNS`; NaN if they are unknown in a shard.
    """

    examples: int
    row_of_head: dict[tuple[int, str, int], int] = field(default_factory=dict)
    names: dict[int, str] = field(default_factory=dict)
    shards: list[dict[str, Any]] = field(default_factory=list)
    sums: StatisticSums = field(default_factory=lambda: StatisticSums.empty(0))
    blocks: Moments = field(default_factory=lambda: no_moments(0))
    # tables with columns row, value and count: the histogram bins that are not empty
    _bins: list[Any] = field(default_factory=list)
    _examples: Any = None  # the examples of all rows; `_row_of_example` has their rows
    _row_of_example: IntArray = field(default_factory=lambda: np.zeros(0, np.int64))

    def add_shard(self, table: Any) -> None:
        """Add the table of heads of one shard; the caller adds shards in the order of the plan."""
        self.shards.append(read_metadata(table.schema))
        if not len(table):
            return
        keys = list(
            zip(*(table[name].to_pylist() for name in ("layer", "statistic", "head")), strict=True)
        )  # (layer, statistic, head) of each row
        rows = np.array([self.row_of_head.setdefault(key, len(self.row_of_head)) for key in keys])
        self.names.update(zip((key[0] for key in keys), table["name"].to_pylist(), strict=True))
        self._add_sums(sums_of_table(table), blocks_of_table(table), rows)
        self._add_bins(table, rows)
        self._add_examples(table, rows)

    def _add_sums(self, sums: StatisticSums, blocks: Moments, rows: IntArray) -> None:
        """Merge sums and moments of blocks into the rows with the indices `rows`, of which some may be new."""
        new = len(self.row_of_head) - len(self.sums.num_queries)
        self.sums = StatisticSums.concatenate([self.sums, StatisticSums.empty(new)])
        self.blocks = concatenate_moments([self.blocks, no_moments(new)])
        number, mean, squares = self.blocks
        merged = *self.sums.rows(rows).merge(sums), *merge_moments((number[rows], mean[rows], squares[rows]), blocks)
        for column, values in zip((*self.sums, *self.blocks), merged, strict=True):
            column[rows] = values

    def _add_bins(self, table: Any, rows: IntArray) -> None:
        import pyarrow as pa
        import pyarrow.compute as pc

        values, counts = (table[name].combine_chunks() for name in ("bin_value", "bin_count"))
        bins = pa.table(
            {
                "row": rows[pc.list_parent_indices(values).to_numpy()],
                "value": pc.list_flatten(values),
                "count": pc.list_flatten(counts),
            }
        )
        self._bins.append(bins)
        # Grouping takes time proportional to all bins so far, so grouping after each shard would take shards x bins.
        if sum(map(len, self._bins[1:])) > len(self._bins[0]):
            self._add_up_equal_bins()

    def _add_up_equal_bins(self) -> None:
        """Sum the counts of equal bins; the sum of integers does not depend on their order."""
        import pyarrow as pa

        bins = pa.concat_tables(self._bins).group_by(["row", "value"], use_threads=False)
        self._bins = [bins.aggregate([("count", "sum")]).rename_columns(["row", "value", "count"])]

    def _add_examples(self, table: Any, rows: IntArray) -> None:
        import pyarrow as pa
        import pyarrow.compute as pc

        lists = table["examples"].combine_chunks()
        best, row = pc.list_flatten(lists), rows[pc.list_parent_indices(lists).to_numpy()]
        if self._examples is not None:
            best, row = pa.concat_arrays([self._examples, best]), np.append(self._row_of_example, row)
        shard, text, position = (best.field(name).to_numpy() for name in ("shard", "text", "position"))
        order = np.lexsort((position, text, shard, -best.field("value").to_numpy(), row))
        row = row[order]
        rank = np.arange(len(row)) - np.searchsorted(row, row)
        kept = rank < self.examples
        self._examples, self._row_of_example = best.take(pa.array(order[kept])), row[kept]

    def heads_table(self) -> Any:
        """Return the table of heads, sorted by layer, statistic (in the order of the probes) and head."""
        if not self.row_of_head:
            return heads_schema().empty_table()
        keys = sorted(self.row_of_head, key=lambda key: (key[0], self.row_of_head[key]))
        order = np.array([self.row_of_head[key] for key in keys])
        self._add_up_equal_bins()
        bins = self._bins[0].sort_by([("row", "ascending"), ("value", "ascending")])
        few = sum(each.get("texts", 0) for each in self.shards) < MIN_OBSERVATIONS
        return build_heads_table(
            [(layer, self.names[layer], statistic, head) for layer, statistic, head in keys],
            order,
            self.sums,
            self.blocks if few else None,
            (bins["row"].to_numpy(), bins["value"].combine_chunks(), bins["count"].combine_chunks()),
            group_values_by_row(self._row_of_example, self._examples, order),
        )


def read_shard(folder: Path, plan: Plan, index: int) -> Any:
    """Read the table of a shard; None if its file is missing, damaged, or belongs to another shard or census."""
    table = _read_table(plan.shard_file(folder, index))
    if table is None:
        return None
    metadata = read_metadata(table.schema)
    return table if (metadata.get("plan"), metadata.get("shard")) == (plan.id, index) else None


def _read_table(file: Path) -> Any:
    """Read a parquet file; None if it cannot be read or is damaged."""
    try:
        return table_from_parquet(file.read_bytes())
    except OSError:
        return None


def missing_shards(folder: Path, plan: Plan, shards: Sequence[int]) -> list[int]:
    """Return the indices of those of `shards` that have no readable result file."""
    if (merged := read_merged_tables(folder, plan)) is not None and not merged.missing:
        return []
    return [index for index in shards if read_shard(folder, plan, index) is None]


def problems_of_shards(folder: Path, plan: Plan, shards: Sequence[int]) -> dict[int, str]:
    """Return index of a shard -> why it could not be counted, for those of `shards` that failed."""
    found = {}
    for index in shards:
        with suppress(OSError, UnicodeDecodeError):
            found[index] = plan.problem_file(folder, index).read_text(encoding="utf-8")
    return found


class MergedTables(NamedTuple):
    """The tables of heads and of shards (pyarrow), and the indices of the shards that are missing in the tables."""

    heads: Any
    shards: Any
    missing: list[int]


def merge_shards(folder: Path, plan: Plan) -> MergedTables:
    """Merge the result files of all shards that have one."""
    found, missing = MergedSums(plan.examples), []
    for index in range(len(plan.shards)):
        table = read_shard(folder, plan, index)
        if table is None:
            missing.append(index)
        else:
            found.add_shard(add_missing_columns(table))
    return MergedTables(found.heads_table(), shards_table(plan, found.shards), missing)


def read_merged_tables(folder: Path, plan: Plan) -> MergedTables | None:
    """Read the merged tables of a directory; None unless they contain every shard that has a result file."""
    heads, shards = (_read_table(folder / file) for file in (HEADS_FILE, SHARDS_FILE))
    if heads is None or shards is None:
        return None
    of_heads, of_shards = (read_metadata(each.schema) for each in (heads, shards))
    every = list(range(len(plan.shards)))
    done = of_heads.get("shards")
    if of_heads != of_shards or of_heads.get("plan") != plan.id:
        return None
    if done not in (every, [index for index in every if plan.shard_file(folder, index).exists()]):
        return None
    return MergedTables(add_missing_columns(heads), shards, [index for index in every if index not in set(done)])


def write_merged_tables(folder: Path, plan: Plan, merged: MergedTables) -> None:
    """Write the merged tables, unless the directory has them already.

    Raises:
        InputError: the tables cannot be written.
    """
    if read_merged_tables(folder, plan) is not None:
        return
    metadata = {"plan": plan.id, "shards": merged.shards["shard"].to_pylist()}
    for file, table in ((HEADS_FILE, merged.heads), (SHARDS_FILE, merged.shards)):
        write_atomically(folder / file, table_to_parquet(table, metadata))


def shards_table(plan: Plan, shards: Sequence[dict[str, Any]]) -> Any:
    """Return a table with one row per shard: file and range of its texts, numbers of rows, texts and tokens read."""
    import pyarrow as pa

    numbers = ("rows", "texts", "tokens", "truncated", "empty", "broken", "left_out")
    fields = [("shard", pa.int32()), ("file", pa.string()), ("place", pa.string())]
    columns = [*fields, *((name, pa.int64()) for name in numbers), ("problems", pa.list_(pa.string()))]
    found = [
        {
            **{name: each[name] for name in ("shard", *numbers, "problems")},
            "file": plan.shards[each["shard"]].file,
            "place": str(plan.shards[each["shard"]]),
        }
        for each in shards
    ]
    return pa.Table.from_pylist(found, schema=pa.schema(columns))
