"""Count one shard: read its texts, run the model on them, and write one parquet file with the sums of every head.

A shard is read in groups of about 4 million characters, in the order of its texts. The texts of a group are sorted by
length, batched and counted before the next group is read, and only the texts of strongest examples are kept in memory.
Memory therefore depends neither on the size of the shard nor on its format, and a compressed file of any size can be
one shard. The groups depend only on the texts, and so do the bytes of the shard's file. A group fills hundreds of
batches of 2,048 tokens, enough to put texts of similar length into each batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from math import inf
from typing import Any

import numpy as np
from numpy.typing import NDArray

from multihead.counting.batches import TextBatch, batches_by_length
from multihead.counting.formats import rows_of_shard
from multihead.counting.heads_table import build_heads_table, heads_schema, table_to_parquet
from multihead.counting.plan import Plan
from multihead.counting.tally import TOKENS_AFTER, TOKENS_BEFORE, CensusTally, LayerSums, replace_attention
from multihead.models.loading import LoadedModel, silence_transformers, tokenize_texts
from multihead.observation.layer_filter import LayerFilter
from multihead.probes.probe import Probe
from multihead.record.chance import MIN_OBSERVATIONS

MAX_NAMED_ROWS = 20
"""Largest number of broken rows of a shard that are described in its problems; all broken rows are counted."""

MAX_CHARACTERS_PER_GROUP = 1 << 22
"""Number of characters in a group of texts, which is in memory at once and runs before the next group is read."""

_OVERHEAD_CHARACTERS_PER_TEXT = 200  # memory of a text's Python objects and token ids, in characters
_TEXTS_PER_TOKENIZER_CALL = 1000  # number of texts that are tokenized together
_CHARACTERS_PER_TOKEN = 64  # a text is cut to this many characters per allowed token before it is tokenized

ReportBatch = Callable[[int, int], None]
"""Function called after each batch with the batch's numbers of texts and tokens."""


@dataclass
class ShardCounts:
    """How many rows, texts and tokens of a shard were read.

    Attributes:
        rows: number of rows that were read.
        texts: number of texts that ran through the model.
        tokens: number of tokens that ran through the model.
        truncated: number of texts that were cut to the largest number of tokens.
        empty: number of rows with an empty text or a text without a token.
        broken: number of rows from which no text could be read.
        left_out: number of rows that the random draw of `Plan.share` left out.
        problems: a sentence per broken row, for the first `MAX_NAMED_ROWS`: where the row is, and what is wrong.
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
class ShardCounter:
    """A model that counts shards.

    Attributes:
        loaded: the model and its tokenizer.
        plan: the plan of the census.
        probes: the probes that the plan describes.
    """

    loaded: LoadedModel
    plan: Plan
    probes: tuple[Probe, ...]

    def count_shard(self, index: int, report_batch: ReportBatch = lambda texts, tokens: None) -> bytes:
        """Run the model on the texts of a shard, and return the bytes of the shard's parquet file.

        Args:
            index: index of the shard in the plan.
            report_batch: called after each batch.

        Raises:
            OSError, InputError: the texts of the shard cannot be read.
            ModelError: the model has no attention that can be measured.
        """
        plan, encoder_or_model = self.plan, self.loaded.encoder_or_model
        # The base model has no output layer (language-model head), whose result no attention layer uses.
        model: Any = getattr(encoder_or_model, "base_model", encoder_or_model)
        counts = ShardCounts()
        chosen = None if plan.layers is None else LayerFilter.from_argument(plan.layers)
        options = self.probes, plan.special_ids, plan.examples, chosen
        kept: dict[int, str] = {}  # index of a text -> the text, for the strongest examples so far
        with replace_attention(model) as packed, CensusTally.measure_model(model, *options) as tally:
            for texts in group_texts(self._read_texts(index, counts)):
                for batch in self._batches(texts, counts, packed=packed):
                    tally.add_batch(batch)
                    counts.texts += len(batch.lengths)
                    counts.tokens += batch.num_tokens
                    report_batch(len(batch.lengths), batch.num_tokens)
                if counts.texts:
                    tally.check_complete()
                kept |= texts
                kept = {each: kept[each] for each in sorted(tally.texts_of_examples())}
        return _shard_as_parquet(tally.layers, self._tokenize_as_text(kept), counts, plan, index)

    def _read_texts(self, index: int, counts: ShardCounts) -> Iterator[tuple[int, str]]:
        """Yield (index, text) for the texts of a shard; count empty, broken and left-out rows in `counts`."""
        plan, most = self.plan, self.plan.tokens * _CHARACTERS_PER_TOKEN
        draw = np.random.default_rng([plan.seed, index])
        for text, row in enumerate(rows_of_shard(plan.shards[index], plan.column)):
            counts.rows += 1
            if plan.share < 1 and draw.random() >= plan.share:
                counts.left_out += 1
            elif row.text is not None:
                counts.truncated += len(row.text) > most
                yield text, row.text[:most]
            elif row.problem == "empty":
                counts.empty += 1
            else:
                counts.broken += 1
                if len(counts.problems) < MAX_NAMED_ROWS:
                    counts.problems.append(f"{row.place_in_file}: {row.problem}")

    def _batches(self, texts: Mapping[int, str], counts: ShardCounts, *, packed: bool) -> Iterator[TextBatch]:
        """Tokenize `texts` (index -> text), and yield batches of them; texts without a token are counted as empty."""
        ids = dict(zip(texts, self._tokenize(texts.values(), counts), strict=True))
        filled = {text: each for text, each in ids.items() if len(each)}
        counts.empty += len(ids) - len(filled)
        return batches_by_length(filled, tokens=self.plan.batch_tokens, packed=packed)

    def _tokenize(self, texts: Iterable[str], counts: ShardCounts) -> Iterator[NDArray[np.int64]]:
        """Yield the token ids of each text, (tokens,) int64, truncated to the largest number of tokens of the plan."""
        most, tokenizer = self.plan.tokens, self.loaded.tokenizer
        left = iter(texts)
        while some := list(islice(left, _TEXTS_PER_TOKENIZER_CALL)):
            with silence_transformers():
                found = tokenizer(some, truncation=True, max_length=most + 1)["input_ids"]
                cut = [place for place, ids in enumerate(found) if len(ids) > most]
                # The tokenizer truncates, so that a truncated text keeps the special token at its end.
                if cut:
                    short = tokenizer([some[place] for place in cut], truncation=True, max_length=most)["input_ids"]
                    for place, ids in zip(cut, short, strict=True):
                        found[place] = ids
            counts.truncated += sum(len(some[place]) < most * _CHARACTERS_PER_TOKEN for place in cut)
            yield from (np.array(ids, np.int64) for ids in found)

    def _tokenize_as_text(self, texts: Mapping[int, str]) -> dict[int, list[str]]:
        """Return index of a text -> its tokens as text."""
        pieces: dict[int, list[str]] = {}
        left = iter(texts)
        while some := list(islice(left, _TEXTS_PER_TOKENIZER_CALL)):
            found = tokenize_texts(self.loaded, [texts[text] for text in some], tokens=self.plan.tokens)
            pieces.update(zip(some, found, strict=True))
        return pieces


def group_texts(texts: Iterable[tuple[int, str]]) -> Iterator[dict[int, str]]:
    """Divide the texts of a shard into groups (index -> text) of about `MAX_CHARACTERS_PER_GROUP`, in order."""
    group: dict[int, str] = {}
    size = 0
    for index, text in texts:
        group[index] = text
        size += len(text) + _OVERHEAD_CHARACTERS_PER_TEXT
        if size >= MAX_CHARACTERS_PER_GROUP:
            yield group
            group, size = {}, 0
    if group:
        yield group


def _describe_example(
    tokens: Sequence[str], shard: int, value: float, text: int, position: int, key: int, values: list[float]
) -> dict[str, Any]:
    """Return a strongest example as a dict for the table of heads.

    Args:
        tokens: the tokens of the text of the example, as text.
        shard: index of the shard.
        value: value of the statistic at the query.
        text: index of the text in the shard.
        position: position of the query in the text.
        key: position of the key with the largest weight; -1 where unknown.
        values: value of the statistic at each token around the query.
    """
    start, stop = max(position - TOKENS_BEFORE, 0), min(position + TOKENS_AFTER + 1, len(tokens))
    first = TOKENS_BEFORE - (position - start)
    return {
        "value": value,
        "shard": shard,
        "text": text,
        "position": position,
        "token": _strip_token(tokens[position]),
        "key": key,
        "key_token": _strip_token(tokens[key]) if key >= 0 else "",
        "start": start,
        "tokens": tokens[start:stop],
        "values": values[first : first + stop - start],
    }


def _strip_token(piece: str) -> str:
    """Return a token without the white space around it, unless it is only white space."""
    return piece.strip() or piece


def _shard_as_parquet(
    layers: dict[int, LayerSums], pieces: Mapping[int, Sequence[str]], counts: ShardCounts, plan: Plan, index: int
) -> bytes:
    """Return the bytes of a shard's parquet file: a row per layer, statistic and head, and the counts as metadata."""
    import pyarrow as pa

    tables = [heads_schema().empty_table()]
    for number, layer in sorted(layers.items()):
        rows = [(number, layer.name, name, head) for name in layer.names for head in range(layer.num_heads)]
        row_of_bin, value, count = layer.filled_bins()
        bins = row_of_bin, pa.array(value), pa.array(count)
        examples = [
            [_describe_example(pieces[each[1]], index, *each) for each in zip(*row, strict=True) if each[0] > -inf]
            for row in zip(*(column.tolist() for column in layer.strongest), strict=True)
        ]
        blocks = layer.blocks if layer.num_samples < MIN_OBSERVATIONS else None
        tables.append(build_heads_table(rows, np.arange(len(rows)), layer.sums, blocks, bins, examples))
    table = pa.concat_tables(tables).combine_chunks()
    return table_to_parquet(table, {"plan": plan.id, "shard": index, **asdict(counts)})
