"""Record every attention call: which layer made it, and which earlier call it continues.

One listener serves `observe`, `census` and `Watch` (`Recorder`): it numbers the layers, finds the texts of a call, and
passes their statistics to the samples of a layer or to its running summary. A census asks for a summary with moments,
extremes and examples (`LayerSums`), and all texts of a call are measured for it at once (`observation/measuring.py`); a
watch asks for one with the exact maximum of `largest_score`. So a watched step takes no memory per query.

Statistics that a kernel computed before a call's positions were corrected are dropped (cross-attention in
`observation/recorder.py`), because distances depend on positions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Literal, NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn

from multihead.errors import ModelError, ProbeError
from multihead.kernels import sequence_split
from multihead.kernels.call import AttentionCall, AttentionRequest, AttentionResult
from multihead.kernels.dense_tile import first_key_of_samples
from multihead.kernels.parts import Part
from multihead.kernels.plan.bounds import bounds_of
from multihead.kernels.sequence_split import SequenceSplit
from multihead.layer.sharding import HeldHeads, held_heads
from multihead.masks.place import SampleSpan
from multihead.models import huggingface, pretrained
from multihead.models.pretrained import InputTracker
from multihead.observation.layer_filter import LayerFilter
from multihead.observation.measuring import StatisticsMeasurer
from multihead.observation.record import Record
from multihead.probes.catalogue import PROBES
from multihead.probes.context import ProbeContext
from multihead.probes.probe import Need, Parts, Probe
from multihead.probes.statistics import (
    drop_position_parts,
    measure_token_parts,
    possible_probes,
    sink_mass,
    statistic_from_parts,
    statistics_of_call,
)
from multihead.record.analysis.chance import content_key, visibility_key
from multihead.record.batch import (
    KeptRows,
    RecordedBatch,
    SampleSpans,
    hide_padding_queries,
    new_samples,
    restore_dropped_keys,
    shift_all_key_indices,
    slice_call,
    slice_request,
)
from multihead.record.layer import LayerRecord
from multihead.record.running_summary import RunningSummary
from multihead.record.sample import PER_KEY, SampleRecord
from multihead.record.segments import Rows, Segment, append_new_keys, copy_contiguous
from multihead.record.split import LayerPartOfRank, TokensOfRank
from multihead.record.token_ids import CallTokenIds
from multihead.scores.bias import values_of, with_values

Keep = Literal["cpu", "device", "statistics", "summary"]
Sums: TypeAlias = Callable[[str, int], RunningSummary]
"""Returns the empty sums of a layer, of its name and its number of heads."""

OF_TOKENS: frozenset[Part] = frozenset({"duplicate_mass", "induction_mass"})


@dataclass(eq=False)
class _PreviousCall:
    """State of a layer's previous call, used to detect that the next one continues it (cached decoding).

    Attributes:
        batch: number of samples.
        query_stop: position after its last query, in the sequence.
        keys: number of its keys.
        edge: (2, batch, kv_heads, head_dim), its first key, and the key of its last query (in cross-attention its
            last key); None if a cache of this library links the calls, and for packed samples.
        crosses: whether its keys come from another sequence.
        window: whether it computes a further window of the same samples as the call before it.
        samples: returns the records of its samples.
        key_starts: returns (samples,) int64, the position of the first key of each in the sequence; None before it is
            recorded.
        num_keys: returns (samples,) int64, the number of keys of each sample in all its windows so far.
    """

    batch: int
    query_stop: int
    keys: int
    edge: Tensor | None
    crosses: bool = False
    window: bool = False
    samples: Callable[[], list[SampleRecord]] = list
    key_starts: Callable[[], Tensor] | None = None
    num_keys: Callable[[], Tensor] | None = None

    @staticmethod
    def from_call(call: AttentionCall, offset: int | Tensor, *, crosses: bool) -> _PreviousCall:
        """Keep what is needed of a call whose first key has the position `offset`."""
        request, shape = call.request, call.request.shape
        if request.continued is not None:
            return _PreviousCall(shape.batch, 0, shape.key_length, None, crosses)
        start = 0 if isinstance(request.query_start, Tensor) else request.query_start
        stop = int(offset) + start + shape.query_length
        if not shape.key_length or request.packed_lengths is not None:  # no call continues packed samples
            return _PreviousCall(shape.batch, stop, shape.key_length, None, crosses)
        last = -1 if crosses else min(stop - int(offset), shape.key_length) - 1
        edge = torch.stack([request.k[:, :, 0], request.k[:, :, last]]).detach()
        return _PreviousCall(shape.batch, stop, shape.key_length, edge, crosses)


@dataclass(eq=False)
class Recorder:
    """A listener that adds every attention call of a model to a record."""

    record: Record
    inputs: InputTracker
    layer_filter: LayerFilter | None  # None records all layers
    keep: Keep
    measuring: StatisticsMeasurer
    sums: Sums | None = None  # makes the sums of a layer where no samples are kept
    wanted: frozenset[Part] = field(init=False)
    _counted: dict[str, str] = field(init=False)  # which queries count, for statistics that are not built in
    _layers: dict[str, LayerRecord] = field(default_factory=dict)
    _previous: dict[tuple[str, object], _PreviousCall] = field(default_factory=dict)  # of each layer and text
    _counts: dict[str, int] = field(default_factory=dict)
    _newest: tuple[nn.Module, Tensor, Tensor] | None = None  # the layer of the newest call, its q and its k
    _pass: int = -1
    _spans: SampleSpans | None = None  # the samples of the previous call in this pass
    _levels: dict[object, dict[str, Tensor]] = field(default_factory=dict)  # chance levels, by mask
    _gathered_ids: tuple[Tensor, Tensor] | None = None  # the ids of this rank and of all ranks of a split sequence
    _pass_continues: bool = False  # whether self-attention in this forward pass continued a cached sequence

    def __post_init__(self) -> None:
        """Find the parts that a kernel may measure while it computes: those of probes that need nothing but q and k."""
        wanted = frozenset[Part]()
        for probe in self.probes:
            if not probe.needs and probe.axes == "queries":
                wanted |= probe.parts
        self.wanted = wanted
        self._counted = {probe.name: probe.counted for probe in self.probes if probe.name not in PROBES}

    @property
    def names(self) -> dict[int, str]:
        """Name of each module of the model, by id."""
        return self.measuring.names

    @property
    def probes(self) -> tuple[Probe, ...]:
        """The statistics."""
        return self.measuring.probes

    @torch.no_grad()
    def hear(self, call: AttentionCall) -> None:
        """Add a call to the record if a layer of the model made it."""
        request, caller = call.request, call.request.origin
        if caller is None or id(caller.layer) not in self.names:
            return
        module, continued = caller.layer, caller.continued
        self._begin_pass()
        window = self._is_window(request, module)
        name = self._number_call(self.names[id(module)], again=window)
        keys = huggingface.call_keys.get()
        offset: int | Tensor = 0 if keys is None else keys.key_offset  # position of the first key
        crosses = pretrained.is_cross_attention_call(caller, self.names[id(module)])
        if continued is not None:
            offset, crosses = continued.key_start, continued.position is not None
        text = name, None if continued is None else continued.text
        sequence = sequence_split.active
        previous = self._previous.get(text)
        if previous is not None and not (window or self._continues_call(call, previous, offset, crosses=crosses)):
            previous = None
        self._pass_continues |= previous is not None and not crosses and not window
        layer = self._record_of_layer(name, module, request)
        if sequence is not None:
            if self.layer_filter is None or self.layer_filter.matches(name, layer.number):
                self._add_queries_of_rank(call, sequence, module, layer)
            return
        if crosses and not request.mask.uses_positions:
            # Queries have no position among the keys of another sequence: they are counted from its beginning.
            start: int | Tensor = 0 if previous is None else previous.query_stop
            if continued is not None and continued.position is not None:
                start = continued.position
            if isinstance(start, Tensor) or start != request.query_start:
                call = AttentionCall(replace(request, query_start=start), drop_position_parts(call.attended))
        state = _PreviousCall.from_call(call, offset, crosses=crosses)
        if previous is not None:
            state.samples, state.key_starts, state.num_keys = previous.samples, previous.key_starts, previous.num_keys
            state.window = window
        self._previous[text] = state
        if self.layer_filter is None or self.layer_filter.matches(name, layer.number):
            self._add_call(call, module, layer, state, offset)

    def _begin_pass(self) -> None:
        """Forget what holds for one forward pass of the model, if another one has begun."""
        if self.inputs.passes != self._pass or not self.inputs.is_running:
            self._pass, self._pass_continues, self._spans, self._newest = self.inputs.passes, False, None, None
            self._counts.clear()
            self._levels.clear()

    def _record_of_layer(self, name: str, module: nn.Module, request: AttentionRequest) -> LayerRecord:
        """Return the record of a layer, an empty one at its first call."""
        if name not in self._layers:
            summary = None if self.sums is None else self.sums(name, request.shape.num_heads)
            # Only processes that form a group share a layer.
            grouped = dist.is_available() and dist.is_initialized()
            split = _split_of_layer(module, request, sequence_split.active) if grouped else None
            self._layers[name] = LayerRecord(name, running_summary=summary, number=len(self._layers), split=split)
        return self._layers[name]

    def _is_window(self, request: AttentionRequest, module: nn.Module) -> bool:
        """Whether q and k of a call follow those of the layer's call before it in the same tensors.

        A layer that attends within each image or window of a sample one by one makes such calls.
        """
        newest, (q, k) = self._newest, (request.q.detach(), request.k.detach())
        self._newest = module, q, k  # held, so that no other tensor takes their memory
        return newest is not None and newest[0] is module and all(map(_follow_in_memory, newest[1:], (q, k)))

    def _number_call(self, name: str, *, again: bool) -> str:
        """Number the calls of one layer within a forward pass of the model; `again` gives the newest number."""
        self._counts[name] = self._counts.get(name, 0) + (not again)
        return name if self._counts[name] == 1 else f"{name}#{self._counts[name]}"

    def _continues_call(
        self, call: AttentionCall, previous: _PreviousCall, offset: int | Tensor, *, crosses: bool
    ) -> bool:
        """Whether a call continues the previous one of its layer: it has the same keys, and more."""
        request = call.request
        if request.continued is not None:
            return True
        if isinstance(request.query_start, Tensor) or isinstance(offset, Tensor):
            return False
        if request.packed_lengths is not None or previous.edge is None or not request.shape.key_length:
            return False
        if request.shape.batch != previous.batch or request.k.shape[1::2] != previous.edge.shape[2:]:
            return False
        first, keys = request.k[:, :, 0], request.shape.key_length
        if crosses:
            same = keys == previous.keys and (self._pass_continues or request.shape.query_length == 1)
            return same and torch.equal(torch.stack([first, request.k[:, :, -1]]), previous.edge)
        begin = offset + request.query_start
        index = begin - 1 - offset
        if begin != previous.query_stop or not 0 <= index < keys:
            return False
        return torch.equal(request.k[:, :, index], previous.edge[1])

    def _add_call(
        self,
        call: AttentionCall,
        module: nn.Module,
        layer: LayerRecord,
        state: _PreviousCall,
        offset: int | Tensor,
    ) -> None:
        """Measure a call, sample by sample where needed, and add it to the record."""
        request, name = call.request, self.names[id(module)]
        places = self._find_samples(request, name)
        ids = self._ids_of_call(request, name, places, crosses=state.crosses)
        windows = 1 if state.crosses else self._windows_per_sample(request, name)
        if layer.running_summary is not None and layer.running_summary.takes_batches:
            measured = self.measuring.measure_whole_batch(call, places, ids, module)
            levels = self._measure_chance_levels(call, places, ids, module)
            measured = {name: each._replace(chance=levels.get(name)) for name, each in measured.items()}
            layer.running_summary.add(measured, samples=len(places.spans))
            self.record.add(layer, ())
            return
        first = state.key_starts is None
        if first:
            # A cache may overwrite its tensor of offsets.
            own_offset = offset.clone() if isinstance(offset, Tensor) else offset
            state.key_starts = cache(partial(places.key_starts, own_offset))
        starts = _make_key_starts(places, state, windows, offset)
        if first and self._add_batch(call, layer, state, places, ids, module, windows):
            return
        samples = state.samples()
        state.samples = lambda: samples
        self.record.add(layer, ())
        for index, (span, key_start) in enumerate(zip(places.spans, starts().flatten().tolist(), strict=True)):
            sample, apart = samples[index // windows], state.window or index % windows > 0
            if not first:
                ids.append_to_sample(sample, span, index, key_start - span.keys[0])
            alone, start = slice_call(call, span), 0 if request.packed_lengths is not None else key_start
            if not apart:
                alone, start = restore_dropped_keys(alone, start)
            if places.real is not None:
                alone = hide_padding_queries(alone, places.real[span.sample, slice(*span.queries)])
            self._add_sample(layer, sample, alone, start, module, first=first, apart=apart)
            self.record.add(layer, [sample])  # one call

    def _measure_chance_levels(
        self, call: AttentionCall, places: SampleSpans, ids: CallTokenIds, module: nn.Module
    ) -> dict[str, Tensor]:
        """Return the chance levels of a call, measured once in a pass for layers whose queries see the same keys."""
        request = call.request
        sizes = request.shape.batch, request.shape.query_length, request.shape.key_length
        where = (content_key(each) for each in (request.query_start, places.packed_lengths, places.real, ids.queries))
        key = (sizes, *where, *visibility_key(request))
        if key not in self._levels:
            self._levels[key] = self.measuring.measure_even_spread(call, places, ids, module)
        return self._levels[key]

    def _add_batch(
        self,
        call: AttentionCall,
        layer: LayerRecord,
        state: _PreviousCall,
        places: SampleSpans,
        ids: CallTokenIds,
        module: nn.Module,
        windows: int,
    ) -> bool:
        """Create the samples of a call; return whether parts of the whole batch sufficed to record it."""
        new_sample = self._sample_factory(layer.name, crosses=state.crosses)
        parts = self._parts_of_batch(call, places, ids)
        if parts is not None:
            batch = self._record_batch(call, places, parts, ids, self.names[id(module)], new_sample)
            batch.windows = windows
            if layer.running_summary is None:
                state.samples = lambda: batch.samples
                self.record.add_batch(layer, batch)
            else:
                layer.running_summary.add(batch.measured(), samples=batch.num_samples)
                state.samples = lambda: new_samples(new_sample, places, ids)[::windows]
                self.record.add(layer, ())
            return True
        samples = new_samples(new_sample, places, ids)[::windows]
        if self.keep in ("cpu", "device"):
            for sample in samples:
                sample.q, sample.k = Rows(2), Rows(2)
        if layer.running_summary is None:
            layer.samples.extend(samples)
        state.samples = lambda: samples
        return False

    def _windows_per_sample(self, request: AttentionRequest, name: str) -> int:
        """Return how many rows of a call's batch are windows of one and the same sample."""
        one_each = request.packed_lengths is not None or request.continued is not None
        return 1 if one_each else self.inputs.rows_per_sample(name, request.shape.batch)

    def _add_queries_of_rank(
        self, call: AttentionCall, sequence: SequenceSplit, module: nn.Module, layer: LayerRecord
    ) -> None:
        """Add the queries of this rank, where a sequence is split over ranks; each call begins new samples."""
        request, attended, name = call.request, call.attended, self.names[id(module)]
        device = request.shape.device if self.keep == "device" else torch.device("cpu")
        length = sequence.whole_shape(request.shape).query_length
        bare = self._request_to_keep(request, device)
        bare = replace(bare, shape=bare.shape._replace(query_length=length, key_length=length))
        if self._spans is None or not self._spans.fits_call(bare, None, None):
            self._spans = SampleSpans(bare)
        places = self._spans
        # The kept request may lack the bias, which the statistics need.
        whole = replace(request, shape=bare.shape._replace(device=request.shape.device), origin=None)
        ids = CallTokenIds(
            self._ids_of_whole_sequence(request, sequence, name), None, crosses=False, packed=False, query_start=0
        )
        parts = dict(attended.statistics)
        if request.sinks is not None:
            parts["sink_mass"] = sink_mass(attended.logsumexp.detach(), request.sinks)
        left_out = places.unsliceable_parts
        shared = shift_all_key_indices(parts, places)
        ready = [
            probe
            for probe in self.probes
            if left_out is not None and probe.parts <= shared.keys() and not probe.parts & left_out
        ]
        statistics = {probe.name: statistic_from_parts(probe, shared, attended.logsumexp.detach()) for probe in ready}
        others = self._probes_over_all_keys([probe for probe in self.probes if probe not in ready])
        keys = sequence.gather_tokens(request.k, 2) if others else None
        values = sequence.gather_tokens(request.v, 2) if any("values" in probe.needs for probe in others) else keys
        samples = []
        for index, span in enumerate(places.spans):
            queries, own_keys = (
                _find_tokens_on_rank(sequence.chunks(length), each) for each in (span.queries, span.keys)
            )
            sample = self._sample_factory(layer.name)()
            if sequence.rank_and_ranks[1] > 1:
                sample.split = TokensOfRank(
                    tuple(each.moved for each in queries), tuple(each.moved for each in own_keys)
                )
            ids.append_to_sample(sample, span, index, -span.keys[0])
            sample.segments = [Segment(replace(slice_request(bare, span, packed=False), sinks=bare.sinks))]
            rows = [slice(*each.own) for each in queries]
            sample.calls = [((0, sample.num_queries), (0, span.keys[1] - span.keys[0]))]
            sample.logsumexp.add(_slice_rows(attended.logsumexp, span, rows).to(device))
            found = {key: _slice_rows(value, span, rows)[0].cpu() for key, value in statistics.items()}
            if keys is not None and values is not None:
                more = self._measure_with_all_keys(keys, values, call, whole, span, queries, sample, module, others)
                found |= {key: value.cpu() for key, value in more.items()}
            in_order = (*(probe.name for probe in self.probes), *found)  # as one process orders them, for pages
            sample.set_statistics({key: found[key] for key in in_order if key in found})
            if self.keep in ("cpu", "device"):
                sample.q = Rows(2, [copy_contiguous(_slice_rows(request.q, span, rows), device)])
                sample.k = Rows(
                    2, [copy_contiguous(_slice_rows(request.k, span, [slice(*each.own) for each in own_keys]), device)]
                )
            samples.append(sample)
        if layer.running_summary is None:
            layer.samples.extend(samples)
        else:
            for sample in samples:
                layer.running_summary.add(sample.measured(), samples=1)
        self.record.add(layer, samples)

    def _ids_of_whole_sequence(self, request: AttentionRequest, sequence: SequenceSplit, name: str) -> Tensor | None:
        """Return the token ids of the whole sequence, (batch, tokens) int64; they are gathered once per input."""
        own = self.inputs.inputs_of_queries(name).ids if self.inputs.any_ids else None
        if own is None or own.shape != (request.shape.batch, request.shape.query_length):
            return None
        if self._gathered_ids is None or self._gathered_ids[0] is not own:
            self._gathered_ids = own, sequence.gather_tokens(own.to(request.shape.device), 1).cpu()
        return self._gathered_ids[1]

    @staticmethod
    def _probes_over_all_keys(probes: list[Probe]) -> list[Probe]:
        """Return the probes that are measured with the keys of all ranks; coverage is made of what keys receive."""
        if any("pooled_map" in probe.parts for probe in probes):
            raise ProbeError(
                "pooled_map is a part of the whole map, and this rank has some of its queries.",
                "Leave it out, join the records with seen.reduce(group), and call seen.layers[0].map().",
            )
        if any("received" in probe.parts for probe in probes) and PROBES["received"] not in probes:
            return [*probes, PROBES["received"]]
        return probes

    def _measure_with_all_keys(
        self,
        keys: Tensor,
        values: Tensor,
        call: AttentionCall,
        whole: AttentionRequest,
        span: SampleSpan,
        queries: list[_TokensOnRank],
        sample: SampleRecord,
        module: nn.Module,
        probes: list[Probe],
    ) -> dict[str, Tensor]:
        """Measure a sample's queries of this rank with the keys of all ranks.

        Returns:
            (heads, its queries of this rank) each; (heads, keys) of what keys receive from them.
        """
        request, attended = call.request, call.attended
        one, columns = slice(span.sample, span.sample + 1), slice(*span.keys)
        of_span = slice_request(whole, span, packed=False)
        first_key = first_key_of_samples(of_span, bounds_of(of_span))
        found: list[dict[str, Tensor]] = []
        nothing = (span.queries[0],) * 2
        for each in queries or [_TokensOnRank(nothing, (0, 0), (0, 0))]:  # a rank without tokens: empty statistics
            rows = slice(*each.own)
            part = replace(
                slice_request(whole, replace(span, queries=each.positions), packed=False),
                q=request.q[one, :, rows],
                k=keys[one, :, columns],
                v=values[one, :, columns],
                sinks=request.sinks,
            )
            result = AttentionResult(attended.output[one, :, rows], attended.logsumexp[one, :, rows])
            context = self._context_of_probes(sample, AttentionCall(part, result), 0, module, first=True)
            context = replace(context, first_key=first_key)
            chosen = possible_probes(probes, part, context)
            found.append(statistics_of_call(AttentionCall(part, result), chosen, context))
        joined = {}
        for key in found[0] if found else ():
            each_chunk = [measured[key][0] for measured in found]
            joined[key] = torch.stack(each_chunk).sum(0) if key in PER_KEY else torch.cat(each_chunk, 1)
        if "coverage" in joined:
            joined["coverage"] = joined["received"].clamp(max=1)
        return joined

    def _find_samples(self, request: AttentionRequest, name: str) -> SampleSpans:
        """Find the samples in a call, or take those of the previous call if they are at the same places."""
        keys, real, padding = huggingface.call_keys.get(), None, None
        if request.continued is not None and request.continued.lengths is not None:
            token = torch.arange(request.shape.query_length, device=request.shape.device)
            real = token < request.continued.lengths[:, None]
        elif request.origin is not None and request.origin.real is not None:
            real = request.origin.real
            if request.origin.crosses is False and request.shape.key_length == request.shape.query_length:
                padding = real
        elif keys is not None:
            real, padding = self._real_queries(request, name, keys.key_offset), keys.padding
        if self._spans is None or not self._spans.fits_call(request, real, padding):
            packed = request.packed_lengths
            own_packed = None if packed is None else packed.clone()  # the caller may change them before they are read
            self._spans = SampleSpans(self._request_to_keep(request, request.shape.device), own_packed, real, padding)
        return self._spans

    def _ids_of_call(self, request: AttentionRequest, name: str, places: SampleSpans, *, crosses: bool) -> CallTokenIds:
        """Return the token ids of a call, from inputs that fit its shape and belong to the model around its layer."""
        unknown = CallTokenIds(None, None, crosses, places.packed, places.request.query_start)
        if not self.inputs.any_ids:
            return unknown
        shape, continued, packed = request.shape, request.continued, request.packed_lengths
        if (
            continued is not None
            and continued.lengths is not None
            and bool((continued.lengths < shape.query_length).any())
        ):
            return unknown  # which of the ids are padding is unknown
        queries = self.inputs.inputs_of_queries(name).ids
        if queries is not None and (
            len(queries) != len(packed) if packed is not None else queries.shape != (shape.batch, shape.query_length)
        ):
            queries = None
        keys = self.inputs.encoder_inputs(name).ids if unknown.crosses else None
        if keys is not None and keys.shape != (shape.batch, shape.key_length):
            keys = None
        return replace(unknown, queries=queries, keys=keys)

    def _parts_of_batch(self, call: AttentionCall, places: SampleSpans, ids: CallTokenIds) -> Parts | None:
        """Return the parts of all probes, measured for the whole batch; None if samples must be measured alone.

        The kernel measured what needs q and k alone. Weights on special tokens and sinks are measured here. Samples
        are measured alone if the kernel did not run, if a part needs more, if a part of the whole call is not that of
        each sample, or if there is padding between the queries of a sample.
        """
        measured, left_out = call.attended.statistics, places.unsliceable_parts
        if left_out is None:
            return None
        known: set[Need] = {"values", "output_weight", "sets"}
        if call.request.sinks is not None:
            known.add("sinks")
        if ids.queries is not None or ids.keys is not None:
            known |= {"ids", "special_keys"} if self.measuring.special_ids else {"ids"}
        wanted = frozenset[Part]()
        for probe in self.probes:
            if probe.needs <= known and not (ids.crosses and probe.parts & OF_TOKENS):
                wanted |= probe.parts
        if wanted & left_out:
            return None
        missing = wanted - measured.keys()
        if missing:
            more = measure_token_parts(call, missing, ids.special_keys(call.request, self.measuring.special_ids))
            if more is None:
                return None
            measured = {**measured, **more}
        return measured

    def _record_batch(
        self,
        call: AttentionCall,
        places: SampleSpans,
        parts: Parts,
        ids: CallTokenIds,
        name: str,
        new_sample: Callable[[], SampleRecord],
    ) -> RecordedBatch:
        """Record a call that is the first call of all its samples."""
        request, logsumexp = call.request, call.attended.logsumexp.detach()
        device = request.shape.device if self.keep == "device" else torch.device("cpu")
        if request.shape.device.type != "cpu":
            parts = {part: value.cpu() for part, value in parts.items()}
        shared = device == places.request.shape.device and request.sinks is None and request.bias is None
        bare = places.request if shared else self._request_to_keep(request, device)
        batch = RecordedBatch(new_sample, places, bare, logsumexp.to(device), parts, ids, self.probes)
        if self.record.statistics:  # the function of a user's statistic may raise an error, so it runs now
            batch.statistics  # noqa: B018
        if self.keep in ("cpu", "device"):
            fresh = request.origin is not None and request.origin.fresh
            batch.q = KeptRows.keep(request.q, lambda: places.query_rows, device, layer=name, fresh=fresh)
            batch.k = KeptRows.keep(request.k, lambda: places.key_rows, device, layer=name, fresh=fresh)
        # The lengths of packed samples are those of this call; the tensors of a caller's mask may change.
        if request.mask.holds_tensors and not (places.packed and not request.mask.without_documents().holds_tensors):
            batch.slice_requests()
        return batch

    def _add_sample(
        self,
        layer: LayerRecord,
        sample: SampleRecord,
        call: AttentionCall,
        key_start: int,
        module: nn.Module,
        *,
        first: bool,
        apart: bool,
    ) -> None:
        """Measure a call of one sample, and append it to its record; its first key has the index `key_start` there.

        A window, which is `apart`, is measured as a call of its own.
        """
        context = self._context_of_probes(sample, call, 0 if apart else key_start, module, first=first or apart)
        # Tokens of another text are not compared with the token of the query.
        probes = [probe for probe in self.probes if not (sample.crosses and probe.parts & OF_TOKENS)]
        found = statistics_of_call(call, possible_probes(probes, call.request, context), context)
        device = call.request.shape.device if self.keep == "device" else torch.device("cpu")
        request = replace(self._request_to_keep(call.request, device), query_start=int(call.request.query_start))
        if sample.k is not None:
            append_new_keys(sample.k, call.request.k, start=key_start, device=device)
        target = sample
        if layer.running_summary is not None:  # only the token ids are kept until the next call
            target = replace(self._sample_factory(sample.name, crosses=sample.crosses)(), keys_read=sample.keys_read)
        target.append_call(
            Segment(request, key_start, apart=apart),
            copy_contiguous(call.attended.logsumexp, device),
            {name: value[0].cpu() for name, value in found.items()},
            None if sample.q is None else copy_contiguous(call.request.q, device),
        )
        if layer.running_summary is not None:
            layer.running_summary.add(target.measured(), samples=int(first and not apart))

    def _request_to_keep(self, request: AttentionRequest, device: torch.device) -> AttentionRequest:
        """Return a request as a record keeps it: without q, k, v and the origin."""
        bias, keeps = request.bias, self.keep in ("cpu", "device")
        if bias is not None and not keeps and not bool((values_of(bias) == -torch.inf).any()):
            bias = None  # the bias hides no key, and nothing else of it is needed
        nothing, start = torch.empty(0), request.query_start
        return replace(
            request,
            query_start=start.clone() if isinstance(start, Tensor) else start,  # a cache may overwrite it
            q=nothing,
            k=nothing,
            v=nothing,
            wanted=frozenset(),
            shape=request.shape._replace(device=device),
            bias=None if bias is None else with_values(bias, values_of(bias).detach().to(device)),
            sinks=None if request.sinks is None or not keeps else copy_contiguous(request.sinks, device),
            origin=None,
        )

    def _sample_factory(self, name: str, *, crosses: bool = False) -> Callable[[], SampleRecord]:
        """Return a function that makes an empty sample; a batch keeps it, so it must not keep the recorder."""
        size, pool = self.measuring.map_size, self.measuring.map_pool
        return partial(SampleRecord, name, size, pool, crosses=crosses, counted=self._counted)

    def _context_of_probes(
        self, sample: SampleRecord, call: AttentionCall, start: int, module: nn.Module, *, first: bool
    ) -> ProbeContext:
        """Return the inputs of probes besides q and k, for a call whose first key has the index `start`."""
        shape, read = call.request.shape, sample.keys_read.ids
        stop = start + shape.key_length
        known = read is not None and read.length >= stop and self.measuring.needs & {"ids", "special_keys"}
        ids = read.between(start, stop)[None] if known and read is not None else None
        before = read.between(start - 1, start) if ids is not None and read is not None and start else None
        # In a later call the first key that its queries see may not be the first of the sample.
        first_key = None if first else -start
        return self.measuring.probe_context(module, shape, ids, first_key=first_key, key_start=start, id_before=before)

    def _real_queries(self, request: AttentionRequest, name: str, offset: int) -> Tensor | None:
        """Return which queries of a Hugging Face model's call are not padding: (batch, queries) bool, or None."""
        tokens, shape = self.inputs.inputs_of_queries(name).tokens, request.shape
        if tokens is None or tokens.shape[0] != shape.batch or tokens.shape[1] < shape.query_length:
            return None
        begin = min(offset + int(request.query_start), tokens.shape[1] - shape.query_length)
        return tokens[:, begin : begin + shape.query_length].to(shape.device)

    def check_complete(self, model: nn.Module) -> None:
        """Check that every layer to be recorded was recorded.

        Raises:
            ModelError: no attention call was captured, or an item of `layers` matches no layer that ran.
        """
        if not self._layers:
            # `replace` leaves subclasses of nn.MultiheadAttention as they are, so it is no mend for them.
            of_torch = any(type(module) is nn.MultiheadAttention for module in model.modules())
            raise ModelError(
                f"No attention call of {type(model).__name__} was captured: it did not run inside the context, or its "
                f"layers compute their attention themselves{', as nn.MultiheadAttention does' if of_torch else ''}.",
                "Call multihead.compat.torch_nn.replace(model, inplace=True), which makes each nn.MultiheadAttention a "
                "layer that is recorded, and run the model inside the context."
                if of_torch
                else "Run the model inside the context. Layers of multihead are recorded, and Hugging Face models that "
                "use AttentionInterface.",
            )
        missed = [] if self.layer_filter is None else self.layer_filter.unmatched_items(list(self._layers))
        if missed:
            raise ModelError(
                f"No layer that ran matches {' or '.join(repr(each) for each in missed)}.",
                f"Choose among {', '.join(f'{index}: {name}' for index, name in enumerate(self._layers))}.",
            )


def _make_key_starts(
    places: SampleSpans, state: _PreviousCall, windows: int, offset: int | Tensor
) -> Callable[[], Tensor]:
    """Return a function that finds the index of each row's first key in its sample: (samples, windows) int64.

    The keys of a window follow those of the one before it.
    """
    of_first, before = state.key_starts, state.num_keys if state.window else None
    assert of_first is not None

    def starts_in_windows() -> Tensor:
        lengths = places.key_lengths(windows)
        starts = lengths.cumsum(1) - lengths
        return starts if before is None else starts + before()[:, None]

    state.num_keys = cache(lambda: starts_in_windows()[:, -1] + places.key_lengths(windows)[:, -1])
    return starts_in_windows if state.window or windows > 1 else lambda: places.key_starts(offset) - of_first()


def _follow_in_memory(rows: Tensor, later: Tensor) -> bool:
    """Whether `later` follows `rows` in the same memory, (batch, heads, rows, head_dim) each."""
    if rows.shape[:2] != later.shape[:2] or rows.stride() != later.stride() or not later.numel():
        return False
    if rows.untyped_storage().data_ptr() != later.untyped_storage().data_ptr():
        return False
    return later.storage_offset() == rows.storage_offset() + rows.shape[2] * rows.stride(2)


class _TokensOnRank(NamedTuple):
    """Successive tokens of a range of the sequence that this rank holds.

    Attributes:
        positions: their positions in the sequence, [first, stop).
        moved: their positions counted from the start of the range.
        own: their indices among the tokens of this rank.
    """

    positions: tuple[int, int]
    moved: tuple[int, int]
    own: tuple[int, int]


def _find_tokens_on_rank(chunks: tuple[tuple[int, int], ...], ends: tuple[int, int]) -> list[_TokensOnRank]:
    """Return the tokens of a range that a rank holds, one item per chunk of the rank that overlaps the range."""
    found, before = [], 0
    for first, stop in chunks:
        low, high = max(first, ends[0]), min(stop, ends[1])
        if low < high:
            own = low - first + before, high - first + before
            found.append(_TokensOnRank((low, high), (low - ends[0], high - ends[0]), own))
        before += stop - first
    return found


def _slice_rows(tensor: Tensor, span: SampleSpan, rows: list[slice]) -> Tensor:
    """Return some rows of a sample: (1, heads, rows, ...) of (batch, heads, rows, ...)."""
    one = tensor.detach()[span.sample : span.sample + 1]
    return torch.cat([one[:, :, each] for each in rows], 2) if rows else one[:, :, :0]


def _split_of_layer(
    module: nn.Module, request: AttentionRequest, sequence: SequenceSplit | None
) -> LayerPartOfRank | None:
    """Return the heads and tokens of a layer that this process computes; None where it computes all of them."""
    held = held_heads(module, request.shape.head_dim)
    rank, ranks = (0, 1) if sequence is None else sequence.rank_and_ranks
    if held is None:
        heads, kv_heads = request.shape.num_heads, request.shape.num_kv_heads
        held = HeldHeads((0, heads), heads, (0, kv_heads), kv_heads)
    split = LayerPartOfRank(*held, rank, ranks)
    return None if split.is_whole else split
