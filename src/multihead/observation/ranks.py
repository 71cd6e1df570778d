"""Record the queries of one rank, where a sequence is split over processes, and the heads where layers are."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from torch import Tensor

from multihead.errors import ProbeError
from multihead.kernels.call import AttentionCall, AttentionRequest, AttentionResult
from multihead.kernels.dense_tile import first_key_of_samples
from multihead.kernels.parts import RECEIVED, SINK_MASS, number_in_text
from multihead.kernels.plan.bounds import bounds_of
from multihead.kernels.sequence_split import SequenceSplit
from multihead.layer.sharding import RankHeads, rank_heads
from multihead.masks.positions import SampleSpan
from multihead.models.pretrained import InputTracker
from multihead.observation.measuring import StatisticsMeasurer, TextInCall
from multihead.observation.samples import SamplesOfPass
from multihead.probes.catalogue import PROBES, needs_pictures
from multihead.probes.probe import Probe
from multihead.probes.statistics import complete_statistics, parts_of_probes, possible_probes, sink_mass
from multihead.record.batch import CallTokenIds, slice_request
from multihead.record.sample import SampleRecord
from multihead.record.segments import Segment, copy_contiguous
from multihead.record.split import LayerPartOfRank, TokensOfRank
from multihead.record.text_table import RowsInTensor

TokensOnRank: TypeAlias = list[tuple[tuple[int, int], slice]]
"""Tokens of this rank in a range of a split sequence: positions in the range, [first, stop); indices on the rank."""


@dataclass(eq=False)
class QueriesOfRank:
    """Measures the queries of this rank in the calls of a sequence that is split over ranks.

    Attributes:
        measurer: the statistics of the model's layers.
        inputs: the token inputs of the model.
        asked_for_pictures: whether the user named statistics of pictures.
    """

    measurer: StatisticsMeasurer
    inputs: InputTracker
    asked_for_pictures: bool

    def samples_of_call(
        self,
        call: AttentionCall,
        sequence: SequenceSplit,
        found: SamplesOfPass,
        device: torch.device,
        new_sample: Callable[[], SampleRecord],
    ) -> list[SampleRecord]:
        """Return the samples of a call, with the queries of this rank.

        Args:
            call: the call of this rank.
            sequence: how the sequence is split.
            found: finds the samples of the pass.
            device: device of the record.
            new_sample: creates an empty sample.
        """
        request, result = call.request, call.result
        length = sequence.whole_shape(request.shape).query_length
        bare = found.request_without_tensors(request, device)
        bare = replace(bare, shape=bare.shape._replace(query_length=length, key_length=length))
        sample_spans = found.spans_of(bare)
        own_ids = self._ids_of_whole_sequence(request, sequence, found)
        ids = CallTokenIds(own_ids, None, cross_attention=False, query_start=0)
        _check_measurable(self.measurer.probes, asked_for_pictures=self.asked_for_pictures)
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
            sample = new_sample()
            if sequence.rank_and_world_size[1] > 1:
                sample.split = TokensOfRank(*(tuple(place for place, _ in tokens) for tokens in (queries, own_keys)))
            ids.append_to_sample(sample, span, -span.keys[0])
            sample.segments = [Segment(replace(slice_request(bare, span), sinks=bare.sinks))]
            rows, columns = ([indices for _, indices in tokens] for tokens in (queries, own_keys))
            sample.calls = [((0, sample.num_queries), (0, span.keys[1] - span.keys[0]))]
            sample.logsumexp = RowsInTensor(_slice_rows(result.logsumexp, span, rows).to(device))
            sample.set_statistics(self._measure_queries(attended, span, queries, sample))
            if found.keeps_qk:
                sample.q = RowsInTensor(copy_contiguous(_slice_rows(request.q, span, rows), device))
                sample.k = RowsInTensor(copy_contiguous(_slice_rows(request.k, span, columns), device))
            samples.append(sample)
        return samples

    def _ids_of_whole_sequence(
        self, request: AttentionRequest, sequence: SequenceSplit, found: SamplesOfPass
    ) -> Tensor | None:
        """Return the token ids of all ranks, (batch, tokens) int64, gathered once per input; None if unknown."""
        name = self.measurer.module_name(request)
        own = self.inputs.inputs_of_queries(name).ids
        if own is None or own.shape != (request.shape.batch, request.shape.query_length):
            return None
        device = request.shape.device
        return found.shared.once("gathered", own, lambda: sequence.gather_tokens(own.to(device), 1).cpu())

    def _measure_queries(
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
            context = self.measurer.context_of_text(TextInCall(span, 0, read), part.shape, 0, caller, first=True)
            context = replace(context, first_key=first_key)
            possible = possible_probes(self.measurer.probes, part, context)
            found.append(complete_statistics(part, own.logsumexp, possible, context, parts=own.statistics, result=own))
        return sample.join_queries([{name: value[0].cpu() for name, value in each.items()} for each in found])


def part_of_layer(request: AttentionRequest, sequence: SequenceSplit | None) -> LayerPartOfRank | None:
    """Return which heads and tokens of a layer this process computes; None if it computes all."""
    shape, place = request.shape, (0, 1) if sequence is None else sequence.rank_and_world_size
    held = rank_heads(request.known_origin.layer, shape.head_dim)
    held = RankHeads.of_rank(0, 1, shape.num_heads, shape.num_kv_heads) if held is None else held
    split = LayerPartOfRank(*held, *place)
    return None if split.is_whole else split


def _check_measurable(probes: Iterable[Probe], *, asked_for_pictures: bool) -> None:
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
