"""Parts of the texts that `generate` returns, held until these are known."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from torch import Tensor

from multihead.masks.positions import SampleSpan
from multihead.models.generation import UNKNOWN_ID
from multihead.record.running_summary import RunningSummary
from multihead.record.sample import SampleRecord
from multihead.record.segments import ChunkedRows, Segment, append_new_keys, copy_contiguous
from multihead.record.text_rows import MeasuredRows, TextRows


@dataclass(frozen=True, eq=False)
class RecordedCall:
    """A call of one text, as a record keeps it.

    Attributes:
        segment: the call, without tensors.
        logsumexp: (1, heads, queries), nats.
        statistics: statistics of the call.
        q: (1, heads, queries, head_dim); None if only statistics are kept.
        k: (1, kv_heads, keys, head_dim), the keys of the call from `key_start` on, which a cache may overwrite later;
            None if only statistics are kept.
        key_start: index of the first of these keys in the text.
    """

    segment: Segment
    logsumexp: Tensor
    statistics: dict[str, Tensor]
    q: Tensor | None
    k: Tensor | None
    key_start: int

    def with_own_keys(self) -> RecordedCall:
        """Return the call with a copy of its keys, to be appended later."""
        return replace(self, k=None if self.k is None else copy_contiguous(self.k, self.logsumexp.device))

    def append_to(self, sample: SampleRecord) -> None:
        """Append the call to the record of its text, which copies the keys that are new to it."""
        if sample.k is not None and self.k is not None:
            append_new_keys(sample.k, self.k, start=self.key_start, device=self.logsumexp.device)
        sample.append_call(self.segment, self.logsumexp, self.statistics, self.q)


@dataclass(frozen=True, eq=False)
class HeldPart:
    """What a layer does with some tokens of a row of `generate`, of which all belong to a text or none.

    Attributes:
        stop: number of tokens of the row that the pass has read up to the last of these.
        cross_attention: whether the keys are another text.
        key_ids: (keys,) int64, the ids of that text; None if unknown.
        call: what a record keeps; None for a summary.
        measured: what a summary adds up; None for a record.
    """

    stop: int
    cross_attention: bool
    key_ids: Tensor | None
    call: RecordedCall | None
    measured: MeasuredRows | None


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


def sample_of_parts(new_sample: Callable[[], SampleRecord], parts: Sequence[HeldPart], ids: Tensor) -> SampleRecord:
    """Create the record of a text from its parts; `ids`, (tokens,) int64, are those of its tokens."""
    sample = new_sample()
    known = None if bool((ids == UNKNOWN_ID).any()) else ids
    for part in parts:
        assert part.call is not None
        if not sample.calls and part.call.q is not None:
            sample.q, sample.k = ChunkedRows(2), ChunkedRows(2)
        part.call.append_to(sample)
    text = sample.growing_query_text if sample.cross_attention else sample.growing_key_text
    text.append_ids(known, start=0)
    if sample.cross_attention:
        sample.growing_key_text.append_ids(parts[0].key_ids, start=0)
    return sample


def add_to_summary(summary: RunningSummary, texts: Sequence[Sequence[HeldPart]], ids: Sequence[Tensor]) -> None:
    """Add texts to the summary of a layer.

    Args:
        summary: the summary.
        texts: the parts of each text.
        ids: per text the ids of its tokens, (tokens,) int64.
    """
    begun = summary.begin_texts(len(texts))
    for place, (parts, read) in enumerate(zip(texts, ids, strict=True)):
        joined = MeasuredRows.concatenate([part.measured for part in parts if part.measured is not None])
        crosses = parts[0].cross_attention
        positions, num_keys = joined.rows.positions, int(joined.rows.num_keys.max())
        known = None if crosses or bool((read == UNKNOWN_ID).any()) else read[:num_keys]
        summary.cross_attention |= crosses or (bool(len(positions)) and int(positions[-1]) + 1 != num_keys)
        rows = TextRows.of_text(positions, num_keys, known)
        summary.add(replace(joined, rows=rows), begun, first=place)
    summary.end_texts(begun)
