"""Find the samples in an attention call on a batch, and slice each out of it without padding.

A batch is recorded as it ran (`WaitingCall`), and its rows are put into the table of the layer when one of its samples
is read. Recording keeps the quantities that the kernel measured (`kernels/parts.py`), and q and k as the layer computed
them (`KeptRows`); until they are read, q and k include padding. Statistics are computed from the measured quantities
when a statistic is read, but at once if there are user-defined probes, whose functions may raise errors. q and k are
copied at once where something else may write to them: a cache, the caller of a Hugging Face model's attention, any code
if they are inference tensors; and where they are part of a larger tensor, which would stay in memory. Reading a kept
tensor that was changed in place raises an error; the change is detected by the version counter of the tensor, as in
autograd.
Tables summarise the batch as it waits, sample by sample over the same numbers in the same order, so that reading a
sample changes no bit of a table. An earlier version cut each batch while recording it, and creating requests, masks,
texts and small tensors per sample and layer took longer than the statistics. Since batches wait, recording 32 texts in
6 layers takes a quarter of the earlier time, or two fifths if q and k are copied. The texts of a row are found when
they are read. The call of a layer on a padded batch (8 x 512 tokens) takes 1.04 times as long as without
recording, or 1.05 with q and k (medians of five runs); single runs are 1.03 to 1.07, since how often the C allocator
returns memory to the system differs more than that. Most of the time that recording adds is the first execution of
Python code after a kernel, whose data has filled the caches.

Copies of q and k are in the ordinary heap. Memory-mapped copies were tried: they were 3 to 5 % faster at best, and with
glibc 2.36 the peak memory was unpredictably 0.8 or 2.4 times the bytes of the copies, while it is 1.4 to 1.8 times with
copies in the heap. Heap copies fill the gaps that the model's own tensors leave.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from multihead.errors import ModelError
from multihead.kernels.call import AttentionCall, AttentionRequest, AttentionResult, InputPlaces
from multihead.kernels.dense_tile import first_key_of_queries
from multihead.kernels.parts import PartName, number_in_text, part_named, set_empty_and_bad_queries
from multihead.kernels.plan.bounds import bounds_of
from multihead.masks import Keep
from multihead.masks.leading_keys import LeadingKeys
from multihead.masks.positions import SampleSpan
from multihead.masks.texts import RowTexts
from multihead.probes.probe import PartValues, Probe, Statistic
from multihead.probes.statistics import statistic_from_parts
from multihead.probes.tile import has_large_logsumexp
from multihead.record.sample import SampleRecord
from multihead.record.segments import Segment, copy_contiguous
from multihead.record.shared import SharedByLayers
from multihead.record.text_rows import MeasuredRows, TextRows, concatenate_ranges
from multihead.record.text_table import LaterRows, RowsOnTheirWay, TextTable
from multihead.scores.bias import Bias, RelativeBias


def copy_rows(tensor: Tensor, places: Tensor | None, device: torch.device) -> Tensor:
    """Return a copy of the rows of texts, (heads, rows, features), because a model may overwrite the tensor.

    Args:
        tensor: (batch, heads, rows, features).
        places: (rows of texts,) int64, their indices in the flattened (batch * rows), the other rows are padding; None
            for all rows.
        device: device of the copy.
    """
    tensor = tensor.detach()
    if places is None and len(tensor) == 1:
        # A copy in the same layout copies contiguous memory, which is fastest.
        return (tensor.to(device, copy=True) if tensor.stride(-1) == 1 else copy_contiguous(tensor, device))[0]
    tokens = tensor.transpose(1, 2)  # (batch, rows, heads, features)
    if places is None:
        return copy_contiguous(tokens, device).flatten(0, 1).transpose(0, 1)
    # (batch * rows, heads * features): a view if the heads are contiguous in each row, as after a projection
    flat = tokens.flatten(0, 1).flatten(1)
    chosen = flat.index_select(0, places.to(tensor.device)).to(device)
    return chosen.view(len(chosen), tensor.shape[1], tensor.shape[3]).transpose(0, 1)


@dataclass(frozen=True, eq=False)
class KeptRows:
    """The rows of q or k that a record keeps: a copy, or the tensor of the call, which is copied when it is read.

    Copying takes longer than measuring, and is not needed for tables of statistics.

    Attributes:
        tensor: (batch, heads, rows, features), or a copy that `copy_rows` returned.
        places: returns which rows to keep, see `copy_rows`; None if `tensor` is a copy.
        version_when_kept: version counter of the tensor, which in-place writes increase.
        layer: name of the layer that computed the tensor.
    """

    tensor: Tensor
    places: Callable[[], Tensor | None] | None
    version_when_kept: int
    layer: str

    @staticmethod
    def keep(
        tensor: Tensor, places: Callable[[], Tensor | None], device: torch.device, *, layer: str, fresh: bool
    ) -> KeptRows:
        """Return the kept rows of a tensor, copied at once if something may write to the tensor later.

        Args:
            tensor: (batch, heads, rows, features).
            places: returns which rows to keep, see `copy_rows`; called when the rows are copied.
            device: device of the kept rows.
            layer: name of the layer that computed the tensor.
            fresh: whether the layer computed the tensor for this call only, so that nothing writes to it later.
        """
        # A view would keep its whole base in memory, and writes to inference tensors do not change their version.
        whole = tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
        if not fresh or not whole or type(tensor) is not Tensor or tensor.device != device or tensor.is_inference():
            return KeptRows(copy_rows(tensor, places(), device), None, 0, layer)
        return KeptRows(tensor.detach(), places, tensor._version, layer)  # noqa: SLF001 - PyTorch documents it

    def read(self) -> Tensor:
        """Return a copy of the kept rows, (heads, rows, features).

        Raises:
            ModelError: the tensor was changed in place after the call.
        """
        if self.places is None:
            return self.tensor
        if self.tensor._version != self.version_when_kept:  # noqa: SLF001
            raise ModelError(
                f"Queries or keys of {self.layer} were changed in place after the layer computed them.",
                "Change a copy of what its projections return, such as output.clone() in a hook.",
            )
        return copy_rows(self.tensor, self.places(), self.tensor.device)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle a copy of the rows, because pickling does not preserve a tensor's version counter."""
        return KeptRows, (self.read(), None, 0, self.layer)


@dataclass(frozen=True, eq=False)
class CallTokenIds:
    """The token ids of one call.

    Attributes:
        queries: (batch, queries) int64, the ids of its queries, or None.
        keys: (batch, keys) int64, the ids of its keys if they are another text, or None.
        cross_attention: whether its keys come from another text (cross-attention).
        query_start: position of its first query among its keys; a tensor has one per sample.
    """

    queries: Tensor | None
    keys: Tensor | None
    cross_attention: bool
    query_start: int | Tensor

    def key_ids(self, request: AttentionRequest) -> Tensor | None:
        """Return the token id of each key of the call, (batch, keys) int64; None if unknown."""
        ids = self.keys if self.cross_attention else self.queries
        if self.cross_attention or ids is None:
            return ids
        shape = request.shape
        if isinstance(request.query_start, Tensor) or request.query_start or shape.query_length != shape.key_length:
            return None
        return ids

    def special_keys(self, request: AttentionRequest, special_ids: Sequence[int]) -> Tensor | None:
        """Return which keys of the call are special tokens, (batch, keys) bool; None if unknown."""
        ids = self.key_ids(request) if special_ids else None
        return None if ids is None else is_among(ids, special_ids).to(request.shape.device)

    def append_to_sample(self, sample: SampleRecord, span: SampleSpan, offset: int) -> None:
        """Append the ids of one sample of the call to the sample's record.

        Args:
            sample: the record of the sample.
            span: ranges of the sample's queries and keys in the call.
            offset: index of the call's first key in the keys of the sample; negative if padding comes first.
        """
        if self.cross_attention:
            before = sample.calls[-1][0][1] if sample.calls else 0
            sample.growing_query_text.append_ids(_row_of_ids(self.queries, span.sample, span.queries), start=before)
            if not sample.calls:
                sample.growing_key_text.append_ids(_row_of_ids(self.keys, span.sample, span.keys), start=0)
            return
        start = self.query_start
        origin = offset + (int(start[span.sample]) if isinstance(start, Tensor) else start)
        first, stop = max(-origin, 0), max(offset + span.keys[1] - origin, 0)
        sample.growing_key_text.append_ids(_row_of_ids(self.queries, span.sample, (first, stop)), start=origin + first)


def is_among(ids: Tensor, wanted: Sequence[int]) -> Tensor:
    """Return which of the ids are in `wanted`: bool, of the shape of `ids`."""
    return torch.isin(ids, torch.tensor(wanted, device=ids.device))


def _row_of_ids(ids: Tensor | None, row: int, ends: tuple[int, int]) -> Tensor | None:
    return None if ids is None else ids[row, slice(*ends)]


@dataclass(eq=False)
class SampleSpans:
    """Which queries and keys of an attention call belong to each sample; shared by layers with the same mask.

    Attributes:
        request: the call on the CPU, without q, k, v and the layer that made it.
        texts: the texts of each row of the batch, each a sample; None if each row is one sample.
        real_queries: (batch, queries) bool, False for padding; None if unknown.
        real_keys: (batch, keys) bool, False for padding; None if unknown.
        requests: the sliced request of each sample, without q, k and v; empty until `slice_requests`.
        one_text: whether a row is one sample although its mask separates texts, as in cross-attention.
    """

    request: AttentionRequest
    texts: RowTexts | None = None
    real_queries: Tensor | None = None
    real_keys: Tensor | None = None
    requests: list[AttentionRequest] = field(default_factory=list)
    one_text: bool = False
    _key_starts_in_text: dict[int, int | Tensor] = field(default_factory=dict)  # by number of windows
    # the call on its own device, if that is not the CPU, where all of the above is
    of_device: AttentionRequest | None = None
    _shared: SharedByLayers = field(default_factory=SharedByLayers)  # what was found about token ids

    @cached_property
    def spans(self) -> list[SampleSpan]:
        """Ranges of queries and keys of each sample in the call."""
        return spans_of_call(self.request, self.texts, queries=self.real_queries, keys=self.real_keys)

    @cached_property
    def span_ends(self) -> Tensor:
        """Per sample its index in the batch, query range and key range, [first, stop) each: (5, samples) int64."""
        found = [(span.sample, *span.queries, *span.keys) for span in self.spans]
        return torch.tensor(found, dtype=torch.int64).view(-1, 5).T

    def key_starts(self, offset: int | Tensor) -> Tensor:
        """Return the position of the first key of each sample in the sequence: (samples,) int64.

        Args:
            offset: position of the first key of the call in the sequence, one number or (batch,).
        """
        sample, first_key = self.span_ends[0], self.span_ends[3]
        return first_key + (offset.cpu()[sample] if isinstance(offset, Tensor) else offset)

    def key_lengths(self, windows: int) -> Tensor:
        """Return the number of keys of each window: (samples, windows) int64; `windows` batch rows form one sample."""
        return (self.span_ends[4] - self.span_ends[3]).view(-1, windows)

    @cached_property
    def key_places(self) -> Tensor | None:
        """The rows of k that belong to samples, as in `TextRows.places`."""
        shape, (sample, _, _, start, stop) = self.request.shape, self.span_ends
        lengths = stop - start
        if int(lengths.sum()) == shape.batch * shape.key_length:
            return None
        return concatenate_ranges(sample * shape.key_length + start, lengths)

    @cached_property
    def sliceable(self) -> Sliceable:
        """Which parts measured on the whole call are valid for each single sample.

        With padding between the queries of a sample, no measured quantity is valid for a sample.
        """
        # Each text begins at its first key, and its queries see only its own keys; spans need not be read.
        if self.texts is not None and _hides_no_token(self.request, self.real_queries, self.real_keys):
            return Sliceable()
        if self.real_queries is not None:
            sample, first, stop = self.span_ends[:3]
            places = concatenate_ranges(sample * self.request.shape.query_length + first, stop - first)
            if not bool(self.real_queries.flatten()[places].all()):
                return Sliceable(any_part=False)
        of_spans = [sliceable_parts(self.request, span) for span in self.spans]
        return Sliceable(*(all(each) for each in zip(*of_spans, strict=True))) if of_spans else Sliceable()

    @cached_property
    def text_rows(self) -> TextRows:
        """The queries of the call that belong to samples, as rows, one text per span."""
        return TextRows.of_spans(self.span_ends, self.request.shape, self.request.query_start)

    def ids_of_queries(self, ids: Tensor, request: AttentionRequest) -> Tensor | None:
        """Return the token ids of the queries of a call, given those of the model's input.

        Args:
            ids: (samples, tokens) int64, on the CPU.
            request: the call, with its origin.

        Returns:
            (batch, queries) int64; None if the ids do not fit the call.
        """
        places = request.known_origin.input_places
        of = ids, None if places is None else places.index
        return self._shared.once("queries", of, lambda: self._find_ids(ids, places))

    def _find_ids(self, ids: Tensor, places: InputPlaces | None) -> Tensor | None:
        size = self.request.shape.batch, self.request.shape.query_length
        if places is not None and ids.shape == places.shape and (places.padded_left or ids.shape != size):
            tokens, found = ids.flatten()[places.index.cpu()], ids.new_zeros(size)
            whole = size == (1, len(tokens))
            real = torch.ones(size, dtype=torch.bool) if whole else self.sample_of_queries() >= 0
            if int(real.sum()) != len(tokens):
                return None
            found[real] = tokens
            return found
        if ids.shape == size:
            return ids
        if self.texts is None or size[0] != 1 or len(ids) != len(self.spans):
            return None
        # The layer has no padding and the model's input has, such as that of nested tensors, which is on the right.
        real = torch.arange(ids.shape[1]) < self.text_rows.ends.diff()[:, None]
        return ids[real][None] if int(real.sum()) == size[1] else None

    def rows_with_ids(self, ids: CallTokenIds) -> TextRows:
        """Return `text_rows` with the token ids of the call, where these are all tokens of the texts so far."""
        return self._shared.once("rows", (ids.queries, ids.cross_attention), lambda: self._add_ids(ids))

    def _add_ids(self, ids: CallTokenIds) -> TextRows:
        rows, known = self.text_rows, ids.queries
        if (
            known is None
            or ids.cross_attention
            or bool((rows.positions[rows.ends[:-1][rows.ends.diff() > 0]] != 0).any())
        ):
            return rows
        return rows.with_token_ids(rows.select(known[:, None])[0])

    @cached_property
    def first_keys(self) -> Tensor:
        """Index of the first key of each query's sample: (batch, 1, 1 or queries) int64."""
        return self._per_query(self.span_ends[3])

    def key_starts_in_text(self, windows: int = 1) -> int | Tensor:
        """Return what the number of a key in its text exceeds its index in the call by, see `ProbeContext.key_start`.

        Each `windows` rows of the batch are windows of one text.

        Returns:
            (batch, 1, 1 or queries) int64, or 0.
        """
        if windows not in self._key_starts_in_text:
            lengths = self.key_lengths(windows)
            found = (lengths.cumsum(1) - lengths).flatten() - self.span_ends[3]
            self._key_starts_in_text[windows] = self._per_query(found) if bool(found.any()) else 0
        return self._key_starts_in_text[windows]

    def _per_query(self, of_samples: Tensor) -> Tensor:
        """Return for each query the number of its sample: (samples,) -> (batch, 1, 1 or queries); 0 without sample."""
        if self.texts is None:
            return of_samples[:, None, None]
        return self._fill(of_samples, *self.span_ends[:3], width=self.request.shape.query_length, other=0)[:, None]

    @cached_property
    def sample_of_keys(self) -> Tensor:
        """The sample of each key, (batch, keys) int64; -1 for keys of no sample."""
        sample, _, _, first, stop = self.span_ends
        numbers = torch.arange(len(sample))
        return self._fill(numbers, sample, first, stop, width=self.request.shape.key_length, other=-1)

    def ids_within_texts(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return the token ids of keys, (batch, keys), -1 outside of texts; and numbers that no two texts share."""

        def find() -> tuple[Tensor, Tensor]:
            text = self.sample_of_keys
            read = ids.masked_fill(text < 0, -1)
            return read, read + text.clamp(min=0) * (int(read.max()) + 2)

        return self._shared.once("keys", ids, find)

    def sample_of_queries(self) -> Tensor:
        """Return the sample of each query, (batch, queries) int64; -1 for queries of no sample."""
        numbers = torch.arange(len(self.spans))
        return self._fill(numbers, *self.span_ends[:3], width=self.request.shape.query_length, other=-1)

    def _fill(
        self, of_samples: Tensor, sample: Tensor, start: Tensor, stop: Tensor, *, width: int, other: int
    ) -> Tensor:
        """Return a number per token, (batch, width): that of its sample, or `other` where a token has none."""
        lengths = stop - start
        filled = of_samples.new_full((self.request.shape.batch, width), other)
        places = concatenate_ranges(sample * width + start, lengths)
        filled.view(-1)[places] = of_samples.repeat_interleave(lengths)
        return filled

    def fits_call(
        self, request: AttentionRequest, real: Tensor | None, padding: Tensor | None, *, one_text: bool
    ) -> bool:
        """Whether these spans are valid for another call: same mask, options, shape and padding; a row is one text."""
        mine = self.request if self.of_device is None else self.of_device
        for each in (request, mine):
            if isinstance(each.query_start, Tensor) or each.bias is not None:
                return False
        return (
            request.mask is mine.mask
            and one_text == self.one_text
            and (request.query_start, request.scale, request.softcap) == (mine.query_start, mine.scale, mine.softcap)
            and request.shape == mine.shape
            and _are_equal(real, self.real_queries)
            and _are_equal(padding, self.real_keys)
        )


def has_arrived() -> None:
    """Wait for nothing: the tensors of a call have been computed."""


def warn_of_large_scores(logsumexp: Tensor) -> None:
    """Warn if the logsumexp of a call of a GPU, (batch, heads, queries), is too large for statistics in float32."""
    if has_large_logsumexp(logsumexp):
        warnings.warn(
            "Scores of an observed call are so large that a GPU, which measures in float32, rounds their weights. "
            "Call multihead.statistics with the q and k of the call on the CPU, in float64.",
            UserWarning,
            stacklevel=2,
        )


@dataclass(eq=False)
class WaitingCall:
    """The first call of a batch of texts, whose rows wait until a sample of its layer is read.

    Making samples takes longer than recording, and tables need only statistics, which are computed when they are read.

    Attributes:
        new_sample: function that creates an empty sample of the layer.
        sample_spans: which queries and keys of the call belong to each sample.
        request: the call without q, k, v and the layer that made it.
        logsumexp: (batch, heads, queries), nats.
        parts: quantities that the kernel measured on the whole call, tensors on the CPU; statistics are computed from
            them.
        ids: token ids of the call.
        probes: probes of the record; a statistic is computed for each whose `Probe.parts` were measured.
        q: the queries of texts; None if only statistics are kept.
        k: the keys of texts; None if only statistics are kept.
        windows: how many consecutive rows of the batch are windows of one sample.
        arrive: waits until `logsumexp` and `parts` have arrived from a GPU.
    """

    new_sample: Callable[[], SampleRecord]
    sample_spans: SampleSpans
    request: AttentionRequest
    logsumexp: Tensor
    parts: PartValues
    ids: CallTokenIds
    probes: tuple[Statistic, ...]
    q: LaterRows | None = None
    k: LaterRows | None = None
    windows: int = 1
    arrive: Callable[[], None] = has_arrived
    _statistics: dict[str, Tensor] | None = None  # None until computed

    @property
    def statistics(self) -> dict[str, Tensor]:
        """Statistics of the whole batch: name -> (batch, heads, queries), on the CPU."""
        self.wait()
        measured = self.parts  # read first, because another thread frees them after it has computed the statistics
        if self._statistics is None:
            logsumexp = self.logsumexp.cpu()
            parts = number_in_text(measured, self.sample_spans.key_starts_in_text(self.windows), logsumexp)
            regular = bool((logsumexp > -torch.inf).all())
            self._statistics = {
                probe.name: statistic_from_parts(probe, parts, logsumexp, all_rows_regular=regular)
                for probe in self.probes
                if isinstance(probe, Probe) and probe.parts <= parts.keys()
            }
            self.parts = {}
        return self._statistics

    def wait(self) -> None:
        """Wait until what was measured on a GPU has arrived."""
        if self.arrive is has_arrived:
            return
        self.arrive()
        self.arrive = has_arrived
        warn_of_large_scores(self.logsumexp.cpu())

    def __getstate__(self) -> dict[str, Any]:
        """Return the fields, without what another process cannot wait for."""
        self.wait()
        return self.__dict__

    def measured(self) -> MeasuredRows:
        """Return the statistics as rows of texts, each span a text of its own."""
        self.wait()
        rows = self.sample_spans.rows_with_ids(self.ids)
        sees = rows.select(self.logsumexp.cpu()) != -torch.inf
        values = {name: rows.select(value) for name, value in self.statistics.items()}
        return MeasuredRows(rows, sees, values, own={probe.name: probe for probe in self.probes})

    @property
    def num_texts(self) -> int:
        """Number of texts."""
        return len(self.sample_spans.spans) // self.windows

    def slice_requests(self) -> None:
        """Slice the request of each sample, early if the mask has tensors, because the caller may change them."""
        sample_spans = self.sample_spans
        if not sample_spans.requests:
            sample_spans.requests = [slice_request(self.request, span) for span in sample_spans.spans]

    def make_samples(self, table: TextTable, *, first: int) -> list[SampleRecord]:
        """Append the rows to the table of the layer, where the first text has the number `first`; return the samples.

        The windows of a text follow each other.
        """
        spans, rows, windows = self.sample_spans, self.sample_spans.text_rows, self.windows
        self.slice_requests()
        values: dict[str, Tensor | LaterRows]
        logsumexp: Tensor | LaterRows
        if self.arrive is has_arrived:
            values = {name: rows.select(value) for name, value in self.statistics.items()}
            logsumexp = rows.select(self.logsumexp)
        else:
            values = {each.name: self._read_later(each.name) for each in self.probes if self._is_measured(each)}
            logsumexp = RowsOnTheirWay(self._read_logsumexp)
        samples = new_samples(self.new_sample, spans, self.ids)[::windows]
        for text, sample in enumerate(samples, first):
            sample.view_table(table, text, keeps_qk=self.q is not None)
        for index, request in enumerate(spans.requests):
            sample = samples[index // windows]
            # learned sinks differ between layers that share a mask
            segment = Segment(replace(request, sinks=self.request.sinks))
            if index % windows:
                segment = replace(segment, key_start=sample.num_keys, is_window=True)
            sample.append_segment(segment)
        texts = [first + index // windows for index in range(len(spans.spans))]
        queries, keys = rows.ends.diff().tolist(), spans.key_lengths(1).flatten().tolist()
        if self.k is not None:
            table.k.append(self.k, list(zip(texts, keys, strict=True)))
        table.append(list(zip(texts, queries, strict=True)), logsumexp, values, self.q)
        return samples

    def _is_measured(self, probe: Statistic) -> bool:
        """Whether a statistic is computed from the parts."""
        return isinstance(probe, Probe) and probe.parts <= self.parts.keys()

    def _read_later(self, name: str) -> RowsOnTheirWay:
        """Return the rows of a statistic, computed when they are read."""
        return RowsOnTheirWay(lambda: self.sample_spans.text_rows.select(self.statistics[name]))

    def _read_logsumexp(self) -> Tensor:
        """Wait for the logsumexp, and return its rows."""
        self.wait()
        return self.sample_spans.text_rows.select(self.logsumexp)


def new_samples(
    new_sample: Callable[[], SampleRecord], sample_spans: SampleSpans, ids: CallTokenIds
) -> list[SampleRecord]:
    """Create a sample for each span of a call, with only its token ids."""
    samples = [new_sample() for _ in sample_spans.spans]
    for sample, span in zip(samples, sample_spans.spans, strict=True):
        ids.append_to_sample(sample, span, -span.keys[0])
    return samples


def spans_of_call(
    request: AttentionRequest,
    texts: RowTexts | None = None,
    *,
    queries: Tensor | None = None,
    keys: Tensor | None = None,
) -> list[SampleSpan]:
    """Find the ranges of queries and keys of each sample in a call: of each row of the batch, or of each text of a row.

    Args:
        request: the call.
        texts: the texts of each row; None if each row is one sample.
        queries: (batch, queries) bool, False for padding; None if unknown, so that queries at the end without visible
            keys count as padding.
        keys: (batch, keys) bool, False for padding; None if unknown. Keys at the end that no query sees are always
            left out.
    """
    shape, device = request.shape, request.shape.device
    batch, columns = shape.batch, shape.key_length
    samples = _SamplesOfRows(request, texts)
    row, first_token, stop_token, first_key, stop_key = samples.ranges
    if texts is not None and _hides_no_token(request, queries, keys):
        places = zip(row.tolist(), *(each.tolist() for each in samples.ranges[1:]), strict=True)
        return [SampleSpan(at, (a, b), (c, d), *(True,) * 3) for at, a, b, c, d in places]
    bounds = bounds_of(request)
    stop, seeing = (each.expand(batch, -1) for each in (bounds.stop, ~bounds.sees_nothing))  # (batch, queries)
    index = torch.arange(shape.query_length, device=device).expand(batch, -1)
    if queries is not None:
        first, end = samples.ends_of(queries, first_token)
    else:
        end = samples.largest(index + 1, seeing)
        first, end = first_token, torch.where(end > 0, end, stop_token)
    counted = seeing & (index >= samples.per_query(first)) & (index < samples.per_query(end))
    # an empty text has no keys
    none = stop_key if queries is None else torch.where(samples.largest(index + 1, queries) > 0, stop_key, first_key)
    last = torch.where(samples.largest(index + 1, counted) > 0, samples.largest(stop, counted), none)
    end_key = last
    if keys is not None:
        first_key, end_key = samples.ends_of(keys, first_key, of_keys=True)
        end_key = first_key.maximum(end_key.minimum(last))
    # A row's statistics are valid for its sample if the row sees only keys of that sample.
    real = counted if queries is None else counted & queries
    start = first_key_of_queries(request, bounds).expand(batch, -1)
    # `earliest` is the number of keys if no query counts
    earliest = columns - samples.largest(columns - start, real)
    holds_all = (earliest >= first_key) & (samples.largest(stop, real) <= end_key)
    holds_first = (earliest == columns - samples.largest(columns - start, seeing)) | (earliest == columns)
    found = torch.stack((row, first, end, first_key, end_key, holds_all, holds_first)).tolist()
    return [
        SampleSpan(sample, (row_first, row_end), (key_first, key_end), bool(inside), bool(same), texts is not None)
        for sample, row_first, row_end, key_first, key_end, inside, same in zip(*found, strict=True)
    ]


def _hides_no_token(request: AttentionRequest, queries: Tensor | None, keys: Tensor | None) -> bool:
    """Whether every query of a text sees its own key, so that all tokens of a text belong to it; reads no values."""
    band = request.mask.without_documents().band
    return band is not None and band.lengths is None and request.bias is None and queries is None and keys is None


class _SamplesOfRows:
    """The samples of a call, the rows of its batch or the texts of each row, and reductions over their tokens.

    Attributes:
        ranges: (5, samples) int64, as `RowTexts.ranges` returns them, on the device of the call.
    """

    def __init__(self, request: AttentionRequest, texts: RowTexts | None) -> None:
        shape = request.shape
        self.shape, self._of_query, self._of_key = shape, None, None
        if texts is None:
            row = torch.arange(shape.batch, device=shape.device)
            none = torch.zeros_like(row)
            self.ranges = torch.stack([row, none, none + shape.query_length, none, none + shape.key_length])
            return
        sizes = {"batch": shape.batch, "queries": shape.query_length, "keys": shape.key_length}
        self.ranges = texts.ranges(request.query_start, **sizes).to(shape.device)
        row, first_query, stop_query, first_key, stop_key = self.ranges
        self._of_query, self._of_key = (
            self._numbers(row, first, stop, width)
            for first, stop, width in (
                (first_query, stop_query, shape.query_length),
                (first_key, stop_key, shape.key_length),
            )
        )

    def _numbers(self, row: Tensor, first: Tensor, stop: Tensor, width: int) -> Tensor:
        """Return the sample of each token, (batch * width,) int64, or the number of samples for tokens of none."""
        filled = torch.full((self.shape.batch * width,), len(row))
        places = concatenate_ranges((row * width + first).cpu(), (stop - first).cpu())
        filled[places] = torch.arange(len(row)).repeat_interleave((stop - first).cpu())
        return filled.to(self.shape.device)

    def largest(self, values: Tensor, counted: Tensor, *, of_keys: bool = False) -> Tensor:
        """Return per sample the largest of non-negative values (batch, tokens) where `counted`; 0 if there are none."""
        numbers = self._of_key if of_keys else self._of_query
        if numbers is None:
            return _largest_where_counted(values, counted)
        none = values.new_zeros(self.ranges.shape[1] + 1)
        return none.scatter_reduce(0, numbers, values.masked_fill(~counted, 0).flatten(), "amax")[:-1]

    def per_query(self, of_samples: Tensor) -> Tensor:
        """Return for each query the number of its sample: (samples,) -> (batch, 1 or queries)."""
        if self._of_query is None:
            return of_samples[:, None]
        return torch.nn.functional.pad(of_samples, (0, 1))[self._of_query].view(self.shape.batch, -1)

    def ends_of(self, flags: Tensor, none: Tensor, *, of_keys: bool = False) -> tuple[Tensor, Tensor]:
        """Return per sample the index of the first flag (batch, tokens) and that after the last; `none` without one."""
        count = flags.shape[1]
        index = torch.arange(count, device=flags.device).expand_as(flags)
        end = self.largest(index + 1, flags, of_keys=of_keys)
        first = count - self.largest(count - index, flags, of_keys=of_keys)
        return torch.where(end > 0, first, none), torch.where(end > 0, end, none)


def _are_equal(one: Tensor | None, other: Tensor | None) -> bool:
    return one is other or (one is not None and other is not None and torch.equal(one, other))


def _largest_where_counted(values: Tensor, counted: Tensor) -> Tensor:
    """Return per row the largest of the non-negative values where `counted`; 0 if there are none."""
    # one more column, so that no row is empty
    padded = torch.nn.functional.pad(values.masked_fill(~counted, 0), (1, 0))
    return padded.amax(1)


def slice_call(call: AttentionCall, span: SampleSpan) -> AttentionCall:
    """Slice one sample from a call: return an equivalent call with a batch of one.

    Measured statistics are sliced too, except statistics that are not valid for a single sample.
    """
    request, attended = call.request, call.result
    sample, rows, columns = slice(span.sample, span.sample + 1), slice(*span.queries), slice(*span.keys)
    part = slice_request(
        request, span, q=request.q[sample, :, rows], k=request.k[sample, :, columns], v=request.v[sample, :, columns]
    )
    valid, logsumexp = sliceable_parts(request, span), attended.logsumexp[sample, :, rows]
    kept = {name: value[sample, :, rows] for name, value in attended.statistics.items() if valid.includes(name)}
    kept = dict(number_in_text(kept, -span.keys[0], logsumexp))
    factors = None if attended.head_factors is None else attended.head_factors[sample, :, rows]
    return AttentionCall(part, AttentionResult(attended.output[sample, :, rows], logsumexp, kept, factors))


def slice_request(request: AttentionRequest, span: SampleSpan, **tensors: Any) -> AttentionRequest:
    """Slice the mask, bias and shape of one sample from a request, with its q, k and v where these are given."""
    rows, columns = slice(*span.queries), slice(*span.keys)
    shape = request.shape._replace(
        batch=1,
        query_length=rows.stop - rows.start,
        key_length=columns.stop - columns.start,
    )
    position = position_in_sample(request, span)
    mask = (request.mask.without_documents() if span.is_text_of_row else request.mask).select_span(span)
    if not mask.uses_positions:
        position = max(position, 0)  # in cross-attention no query is before the first key
    return replace(
        request,
        shape=shape,
        mask=mask,
        query_start=position,
        bias=None if request.bias is None else _slice_bias(request.bias, request.shape.query_length, span),
        origin=None,
        **tensors,
    )


class Sliceable(NamedTuple):
    """Which of the quantities that were measured on a whole call are valid for its samples.

    Attributes:
        any_part: whether sums over the weights of a query are.
        first_key: whether weights on the first key are.
        positions: whether quantities that use the positions of queries are.
    """

    any_part: bool = True
    first_key: bool = True
    positions: bool = True

    def includes_all(self, names: Iterable[PartName]) -> bool:
        """Whether all of these parts are valid."""
        return all(self) or all(map(self.includes, names))

    def includes(self, name: PartName) -> bool:
        """Whether a part is valid."""
        if self.any_part and self.first_key and self.positions:
            return True
        part = part_named(name)
        return self.any_part and (
            (self.first_key or not part.uses_first_key) and (self.positions or not part.uses_positions)
        )


def sliceable_parts(request: AttentionRequest, span: SampleSpan) -> Sliceable:
    """Return which of the quantities that were measured on a whole call are valid for one of its samples.

    Sums over the weights of a query are valid if the sample's queries see only the sample's keys. Mean distances are
    valid under the same condition, because queries and keys of a sample are shifted equally, unless a query is before
    the first key. The weight on the first key is valid only if the first key of the call is the first key of the
    sample.
    """
    whole = (span.queries, span.keys) == ((0, request.shape.query_length), (0, request.shape.key_length))
    return Sliceable(
        span.holds_all_visible_keys or whole,
        span.holds_first_visible_key,
        position_in_sample(request, span) >= 0,
    )


def position_in_sample(request: AttentionRequest, span: SampleSpan) -> int:
    """Return the position of a sample's first query, counted from the sample's first key."""
    start = request.query_start
    origin = int(start[span.sample]) if isinstance(start, Tensor) else start
    return origin + span.queries[0] - span.keys[0]


def restore_dropped_keys(call: AttentionCall, key_start: int) -> tuple[AttentionCall, int]:
    """Insert zeros for keys that a cache dropped after the leading keys, so that the call has all keys of its sample.

    The mask hides these keys, because a cache drops only keys that no later query sees. The measured statistics are
    removed, because their distances and key indices do not count the dropped keys.

    Args:
        call: a call with a batch of one.
        key_start: number of the sample's keys that were dropped.

    Returns:
        the call, and the index of its first key in the keys of the sample.
    """
    request, mask, shape = call.request, call.request.mask, call.request.shape
    if not isinstance(mask, LeadingKeys) or key_start <= 0:
        return call, key_start
    if shape.key_length < mask.count:  # a call without tokens of this sample
        return call, 0
    bias = request.dense_bias
    if bias is not None:
        bias = _insert_zeros(bias.expand(-1, -1, -1, shape.key_length), 3, mask.count, key_start)
    whole = replace(
        request,
        k=_insert_zeros(request.k, 2, mask.count, key_start),
        v=_insert_zeros(request.v, 2, mask.count, key_start),
        shape=shape._replace(key_length=key_start + shape.key_length),
        mask=LeadingKeys(mask.count, mask.mask.after_dropping_keys(-key_start)),
        query_start=request.query_start + key_start,
        bias=bias,
    )
    return AttentionCall(whole, replace(call.result, statistics={})), 0


def hide_padding_queries(call: AttentionCall, real: Tensor) -> AttentionCall:
    """Hide all keys from padding queries between the tokens of a sample, so that summaries do not count them.

    Args:
        call: a call with a batch of one.
        real: (queries,) bool, False for padding.
    """
    if bool(real.all()):
        return call
    logsumexp = call.result.logsumexp.masked_fill(~real, -torch.inf)
    mask = call.request.mask & Keep(real, "queries")
    shown = torch.zeros_like(real)
    statistics = {
        part: set_empty_and_bad_queries(value, ~real, shown) for part, value in call.result.statistics.items()
    }
    attended = replace(call.result, kernel_logsumexp=logsumexp, finish=None, statistics=statistics)
    return AttentionCall(replace(call.request, mask=mask), attended)


def _insert_zeros(tensor: Tensor, axis: int, place: int, count: int) -> Tensor:
    """Insert `count` zeros along `axis` before index `place`."""
    before, after = tensor.tensor_split([place], axis)
    sizes = [*tensor.shape[:axis], count, *tensor.shape[axis + 1 :]]
    return torch.cat([before, tensor.new_zeros(sizes), after], axis)


def _slice_bias(bias: Bias, queries: int, span: SampleSpan) -> Bias:
    """Slice a bias to the rows and columns of one sample."""
    if isinstance(bias, RelativeBias):
        part = bias.slice_ranges(queries, span.queries, span.keys)
        return part if len(part.values) == 1 else RelativeBias(part.values[span.sample][None])
    return _slice_broadcast_tensor(bias, span)


def _slice_broadcast_tensor(tensor: Tensor, span: SampleSpan) -> Tensor:
    """Slice one sample from a tensor that broadcasts to (batch, heads, queries, keys)."""
    if tensor.shape[0] > 1:
        tensor = tensor[span.sample : span.sample + 1]
    if tensor.shape[2] > 1:
        tensor = tensor[:, :, slice(*span.queries)]
    if tensor.shape[3] > 1:
        tensor = tensor[..., slice(*span.keys)]
    return tensor
