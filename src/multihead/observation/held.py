"""Parts of the texts that `generate` returns, held until these are known."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from torch import Tensor

from multihead.masks.positions import SampleSpan
from multihead.models.generation import UNKNOWN_ID, GeneratedPass, GeneratedText, ReadRow
from multihead.observation.measuring import TextInCall
from multihead.record.running_summary import RunningSummary
from multihead.record.sample import RecordedCall, SampleRecord
from multihead.record.text_rows import MeasuredRows, TextRows


@dataclass(frozen=True, eq=False)
class HeldPart:
    """What a layer does with some tokens of a row of `generate`, of which all belong to a text or none.

    Attributes:
        stop: number of tokens of the row that the pass has read up to the last of these.
        cross_attention: whether the keys are another text.
        key_ids: (keys,) int64, the ids of that text; None if unknown.
        measured: what a record keeps, or what a summary adds up; a function waits for what is on its way from a GPU.
    """

    stop: int
    cross_attention: bool
    key_ids: Tensor | None
    measured: RecordedCall | MeasuredRows | Callable[[], MeasuredRows]

    @property
    def rows(self) -> MeasuredRows:
        """What a summary adds up."""
        assert not isinstance(self.measured, RecordedCall)
        return self.measured if isinstance(self.measured, MeasuredRows) else self.measured()


def parts_of_rows(
    read: GeneratedPass,
    spans: Sequence[SampleSpan],
    starts: Sequence[int],
    *,
    key_ids: Tensor | None,
    cross_attention: bool,
) -> list[tuple[ReadRow, TextInCall]]:
    """Return the parts of each row of a pass that belong to a text or not, without rows that equal one before.

    Args:
        read: the pass.
        spans: the queries and keys of each row in a call.
        starts: per span the column of its first key.
        key_ids: (rows, keys) int64, the ids of the keys of cross-attention; None if unknown.
        cross_attention: whether the keys are another text.
    """
    found: list[tuple[ReadRow, TextInCall]] = []
    for span, first_key in zip(spans, starts, strict=True):
        if (row := read.rows.get(span.sample)) is None:
            continue  # an equal row of the same prompt is held
        tokens = read.ids[span.sample, row.padding :]
        keys = None if bool((tokens == UNKNOWN_ID).any()) else tokens
        if cross_attention:
            keys = None if key_ids is None else key_ids[span.sample, slice(*span.keys)]
        start = 0 if cross_attention else first_key - row.padding
        parts = split_span(span, row.whole, cross_attention=cross_attention)
        found += [(row, TextInCall(part, start, keys)) for part in parts]
    return found


def held_parts(text: GeneratedText, layer: str) -> list[HeldPart]:
    """Return what is held of a layer's calls for a text that `generate` has returned, by the name of the layer."""
    return [part for row, count in text.rows for part in row.held.get(layer, ()) if part.stop <= count]


def split_span(span: SampleSpan, whole: int, *, cross_attention: bool) -> list[SampleSpan]:
    """Split the queries of a text in a call: those before index `whole` together, and each later one alone.

    In self-attention a later query and its key come together, so the part of a query ends with its key.
    """
    first, stop = span.queries
    ends = sorted({first, min(max(whole, first), stop), *range(max(whole, first), stop + 1)})
    parts = []
    for start, end in pairwise(ends):
        last_key = span.keys[1] if cross_attention else span.keys[1] - (stop - end)
        parts.append(replace(span, queries=(start, end), keys=(span.keys[0], last_key)))
    return parts


def append_parts(sample: SampleRecord, parts: Sequence[HeldPart], ids: Tensor) -> None:
    """Append the parts of a text to its sample; `ids`, (tokens,) int64, are those of its tokens."""
    for part in parts:
        assert isinstance(part.measured, RecordedCall)
        sample.append_call(part.measured)
    text = sample.growing_query_text if sample.cross_attention else sample.growing_key_text
    text.append_ids(None if bool((ids == UNKNOWN_ID).any()) else ids, start=0)
    if sample.cross_attention:
        sample.growing_key_text.append_ids(parts[0].key_ids, start=0)


def add_to_summary(summary: RunningSummary, texts: Sequence[Sequence[HeldPart]], ids: Sequence[Tensor]) -> None:
    """Add texts to the summary of a layer.

    Args:
        summary: the summary.
        texts: the parts of each text.
        ids: per text the ids of its tokens, (tokens,) int64.
    """
    begun = summary.begin_texts(len(texts))
    for place, (parts, read) in enumerate(zip(texts, ids, strict=True)):
        joined = MeasuredRows.concatenate([part.rows for part in parts])
        crosses = parts[0].cross_attention
        positions, num_keys = joined.rows.positions, int(joined.rows.num_keys.max())
        known = None if crosses or bool((read == UNKNOWN_ID).any()) else read[:num_keys]
        summary.cross_attention |= crosses or (bool(len(positions)) and int(positions[-1]) + 1 != num_keys)
        rows = replace(TextRows.of_text(positions, num_keys, known), placed=joined.rows.placed)
        summary.add(replace(joined, rows=rows), begun, first=place)
    summary.end_texts(begun)
