"""Collect the inputs of probes besides q and k, and measure statistics for all texts of a batch at once.

Each sample is measured alone, without its padding, so padding does not affect means, maps and attention received.
Statistics that the kernel measured for a whole batch are sliced into samples; the weights on special tokens are
measured for the whole batch in one more pass.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor, nn

from multihead.errors import ModelError
from multihead.functional import attend
from multihead.kernels.call import AttentionCall, AttentionRequest
from multihead.kernels.native.statistics import FIRST_KEY_WEIGHT
from multihead.kernels.parts import FIRST_KEYS_MASS, SPECIAL_MASS, TOKENS_MASS, PartName
from multihead.observation.output_projection import output_weight
from multihead.probes.context import MAP_SIZE, PoolOperation, ProbeContext
from multihead.probes.lookups import weight_at_keys
from multihead.probes.measured_call import MeasuredCall
from multihead.probes.probe import Probe
from multihead.probes.statistics import complete_statistics, parts_of_probes, possible_probes
from multihead.record.batch import SampleSpans
from multihead.record.chance import with_zero_scores
from multihead.record.summaries import MeasuredStatistic, occurred_before, queries_that_count
from multihead.record.token_ids import CallTokenIds, is_among
from multihead.tensors.shapes import AttentionShape

MAX_LOOKED_UP_SPECIAL_KEYS = 4  # with more special tokens per text, a pass over all keys is faster than look-ups


@dataclass(frozen=True, eq=False)
class StatisticsMeasurer:
    """Measures the statistics of a model's layers, and collects the inputs of probes besides q and k.

    Attributes:
        root: the model.
        names: id of each module of the model -> its name.
        probes: the statistics to measure.
        special_ids: token ids that count as special in `special_mass`.
        map_size: largest number of rows and columns of the pooled map.
        map_pool: whether a cell of the pooled map is the "mean" or the "max" of the weights in its block.
    """

    root: nn.Module
    names: dict[int, str]
    probes: tuple[Probe, ...]
    special_ids: tuple[int, ...] = ()
    map_size: int = MAP_SIZE
    map_pool: PoolOperation = "mean"

    @cached_property
    def needs(self) -> frozenset[str]:
        """Names of the inputs that any of the probes needs besides q and k, such as "ids"."""
        return frozenset[str]().union(*(probe.needs for probe in self.probes))

    def module_name(self, request: AttentionRequest) -> str:
        """Return the name of the module that makes a call."""
        return self.names[id(request.known_origin.layer)]

    def probe_context(
        self, layer: nn.Module, shape: AttentionShape, ids: Tensor | None, *, distinct: Tensor | None = None
    ) -> ProbeContext:
        """Return the inputs of probes besides q and k, such as token ids and the output projection.

        Args:
            layer: module that makes the call.
            shape: shape of the call.
            ids: (batch, keys) int64, the token id of each key, or None.
            distinct: (batch, keys), like `ids`, but different for equal tokens of different texts in a packed row.
        """
        compared = special = weight = None
        sets = {}
        if ids is not None:
            if "special_keys" in self.needs and self.special_ids:
                special = is_among(ids, self.special_ids).to(shape.device)
            if "ids" in self.needs:
                compared = (ids if distinct is None else distinct).to(shape.device)
            for probe in self.probes:
                for part in probe.parts:
                    if probe.tokens is not None and part[0] == TOKENS_MASS.name:
                        sets[str(part[1])] = is_among(ids, sorted(probe.tokens)).to(shape.device)
        if "output_weight" in self.needs:
            width = shape.num_heads * shape.value_dim
            weight = output_weight(layer, self.root, self.names[id(layer)], width=width)
        return ProbeContext(special, compared, sets, weight, map_size=self.map_size, map_pool=self.map_pool)

    def measure_whole_batch(
        self, call: AttentionCall, sample_spans: SampleSpans, ids: CallTokenIds
    ) -> dict[str, MeasuredStatistic]:
        """Measure all texts of a call at once; return statistic -> its values, and the queries to average over.

        Args:
            call: a call whose queries and keys are the tokens of whole texts, one per row or packed.
            sample_spans: the positions of the texts in the batch.
            ids: the token ids of the texts.
        """
        request, shape, logsumexp = call.request, call.request.shape, call.result.logsumexp.detach()
        read = ids.key_ids(request)
        if ids.cross_attention or read is None:
            raise ModelError(
                f"{self.module_name(request)} attends from {shape.query_length} queries to {shape.key_length} keys, "
                "which are not the tokens of the texts.",
                "Give a model whose layers read each token of a text once, or choose other layers.",
            )
        real, positions, num_keys = sample_spans.query_properties
        read = read.masked_fill(~real[:, 0], -1)
        text = torch.arange(shape.batch)[:, None]  # number of the text of each token
        if sample_spans.packed:
            text = torch.arange(len(sample_spans.spans)).repeat_interleave(
                sample_spans.span_ends[2] - sample_spans.span_ends[1]
            )[None]
        distinct = read + text * (int(read.max()) + 2)  # equal tokens of two texts must not match
        context = self.probe_context(request.known_origin.layer, shape, read, distinct=distinct)
        context = replace(context, key_start=sample_spans.key_starts_in_text())
        probes, parts = possible_probes(self.probes, request, context), call.result.statistics
        if sample_spans.packed:
            missing = parts_of_probes(probes) - parts.keys()
            parts = {**parts, **_measure_packed_texts(call, sample_spans, text[0], missing, context)}
        found = complete_statistics(request, logsumexp, probes, context, parts=parts, result=call.result)
        sees = real & (logsumexp.cpu() != -torch.inf)
        flat = distinct.flatten()
        where = sees, positions, num_keys, lambda: occurred_before(torch.arange(len(flat)), flat).view(real.shape)
        return {
            probe.name: MeasuredStatistic(found[probe.name].cpu(), queries_that_count(probe, *where))
            for probe in probes
        }

    def measure_chance_levels(
        self, call: AttentionCall, sample_spans: SampleSpans, ids: CallTokenIds
    ) -> dict[str, Tensor]:
        """Measure the chance level of each probe, its value for weights spread evenly over the visible keys.

        Takes the arguments of `measure_whole_batch`. One head is measured, because the chance level depends only on the
        mask.

        Returns:
            statistic -> chance level, (batch, heads or 1, queries).
        """
        probes = tuple(each for each in self.probes if each.chance and "values" not in each.needs)
        request = with_zero_scores(call.request, exact=call.request.shape.dtype == torch.float64)
        wanted = parts_of_probes(each for each in probes if not each.needs)
        request = replace(request, origin=call.request.origin, requested_statistics=wanted)
        spread = AttentionCall(request, attend(request, published=False))
        found = replace(self, probes=probes).measure_whole_batch(spread, sample_spans, ids)
        return {name: each.values for name, each in found.items()}


def _measure_packed_texts(
    call: AttentionCall, sample_spans: SampleSpans, text: Tensor, missing: frozenset[PartName], context: ProbeContext
) -> dict[PartName, Tensor]:
    """Measure the weights on the first keys and on the special keys of each query's own text in a packed row."""
    found: dict[PartName, Tensor] = {}
    counts = {part: part[1] for part in missing if part[0] == FIRST_KEYS_MASS.name and isinstance(part[1], int)}
    if not counts and SPECIAL_MASS.name not in missing:
        return found
    logsumexp, device = call.result.logsumexp.detach(), call.request.shape.device
    measured = MeasuredCall.from_request(call.request, logsumexp, context)
    start = sample_spans.first_keys[0, 0]  # (tokens,)

    def weight_on(keys: Tensor) -> Tensor:
        found = weight_at_keys(measured, keys.to(device)[None]).to(logsumexp.dtype)
        return found.masked_fill_(logsumexp.isnan(), torch.nan)

    for part, count in counts.items():
        found[part] = torch.zeros_like(logsumexp)
        for place in range(min(count, int(text.bincount().max()))):
            found[part] += weight_on(start + place)  # 0 after the end of the text: not visible
    if SPECIAL_MASS.name in missing and context.special_keys is not None:
        first = found.get(FIRST_KEY_WEIGHT, call.result.statistics.get(FIRST_KEY_WEIGHT))
        keys = token_indices_per_text(context.special_keys[0].cpu(), text)  # (most, tokens)
        if len(keys) <= MAX_LOOKED_UP_SPECIAL_KEYS:
            total = torch.zeros_like(logsumexp)
            for each in keys:
                total += first if first is not None and torch.equal(each, start) else weight_on(each)
            found[SPECIAL_MASS.name] = total
    return found


def token_indices_per_text(flags: Tensor, text: Tensor) -> Tensor:
    """Find the flagged tokens in the text of each token, for a row of packed texts.

    Args:
        flags: (tokens,) bool, True for the tokens to find.
        text: (tokens,) int64, number of each token's text, ascending from 0.

    Returns:
        (n, tokens) int64: in row i, the index of the i-th flagged token in the same text, or -1; n is the largest
        number of flagged tokens in a text.
    """
    place, texts = flags.nonzero().flatten(), int(text[-1]) + 1
    row = text[place]
    count = row.bincount(minlength=texts)
    rank = torch.arange(len(place)) - (count.cumsum(0) - count)[row]
    table = torch.full((int(count.max()), texts), -1)
    table[rank, row] = place
    return table[:, text]
