"""Count one shard: read its texts, run the model on them, and write one parquet file with the sums of every head."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from multihead.counting.batches import batches_by_length
from multihead.counting.corpus import Row, rows_of_shard
from multihead.counting.plan import Plan
from multihead.counting.sums import AFTER, BEFORE, LayerSums
from multihead.counting.tally import Tally, measured_model
from multihead.files import write_atomically
from multihead.models.loading import LoadedModel, tokens_of_texts, without_messages
from multihead.observation.layer_filter import LayerFilter
from multihead.probes.probe import Probe

METADATA = b"multihead"
"""The key of the summary in the metadata of a parquet file."""

NAMED = 20
"""How many broken rows of a shard are named; all are counted."""

OF_CHANCE = "chance", "texts", "excess", "excess_squares"
"""The columns about chance, null where no query counts or chance is unknown; files of earlier versions lack them."""

_AT_ONCE = 1000  # texts that are tokenized together
_CHARACTERS = 64  # per token: the rest of a longer text is not even tokenized

Renew = Callable[[int, int], None]
"""Called after each batch with the numbers of its texts and tokens."""


@dataclass
class Counts:
    """What was read of a shard.

    Attributes:
        rows: rows that were read.
        texts: texts that ran through the model.
        tokens: their tokens.
        truncated: texts of which only the first tokens ran.
        empty: rows with an empty text, or one without a token.
        broken: rows without a text.
        left_out: rows that the draw of the plan's `share` left out.
        problems: the place of the first broken rows, and what is wrong with them.
    """

    rows: int = 0
    texts: int = 0
    tokens: int = 0
    truncated: int = 0
    empty: int = 0
    broken: int = 0
    left_out: int = 0
    problems: list[str] = field(default_factory=list)


@dataclass(frozen=True, eq=False)
class Counter:
    """A model that counts shards.

    Attributes:
        loaded: the model and its tokenizer.
        plan: the plan.
        probes: its probes.
    """

    loaded: LoadedModel
    plan: Plan
    probes: tuple[Probe, ...]

    def count(self, index: int, renew: Renew = lambda texts, tokens: None) -> bytes:
        """Return the parquet file of a shard.

        Args:
            index: the shard.
            renew: called after each batch.

        Raises:
            OSError, InputError: its texts cannot be read.
            ModelError: the model has no attention that can be measured.
        """
        plan, model = self.plan, _model_without_head(self.loaded)
        counts = Counts()
        texts = list(self._read_texts(index, counts))
        ids = list(self._token_ids([text for _, text in texts], counts))
        places = [place for place, each in enumerate(ids) if len(each)]
        counts.empty += len(ids) - len(places)
        chosen = None if plan.layers is None else LayerFilter.of(plan.layers)
        kept = [ids[place] for place in places]
        options = self.probes, plan.special_ids, plan.examples, chosen
        with measured_model(model) as packed, Tally.of(model, *options) as tally:
            for batch in batches_by_length(
                kept, [texts[place][0] for place in places], tokens=plan.batch_tokens, packed=packed
            ):
                tally.add(batch)
                counts.texts += len(batch.lengths)
                counts.tokens += batch.num_tokens
                renew(len(batch.lengths), batch.num_tokens)
        if counts.texts:
            tally.check_complete()
        examples = _Examples(self, index, dict(texts), tally.layers.values())
        return _shard_as_parquet(tally.layers, examples, counts, plan, index)

    def write(self, folder: Path, index: int, renew: Renew = lambda texts, tokens: None) -> None:
        """Count a shard and write its file, whole or not at all."""
        write_atomically(self.plan.shard_file(folder, index), self.count(index, renew))

    def _read_texts(self, index: int, counts: Counts) -> Iterator[tuple[int, str]]:
        """Read the texts of a shard with their indices, and count the other rows."""
        plan, most = self.plan, self.plan.tokens * _CHARACTERS
        draw = np.random.default_rng([plan.seed, index])
        for row in rows_of_shard(plan.shards[index], plan.column):
            counts.rows += 1
            if plan.share < 1 and draw.random() >= plan.share:
                counts.left_out += 1
            elif row.text is not None:
                counts.truncated += len(row.text) > most
                yield row.index, row.text[:most]
            elif row.problem == "empty":
                counts.empty += 1
            else:
                _count_broken(counts, row)

    def _token_ids(self, texts: Sequence[str], counts: Counts) -> Iterator[NDArray[np.int64]]:
        """Return the token ids of each text, truncated."""
        most, tokenizer = self.plan.tokens, self.loaded.tokenizer
        left = iter(texts)
        while some := list(islice(left, _AT_ONCE)):
            with without_messages():
                found = tokenizer(some, truncation=True, max_length=most + 1)["input_ids"]
                cut = [place for place, ids in enumerate(found) if len(ids) > most]
                # A truncated text keeps the special token at its end.
                short = (
                    tokenizer([some[place] for place in cut], truncation=True, max_length=most)["input_ids"]
                    if cut
                    else []
                )
            counts.truncated += sum(len(some[place]) < most * _CHARACTERS for place in cut)
            for place, ids in zip(cut, short, strict=True):
                found[place] = ids
            yield from (np.array(ids, np.int64) for ids in found)


def _count_broken(counts: Counts, row: Row) -> None:
    counts.broken += 1
    if len(counts.problems) < NAMED:
        counts.problems.append(f"{row.place}: {row.problem}")


def _model_without_head(loaded: LoadedModel) -> Any:
    """Return the part of a model that reads texts, without a head that computes what no layer reads."""
    model: Any = loaded.reader
    return getattr(model, "base_model", model)


class _Examples:
    """The examples of a shard, with the text of their tokens.

    Args:
        counter: the tokenizer.
        shard: the shard.
        texts: its texts by index.
        layers: the sums of its layers.
    """

    def __init__(self, counter: Counter, shard: int, texts: dict[int, str], layers: Iterable[LayerSums]) -> None:
        self._shard = shard
        self._pieces: dict[int, list[str]] = {}
        found: set[int] = set()
        for layer in layers:
            best = layer.strongest
            found.update(best.text[best.value > -torch.inf].tolist())
        left = iter(sorted(found))
        while some := list(islice(left, _AT_ONCE)):
            pieces = tokens_of_texts(counter.loaded, [texts[each] for each in some], tokens=counter.plan.tokens)
            self._pieces.update(zip(some, pieces, strict=True))

    def of(self, layer: LayerSums) -> list[list[dict[str, Any]]]:
        """Return the examples of each row of a layer, the strongest first."""
        best = layer.strongest
        numbers = (each.tolist() for each in (best.value, best.text, best.position, best.key, best.values))
        return [
            [self._example(*each) for each in zip(*row, strict=True) if each[0] > -inf]
            for row in zip(*numbers, strict=True)
        ]

    def _example(self, value: float, text: int, position: int, key: int, values: list[float]) -> dict[str, Any]:
        pieces = self._pieces[text]
        start, stop = max(position - BEFORE, 0), min(position + AFTER + 1, len(pieces))
        first = BEFORE - (position - start)
        return {
            "value": value,
            "shard": self._shard,
            "text": text,
            "position": position,
            "token": _without_gap_before(pieces[position]),
            "key": key,
            "key_token": _without_gap_before(pieces[key]) if key >= 0 else "",
            "start": start,
            "tokens": pieces[start:stop],
            "values": values[first : first + stop - start],
        }


def _without_gap_before(piece: str) -> str:
    """Return a token without the gap before it."""
    return piece.strip() or piece


def schema() -> Any:
    """Return the columns of a table of heads."""
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
            ("count", pa.int64()),
            ("nonfinite", pa.int64()),
            ("mean", pa.float64()),
            ("squares", pa.float64()),
            ("chance", pa.float64()),
            ("texts", pa.int64()),
            ("excess", pa.float64()),
            ("excess_squares", pa.float64()),
            ("minimum", pa.float64()),
            ("maximum", pa.float64()),
            ("bin_value", pa.list_(pa.float64())),
            ("bin_count", pa.list_(pa.int64())),
            ("examples", pa.list_(example)),
        ]
    )


def with_missing_columns(table: Any) -> Any:
    """Return a table of heads with the columns that one of an earlier version lacks, all null."""
    import pyarrow as pa

    for at, column in enumerate(schema()):
        if column.name not in table.column_names:
            table = table.add_column(at, column, pa.nulls(len(table), column.type))
    return table


def _shard_as_parquet(
    layers: dict[int, LayerSums], examples: _Examples, counts: Counts, plan: Plan, index: int
) -> bytes:
    """Return the file of a shard: a row per layer, statistic and head, and the counts in the metadata."""
    import pyarrow as pa

    tables = [schema().empty_table()]
    for number, layer in sorted(layers.items()):
        rows = len(layer.count)
        none = (layer.count == 0).numpy()
        row_of_bin, *bins = layer.histograms()
        columns = {
            "layer": [number] * rows,
            "name": [layer.name] * rows,
            "head": [head for _ in layer.statistics for head in range(layer.num_heads)],
            "statistic": [name for name in layer.statistics for _ in range(layer.num_heads)],
            "count": layer.count.numpy(),
            "nonfinite": layer.nonfinite.numpy(),
            "mean": layer.mean.numpy(),
            "squares": layer.squares.numpy(),
            **{
                name: pa.array(getattr(layer, name).numpy(), mask=none | layer.excess.isnan().numpy())
                for name in OF_CHANCE
            },
            "minimum": pa.array(layer.minimum.numpy(), mask=none),
            "maximum": pa.array(layer.maximum.numpy(), mask=none),
            **{
                name: one_list_per_row(row_of_bin, pa.array(values), np.arange(rows))
                for name, values in zip(("bin_value", "bin_count"), bins, strict=True)
            },
            "examples": examples.of(layer),
        }
        tables.append(pa.Table.from_pydict(columns, schema=schema()))
    table = pa.concat_tables(tables).combine_chunks()
    return parquet_of(table, {"plan": plan.id, "shard": index, **asdict(counts)})


def one_list_per_row(row: NDArray[np.int64], values: Any, order: NDArray[np.int64]) -> Any:
    """Return values as one list per row: `row` is the row of each value, ascending, `order` that of the lists."""
    import pyarrow as pa

    first, stop = (np.searchsorted(row, order, side) for side in ("left", "right"))
    ends = np.cumsum(stop - first)
    offsets = np.append(0, ends)
    index = np.repeat(first - offsets[:-1], stop - first) + np.arange(offsets[-1])
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), values.take(pa.array(index)))


def parquet_of(table: Any, metadata: dict[str, Any]) -> bytes:
    """Return a table as a parquet file with some metadata; equal tables are equal bytes."""
    import pyarrow.parquet as pq

    written = io.BytesIO()
    content = json.dumps(metadata, ensure_ascii=False, sort_keys=True).encode()
    pq.write_table(table.replace_schema_metadata({METADATA: content}), written, compression="zstd")
    return written.getvalue()


def read_metadata(schema: Any) -> dict[str, Any]:
    """Return the metadata that `parquet_of` wrote; empty if there is none."""
    content = (schema.metadata or {}).get(METADATA, b"{}")
    found = json.loads(content)
    return found if isinstance(found, dict) else {}
