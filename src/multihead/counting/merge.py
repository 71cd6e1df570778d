"""Merge the files of shards into one table of heads, in the plan's order, so that equal shards give equal bytes."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from multihead.counting.plan import Plan
from multihead.counting.shard import (
    OF_CHANCE,
    add_missing_columns,
    group_values_by_row,
    heads_schema,
    read_metadata,
    table_to_parquet,
)
from multihead.counting.sums import merge_moments
from multihead.errors import InputError
from multihead.files import write_atomically

HEADS = "heads.parquet"
SHARDS = "shards.parquet"

Numbers = NDArray[np.int64]
Reals = NDArray[np.float64]


@dataclass(eq=False)
class MergedSums:
    """The sums of all shards so far: one row per layer, statistic and head.

    Attributes:
        examples: how many of the strongest examples are kept.
        place: the row of each (layer, statistic, head).
        names: the name of each layer.
        shards: the metadata of each shard's file: how many rows, texts and tokens were read.
    """

    examples: int
    place: dict[tuple[int, str, int], int] = field(default_factory=dict)
    names: dict[int, str] = field(default_factory=dict)
    shards: list[dict[str, Any]] = field(default_factory=list)
    count: Numbers = field(default_factory=lambda: np.zeros(0, np.int64))
    nonfinite: Numbers = field(default_factory=lambda: np.zeros(0, np.int64))
    mean: Reals = field(default_factory=lambda: np.zeros(0))
    squares: Reals = field(default_factory=lambda: np.zeros(0))
    chance: Reals = field(default_factory=lambda: np.zeros(0))  # NaN if the chance is unknown in a shard
    texts: Numbers = field(default_factory=lambda: np.zeros(0, np.int64))
    excess: Reals = field(default_factory=lambda: np.zeros(0))
    excess_squares: Reals = field(default_factory=lambda: np.zeros(0))
    minimum: Reals = field(default_factory=lambda: np.zeros(0))
    maximum: Reals = field(default_factory=lambda: np.zeros(0))
    _bins: Any = None  # table of (row, value, count): the bins that are not empty
    _best: Any = None  # the examples of all rows; `_row_of_best` has their rows
    _row_of_best: Numbers = field(default_factory=lambda: np.zeros(0, np.int64))

    def add_shard(self, table: Any) -> None:
        """Add the table of one shard; shards come in the order of the plan."""
        self.shards.append(read_metadata(table.schema))
        if not len(table):
            return
        keys = list(
            zip(*(table[name].to_pylist() for name in ("layer", "statistic", "head")), strict=True)
        )  # (layer, statistic, head) of each row
        rows = np.array([self.place.setdefault(key, len(self.place)) for key in keys])
        self.names.update(zip((key[0] for key in keys), table["name"].to_pylist(), strict=True))
        self._reserve_rows(len(self.place))
        self._add_moments(table, rows)
        self._add_bins(table, rows)
        self._add_examples(table, rows)

    def _reserve_rows(self, rows: int) -> None:
        more = rows - len(self.count)
        if more:
            for name in ("count", "nonfinite", "mean", "squares", *OF_CHANCE):
                before = getattr(self, name)
                setattr(self, name, np.append(before, np.zeros(more, before.dtype)))
            self.minimum = np.append(self.minimum, np.full(more, np.inf))
            self.maximum = np.append(self.maximum, np.full(more, -np.inf))

    def _add_moments(self, table: Any, rows: Numbers) -> None:
        count, mean, squares = (table[name].to_numpy() for name in ("count", "mean", "squares"))
        texts = table["texts"].fill_null(0).to_numpy()
        chance, excess, excess_squares = (  # null is read as NaN, and as 0 where no query counts
            np.where(count == 0, 0, table[name].to_numpy()) for name in ("chance", "excess", "excess_squares")
        )
        before = self.count[rows]
        found = _merge_moment_columns((before, self.mean[rows], self.squares[rows]), (count, mean, squares))
        self.count[rows], self.mean[rows], self.squares[rows] = found
        nothing = np.zeros(len(rows))
        _, self.chance[rows], _ = _merge_moment_columns((before, self.chance[rows], nothing), (count, chance, nothing))
        of_texts = self.texts[rows], self.excess[rows], self.excess_squares[rows]
        found = _merge_moment_columns(of_texts, (texts, excess, excess_squares))
        self.texts[rows], self.excess[rows], self.excess_squares[rows] = found
        self.nonfinite[rows] += table["nonfinite"].to_numpy()
        least, most = (
            table[name].fill_null(fill).to_numpy() for name, fill in (("minimum", np.inf), ("maximum", -np.inf))
        )
        self.minimum[rows] = np.minimum(self.minimum[rows], least)
        self.maximum[rows] = np.maximum(self.maximum[rows], most)

    def _add_bins(self, table: Any, rows: Numbers) -> None:
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
        if self._bins is not None:
            bins = pa.concat_tables([self._bins, bins])
        # Sums of integers do not depend on their order, so the rows need no sorting.
        summed = bins.group_by(["row", "value"], use_threads=False).aggregate([("count", "sum")])
        self._bins = summed.rename_columns(["row", "value", "count"])

    def _add_examples(self, table: Any, rows: Numbers) -> None:
        import pyarrow as pa
        import pyarrow.compute as pc

        lists = table["examples"].combine_chunks()
        best, row = pc.list_flatten(lists), rows[pc.list_parent_indices(lists).to_numpy()]
        if self._best is not None:
            best, row = pa.concat_arrays([self._best, best]), np.append(self._row_of_best, row)
        shard, text, position = (best.field(name).to_numpy() for name in ("shard", "text", "position"))
        order = np.lexsort((position, text, shard, -best.field("value").to_numpy(), row))
        row = row[order]
        rank = np.arange(len(row)) - np.searchsorted(row, row)
        kept = rank < self.examples
        self._best, self._row_of_best = best.take(pa.array(order[kept])), row[kept]

    def heads_table(self) -> Any:
        """Return the table of heads, by layer, statistic and head: statistics in the order of the probes."""
        import pyarrow as pa

        rows = sorted(self.place, key=lambda key: (key[0], self.place[key]))
        order = np.array([self.place[key] for key in rows], np.int64)
        none = self.count[order] == 0
        columns: dict[str, Any] = {
            "layer": [key[0] for key in rows],
            "name": [self.names[key[0]] for key in rows],
            "head": [key[2] for key in rows],
            "statistic": [key[1] for key in rows],
        }
        for name in ("count", "nonfinite", "mean", "squares"):
            columns[name] = getattr(self, name)[order]
        for name in OF_CHANCE:
            columns[name] = pa.array(getattr(self, name)[order], mask=none | np.isnan(self.excess[order]))
        for name in ("minimum", "maximum"):
            columns[name] = pa.array(getattr(self, name)[order], mask=none)
        if self._bins is None:
            return pa.Table.from_pydict({name: [] for name in heads_schema().names}, schema=heads_schema())
        bins = self._bins.sort_by([("row", "ascending"), ("value", "ascending")])
        columns["bin_value"] = group_values_by_row(bins["row"].to_numpy(), bins["value"].combine_chunks(), order)
        columns["bin_count"] = group_values_by_row(bins["row"].to_numpy(), bins["count"].combine_chunks(), order)
        columns["examples"] = group_values_by_row(self._row_of_best, self._best, order)
        return pa.Table.from_pydict(columns, schema=heads_schema())


def _merge_moment_columns(
    one: tuple[Numbers, Reals, Reals], other: tuple[Numbers, Reals, Reals]
) -> tuple[Numbers, Reals, Reals]:
    """Merge the counts, means and sums of squares of two tables, row by row; see `merge_moments`."""
    first, second = ([torch.tensor(column) for column in each] for each in (one, other))
    count, mean, squares = merge_moments((first[0], first[1], first[2]), (second[0], second[1], second[2]))
    return count.numpy(), mean.numpy(), squares.numpy()


def missing_shards(folder: Path, plan: Plan) -> list[int]:
    """Return the indices of the shards whose result file does not exist."""
    present = {each.name for each in plan.shard_file(folder, 0).parent.iterdir()}
    return [index for index in range(len(plan.shards)) if plan.shard_file(folder, index).name not in present]


def merge_shards(folder: Path, plan: Plan) -> MergedSums:
    """Merge the shards whose result file exists.

    Raises:
        InputError: a file cannot be read, or belongs to another census.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    left_out, found = set(missing_shards(folder, plan)), MergedSums(plan.examples)
    for index in range(len(plan.shards)):
        if index in left_out:
            continue
        file = plan.shard_file(folder, index)
        try:
            table = pq.read_table(file, use_threads=False, partitioning=None)
        except (OSError, pa.ArrowException) as error:
            line = str(error).splitlines()[0]
            raise InputError(f"{str(file)!r} cannot be read: {line}.", "Delete it and run the census again.") from None
        if read_metadata(table.schema).get("plan") != plan.id:
            raise InputError(f"{str(file)!r} is not a shard of this census.", "Delete it and run the census again.")
        found.add_shard(add_missing_columns(table))
    return found


def write_merged_tables(folder: Path, plan: Plan, left_out: Collection[int] = ()) -> None:
    """Write the tables of heads and of shards, unless they exist or shards are missing that others may count.

    Another process may have counted a shard and written its tables while this one merged. So the shards are listed
    again after each write, until the tables are those of all shards that have a file.

    Args:
        folder: the directory of the census.
        plan: its plan.
        left_out: the shards that cannot be read; the others must have a file.
    """
    before: list[int] | None = None
    while (missing := missing_shards(folder, plan)) != before and set(missing) <= set(left_out):
        before = missing
        done = [index for index in range(len(plan.shards)) if index not in missing]
        if not done or all(read_merged_table(folder / file, plan, done) is not None for file in (HEADS, SHARDS)):
            return
        found = merge_shards(folder, plan)
        metadata = {"plan": plan.id, "shards": [each["shard"] for each in found.shards]}
        write_atomically(folder / HEADS, table_to_parquet(found.heads_table(), metadata))
        write_atomically(folder / SHARDS, table_to_parquet(shards_table(plan, found.shards), metadata))


def read_merged_table(file: Path, plan: Plan, done: Sequence[int]) -> Any:
    """Read a merged table; None if the file does not exist or was merged from other shards than `done`."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        found = pq.read_table(file, use_threads=False, partitioning=None)
    except (OSError, pa.ArrowException):
        return None
    metadata = read_metadata(found.schema)
    return found if (metadata.get("plan"), metadata.get("shards")) == (plan.id, list(done)) else None


def shards_table(plan: Plan, shards: Sequence[dict[str, Any]]) -> Any:
    """Return a table with a row per shard: where its texts are, and how many rows, texts and tokens were read."""
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
