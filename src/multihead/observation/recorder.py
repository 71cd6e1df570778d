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
from typing import Literal, NamedTuple
from weakref import WeakKeyDictionary, finalize

import torch
import torch.distributed as dist
from torch import Tensor

from multihead.errors import ModelError
from multihead.kernels import sequence_split
from multihead.kernels.call import AttentionCall, AttentionRequest, AttentionResult, CachedSequence
from multihead.kernels.parts import PartInput, PartName, part_named
from multihead.kernels.sequence_split import SequenceSplit
from multihead.models import pretrained
from multihead.models.generation import GeneratedPass, GeneratedText
from multihead.models.pretrained import KNOWN_TEXTS, WHOLE_MASK, InputTracker
from multihead.observation.from_device import CallOnItsWay, QkOnTheirWay, StepOnItsWay, copy_measured, record_step
from multihead.observation.held import HeldPart, add_to_summary, append_parts, held_parts, parts_of_rows
from multihead.observation.host_copies import HostCopies
from multihead.observation.layer_filter import LayerFilter
from multihead.observation.layer_names import LayerNamer
from multihead.observation.measuring import StatisticsMeasurer, TextInCall
from multihead.observation.picture_calls import PictureCalls
from multihead.observation.ranks import QueriesOfRank, part_of_layer
from multihead.observation.record import Record
from multihead.observation.samples import SamplesOfPass
from multihead.observation.text_slices import rows_of_text, rows_of_texts, slice_text, with_query_start
from multihead.probes.context import ProbeContext
from multihead.probes.probe import PartValues, Probe
from multihead.probes.statistics import (
    measure_token_parts,
    parts_of_probes,
    statistics_of_call,
)
from multihead.record.batch import (
    CallTokenIds,
    KeptRows,
    SampleSpans,
    WaitingCall,
    new_samples,
)
from multihead.record.chance import content_key, visibility_key
from multihead.record.layer import LayerRecord
from multihead.record.running_summary import OpenTexts, RunningSummary
from multihead.record.sample import OwnStatistics, RecordedCall, SampleRecord
from multihead.record.segments import Segment, copy_contiguous
from multihead.record.shared import ChanceLevels
from multihead.record.text_rows import MeasuredRows, TextRows
from multihead.record.text_table import LaterRows
from multihead.record.texts import PictureTokens

Keep = Literal["cpu", "device", "statistics", "summary"]


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


class _TextsOfCall(NamedTuple):
    """The texts of a call that are measured; not the call, whose tensors on a GPU are not kept until it is read.

    Attributes:
        state: the call, as the layer has it.
        spans: the positions of the texts in the call.
        texts: the texts.
        first: whether the first keys that the queries of a text see are its first keys.
    """

    state: _LayerCall
    spans: SampleSpans
    texts: Sequence[TextInCall]
    first: bool


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
    requested_statistics: frozenset[PartName] = field(init=False, default=frozenset())
    _wanted_in_call: frozenset[PartName] = field(init=False)
    _own_statistics: OwnStatistics = field(init=False)  # the statistics that are not built in
    # whether a layer is cross-attention, where tokens of keys are not compared with the query's, whether the texts of a
    # call are known, and whether keys have places in pictures -> what measures it
    _measurers: dict[tuple[bool, bool, bool], StatisticsMeasurer] = field(default_factory=dict)
    _layers: dict[str, LayerRecord] = field(default_factory=dict)
    # the sequences in a cache, or of a pass -> name of a layer -> its newest call on them
    _previous_calls: WeakKeyDictionary[CachedSequence, dict[str, _LayerCall]] = field(default_factory=WeakKeyDictionary)
    _namer: LayerNamer = field(init=False)
    _copies: HostCopies = field(default_factory=HostCopies)
    _samples: SamplesOfPass = field(init=False)  # of this pass
    _ranks: QueriesOfRank = field(init=False)  # where ranks split a sequence
    _warned_of_unknown_texts: bool = False

    def __post_init__(self) -> None:
        """Set `requested_statistics`, which a kernel may measure while it computes: those that need only q and k.

        On a GPU one launch measures them and those that need more, after the call, unless ranks split the sequence.
        """
        self._wanted_in_call = parts_of_probes(
            probe for probe in self.measurer.probes if not probe.needs and probe.axes == "queries"
        )
        parameters = self.measurer.root.parameters()
        on_gpu = getattr(next(parameters, None), "is_cuda", False) and all(each.is_cuda for each in parameters)
        if not on_gpu or sequence_split.active_split is not None:
            self.requested_statistics = self._wanted_in_call
        self._namer = LayerNamer(self.measurer.names, self.inputs)
        self.inputs.on_texts = self.add_generated_texts
        self._own_statistics = OwnStatistics(self.measurer.own)
        self._ranks = QueriesOfRank(self.measurer, self.inputs, self.pictures.asked)

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
            self._samples = SamplesOfPass(self.measurer, self.inputs, self._keeps_qk)
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
        state.chance_levels = self._samples.shared.chance_levels
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
            split = part_of_layer(request, sequence_split.active_split) if grouped else None
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
        sample_spans = self._samples.find(request, cross_attention=state.cross_attention)
        ids = self._samples.ids_of(request, sample_spans, cross_attention=state.cross_attention)
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

        latest, found = self._latest_counted_offset, None
        if request.shape.device.type == "cuda":
            found = self._parts_of_batch(call, sample_spans, ids, measurer.probes)
        if found is None:
            measured = measure(call)
            summary.add(measured, state.texts)
            if latest > 0:
                left = measured.waiting(latest)
                state.waiting = cache(lambda: [[each] for each in left.texts()])
        else:
            on_way = CallOnItsWay.begin(call, found, sample_spans.request, self._copies)
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
        found = self._parts_of_batch(call, sample_spans, ids, probes)
        if found is None:
            samples = self._begin_texts(layer, new_samples(new_sample, sample_spans, ids)[::windows])
            state.samples = lambda: samples
            return False
        request, device = call.request, self._device_of_record(call.request)
        parts, logsumexp, arrive = copy_measured(*found, device, self._copies)
        shared = device == sample_spans.request.shape.device and request.sinks is None and request.bias is None
        bare = sample_spans.request if shared else self._samples.request_without_tensors(request, device)
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

    def _begin_texts(self, layer: LayerRecord, samples: list[SampleRecord]) -> list[SampleRecord]:
        """Append texts to a layer, whose rows are appended to its table call by call; return their samples."""
        for text, sample in enumerate(samples, len(layer.samples)):
            sample.view_table(layer.texts.table, text, keeps_qk=self._keeps_qk)
        layer.samples.extend(samples)
        return samples

    def _parts_of_batch(
        self, call: AttentionCall, sample_spans: SampleSpans, ids: CallTokenIds, probes: tuple[Probe, ...]
    ) -> tuple[PartValues, Tensor] | None:
        """Return the parts of probes for the whole batch, and the logsumexp; None to measure each sample separately.

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
        if not missing:
            return measured, call.result.logsumexp.detach()
        more = measure_token_parts(call, missing, self._samples.special_keys(ids, call.request))
        if more is None:
            return None
        if call.request.shape.device.type == "cuda":
            self.requested_statistics = frozenset()  # one launch measures them and those that need more
        return {**measured, **more[0]}, more[1]

    def _add_queries_of_rank(self, call: AttentionCall, sequence: SequenceSplit, layer: LayerRecord) -> None:
        """Add the queries of this rank for a sequence that is split over ranks; each call creates new samples."""
        self.requested_statistics = self._wanted_in_call
        device, new_sample = self._device_of_record(call.request), self._sample_factory(layer.name)
        samples = self._ranks.samples_of_call(call, sequence, self._samples, device, new_sample)
        if layer.running_summary is None:
            layer.samples.extend(samples)
        else:
            for sample in samples:  # chance levels of a text whose queries are on several ranks are unknown
                texts = layer.running_summary.begin_texts(1)
                layer.running_summary.add(sample.measured_rows(), texts)
                layer.running_summary.end_texts(texts)
        self.record.add_calls(layer, [(sample, 0) for sample in samples] if layer.running_summary is None else ())

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
        given = _TextsOfCall(state, sample_spans, texts, first)
        if summary is not None:
            assert state.texts is not None
            on_way = self._begin_step(call, given)
            if on_way is not None:
                step = partial(self._rows_of_step, on_way, given)
                later = summary.add_later(lambda: self._rows_to_add(state, places, step()), len(texts), state.texts)
                on_way.copied.when_full(later)
                return
            rows = self._measure_rows(call, given)
            for measured, place in self._rows_to_add(state, places, rows):
                summary.add(measured, state.texts, first=place)
            return
        records = self._record_texts(call, given)
        for place, recorded in zip(places, records, strict=True):
            samples[place].append_call(recorded)
            self.record.add_calls(layer, [(samples[place], len(samples[place].calls) - 1)])

    def _record_texts(self, call: AttentionCall, given: _TextsOfCall) -> Iterator[RecordedCall]:
        """Measure texts of a call, all at once if possible, and return what a record keeps of each."""
        state, sample_spans, texts, first = given
        measurer, device = self._measurer_of(state), self._device_of_record(call.request)
        on_way = self._begin_step(call, given)
        if on_way is not None:
            step = StepOnItsWay(on_way, measurer.probes, texts)
            yield from record_step(call.request, step, self._samples, sample_spans, device, self._copies)
            return
        together, caller = measurer.context_of_texts(call, sample_spans, texts, first=first), call.request.known_origin
        values = {} if together is None else statistics_of_call(call, measurer.probes, together)
        values = {name: value.cpu() for name, value in values.items()}
        if together is not None:
            result = call.result
            bare = AttentionResult(result.output, result.logsumexp, head_factors=result.head_factors)
            call = AttentionCall(call.request, bare)
        for text in texts:
            alone, start = slice_text(call, sample_spans, text)
            if together is not None:
                row, queries = text.span.sample, slice(*text.span.queries)
                statistics = {name: value[row, :, queries] for name, value in values.items()}
            else:
                context = self.measurer.context_of_text(text, alone.request.shape, start, caller.layer, first=first)
                found = statistics_of_call(alone, measurer.probes, context)
                statistics = {name: value[0].cpu() for name, value in found.items()}
            request, keeps = alone.request, self._keeps_qk
            yield RecordedCall(
                Segment(self._samples.request_without_tensors(request, device), start, is_window=text.is_window),
                copy_contiguous(alone.result.logsumexp, device),
                statistics,
                copy_contiguous(request.q, device) if keeps else None,
                request.k if keeps else None,
                start,
                device,
            )

    def _begin_step(self, call: AttentionCall, given: _TextsOfCall) -> CallOnItsWay | None:
        """Measure texts of a call of a GPU, such as a step of a cache, in one launch, and begin to copy what it found.

        Returns:
            the call on the CPU; None on another device, and where it has to be waited for.
        """
        state, sample_spans, texts, first = given
        request = call.request
        if request.shape.device.type != "cuda" or (self._keeps_qk and request.q.dtype != request.k.dtype):
            return None
        found = self._measurer_of(state).parts_of_step(call, sample_spans, texts, self._samples.shared, first=first)
        if found is None:
            return None
        self.requested_statistics = frozenset()  # one launch has measured all, with the first keys of the texts
        return CallOnItsWay.begin(call, found, sample_spans.request, self._copies)

    def _rows_of_step(self, on_way: CallOnItsWay, given: _TextsOfCall) -> list[MeasuredRows]:
        """Wait for a step on a GPU, and return the rows of each text for a summary."""
        call, (state, sample_spans, texts, first) = on_way.awaited(), given
        context = self._measurer_of(state).context_of_texts(call, sample_spans, texts, first=first, fewest=1)
        assert context is not None
        rows = rows_of_texts(call, texts)
        found = self._measure_with_chance(call, rows, context, state, knows_first_keys=True).texts()
        return self._with_ids_so_far(found, state, texts)

    def _measure_rows(self, call: AttentionCall, given: _TextsOfCall) -> list[MeasuredRows]:
        """Measure texts of a call for a summary, all at once if possible, and return the rows of each."""
        state, sample_spans, texts, first = given
        together = self._measurer_of(state).context_of_texts(call, sample_spans, texts, first=first)
        if together is not None:
            found = self._measure_with_chance(call, rows_of_texts(call, texts), together, state).texts()
        else:
            found, caller = [], call.request.known_origin.layer
            for text in texts:
                alone, start = slice_text(call, sample_spans, text)
                context = self.measurer.context_of_text(text, alone.request.shape, start, caller, first=first)
                rows = rows_of_text(alone, 0 if text.is_window else start, context)
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
        given = _TextsOfCall(state, sample_spans, texts, first)
        found: Iterable[RecordedCall | MeasuredRows | Callable[[], MeasuredRows]]
        if layer.running_summary is None:
            recorded = self._record_texts(call, given)
            found = (each.with_own_keys(first=first, cross_attention=crosses) for each in recorded)
        elif (on_way := self._begin_step(call, given)) is not None:
            step = cache(partial(self._rows_of_step, on_way, given))
            found = [partial(lambda place: step()[place], place) for place in range(len(texts))]
        else:
            found = self._measure_rows(call, given)
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

    @property
    def layer_names(self) -> list[str]:
        """Names of the layers whose calls were heard, in their order."""
        return list(self._layers)

    def _sample_factory(self, name: str, *, cross_attention: bool = False) -> Callable[[], SampleRecord]:
        """Return a function that creates an empty sample; batches store it, so it must not refer to the recorder."""
        size, pool = self.measurer.map_size, self.measurer.map_pool
        return partial(SampleRecord, name, size, pool, cross_attention=cross_attention, own=self._own_statistics)


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
    return with_query_start(call, position)


def _continues_call(
    request: AttentionRequest, previous: _LayerCall, offset: int | Tensor, *, cross_attention: bool
) -> bool:
    """Whether a call with a cache continues where the previous call of its layer with this cache has ended."""
    if request.position_in_sequence is not None:
        return True  # such a cache begins a new sequence when it is cropped or reordered
    if isinstance(request.query_start, Tensor) or isinstance(offset, Tensor) or previous.batch != request.shape.batch:
        return False
    return cross_attention or offset + request.query_start == previous.query_stop
