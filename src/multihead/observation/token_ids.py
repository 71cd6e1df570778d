"""Find the token ids of a call's queries and keys among what the model was given."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from multihead.call import AttentionRequest
from multihead.hooks.inputs import Inputs
from multihead.masks.place import Span
from multihead.record.sample import SampleRecord


@dataclass(frozen=True, eq=False)
class Ids:
    """The token ids of one call.

    Fields:
        queries: (batch, queries) int64, those of its queries; of a packed call (samples, tokens); or None.
        keys: (batch, keys), those of its keys where they are another text; or None.
        request: the call.
        crosses: whether its keys are another text.
    """

    queries: Tensor | None
    keys: Tensor | None
    request: AttentionRequest
    crosses: bool

    def add_to(self, sample: SampleRecord, span: Span, index: int, offset: int) -> None:
        """Add the ids of one sample to what is known of it.

        Args:
            sample: where they go.
            span: its rows and columns in the call.
            index: which sample it is.
            offset: where the call's first key stands among the keys of the sample; negative where padding is before.
        """
        if self.crosses:
            sample.queries_read.grow(_row(self.queries, span.sample, span.queries), start=sample.logsumexp.length)
            if not sample.calls:
                sample.keys_read.grow(_row(self.keys, span.sample, span.keys), start=0)
            return
        if self.request.packed_lengths is not None:
            sample.keys_read.grow(_row(self.queries, index, (0, span.keys[1] - span.keys[0])), start=0)
            return
        start = self.request.query_start
        origin = offset + (int(start[span.sample]) if isinstance(start, Tensor) else start)
        first, behind = max(-origin, 0), max(offset + span.keys[1] - origin, 0)
        sample.keys_read.grow(_row(self.queries, span.sample, (first, behind)), start=origin + first)


def read_ids(inputs: Inputs, request: AttentionRequest, name: str, *, crosses: bool) -> Ids:
    """Find the ids of a call: those that fit its shape, and belong to the part of the model that its layer is in.

    Args:
        inputs: what the model was given.
        request: the call.
        name: the layer's name.
        crosses: whether its keys are another text than its queries.
    """
    shape, continued = request.shape, request.continued
    if continued is not None and continued.lengths is not None and bool((continued.lengths < shape.query_length).any()):
        return Ids(None, None, request, crosses)  # which of the ids are the real ones is not told
    packed = request.packed_lengths
    sizes = (shape.batch, shape.query_length) if packed is None else (len(packed), None)
    queries = inputs.queries_of(name).ids
    if queries is not None and (queries.shape[0] != sizes[0] or sizes[1] not in (None, queries.shape[1])):
        queries = None
    keys = inputs.memory_of(name).ids if crosses else None
    if keys is not None and tuple(keys.shape) != (shape.batch, shape.key_length):
        keys = None
    return Ids(_whole(queries), _whole(keys), request, crosses)


def _whole(ids: Tensor | None) -> Tensor | None:
    return None if ids is None or ids.is_floating_point() or ids.dtype == torch.bool else ids.to("cpu", torch.int64)


def _row(ids: Tensor | None, row: int, ends: tuple[int, int]) -> Tensor | None:
    return None if ids is None else ids[row, slice(*ends)]
