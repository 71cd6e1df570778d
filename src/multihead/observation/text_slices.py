"""Slice the texts of a call that has run, and number their queries."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from multihead.kernels.call import AttentionCall
from multihead.observation.measuring import TextInCall
from multihead.probes.context import ProbeContext
from multihead.probes.statistics import drop_position_parts
from multihead.record.batch import SampleSpans, hide_padding_queries, restore_dropped_keys, slice_call
from multihead.record.text_rows import TextRows


def with_query_start(call: AttentionCall, position: int | Tensor) -> AttentionCall:
    """Return a call whose first query has another position; what a kernel measured of positions is dropped."""
    if not isinstance(position, Tensor) and position == call.request.query_start:
        return call
    return AttentionCall(replace(call.request, query_start=position), drop_position_parts(call.result))


def slice_text(call: AttentionCall, sample_spans: SampleSpans, text: TextInCall) -> tuple[AttentionCall, int]:
    """Slice one text from a call: return a call with a batch of one, and the index of its first key in the text."""
    span, start, origin = text.span, text.start, call.request.query_start
    alone = slice_call(call, span)
    if sample_spans.one_text and not isinstance(origin, Tensor) and origin > 0 and not call.request.mask.uses_positions:
        # Later queries of a text are not moved by padding before the keys, which are another text.
        alone = with_query_start(alone, origin + span.queries[0])
    if not text.is_window:
        alone, start = restore_dropped_keys(alone, start)
    if sample_spans.real_queries is not None:
        alone = hide_padding_queries(alone, sample_spans.real_queries[span.sample, slice(*span.queries)])
    return alone, start


def rows_of_text(alone: AttentionCall, before: int, context: ProbeContext) -> TextRows:
    """Return the queries of a call of one text as rows; `before` keys of the text come before those of the call."""
    shape, positions = alone.request.shape, torch.arange(alone.request.shape.query_length) + alone.request.query_start
    rows = TextRows.of_text(positions + before, before + shape.key_length, None)
    return rows if context.places is None else replace(rows, placed=context.places.select(0).placed_at(positions))


def rows_of_texts(call: AttentionCall, texts: Sequence[TextInCall]) -> TextRows:
    """Return the queries of texts in a call as rows of a summary, for which a window is a text of its own."""
    ends = torch.tensor([(text.span.sample, *text.span.queries, *text.span.keys) for text in texts])
    before = torch.tensor([0 if text.is_window else text.start for text in texts])
    return TextRows.of_spans(ends.T, call.request.shape, call.request.query_start, before)
