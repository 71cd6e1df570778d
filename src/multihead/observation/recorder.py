"""Record attention calls: find the layer of a call, the samples in it, and the earlier call that it continues.

`observe`, `census` and `Watch` all use the class `Recorder`. It numbers the layers, finds the texts of a call, and adds
their statistics to the samples of a layer or to its running summary. One function measures them, with their chance
levels for a summary (`observation/measuring.py`): all texts of a call at once if each is there as it would be alone,
else text by text. For a census the summary has the strongest examples too (`LayerSums`), and takes whole texts only. A
watched training step stores nothing per query.

If the query positions of a call must be corrected (cross-attention), the statistics of distances and offsets that the
kernel has already computed are dropped, because they depend on positions.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from typing import Literal, TypeAlias
from weakref import WeakKeyDictionary, finalize

import torch
import torch.distributed as dist
from torch import Tensor, nn

from multihead.errors import ModelError, ProbeError
from multihead.kernels import sequence_split
from multihead.kernels.call import AttentionCall, AttentionRequest, AttentionResult, CachedSequence
from multihead.kernels.dense_tile import first_key_of_samples
from multihead.kernels.parts import RECEIVED, SINK_MASS, PartInput, PartName, number_in_text, part_named
from multihead.kernels.plan.bounds import bounds_of
from multihead.kernels.sequence_split import SequenceSplit
from multihead.layer.sharding import RankHeads, rank_heads
from multihead.masks.positions import SampleSpan
from multihead.models import pretrained
from multihead.models.coverage import whole_model_advice
from multihead.models.generation import GeneratedPass, GeneratedText
from multihead.models.pretrained import KNOWN_TEXTS, WHOLE_MASK, InputTracker
from multihead.observation.from_device import CallOnItsWay, QkOnTheirWay, StepOnItsWay
from multihead.observation.held import HeldPart, add_to_summary, append_parts, held_parts, parts_of_rows
from multihead.observation.host_copies import HostCopies
from multihead.observation.layer_filter import LayerFilter
from multihead.observation.layer_names import LayerNamer
from multihead.observation.measuring import StatisticsMeasurer, TextInCall
from multihead.observation.picture_calls import PictureCalls
from multihead.observation.record import Record
from multihead.probes.catalogue import PROBES, needs_pictures
from multihead.probes.context import ProbeContext
from multihead.probes.probe import PartValues, Probe
from multihead.probes.statistics import (
    complete_statistics,
    drop_position_parts,
    measure_token_parts,
    parts_of_probes,
    possible_probes,
    sink_mass,
    statistics_of_call,
)
from multihead.record.batch import (
    CallTokenIds,
    KeptRows,
    SampleSpans,
    WaitingCall,
    has_arrived,
    hide_padding_queries,
    is_among,
    new_samples,
    restore_dropped_keys,
    slice_call,
    slice_request,
)
from multihead.record.chance import content_key, visibility_key
from multihead.record.layer import LayerRecord
from multihead.record.running_summary import OpenTexts, RunningSummary
from multihead.record.sample import OwnStatistics, RecordedCall, SampleRecord
from multihead.record.segments import Segment, copy_contiguous
from multihead.record.shared import SharedByLayers
from multihead.record.split import LayerPartOfRank, TokensOfRank
from multihead.record.text_rows import MeasuredRows, TextRows
from multihead.record.text_table import LaterRows, RowsInTensor
from multihead.record.texts import PictureTokens
from multihead.scores.bias import values_of, with_values
from multihead.tensors.shapes import AttentionShape

Keep = Literal["cpu", "device", "statistics", "summary"]
ChanceLevels: TypeAlias = dict[object, dict[str, Tensor]]
"""Mask and sizes of a call -> its chance levels: name of a statistic -> (heads or 1, rows)."""
TokensOnRank: TypeAlias = list[tuple[tuple[int, int], slice]]
"""Tokens of this rank in a range of a split sequence: positions in the range, [first, stop); indices on the rank."""


@dataclass(eq=False)
class _LayerCall:
    """An attention call of a layer, with what is needed to record a later call that continues it (cached decoding).

    Attributes:
        layer: the record of the layer.
        offset: position of the first key in the sequence, an int or (batch,).
        query_stop: position after the last query, in the sequence.
        batch: number of rows.
        cross_attention: whether the keys come from another sequence than the queries.
        is_first: whether the call is the first one of its samples.
        is_further_window: whether the call computes a further window of the samples of the call before it.
        windows: how many consecutive rows of the batch are windows of one sample.
        texts_known: whether it is known which queries belong to which text.
        samples: returns the records of the samples; without their calls if only a summary is kept.
        texts: the samples in the layer's summary; None if there is no summary.
        waiting: returns for each sample the rows of its calls so far that may count in a summary only because of a
            later key, lists that grow.
        chance_levels: the chance levels of the calls of its pass.
        key_starts: returns the position of each sample's first key in the sequence, (samples,) int64; (1,) with 0 until
            the first call of the samples is recorded.
        num_keys: returns the number of keys of each sample in its windows so far, (samples,) int64; (1,) with 0 before
            the first window.
        in_pictures: whether it is known that keys come from places in pictures.
    """

    layer: LayerRecord
    offset: int | Tensor
    query_stop: int
    batch: int
    cross_attention: bool = False
    is_first: bool = True
    is_further_window: bool = False
    windows: int = 1
    texts_known: bool = True
    samples: Callable[[], list[SampleRecord]] = list
    texts: OpenTexts | None = None
    waiting: Callable[[], list[list[MeasuredRows]]] = list
    chance_levels: ChanceLevels = field(default_factory=dict)
    key_starts: Callable[[], Tensor] = lambda: torch.zeros(1, dtype=torch.int64)
    num_keys: Callable[[], Tensor] = lambda: torch.zeros(1, dtype=torch.int64)
    in_pictures: bool = False

    @staticmethod
    def from_call(
        call: AttentionCall, layer: LayerRecord, offset: int | Tensor, *, cross_attention: bool
    ) -> _LayerCall:
        """Create an object for a call whose first key has the position `offset` in the sequence."""
        request, shape, stop = call.request, call.request.shape, 0
        if request.position_in_sequence is None:
            start = 0 if isinstance(request.query_start, Tensor) else request.query_start
            stop = int(offset) + start + shape.query_length
        own_offset = offset.clone() if isinstance(offset, Tensor) else offset  # a cache may overwrite its tensor
        return _LayerCall(layer, own_offset, stop, shape.batch, cross_attention)

    def continue_call(self, previous: _LayerCall, *, is_window: bool) -> None:
        """Continue the samples of the layer's previous call; with `is_window`, with a further window of them."""
        self.is_first, self.is_further_window, self.texts = False, is_window, previous.texts
        self.samples, self.key_starts, self.waiting = previous.samples, previous.key_starts, previous.waiting
        self.num_keys = previous.num_keys if is_window else self.num_keys
        self.in_pictures = previous.in_pictures


@dataclass(eq=False)
class Recorder:
    """A listener that adds every attention call of a model to a record."""

    record: Record
    inputs: InputTracker
    layer_filter: LayerFilter | None  # None records all layers
    keep: Keep
    measurer: StatisticsMeasurer
    keeps_chance: bool = True  # whether a summary has chance levels
    # (name of a layer, number of heads) -> the layer's empty running sums, if `keep` is "summary"
    new_running_summary: Callable[[str, int], RunningSummary] = lambda _, num_heads: RunningSummary(num_heads)
    pictures: PictureCalls = field(default_factory=lambda: PictureCalls([]))
    requested_statistics: frozenset[PartName] = field(init=False)
    _own_statistics: OwnStatistics = field(init=False)  # the statistics that are not built in
    # whether a layer is cross-attention, where tokens of keys are not compared with the query's, whether the texts of a
    # call are known, and whether keys have places in pictures -> what measures it
    _measurers: dict[tuple[bool, bool, bool], StatisticsMeasurer] = field(default_factory=dict)
    _layers: dict[str, LayerRecord] = field(default_factory=dict)
    # the sequences in a cache, or of a pass -> name of a layer -> its newest call on them
    _previous_calls: WeakKeyDictionary[CachedSequence, dict[str, _LayerCall]] = field(default_factory=WeakKeyDictionary)
    _namer: LayerNamer = field(init=False)
    _copies: HostCopies = field(default_factory=HostCopies)
    _newest_sample_spans: SampleSpans | None = None  # the samples of the previous call in this pass
    _shared: SharedByLayers = field(default_factory=SharedByLayers)  # what the layers of this pass share
    _chance_levels: ChanceLevels = field(default_factory=dict)  # of this pass
    _warned_of_unknown_texts: bool = False

    def __post_init__(self) -> None:
        """Set `requested_statistics`, which a kernel may measure while it computes: those that need only q and k."""
        self.requested_statistics = parts_of_probes(
            probe for probe in self.measurer.probes if not probe.needs and probe.axes == "queries"
        )
        self._namer = LayerNamer(self.measurer.names, self.inputs)
        self.inputs.on_texts = self.add_generated_texts
        self._own_statistics = OwnStatistics(self.measurer.own)

    def _measurer_of(self, state: _LayerCall) -> StatisticsMeasurer:
        """Return what measures a call: all statistics that mean something in it."""
        key = state.cross_attention, state.texts_known, state.in_pictures
        if key not in self._measurers:
            probes = self.measurer.probes
            if self.keep == "summary":
                probes = tuple(probe for probe in probes if probe.axes == "queries")
            if state.cross_attention or not state.texts_known:
                probes = tuple(probe for probe in probes if not probe.compares_tokens)
            if not state.texts_known:
                probes = tuple(probe for probe in probes if not _depends_on_text(probe))
            left_out = self.pictures.left_out if state.in_pictures else {each.name for each in self.pictures.probes}
            probes = tuple(probe for probe in probes if probe.name not in left_out)
            self._measurers[key] = replace(self.measurer, probes=probes)
        return self._measurers[key]

    @cached_property
    def _latest_counted_offset(self) -> int:
        """The largest offset of a key because of which a query counts."""
        return max((probe.counted_offset or 0 for probe in self.measurer.probes), default=0)

    @property
    def _keeps_qk(self) -> bool:
        """Whether q and k are kept, so that tiles of the maps can be computed later."""
        return self.keep in ("cpu", "device")

    def _device_of_record(self, request: AttentionRequest) -> torch.device:
        """Return the device on which the tensors of a call are kept."""
        return request.shape.device if self.keep == "device" else torch.device("cpu")

    @torch.no_grad()
    def receive(self, call: AttentionCall) -> None:
        """Add an attention call to the record if a layer of the model made it; called by the kernels."""
        request, caller = call.request, call.request.origin
        if caller is None or id(caller.layer) not in self.measurer.names or self.inputs.is_aside:
            return
        if self._namer.begins_pass():
            self._newest_sample_spans, self._shared, self._chance_levels = None, SharedByLayers(), {}
        name = self._namer.name_call(request, caller.layer)
        layer = self._record_of_layer(name, request)
        is_selected = self.layer_filter is None or self.layer_filter.matches(name, layer.number)
        if sequence_split.active_split is not None:
            if is_selected:
                self._add_queries_of_rank(call, sequence_split.active_split, layer)
            return
        module, continued, keys = self.measurer.module_name(request), caller.position_in_sequence, caller.key_places
        cross_attention = pretrained.is_cross_attention_call(caller, module)
        offset: int | Tensor = 0 if keys is None else keys.offset  # position of the first key
        sequence, num_cached = self.inputs.sequence_of_queries(module)
        if continued is not None:
            offset, cross_attention = continued.key_start, continued.first_query is not None
            sequence, num_cached = continued.sequence, 1
        read = self._generated_pass(request, module)
        previous_calls = self._previous_calls.setdefault(sequence, {})
        previous = None if read is not None else previous_calls.get(name)
        if previous is not None and not (
            self._namer.is_further_window
            or (num_cached and _continues_call(request, previous, offset, cross_attention=cross_attention))
        ):
            previous = None
        if cross_attention and not request.mask.uses_positions:
            call = _number_queries_of_cross_attention(call, previous, read)
        state = _LayerCall.from_call(call, layer, offset, cross_attention=cross_attention)
        state.chance_levels = self._chance_levels
        if previous is not None:
            state.continue_call(previous, is_window=self._namer.is_further_window)
        if is_selected:
            self._add_call(call, state, read)
        if read is None:
            previous_calls[name] = state
            if previous is None and state.texts is not None and layer.running_summary is not None:
                # Texts end when nothing can continue them any more.
                finalize(sequence, layer.running_summary.end_texts, state.texts).atexit = False

    def _generated_pass(self, request: AttentionRequest, module: str) -> GeneratedPass | None:
        """Return the pass of `generate` whose tokens are the queries of a call; None if they are no such tokens."""
        read, shape = self.inputs.generated_pass, request.shape
        if read is None or not read.reads(shape.batch, shape.query_length) or not self.inputs.reads_tokens(module):
            return None
        return read

    def _warn_of_unknown_texts(self, name: str) -> None:
        """Warn once that statistics are left out, because the texts of the calls are unknown."""
        left_out = [each.name for each in self.measurer.probes if each.compares_tokens or _depends_on_text(each)]
        if left_out and not self._warned_of_unknown_texts:
            self._warned_of_unknown_texts = True
            finding = f"The record of {name} has no {', '.join(left_out)}, because its texts are unknown: {WHOLE_MASK}."
            warnings.warn(f"{finding} {KNOWN_TEXTS}", UserWarning, stacklevel=2)

    def _record_of_layer(self, name: str, request: AttentionRequest) -> LayerRecord:
        """Return the record of a layer; at the layer's first call, create it."""
        if name not in self._layers:
            heads, number = request.shape.num_heads, self._namer.numbers[name]
            summary = self.new_running_summary(name, heads) if self.keep == "summary" else None
            # Only the processes of an initialised group can split a layer.
            grouped = dist.is_available() and dist.is_initialized()
            split = _rank_part_of_layer(request, sequence_split.active_split) if grouped else None
            self._layers[name] = LayerRecord(
                name, running_summary=summary, number=number, split=split, _known_heads=heads
            )
        return self._layers[name]

    def _add_call(self, call: AttentionCall, state: _LayerCall, read: GeneratedPass | None) -> None:
        """Measure a call, all samples at once if possible, and add it to the record, or hold it, see `_hold_call`."""
        request, summary = call.request, state.layer.running_summary
        state.texts_known = state.cross_attention or self.inputs.are_texts_known(
            self.measurer.module_name(request), request
        )
        if not state.texts_known:
            self._warn_of_unknown_texts(self.measurer.module_name(request))
        sample_spans = self._find_samples(request, cross_attention=state.cross_attention)
        ids = self._ids_of_call(request, sample_spans, cross_attention=state.cross_attention)
        if read is not None:
            self._hold_call(call, state, sample_spans, ids, read)
            return
        without_windows = sample_spans.texts is not None or request.position_in_sequence is not None
        if not (without_windows or state.cross_attention):
            name = self.measurer.module_name(request)
            state.windows = self.inputs.rows_per_sample(name, request.shape.batch)
        before, windows = state.num_keys, state.windows
        state.num_keys = cache(lambda: before() + sample_spans.key_lengths(windows).sum(1))
        if not state.is_first and sample_spans.texts is not None:
            _check_same_texts(len(sample_spans.spans), len(state.samples()), self.measurer.module_name(request))
        if state.is_first:
            state.key_starts = cache(partial(sample_spans.key_starts, state.offset))
        add = self._add_first_call if summary is None else self._add_batch_to_summary
        tokens: list[PictureTokens] = []
        if state.is_first and not state.cross_attention and self.pictures.measures_first:
            lengths = sample_spans.key_lengths(windows).sum(1).tolist()
            tokens = self.pictures.tokens_of_call(state.layer.name, tuple(lengths))
            state.in_pictures = any(each.boxes.has_places for each in tokens)
        begun = state.is_first and add(call, state, sample_spans, ids)
        for sample, each in zip(state.samples() if tokens else (), tokens, strict=False):
            sample.growing_key_text.set_pictures(each)
        if not begun:
            self._add_samples(call, state, sample_spans, ids)

    def _add_batch_to_summary(
        self, call: AttentionCall, state: _LayerCall, sample_spans: SampleSpans, ids: CallTokenIds
    ) -> bool:
        """Begin the texts of a call; return True if all could be measured at once, and were added to the summary."""
        layer, summary, windows, request = state.layer, state.layer.running_summary, state.windows, call.request
        assert summary is not None
        measurer = self._measurer_of(state)
        whole = not state.in_pictures and measurer.measures_whole(request, sample_spans, ids)
        if summary.takes_batches and (state.cross_attention or not whole or ids.key_ids(request) is None):
            shape = request.shape
            raise ModelError(
                f"{self.measurer.module_name(request)} attends from {shape.query_length} queries to {shape.key_length} "
                "keys, which are not the tokens of the texts.",
                "Give a model whose layers read each token of a text once, or choose other layers.",
            )
        new_sample = self._sample_factory(layer.name, cross_attention=state.cross_attention)
        summary.cross_attention |= state.cross_attention or not sample_spans.text_rows.end_with_their_keys
        state.texts = texts = summary.begin_texts(len(sample_spans.spans) // windows)
        none_wait: list[list[MeasuredRows]] = [[] for _ in texts.begun]
        state.waiting = lambda: none_wait
        state.samples = cache(lambda: new_samples(new_sample, sample_spans, ids)[::windows])
        if not whole:
            return False
        rows = sample_spans.rows_with_ids(ids)

        def measure(call: AttentionCall) -> MeasuredRows:
            context = measurer.context_of_batch(call, sample_spans, ids, windows=windows)
            measured = self._measure_with_chance(call, rows, context, state, sample_spans)
            return measured if windows == 1 else replace(measured, rows=replace(rows, ends=rows.ends[::windows]))

        latest, parts = self._latest_counted_offset, None
        if request.shape.device.type == "cuda":
            parts = self._parts_of_batch(call, sample_spans, ids, measurer.probes)
        if parts is None:
            measured = measure(call)
            summary.add(measured, state.texts)
            if latest > 0:
                left = measured.waiting(latest)
                state.waiting = cache(lambda: [[each] for each in left.texts()])
        else:
            on_way = CallOnItsWay.begin(call, parts, sample_spans.request, self._copies)
            later = cache(lambda: measure(on_way.awaited()))
            arrive = summary.add_later(lambda: [(later(), 0)], len(rows.positions), state.texts)
            on_way.copied.when_full(arrive)
            if latest > 0:
                state.waiting = cache(lambda: [[each] for each in later().waiting(latest).texts()])
        self.record.add_calls(layer, ())
        return True

    def _add_first_call(
        self, call: AttentionCall, state: _LayerCall, sample_spans: SampleSpans, ids: CallTokenIds
    ) -> bool:
        """Create the samples of a call; return True if the whole batch could be measured and recorded at once."""
        layer, windows = state.layer, state.windows
        new_sample = self._sample_factory(layer.name, cross_attention=state.cross_attention)
        probes = self._measurer_of(state).probes
        parts = self._parts_of_batch(call, sample_spans, ids, probes)
        if parts is None:
            samples = self._begin_texts(layer, new_samples(new_sample, sample_spans, ids)[::windows])
            state.samples = lambda: samples
            return False
        request, logsumexp = call.request, call.result.logsumexp.detach()
        device = self._device_of_record(request)
        parts, logsumexp, arrive = self._copy_measured(parts, logsumexp, device)
        shared = device == sample_spans.request.shape.device and request.sinks is None and request.bias is None
        bare = sample_spans.request if shared else self._request_without_tensors(request, device)
        batch = WaitingCall(
            new_sample, sample_spans, bare, logsumexp, parts, ids, probes, windows=windows, arrive=arrive
        )
        if self.record.statistics:  # a user-defined function may raise an error, so it runs now
            batch.statistics  # noqa: B018
        if self._keeps_qk:
            batch.q, batch.k = self._keep_qk(request, sample_spans, layer.name)
        # Tensors in the caller's mask may change later, so they are sliced now; lengths of texts were copied.
        if (request.mask if sample_spans.texts is None else request.mask.without_documents()).holds_tensors:
            batch.slice_requests()
        begun = layer.texts.begin(batch)
        state.samples = lambda: begun.samples
        self.record.add_calls(layer, [begun])
        return True

    def _keep_qk(self, request: AttentionRequest, sample_spans: SampleSpans, name: str) -> tuple[LaterRows, LaterRows]:
        """Keep the rows of q and k of the samples of a call of the layer `name`, on the device of the record."""
        device, fresh = self._device_of_record(request), request.known_origin.qk_computed_for_call
        kept = None
        if request.shape.device.type == "cuda" and not (fresh and self.keep == "device"):
            kept = QkOnTheirWay.begin(request.q, request.k, device, self._copies)
        if kept is not None:
            return (
                kept.rows_at(lambda: sample_spans.text_rows.places, keys=False),
                kept.rows_at(lambda: sample_spans.key_places, keys=True),
            )
        return (
            KeptRows.keep(request.q, lambda: sample_spans.text_rows.places, device, layer=name, fresh=fresh),
            KeptRows.keep(request.k, lambda: sample_spans.key_places, device, layer=name, fresh=fresh),
        )

    def _copy_measured(
        self, parts: PartValues, logsumexp: Tensor, device: torch.device
    ) -> tuple[PartValues, Tensor, Callable[[], None]]:
        """Return parts on the CPU and a logsumexp on a device, and what waits until a GPU has copied them."""
        if logsumexp.device.type != "cuda":
            on_cpu = parts if logsumexp.device.type == "cpu" else {part: value.cpu() for part, value in parts.items()}
            return on_cpu, logsumexp.to(device), has_arrived
        stays = device == logsumexp.device
        copied = self._copies.copy([*parts.values(), *(() if stays else (logsumexp,))])
        on_cpu = dict(zip(parts, copied.tensors, strict=False))
        return on_cpu, logsumexp if stays else copied.tensors[-1], copied.arrive

    def _begin_texts(self, layer: LayerRecord, samples: list[SampleRecord]) -> list[SampleRecord]:
        """Append texts to a layer, whose rows are appended to its table call by call; return their samples."""
        for text, sample in enumerate(samples, len(layer.samples)):
            sample.view_table(layer.texts.table, text, keeps_qk=self._keeps_qk)
        layer.samples.extend(samples)
        return samples

    def _add_queries_of_rank(self, call: AttentionCall, sequence: SequenceSplit, layer: LayerRecord) -> None:
        """Add the queries of this rank for a sequence that is split over ranks; each call creates new samples."""
        request, result = call.request, call.result
        device = self._device_of_record(request)
        length = sequence.whole_shape(request.shape).query_length
        bare = self._request_without_tensors(request, device)
        bare = replace(bare, shape=bare.shape._replace(query_length=length, key_length=length))
        sample_spans = self._shared_spans(bare)
        own_ids = self._ids_of_whole_sequence(request, sequence)
        ids = CallTokenIds(own_ids, None, cross_attention=False, query_start=0)
        _check_measurable_on_a_rank(self.measurer.probes, asked_for_pictures=self.pictures.asked)
        starts = sample_spans.key_starts_in_text()
        if isinstance(starts, Tensor) and starts.shape[-1] == length:  # a number per query, of which this rank has some
            starts = starts[..., sequence.positions_of_rank(request.shape.query_length, starts.device)[0]]
        parts = dict(number_in_text(result.statistics, starts, result.logsumexp))
        if request.sinks is not None:
            parts[SINK_MASS.name] = sink_mass(result.logsumexp.detach(), request.sinks)
        valid = sample_spans.sliceable
        if sample_spans.texts is not None:  # the ranks measured the first key of the row
            valid = valid._replace(first_key=False)
        parts = {part: value for part, value in parts.items() if valid.includes(part)}
        whole = replace(request, shape=bare.shape._replace(device=request.shape.device))
        if parts_of_probes(self.measurer.probes) - parts.keys():
            keys = sequence.gather_tokens(request.k, 2)
            values = sequence.gather_tokens(request.v, 2) if "values" in self.measurer.needs else keys
            whole = replace(whole, k=keys, v=values)
        attended = AttentionCall(whole, replace(result, statistics=parts))
        samples = []
        chunks = sequence.chunks_of_rank(length)
        for span in sample_spans.spans:
            queries, own_keys = (_find_tokens_on_rank(chunks, each) for each in (span.queries, span.keys))
            sample = self._sample_factory(layer.name)()
            if sequence.rank_and_world_size[1] > 1:
                sample.split = TokensOfRank(*(tuple(place for place, _ in tokens) for tokens in (queries, own_keys)))
            ids.append_to_sample(sample, span, -span.keys[0])
            sample.segments = [Segment(replace(slice_request(bare, span), sinks=bare.sinks))]
            rows, columns = ([indices for _, indices in tokens] for tokens in (queries, own_keys))
            sample.calls = [((0, sample.num_queries), (0, span.keys[1] - span.keys[0]))]
            sample.logsumexp = RowsInTensor(_slice_rows(result.logsumexp, span, rows).to(device))
            sample.set_statistics(self._measure_queries_of_rank(attended, span, queries, sample))
            if self._keeps_qk:
                sample.q = RowsInTensor(copy_contiguous(_slice_rows(request.q, span, rows), device))
                sample.k = RowsInTensor(copy_contiguous(_slice_rows(request.k, span, columns), device))
            samples.append(sample)
        if layer.running_summary is None:
            layer.samples.extend(samples)
        else:
            for sample in samples:  # chance levels of a text whose queries are on several ranks are unknown
                texts = layer.running_summary.begin_texts(1)
                layer.running_summary.add(sample.measured_rows(), texts)
                layer.running_summary.end_texts(texts)
        self.record.add_calls(layer, [(sample, 0) for sample in samples] if layer.running_summary is None else ())

    def _ids_of_whole_sequence(self, request: AttentionRequest, sequence: SequenceSplit) -> Tensor | None:
        """Return the token ids of all ranks, (batch, tokens) int64, gathered once per input; None if unknown."""
        name = self.measurer.module_name(request)
        own = self.inputs.inputs_of_queries(name).ids
        if own is None or own.shape != (request.shape.batch, request.shape.query_length):
            return None
        device = request.shape.device
        return self._shared.once("gathered", own, lambda: sequence.gather_tokens(own.to(device), 1).cpu())

    def _measure_queries_of_rank(
        self, call: AttentionCall, span: SampleSpan, queries: TokensOnRank, sample: SampleRecord
    ) -> dict[str, Tensor]:
        """Measure a sample's queries of this rank, in a call that has the keys and values of all ranks.

        Returns:
            statistic -> (heads, queries of this rank); for statistics per key (heads, keys), summed over these queries.
        """
        request, result = call.request, call.result
        one, columns = slice(span.sample, span.sample + 1), slice(*span.keys)
        of_span = slice_request(request, span)
        first_key = first_key_of_samples(of_span, bounds_of(of_span))
        found: list[dict[str, Tensor]] = []
        for positions, rows in queries or [((0, 0), slice(0))]:  # a rank without tokens has empty statistics
            places = positions[0] + span.queries[0], positions[1] + span.queries[0]
            part = slice_request(
                request,
                replace(span, queries=places),
                q=request.q[one, :, rows],
                k=request.k[one, :, columns],
                v=request.v[one, :, columns],
            )
            own = AttentionResult(
                result.output[one, :, rows],
                result.logsumexp[one, :, rows].detach(),
                {name: value[one, :, rows] for name, value in result.statistics.items()},
            )
            read, caller = sample.growing_key_text.ids, request.known_origin.layer
            context = self._context_of_probes(TextInCall(span, 0, read), part.shape, 0, caller, first=True)
            context = replace(context, first_key=first_key)
            possible = possible_probes(self.measurer.probes, part, context)
            found.append(complete_statistics(part, own.logsumexp, possible, context, parts=own.statistics, result=own))
        return sample.join_queries([{name: value[0].cpu() for name, value in each.items()} for each in found])

    def _find_samples(self, request: AttentionRequest, *, cross_attention: bool) -> SampleSpans:
        """Find the spans of the samples in a call; reuse the spans of the previous call if they are equal."""
        keys, on_cpu = None if request.origin is None else request.origin.key_places, self._shared.on_cpu
        real, padding = None, None
        if keys is not None and request.known_origin.input_places is not None:
            keys = None  # the model has left padding out
        if request.position_in_sequence is not None and request.position_in_sequence.lengths is not None:
            real = torch.arange(request.shape.query_length) < on_cpu(request.position_in_sequence.lengths)[:, None]
        elif request.origin is not None and request.origin.unpadded_queries is not None:
            real = on_cpu(request.origin.unpadded_queries)
            if request.origin.is_cross_attention is False and request.shape.key_length == request.shape.query_length:
                padding = real
        elif keys is not None:
            padding = None if keys.padding is None else on_cpu(keys.padding)
            before = self.inputs.tokens_until_query(self.measurer.module_name(request), request, keys.offset, on_cpu)
            unseen = 0 if before is None else before.shape[1] - request.shape.query_length
            real = before[:, unseen:] if before is not None and unseen else before
        return self._shared_spans(request, real, padding, one_text=cross_attention)

    def _shared_spans(
        self,
        request: AttentionRequest,
        real: Tensor | None = None,
        padding: Tensor | None = None,
        *,
        one_text: bool = False,
    ) -> SampleSpans:
        """Return the spans of the newest call if they are valid for this call, else the spans of this call.

        Args:
            request: the call.
            real: (batch, queries) bool on the CPU, False for padding; None if unknown.
            padding: (batch, keys) bool on the CPU, False for padding; None if unknown.
            one_text: whether a row is one text, whatever the mask separates: keys are not the tokens of the queries.
        """
        newest = self._newest_sample_spans
        if newest is None or not newest.fits_call(request, real, padding, one_text=one_text):
            of_device = self._request_without_tensors(request, request.shape.device)
            bare = of_device if request.shape.device.type == "cpu" else self._request_on_cpu(of_device)
            texts = None if one_text else bare.mask.row_texts
            newest = SampleSpans(bare, texts, real, padding, one_text=one_text)
            if bare is not of_device:
                newest.of_device = of_device
            self._newest_sample_spans = newest
        return newest

    def _ids_of_call(
        self, request: AttentionRequest, sample_spans: SampleSpans, *, cross_attention: bool
    ) -> CallTokenIds:
        """Return the token ids of a call, from inputs that fit its shape and belong to the model around its layer."""
        shape, continued = request.shape, request.position_in_sequence
        name = self.measurer.module_name(request)
        queries = keys = None
        lengths = None if continued is None else continued.lengths
        # else it is unknown which are padding
        if lengths is None or not bool((self._shared.on_cpu(lengths) < shape.query_length).any()):
            queries = self.inputs.inputs_of_queries(name).ids
            keys = self.inputs.encoder_inputs(name).ids if cross_attention else None
        if queries is not None:
            queries = sample_spans.ids_of_queries(queries, request)
        if keys is not None:  # `generate` repeats the encoder's output for the beams or samples of a prompt
            keys = keys.repeat_interleave(self.inputs.rows_per_prompt(name, shape.batch), 0)
        if keys is not None and keys.shape != (shape.batch, shape.key_length):
            keys = None
        return CallTokenIds(queries, keys, cross_attention, sample_spans.request.query_start)

    def _parts_of_batch(
        self, call: AttentionCall, sample_spans: SampleSpans, ids: CallTokenIds, probes: tuple[Probe, ...]
    ) -> PartValues | None:
        """Return the parts of probes for the whole batch; None if each sample must be measured separately.

        The kernel has measured the parts that need only q and k. Weights on special tokens and sinks are measured here.
        Samples are measured separately if the kernel measured nothing, if a part needs other inputs, if a part cannot
        be sliced into samples, or if there is padding between the queries of a sample.
        """
        measured, sliceable = call.result.statistics, sample_spans.sliceable
        if not sliceable.any_part:
            return None
        known: set[PartInput] = {"values", "output_weight", "sets", "places"}
        if call.request.sinks is not None:
            known.add("sinks")
        if ids.queries is not None or ids.keys is not None:
            known |= {"ids", "special_keys"} if self.measurer.special_ids else {"ids"}
        parts = parts_of_probes(probe for probe in probes if probe.needs <= known)
        if not sliceable.includes_all(parts):
            return None
        missing = parts - measured.keys()
        if missing:
            read = ids.key_ids(call.request) if self.measurer.special_ids else None
            special = None
            if read is not None:
                special = self._shared.once("special", read, lambda: self._special_among(read, call.request))
            more = measure_token_parts(call, missing, special)
            if more is None:
                return None
            measured = {**measured, **more}
            if call.request.shape.device.type == "cuda":
                self.requested_statistics = frozenset()  # one launch measures them and those that need more
        return measured

    def _special_among(self, ids: Tensor, request: AttentionRequest) -> Tensor:
        """Return which token ids are special, bool on the device of a call."""
        return is_among(ids, self.measurer.special_ids).to(request.shape.device)

    def _request_on_cpu(self, request: AttentionRequest) -> AttentionRequest:
        """Return a request without q, k and v whose other tensors are on the CPU."""
        start, bias = request.query_start, request.bias
        return replace(
            request,
            mask=self._shared.mask_on_cpu(request.mask),
            query_start=self._shared.on_cpu(start) if isinstance(start, Tensor) else start,
            bias=None if bias is None else with_values(bias, values_of(bias).cpu()),
            sinks=None if request.sinks is None else request.sinks.cpu(),
            shape=request.shape._replace(device=torch.device("cpu")),
        )

    def _add_samples(
        self, call: AttentionCall, state: _LayerCall, sample_spans: SampleSpans, ids: CallTokenIds
    ) -> None:
        """Measure the samples of a call, and append the call to each or add it to the summary.

        A further window of a sample is measured without the keys of earlier windows.
        """
        layer, windows = state.layer, state.windows
        starts = sample_spans.key_starts(state.offset) - state.key_starts()
        if state.is_further_window or windows > 1:  # the keys of a window follow the keys of the previous window
            starts = (state.num_keys()[:, None] - sample_spans.key_lengths(windows).flip(1).cumsum(1).flip(1)).flatten()
        samples, places, texts = state.samples(), list[int](), list[TextInCall]()
        state.samples = lambda: samples
        self.record.add_calls(layer, ())
        for index, (span, key_start) in enumerate(zip(sample_spans.spans, starts.tolist(), strict=True)):
            if span.is_text_of_row and not state.is_first and span.queries[0] >= span.queries[1]:
                continue  # a text of the row that ended in an earlier call, or begins in a later one
            place, is_window = index // windows, state.is_further_window or index % windows > 0
            if not state.is_first:
                ids.append_to_sample(samples[place], span, key_start - span.keys[0])
            places.append(place)
            text = samples[place].growing_key_text
            pictures = text.pictures if state.in_pictures else None
            texts.append(TextInCall(span, key_start, text.ids, is_window, pictures))
        first, summary = state.is_first or state.is_further_window or windows > 1, layer.running_summary
        if summary is not None:
            assert state.texts is not None
            on_way = self._begin_step(call, state, sample_spans, texts, first=first)
            if on_way is not None:
                step = partial(self._rows_of_step, on_way, state, sample_spans, texts, first=first)
                later = summary.add_later(lambda: self._rows_to_add(state, places, step()), len(texts), state.texts)
                on_way.copied.when_full(later)
                return
            rows = self._measure_rows(call, state, sample_spans, texts, first=first)
            for measured, place in self._rows_to_add(state, places, rows):
                summary.add(measured, state.texts, first=place)
            return
        records = self._record_texts(call, state, sample_spans, texts, first=first)
        for place, recorded in zip(places, records, strict=True):
            samples[place].append_call(recorded)
            self.record.add_calls(layer, [(samples[place], len(samples[place].calls) - 1)])

    def _record_texts(
        self,
        call: AttentionCall,
        state: _LayerCall,
        sample_spans: SampleSpans,
        texts: Sequence[TextInCall],
        *,
        first: bool,
    ) -> Iterator[RecordedCall]:
        """Measure texts of a call, all at once if possible, and return what a record keeps of each.

        With `first`, the first keys that the queries of a text see are its first keys.
        """
        on_way = self._begin_step(call, state, sample_spans, texts, first=first)
        if on_way is not None:
            yield from self._record_step(call.request, on_way, state, sample_spans, texts)
            return
        measurer, device = self._measurer_of(state), self._device_of_record(call.request)
        together, caller = measurer.context_of_texts(call, sample_spans, texts, first=first), call.request.known_origin
        values = {} if together is None else statistics_of_call(call, measurer.probes, together)
        values = {name: value.cpu() for name, value in values.items()}
        call = call if together is None else AttentionCall(call.request, replace(call.result, statistics={}))
        for text in texts:
            alone, start = _slice_text(call, sample_spans, text)
            if together is not None:
                row, queries = text.span.sample, slice(*text.span.queries)
                statistics = {name: value[row, :, queries] for name, value in values.items()}
            else:
                context = self._context_of_probes(text, alone.request.shape, start, caller.layer, first=first)
                found = statistics_of_call(alone, measurer.probes, context)
                statistics = {name: value[0].cpu() for name, value in found.items()}
            request, keeps = alone.request, self._keeps_qk
            yield RecordedCall(
                Segment(self._request_without_tensors(request, device), start, is_window=text.is_window),
                copy_contiguous(alone.result.logsumexp, device),
                statistics,
                copy_contiguous(request.q, device) if keeps else None,
                request.k if keeps else None,
                start,
                device,
            )

    def _begin_step(
        self,
        call: AttentionCall,
        state: _LayerCall,
        sample_spans: SampleSpans,
        texts: Sequence[TextInCall],
        *,
        first: bool,
    ) -> CallOnItsWay | None:
        """Measure texts of a call of a GPU, such as a step of a cache, in one launch, and begin to copy what it found.

        Args:
            call: the call.
            state: the call, as the layer has it.
            sample_spans: the positions of its texts.
            texts: the texts.
            first: whether the first keys that the queries of a text see are its first keys.

        Returns:
            the call on the CPU; None on another device, and where it has to be waited for.
        """
        request = call.request
        if request.shape.device.type != "cuda" or (self._keeps_qk and request.q.dtype != request.k.dtype):
            return None
        parts = self._measurer_of(state).parts_of_step(call, sample_spans, texts, self._shared, first=first)
        if parts is None:
            return None
        self.requested_statistics = frozenset()  # one launch has measured all, with the first keys of the texts
        return CallOnItsWay.begin(call, parts, sample_spans.request, self._copies)

    def _record_step(
        self,
        request: AttentionRequest,
        on_way: CallOnItsWay,
        state: _LayerCall,
        sample_spans: SampleSpans,
        texts: Sequence[TextInCall],
    ) -> Iterator[RecordedCall]:
        """Return what a record keeps of each text of a step on a GPU, whose numbers are read later."""
        step = StepOnItsWay(on_way, self._measurer_of(state).probes, texts)
        device, new = self._device_of_record(request), request.shape.query_length
        kept = None
        if self._keeps_qk:
            kept = QkOnTheirWay.begin(request.q, request.k[:, :, -new:], device, self._copies)
        for text in texts:
            alone, start = _slice_text(on_way.without_parts, sample_spans, text)
            segment = Segment(self._request_without_tensors(alone.request, device), start)
            q, k = (None, None) if kept is None else kept.rows_of(text.span.sample)
            yield RecordedCall(segment, *step.rows_of(text.span), q, k, segment.key_stop - new, device)

    def _rows_of_step(
        self,
        on_way: CallOnItsWay,
        state: _LayerCall,
        sample_spans: SampleSpans,
        texts: Sequence[TextInCall],
        *,
        first: bool,
    ) -> list[MeasuredRows]:
        """Wait for a step on a GPU, and return the rows of each text for a summary."""
        call = on_way.awaited()
        context = self._measurer_of(state).context_of_texts(call, sample_spans, texts, first=first, fewest=1)
        assert context is not None
        rows = _rows_of_texts(call, texts)
        found = self._measure_with_chance(call, rows, context, state, knows_first_keys=True).texts()
        return self._with_ids_so_far(found, state, texts)

    def _measure_rows(
        self,
        call: AttentionCall,
        state: _LayerCall,
        sample_spans: SampleSpans,
        texts: Sequence[TextInCall],
        *,
        first: bool,
    ) -> list[MeasuredRows]:
        """Measure texts of a call for a summary, all at once if possible, and return the rows of each."""
        together = self._measurer_of(state).context_of_texts(call, sample_spans, texts, first=first)
        if together is not None:
            found = self._measure_with_chance(call, _rows_of_texts(call, texts), together, state).texts()
        else:
            found, caller = [], call.request.known_origin.layer
            for text in texts:
                alone, start = _slice_text(call, sample_spans, text)
                context = self._context_of_probes(text, alone.request.shape, start, caller, first=first)
                rows = _rows_of_text(alone, 0 if text.is_window else start, context)
                found.append(self._measure_with_chance(alone, rows, context, state))
        return self._with_ids_so_far(found, state, texts)

    def _with_ids_so_far(
        self, found: list[MeasuredRows], state: _LayerCall, texts: Sequence[TextInCall]
    ) -> list[MeasuredRows]:
        """Return the rows of each text with the token ids of its keys, if that decides which of them count."""
        if state.cross_attention or all(probe.counted != "repeated" for probe in self.measurer.probes):
            return found
        return [
            replace(measured, rows=measured.rows.with_ids_so_far(text.ids))
            for measured, text in zip(found, texts, strict=True)
        ]

    def _hold_call(
        self, call: AttentionCall, state: _LayerCall, sample_spans: SampleSpans, ids: CallTokenIds, read: GeneratedPass
    ) -> None:
        """Measure the rows of a call of `generate`, and hold them until the texts that it returns are known."""
        layer, crosses, first = state.layer, state.cross_attention, read.begins_texts
        starts = sample_spans.key_starts(state.offset).tolist()
        parts = parts_of_rows(read, sample_spans.spans, starts, key_ids=ids.keys, cross_attention=crosses)
        texts = [text for _, text in parts]
        tokens = [] if crosses else self.pictures.tokens_of_call(layer.name, None)
        state.in_pictures = any(each.boxes.has_places for each in tokens)
        if state.in_pictures and (generation := self.inputs.generation) is not None:
            prompts = [generation.prompt_of_row(text.span.sample, call.request.shape.batch) for text in texts]
            texts = [text._replace(pictures=tokens[each]) for text, each in zip(texts, prompts, strict=True)]
        found: Iterable[RecordedCall | MeasuredRows | Callable[[], MeasuredRows]]
        if layer.running_summary is None:
            recorded = self._record_texts(call, state, sample_spans, texts, first=first)
            found = (each.with_own_keys(first=first, cross_attention=crosses) for each in recorded)
        elif (on_way := self._begin_step(call, state, sample_spans, texts, first=first)) is not None:
            step = cache(partial(self._rows_of_step, on_way, state, sample_spans, texts, first=first))
            found = [partial(lambda place: step()[place], place) for place in range(len(texts))]
        else:
            found = self._measure_rows(call, state, sample_spans, texts, first=first)
        for (row, text), measured in zip(parts, found, strict=True):
            held = HeldPart(text.span.queries[1], crosses, text.ids if crosses else None, measured)
            row.held.setdefault(layer.name, []).append(held)

    @torch.no_grad()
    def add_generated_texts(self, texts: list[GeneratedText]) -> None:
        """Add the texts that `generate` has returned, from what was held of its passes."""
        for name, layer in self._layers.items():
            held = [held_parts(text, name) for text in texts]
            if not held or not all(held):
                continue  # the layer is not recorded, or its queries are no tokens of these texts
            if layer.running_summary is not None:
                self.record.add_calls(layer, ())
                add_to_summary(layer.running_summary, held, [text.ids for text in texts])
                continue
            new_sample = self._sample_factory(name, cross_attention=held[0][0].cross_attention)
            samples = self._begin_texts(layer, [new_sample() for _ in texts])
            for sample, parts, text in zip(samples, held, texts, strict=True):
                append_parts(sample, parts, text.ids)
            self.record.add_calls(layer, [(sample, index) for sample in samples for index in range(len(sample.calls))])

    def _rows_to_add(
        self, state: _LayerCall, places: Sequence[int], rows: Iterable[MeasuredRows]
    ) -> Iterator[tuple[MeasuredRows, int]]:
        """Yield the rows of texts that a summary adds, with their text: also earlier ones that count because of them.

        Args:
            state: the call of the whole batch.
            places: numbers of the texts in the batch.
            rows: the rows of each text.
        """
        latest = self._latest_counted_offset
        for place, measured in zip(places, rows, strict=True):
            yield measured, place
            if latest <= 0 or not len(measured.rows.num_keys):
                continue
            waiting = state.waiting()
            grown = [each.with_num_keys(int(measured.rows.num_keys[-1])) for each in waiting[place]]
            for each in grown:
                yield each, place
            left = [each.waiting(latest) for each in (*grown, measured)]
            waiting[place] = [each for each in left if len(each.rows.positions)]

    def _measure_with_chance(
        self,
        call: AttentionCall,
        rows: TextRows,
        context: ProbeContext,
        state: _LayerCall,
        sample_spans: SampleSpans | None = None,
        *,
        knows_first_keys: bool = False,
    ) -> MeasuredRows:
        """Measure rows of a call for a summary, see `StatisticsMeasurer.measure`.

        Chance levels are kept for the layers of a forward pass with the same visible keys. `knows_first_keys`: the
        parts of the call were measured with the first keys of the context.
        """
        measurer, request, levels = self._measurer_of(state), call.request, state.chance_levels
        known = replace(context, first_key=None) if knows_first_keys else context
        measured = measurer.measure(call, rows, known, sample_spans)
        if not self.keeps_chance:
            return measured
        read = context.ids, context.special_keys, context.id_before, *context.sets.values()
        columns = () if context.places is None else context.places.columns
        places = rows.places if sample_spans is None else sample_spans.real_queries
        contents = request.query_start, rows.ends, places, context.key_start, context.first_key, *read, *columns
        sizes = request.shape.batch, request.shape.query_length, request.shape.key_length
        key = (sizes, *map(content_key, contents), *visibility_key(request))
        if key not in levels:
            of_chance, spread = measurer.spread_evenly(call)
            levels[key] = dict(of_chance.measure(spread, rows, context, sample_spans).values)
        return replace(measured, chance=levels[key])

    def _request_without_tensors(self, request: AttentionRequest, device: torch.device) -> AttentionRequest:
        """Return a copy of a request without q, k, v and the origin, on the device of the record."""
        bias, keeps = request.bias, self._keeps_qk
        if bias is not None and not keeps:  # only hidden keys matter of it
            bias = bias if self._hides_keys(values_of(bias)) else None
        nothing, start = torch.empty(0), request.query_start
        mask = request.mask
        if request.shape.device != device:
            mask = self._shared.mask_on_cpu(mask)
        return replace(
            request,
            mask=mask,
            query_start=start.to(device, copy=True) if isinstance(start, Tensor) else start,  # a cache may overwrite it
            q=nothing,
            k=nothing,
            v=nothing,
            requested_statistics=frozenset(),
            shape=request.shape._replace(device=device),
            bias=None if bias is None else with_values(bias, values_of(bias).detach().to(device)),
            sinks=None if request.sinks is None or not keeps else copy_contiguous(request.sinks, device),
            origin=None,
        )

    def _hides_keys(self, bias: Tensor) -> bool:
        """Whether a bias hides a key; layers that share one on another device wait for that once."""
        if bias.is_cpu:
            return bool((bias == -torch.inf).any())
        return self._shared.once("hides", bias, lambda: bool((bias == -torch.inf).any()))

    def _sample_factory(self, name: str, *, cross_attention: bool = False) -> Callable[[], SampleRecord]:
        """Return a function that creates an empty sample; batches store it, so it must not refer to the recorder."""
        size, pool = self.measurer.map_size, self.measurer.map_pool
        return partial(SampleRecord, name, size, pool, cross_attention=cross_attention, own=self._own_statistics)

    def _context_of_probes(
        self, text: TextInCall, shape: AttentionShape, start: int, caller: nn.Module, *, first: bool
    ) -> ProbeContext:
        """Return the inputs of probes besides q and k, for a call of one text whose first key has the index `start`.

        With `first`, that is the first key that the queries may see.
        """
        read, stop, ids, before = text.ids, start + shape.key_length, None, None
        if read is not None and len(read) >= stop and self.measurer.needs & {"ids", "special_keys"}:
            ids = read[None, start:stop]
            before = None if first or not start else read[start - 1 : start]
        # In a later call the first key that the queries see may not be the sample's first key.
        first_key = None if first else -start
        context = self.measurer.probe_context(caller, shape, ids)
        if text.pictures is not None:
            context = text.pictures.add_places(context, start, stop, has_words=read is not None)
        return replace(context, first_key=first_key, key_start=start, id_before=before)

    def unheard_layers(self, model: nn.Module) -> dict[str, str]:
        """Return each nn.MultiheadAttention of a model that made no call that this listener heard: name -> its class.

        A plain one in a Hugging Face model is replaced while the model is observed, so without a call it did not run.
        """
        heard = {name.partition("#")[0] for name in self._layers}
        unheard = {
            name: module
            for name, module in model.named_modules()
            if isinstance(module, nn.MultiheadAttention) and self.measurer.names[id(module)] not in heard
        }
        models = pretrained.pretrained_models(model) if unheard else {}
        return {
            name: type(module).__name__
            for name, module in unheard.items()
            if type(module) is not nn.MultiheadAttention or pretrained.innermost_model(name, models) is None
        }

    def check_complete(self, model: nn.Module) -> None:
        """Check that every layer that the user selected was recorded.

        Raises:
            ModelError: no attention call was captured, or an item of `layers` matches no layer that ran.
        """
        if not self._layers:
            # Subclasses are not counted, because `replace` does not replace them.
            of_torch = any(type(module) is nn.MultiheadAttention for module in model.modules())
            advice = whole_model_advice(model) or (
                "Call multihead.compat.torch_nn.replace(model, inplace=True), which makes each nn.MultiheadAttention a "
                "layer that is recorded, and run the model inside the context."
                if of_torch
                else "Run the model inside the context. Layers of multihead are recorded, and Hugging Face models that "
                "use AttentionInterface."
            )
            raise ModelError(
                f"No attention call of {type(model).__name__} was captured: it did not run inside the context, or its "
                f"layers compute their attention themselves{', as nn.MultiheadAttention does' if of_torch else ''}.",
                advice,
            )
        missed = [] if self.layer_filter is None else self.layer_filter.unmatched_items(list(self._layers))
        if missed:
            raise ModelError(
                f"No layer that ran matches {' or '.join(repr(each) for each in missed)}.",
                f"Choose among {', '.join(f'{index}: {name}' for index, name in enumerate(self._layers))}.",
            )


def _depends_on_text(probe: Probe) -> bool:
    """Whether a statistic, or which queries count in it, depends on where the text of a query begins or ends."""
    parts = [part_named(name) for name in probe.parts]
    numbered = any(part.uses_first_key or part.numbers_a_token for part in parts)
    return numbered or probe.counted_offset is not None


def _check_same_texts(given: int, before: int, name: str) -> None:
    """Check that a later call of a cache has as many texts as the call that began them."""
    if given != before:
        raise ModelError(
            f"The mask of this call of {name} separates {given} texts, and that of the call before it {before}.",
            "Give masks.Documents the lengths of all texts that the cache will hold, in each of its calls.",
        )


def _number_queries_of_cross_attention(
    call: AttentionCall, previous: _LayerCall | None, read: GeneratedPass | None
) -> AttentionCall:
    """Number the queries of a cross-attention from the start of their own sequence."""
    continued, start = call.request.position_in_sequence, 0 if previous is None else previous.query_stop
    position: int | Tensor = start if read is None else read.first
    if continued is not None and continued.first_query is not None:
        position = continued.first_query
    return _with_query_start(call, position)


def _with_query_start(call: AttentionCall, position: int | Tensor) -> AttentionCall:
    if not isinstance(position, Tensor) and position == call.request.query_start:
        return call
    return AttentionCall(replace(call.request, query_start=position), drop_position_parts(call.result))


def _continues_call(
    request: AttentionRequest, previous: _LayerCall, offset: int | Tensor, *, cross_attention: bool
) -> bool:
    """Whether a call with a cache continues where the previous call of its layer with this cache has ended."""
    if request.position_in_sequence is not None:
        return True  # such a cache begins a new sequence when it is cropped or reordered
    if isinstance(request.query_start, Tensor) or isinstance(offset, Tensor) or previous.batch != request.shape.batch:
        return False
    return cross_attention or offset + request.query_start == previous.query_stop


def _slice_text(call: AttentionCall, sample_spans: SampleSpans, text: TextInCall) -> tuple[AttentionCall, int]:
    """Slice one text from a call: return a call with a batch of one, and the index of its first key in the text."""
    span, start, origin = text.span, text.start, call.request.query_start
    alone = slice_call(call, span)
    if sample_spans.one_text and not isinstance(origin, Tensor) and origin > 0 and not call.request.mask.uses_positions:
        # Later queries of a text are not moved by padding before the keys, which are another text.
        alone = _with_query_start(alone, origin + span.queries[0])
    if not text.is_window:
        alone, start = restore_dropped_keys(alone, start)
    if sample_spans.real_queries is not None:
        alone = hide_padding_queries(alone, sample_spans.real_queries[span.sample, slice(*span.queries)])
    return alone, start


def _rows_of_text(alone: AttentionCall, before: int, context: ProbeContext) -> TextRows:
    """Return the queries of a call of one text as rows; `before` keys of the text come before those of the call."""
    shape, positions = alone.request.shape, torch.arange(alone.request.shape.query_length) + alone.request.query_start
    rows = TextRows.of_text(positions + before, before + shape.key_length, None)
    return rows if context.places is None else replace(rows, placed=context.places.select(0).placed_at(positions))


def _rows_of_texts(call: AttentionCall, texts: Sequence[TextInCall]) -> TextRows:
    """Return the queries of texts in a call as rows of a summary, for which a window is a text of its own."""
    ends = torch.tensor([(text.span.sample, *text.span.queries, *text.span.keys) for text in texts])
    before = torch.tensor([0 if text.is_window else text.start for text in texts])
    return TextRows.of_spans(ends.T, call.request.shape, call.request.query_start, before)


def _check_measurable_on_a_rank(probes: Iterable[Probe], *, asked_for_pictures: bool) -> None:
    """Raise a ProbeError for a statistic that cannot be computed from those of the ranks, each with some queries."""
    for probe in probes:
        if asked_for_pictures and needs_pictures(probe):
            raise ProbeError(
                f"{probe.name} is measured in whole pictures, and this rank has only some of the queries.",
                "Leave it out, or run the model on one rank.",
            )
        if probe.axes == "map":
            raise ProbeError(
                f"{probe.name} needs the whole attention map, and this rank has only some of the queries.",
                "Leave it out, join the records with seen.reduce(group), and call seen.layers[0].map().",
            )
        if probe.axes == "keys" and probe.name not in PROBES:  # files do not hold the function that would join it
            raise ProbeError(
                f"{probe.name} is computed from sums over all queries, and this rank has only some of them.",
                f"Leave it out, join the records with seen.reduce(group), and compute it from {RECEIVED.name!r}.",
            )


def _find_tokens_on_rank(chunks: tuple[tuple[int, int], ...], ends: tuple[int, int]) -> TokensOnRank:
    """Return the tokens of this rank in the range `ends`, one item per chunk of the rank that overlaps it."""
    found, before = [], 0
    for first, stop in chunks:
        low, high = max(first, ends[0]), min(stop, ends[1])
        if low < high:
            indices = slice(low - first + before, high - first + before)
            found.append(((low - ends[0], high - ends[0]), indices))
        before += stop - first
    return found


def _slice_rows(tensor: Tensor, span: SampleSpan, rows: list[slice]) -> Tensor:
    """Slice rows of one sample: (batch, heads, rows, ...) -> (1, heads, sliced rows, ...)."""
    one = tensor.detach()[span.sample : span.sample + 1]
    return torch.cat([one[:, :, each] for each in rows], 2) if rows else one[:, :, :0]


def _rank_part_of_layer(request: AttentionRequest, sequence: SequenceSplit | None) -> LayerPartOfRank | None:
    """Return which heads and tokens of a layer this process computes; None if it computes all."""
    shape, place = request.shape, (0, 1) if sequence is None else sequence.rank_and_world_size
    held = rank_heads(request.known_origin.layer, shape.head_dim)
    held = RankHeads.of_rank(0, 1, shape.num_heads, shape.num_kv_heads) if held is None else held
    split = LayerPartOfRank(*held, *place)
    return None if split.is_whole else split
