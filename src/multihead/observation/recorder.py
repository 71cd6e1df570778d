"""Hear every attention call of a model, find whose it is and what it goes on from, and note it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor, nn

from multihead.call import AttentionCall, AttentionRequest
from multihead.errors import ModelError
from multihead.hooks import huggingface
from multihead.hooks.inputs import Inputs
from multihead.kernels.dense_tile import without_tensors
from multihead.masks.place import Span
from multihead.observation.layer_filter import LayerFilter
from multihead.observation.output_projection import output_weight
from multihead.observation.record import Record
from multihead.observation.slicing import SampleSpans, cut, moved_together, part_of, sliceable, spans, without_queries
from multihead.observation.token_ids import read_ids
from multihead.parts import Part
from multihead.probes.context import Pool, ProbeContext
from multihead.probes.probe import Need, Probe
from multihead.probes.statistics import from_kernel, of_call, possible, without_positions
from multihead.probes.tile import tile
from multihead.record.layer import LayerRecord
from multihead.record.running_summary import RunningSummary
from multihead.record.sample import SampleRecord
from multihead.record.segments import Rows, Segment, grow_keys, kept
from multihead.record.summaries import Measured, queries_that_count
from multihead.scores.bias import values_of, with_values

Keep = Literal["cpu", "device", "statistics", "summary"]
OF_TOKENS: frozenset[Part] = frozenset({"duplicate_mass", "induction_mass"})


@dataclass(eq=False)
class _Last:
    """What is left of the last call of a layer, to tell whether the next one goes on from it.

    Fields:
        batch: number of samples.
        query_stop: place behind its last query, in the sequence.
        keys: number of its keys.
        edge: (2, batch, kv_heads, head_dim), its first key, and its last query's (in cross-attention its last); None
            where a cache says what goes on from what.
        samples: where its samples were noted.
        leads: a sample: place of its first key in the sequence.
    """

    batch: int
    query_stop: int
    keys: int
    edge: Tensor | None
    samples: list[SampleRecord] = field(default_factory=list)
    leads: list[int] = field(default_factory=list)


@dataclass(eq=False)
class Recorder:
    """Hears every call, finds whose it is and what it goes on from, and notes it."""

    record: Record
    names: dict[int, str]
    inputs: Inputs
    layer_filter: LayerFilter
    keep: Keep
    probes: tuple[Probe, ...]
    special_ids: tuple[int, ...]
    map_size: int
    map_pool: Pool
    root: nn.Module
    _layers: dict[str, LayerRecord] = field(default_factory=dict)
    _last: dict[tuple[str, object], _Last] = field(default_factory=dict)  # of each layer and text
    _counts: dict[str, int] = field(default_factory=dict)
    _pass: int = -1
    _places: SampleSpans | None = None  # of the last call in this pass
    _pass_goes_on: bool = False  # whether self-attention in this pass went on from a cache

    @property
    def wanted(self) -> frozenset[Part]:
        """The parts that a kernel may measure while it computes: those of probes that need nothing but q and k."""
        return frozenset[Part]().union(
            *(probe.parts for probe in self.probes if not probe.needs and probe.axes == "queries")
        )

    def hear(self, call: AttentionCall) -> None:
        """Take note of one call."""
        owner = None if call.request.origin is None else call.request.origin.layer
        if owner is None or id(owner) not in self.names:
            return
        name = self.names[id(owner)]
        with torch.no_grad():
            self._hear(call, owner, name, self._numbered(name))

    def _numbered(self, name: str) -> str:
        """Number the calls of one layer within a forward pass of the model."""
        if self.inputs.passes != self._pass or not self.inputs.running:
            self._pass, self._pass_goes_on, self._places = self.inputs.passes, False, None
            self._counts.clear()
        self._counts[name] = self._counts.get(name, 0) + 1
        return name if self._counts[name] == 1 else f"{name}#{self._counts[name]}"

    def _hear(self, call: AttentionCall, owner: nn.Module, name: str, full: str) -> None:
        request, told, continued = call.request, huggingface.origin(), call.request.continued
        offset: int | Tensor = told.key_offset if told is not None else 0
        crosses = huggingface.crosses(owner, name)
        if continued is not None:
            offset, crosses = continued.key_start, continued.position is not None
        last = self._last.get((full, None if continued is None else continued.text))
        goes_on = last is not None and self._goes_on(call, last, offset, crosses=crosses)
        self._pass_goes_on |= goes_on and not crosses
        running_summary = RunningSummary(request.shape.num_heads) if self.keep == "summary" else None
        layer = self._layers.setdefault(
            full, LayerRecord(full, running_summary=running_summary, number=len(self._layers))
        )
        chosen = self.layer_filter.takes(full, layer.number)
        if crosses and not request.mask.uses_positions:
            # Queries have no place among the keys of another sequence: they are counted from its beginning.
            start: int | Tensor = last.query_stop if goes_on and last is not None else 0
            if continued is not None and continued.position is not None:
                start = continued.position
            if isinstance(start, Tensor) or start != request.query_start:
                call = AttentionCall(replace(request, query_start=start), without_positions(call.attended))
        now = _noted(call, offset, crosses=crosses)
        if goes_on and last is not None:
            now.samples, now.leads = last.samples, last.leads
        self._last[full, None if continued is None else continued.text] = now
        if chosen:
            self._note(call, owner, layer, now, offset, goes_on=goes_on, crosses=crosses, name=name)

    def _goes_on(self, call: AttentionCall, last: _Last, offset: int | Tensor, *, crosses: bool) -> bool:
        """Tell whether a call goes on from the last one of its layer: the same keys, and more."""
        request = call.request
        if request.continued is not None:
            # A key that is added in front has no place among others once the first ones of the text are forgotten.
            return not request.mask.leading_keys or not bool(torch.as_tensor(offset).any())
        if isinstance(request.query_start, Tensor) or isinstance(offset, Tensor):
            return False
        if request.packed_lengths is not None or last.edge is None or not request.shape.key_length:
            return False
        if request.shape.batch != last.batch or request.k.shape[1::2] != last.edge.shape[2:]:
            return False
        first, keys = request.k[:, :, 0], request.shape.key_length
        if crosses:
            alike = keys == last.keys and (self._pass_goes_on or request.shape.query_length == 1)
            return alike and torch.equal(torch.stack([first, request.k[:, :, -1]]), last.edge)
        begin = offset + request.query_start
        index = begin - 1 - offset
        if begin != last.query_stop or not 0 <= index < keys:
            return False
        return torch.equal(request.k[:, :, index], last.edge[1])

    def _note(
        self,
        call: AttentionCall,
        owner: nn.Module,
        layer: LayerRecord,
        now: _Last,
        offset: int | Tensor,
        *,
        goes_on: bool,
        crosses: bool,
        name: str,
    ) -> None:
        """Cut a call into its samples, measure each, and add it to the record."""
        told = huggingface.origin()
        real = _real_queries_of_cache(call.request)
        if told is not None:
            real = self._real_queries(call, name, told.key_offset)
        padding = None if told is None else told.padding
        offsets = torch.as_tensor(offset).expand(call.request.shape.batch).tolist()
        ids = read_ids(self.inputs, call.request, name, crosses=crosses)
        if not goes_on:
            now.samples, now.leads = [], []
        if self._places is None or not self._places.fits(call.request, real, padding):
            found = spans(call.request, queries=real, keys=padding)
            self._places = SampleSpans(without_tensors(call.request), real, padding, found)
        found = self._places.found
        starts = []
        for index, span in enumerate(found):
            place = offsets[span.sample] + span.keys[0]
            if not goes_on:
                now.leads.append(place)
                now.samples.append(self._blank(layer.name, crosses=crosses))
                if layer.running_summary is None:
                    layer.samples.append(now.samples[-1])
            ids.add_to(now.samples[index], span, index, offsets[span.sample] - now.leads[index])
            starts.append(place - now.leads[index] if call.request.packed_lengths is None else 0)
        if not goes_on and self._is_measured(call, found, now.samples, real):
            self._add_together(layer, now.samples, call, self._places)
        else:
            for sample, span, start in zip(now.samples, found, starts, strict=True):
                alone = cut(call, span)
                if real is not None:
                    alone = without_queries(alone, real[span.sample, slice(*span.queries)])
                self._add(layer, sample, alone, start, owner, first=not goes_on)
        for sample in now.samples:
            self.record.add(layer, sample)

    def _is_measured(
        self, call: AttentionCall, found: list[Span], samples: list[SampleRecord], real: Tensor | None
    ) -> bool:
        """Whether the kernel measured all that is wanted of every sample, and no padding stands between its queries."""
        request, at_hand = call.request, call.attended.statistics
        if real is not None:
            lengths = torch.tensor([stop - first for first, stop in (span.queries for span in found)])
            if not torch.equal(real.sum(1).cpu(), lengths):
                return False
        crosses = any(sample.crosses for sample in samples)
        known: set[Need] = {"values", "output_weight", "sets"}
        if request.sinks is not None:
            known.add("sinks")
        if any(sample.keys_read.ids is not None for sample in samples):
            known |= {"ids", "special_keys"} if self.special_ids else {"ids"}
        wanted = frozenset[Part]().union(
            *(
                probe.parts
                for probe in self.probes
                if probe.needs <= known and not (crosses and probe.parts & OF_TOKENS)
            )
        )
        return all(wanted == sliceable(request, span, at_hand) & wanted for span in found)

    def _add_together(
        self, layer: LayerRecord, samples: list[SampleRecord], call: AttentionCall, places: SampleSpans
    ) -> None:
        """Add a call that begins all its samples, and that the kernel has measured whole: a few steps for the batch."""
        request, attended = call.request, call.attended
        logsumexp, at_hand = attended.logsumexp.detach(), moved_together(attended.statistics, places.found)
        statistics = {
            probe.name: from_kernel(probe, at_hand, logsumexp) for probe in self.probes if probe.parts <= at_hand.keys()
        }
        if layer.running_summary is not None:
            real, positions, num_keys = places.queries
            sees = real & (logsumexp.cpu() != -torch.inf)  # (batch, heads, queries)
            counted = {
                name: Measured(value.cpu(), queries_that_count(name, sees, positions, num_keys, None))
                for name, value in statistics.items()
                if value.is_floating_point()
            }
            layer.running_summary.add(counted, samples=len(places.found))
            return
        device = request.shape.device if self.keep == "device" else torch.device("cpu")
        alike = [name for name, value in statistics.items() if value.dtype == logsumexp.dtype]
        stacked = torch.stack([logsumexp, *(statistics[name] for name in alike)])  # (1 + names, batch, heads, queries)
        if not places.parts:
            bare = self._bare(request, device)
            places.parts = [part_of(bare, span) for span in places.found]
        parts = places.parts
        if request.sinks is not None:  # which each layer has of its own
            sinks = kept(request.sinks, device) if self.keep in ("cpu", "device") else None
            parts = [replace(part, sinks=sinks) for part in parts]
        # Where nothing is padding the samples share one copy: many small ones wait for the other threads many times.
        shared = places.cover(request)
        q, k = (kept(each, device) if shared and samples[0].q is not None else each for each in (request.q, request.k))
        for sample, span, part in zip(samples, places.found, parts, strict=True):
            one, rows = slice(span.sample, span.sample + 1), slice(*span.queries)
            own = stacked[:, span.sample, :, rows]  # (1 + names, heads, rows)
            own = own if shared else own.clone()
            measured = dict(zip(alike, own[1:].unbind(), strict=True))
            for name in statistics.keys() - measured.keys():
                value = statistics[name][span.sample, :, rows]
                measured[name] = value if len(samples) == 1 else value.clone()
            own_q, own_k = q[one, :, rows], k[one, :, slice(*span.keys)]
            if sample.k is not None:
                sample.k.add(own_k if shared else kept(own_k, device))
            own_q = own_q if shared else kept(own_q, device)
            sample.add(
                Segment(part),
                own[:1].to(device),
                {name: measured[name].cpu() for name in statistics},
                None if sample.q is None else own_q,
            )

    def _add(
        self,
        layer: LayerRecord,
        sample: SampleRecord,
        call: AttentionCall,
        key_start: int,
        owner: nn.Module | None,
        *,
        first: bool,
    ) -> None:
        request = call.request
        context = self._beside(sample, call, key_start, owner, first=first)
        # A token of another text is not the query's own.
        probes = [probe for probe in self.probes if not (sample.crosses and probe.parts & OF_TOKENS)]
        found = of_call(call, possible(probes, request, context), context)
        if "induction_mass" in found and key_start > 0:
            found["induction_mass"] = found["induction_mass"] + _behind_dropped_key(sample, call, key_start)
        device = request.shape.device if self.keep == "device" else torch.device("cpu")
        keeps = self.keep in ("cpu", "device")
        request = replace(self._bare(request, device), query_start=int(request.query_start))
        if sample.k is not None:
            grow_keys(sample.k, call.request.k, start=key_start, device=device)
        target = sample
        if layer.running_summary is not None:  # the call is summed up and forgotten; the text so far is what goes on
            target = SampleRecord(sample.name, self.map_size, crosses=sample.crosses, keys_read=sample.keys_read)
        target.add(
            Segment(request, key_start),
            kept(call.attended.logsumexp, device),
            {name: value[0].cpu() for name, value in found.items()},
            kept(call.request.q, device) if keeps else None,
        )
        if layer.running_summary is not None:
            layer.running_summary.add(target.measured(), samples=int(first))

    def _bare(self, request: AttentionRequest, device: torch.device) -> AttentionRequest:
        """Leave out of a request what a record does not keep in it: q, k, v and its owner."""
        bias, keeps = request.bias, self.keep in ("cpu", "device")
        if bias is not None and not keeps and not bool((values_of(bias) == -torch.inf).any()):
            bias = None  # it hides no key, and nothing else of it is needed
        nothing = torch.empty(0)
        return replace(
            request,
            q=nothing,
            k=nothing,
            v=nothing,
            wanted=frozenset(),
            shape=request.shape._replace(device=device),
            bias=None if bias is None else with_values(bias, values_of(bias).detach().to(device)),
            sinks=None if request.sinks is None or not keeps else kept(request.sinks, device),
            origin=None,
        )

    def _beside(
        self, sample: SampleRecord, call: AttentionCall, start: int, owner: nn.Module | None, *, first: bool
    ) -> ProbeContext:
        """Say what is known beside q and k of a call whose first key stands at `start`."""
        shape = call.request.shape
        read, stop = sample.keys_read.ids, start + shape.key_length
        needs = frozenset[str]().union(*(probe.needs for probe in self.probes))
        ids = special = weight = None
        if read is not None and read.length >= stop and needs & {"ids", "special_keys"}:
            ids = read.between(start, stop)[None].to(shape.device)
            special = torch.isin(ids, torch.tensor(self.special_ids, device=shape.device)) if self.special_ids else None
        if "output_weight" in needs and owner is not None:
            width = shape.num_heads * shape.value_dim
            weight = output_weight(owner, self.root, self.names[id(owner)], width=width)
        return ProbeContext(
            special_keys=special,
            ids=ids,
            output_weight=weight,
            # Of a later call the first key that its queries see need not be the first of the sample.
            first_key=None if first else -start,
            map_size=self.map_size,
            map_pool=self.map_pool,
        )

    def _blank(self, name: str, *, crosses: bool) -> SampleRecord:
        """Begin a sample."""
        one = SampleRecord(name, self.map_size, self.map_pool, crosses=crosses)
        if self.keep in ("cpu", "device"):
            one.q, one.k = Rows(2), Rows(2)
        return one

    def _real_queries(self, call: AttentionCall, name: str, offset: int) -> Tensor | None:
        """Tell which queries of a Hugging Face model's call are no padding: (batch, queries) bool, or None."""
        tokens, shape = self.inputs.queries_of(name).tokens, call.request.shape
        if tokens is None or tokens.shape[0] != shape.batch or tokens.shape[1] < shape.query_length:
            return None
        begin = offset + int(call.request.query_start)
        if begin + shape.query_length > tokens.shape[1]:
            begin = tokens.shape[1] - shape.query_length
        return tokens[:, begin : begin + shape.query_length].to(shape.device)

    def refuse_unless_heard(self, model: nn.Module) -> None:
        """Refuse a record in which something that was asked for is missing.

        Raises:
            ModelError: no call was heard, or a layer that was asked for is none.
        """
        if not self._layers:
            raise ModelError(
                f"No attention of {type(model).__name__} was heard: it did not run inside the context, or its layers "
                "compute their attention themselves.",
                "Run the model inside it; watched are layers of multihead and Hugging Face models that use "
                "AttentionInterface.",
            )
        missed = self.layer_filter.missed(list(self._layers))
        if missed:
            raise ModelError(
                f"No layer that ran is called {' or '.join(repr(each) for each in missed)}.",
                f"Choose among {', '.join(f'{index}: {name}' for index, name in enumerate(self._layers))}.",
            )


def _behind_dropped_key(sample: SampleRecord, call: AttentionCall, start: int) -> Tensor:
    """Weigh the call's first key for the queries of the token before it, which a cache has dropped from the keys.

    Returns: (1, heads, queries), what is to be added to their `induction_mass`.
    """
    ids, request = sample.keys_read.ids, call.request
    assert ids is not None
    place = start + int(request.query_start)
    alike = ids.between(place, place + request.shape.query_length) == ids.between(start - 1, start)
    first = tile(request, call.attended.logsumexp.detach(), keys=slice(0, 1))[..., 0]
    return first * alike.to(first.device)


def _noted(call: AttentionCall, offset: int | Tensor, *, crosses: bool) -> _Last:
    request, keys = call.request, call.request.shape.key_length
    if request.continued is not None:
        return _Last(request.shape.batch, 0, keys, None)
    start = 0 if isinstance(request.query_start, Tensor) else request.query_start
    stop = int(offset) + start + request.shape.query_length
    if not keys:
        return _Last(request.shape.batch, stop, keys, None)
    edge = torch.stack([request.k[:, :, 0], request.k[:, :, -1 if crosses else min(stop - int(offset), keys) - 1]])
    return _Last(request.shape.batch, stop, keys, edge.detach().clone())


def _real_queries_of_cache(request: AttentionRequest) -> Tensor | None:
    """Tell which queries of a call that goes through a cache are no padding: (batch, queries) bool, or None."""
    if request.continued is None or request.continued.lengths is None:
        return None
    token = torch.arange(request.shape.query_length, device=request.shape.device)
    return token < request.continued.lengths[:, None]
