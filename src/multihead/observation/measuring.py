"""Collect the inputs of probes besides q and k, and measure statistics for all texts of a batch at once.

Each sample is measured alone, without its padding, so padding does not affect means, maps and attention received.
Statistics that the kernel measured for a whole batch are sliced into samples; the weights on special tokens are
measured for the whole batch in one more pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor, nn

from multihead.functional import attend
from multihead.kernels.call import AttentionCall, AttentionRequest
from multihead.kernels.native.statistics import FIRST_KEY_WEIGHT
from multihead.kernels.parts import SPECIAL_MASS, TOKENS_MASS, PartName
from multihead.masks.leading_keys import LeadingKeys
from multihead.masks.positions import SampleSpan
from multihead.probes.catalogue import PROBES
from multihead.probes.context import MAP_SIZE, PoolOperation, ProbeContext
from multihead.probes.lookups import weight_at_keys
from multihead.probes.measured_call import MeasuredCall
from multihead.probes.probe import PartValues, Probe, Statistic
from multihead.probes.statistics import measure_parts_on_gpu, parts_of_probes, possible_probes, statistics_of_call
from multihead.record.batch import CallTokenIds, SampleSpans, is_among
from multihead.record.chance import with_zero_scores
from multihead.record.shared import SharedByLayers
from multihead.record.text_rows import MeasuredRows, TextRows
from multihead.record.texts import PictureTokens
from multihead.tensors.shapes import AttentionShape

MAX_LOOKED_UP_SPECIAL_KEYS = 4  # with more special tokens per text, a pass over all keys is faster than look-ups


class TextInCall(NamedTuple):
    """One text of a call.

    Attributes:
        span: its queries and keys in the call.
        start: index in the text of the first of these keys.
        ids: (keys,) int64, the ids of all keys of the text so far; None if unknown.
        is_window: whether the queries see only these keys, so that a summary takes them for a text of their own.
        pictures: its tokens, some of which are places in pictures; None without pictures.
    """

    span: SampleSpan
    start: int
    ids: Tensor | None
    is_window: bool = False
    pictures: PictureTokens | None = None


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
    def own(self) -> dict[str, Statistic]:
        """The statistics that are not built in, by name."""
        return {probe.name: probe for probe in self.probes if probe.name not in PROBES}

    @cached_property
    def parts(self) -> frozenset[PartName]:
        """The parts of all probes."""
        return parts_of_probes(self.probes)

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
            distinct: (batch, keys), like `ids`, but different for equal tokens of different texts.
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

    def measure(
        self, call: AttentionCall, rows: TextRows, context: ProbeContext, sample_spans: SampleSpans | None = None
    ) -> MeasuredRows:
        """Measure the texts of a call: a whole batch, one text, a later call of a cache, or the queries of one rank.

        Args:
            call: the call.
            rows: its queries that belong to texts.
            context: inputs of the probes besides q and k; with its first key, and the number of keys before it.
            sample_spans: the positions of the texts, if the call is the first one of a whole batch.

        Returns:
            the statistics with a number per query whose inputs the call has, on the CPU, without chance levels.
        """
        if sample_spans is not None and sample_spans.texts is not None and context.special_keys is not None:
            parts = call.result.statistics
            if SPECIAL_MASS.name in self.parts - parts.keys():
                parts = {**parts, **_look_up_special_keys(call, sample_spans, context)}
                call = AttentionCall(call.request, replace(call.result, statistics=parts))
        values = {name: rows.select(each) for name, each in statistics_of_call(call, self.probes, context).items()}
        sees = rows.select(call.result.logsumexp.detach()) != -torch.inf
        if not sees.is_cpu:
            values, sees = {name: each.cpu() for name, each in values.items()}, sees.cpu()
        return MeasuredRows(rows, sees, values, own=self.own)

    def context_of_text(
        self, text: TextInCall, shape: AttentionShape, start: int, caller: nn.Module, *, first: bool
    ) -> ProbeContext:
        """Return the inputs of probes besides q and k, for a call of one text whose first key has the index `start`.

        With `first`, that is the first key that the queries may see.
        """
        read, stop, ids, before = text.ids, start + shape.key_length, None, None
        if read is not None and len(read) >= stop and self.needs & {"ids", "special_keys"}:
            ids = read[None, start:stop]
            before = None if first or not start else read[start - 1 : start]
        # In a later call the first key that the queries see may not be the sample's first key.
        first_key = None if first else -start
        context = self.probe_context(caller, shape, ids)
        if text.pictures is not None:
            context = text.pictures.add_places(context, start, stop, has_words=read is not None)
        return replace(context, first_key=first_key, key_start=start, id_before=before)

    def context_of_batch(
        self, call: AttentionCall, sample_spans: SampleSpans, ids: CallTokenIds, *, windows: int
    ) -> ProbeContext:
        """Return the inputs of probes besides q and k with which all texts of a call can be measured at once.

        Args:
            call: the first call of its texts.
            sample_spans: the positions of the texts in the batch.
            ids: the token ids of the texts.
            windows: how many consecutive rows of the batch are windows of one text.
        """
        request = call.request
        read, distinct = ids.key_ids(request), None
        if read is not None:
            read, distinct = sample_spans.ids_within_texts(read)
        context = self.probe_context(request.known_origin.layer, request.shape, read, distinct=distinct)
        return replace(context, key_start=sample_spans.key_starts_in_text(windows))

    def context_of_texts(
        self,
        call: AttentionCall,
        sample_spans: SampleSpans,
        texts: Sequence[TextInCall],
        *,
        first: bool,
        fewest: int = 2,
    ) -> ProbeContext | None:
        """Return the inputs of probes besides q and k with which several texts of a call can be measured at once.

        Args:
            call: the call, such as a step of decoding.
            sample_spans: the positions of the texts in the batch.
            texts: the texts, each in a row of its own, or parts of them that differ in their queries and last keys; one
                of a row with several texts only if `fewest` is 1.
            first: whether the first keys that the queries of a text see are its first keys.
            fewest: with fewer texts they are measured one by one.

        Returns:
            the inputs; None if a text is not there as it would be alone, or a statistic is none per query.
        """
        request, valid = call.request, sample_spans.sliceable
        if len(texts) < fewest or (sample_spans.texts is not None and fewest > 1):
            return None
        if any(text.pictures is not None for text in texts):
            return None
        if sample_spans.one_text and any(text.span.keys[0] for text in texts):
            return None  # padding before keys of another text does not move the queries
        if not first:  # it is looked up
            valid = valid._replace(first_key=True)
        measurable = all(probe.axes == "queries" for probe in self.probes)
        if isinstance(request.mask, LeadingKeys) or not (valid.any_part and measurable):
            return None
        if not valid.includes_all(self.parts):
            return None
        ids, keys_before = None, torch.zeros(request.shape.batch, dtype=torch.int64)
        known = [text.ids is not None and len(text.ids) >= text.start + _length(text.span.keys) for text in texts]
        if self.needs & {"ids", "special_keys"} and any(known):
            if not all(known) or (not first and any(text.start for text in texts)):
                return None
            ids = torch.full((request.shape.batch, request.shape.key_length), -1)
        for span, start, read, *_ in texts:
            keys_before[span.sample] = start - span.keys[0]
            if ids is not None and read is not None:
                ids[span.sample, slice(*span.keys)] = read[start : start + _length(span.keys)]
        context = self.probe_context(request.known_origin.layer, request.shape, ids)
        first_key = None if first else -keys_before
        return replace(context, first_key=first_key, key_start=keys_before[:, None, None])

    def parts_of_step(
        self,
        call: AttentionCall,
        sample_spans: SampleSpans,
        texts: Sequence[TextInCall],
        shared: SharedByLayers,
        *,
        first: bool,
    ) -> tuple[PartValues, Tensor] | None:
        """Measure the parts of texts of a call on its GPU, such as a step of decoding, in one launch, without waiting.

        Args:
            call: the call.
            sample_spans: the positions of the texts in the batch, on the CPU.
            texts: the texts.
            shared: what the layers of the pass share.
            first: whether the first keys that the queries of a text see are its first keys.

        Returns:
            part -> (batch, heads, queries), valid for each text, and the logsumexp; None if a text is not a row as it
            would be alone, or a statistic is computed from other parts.
        """
        request, shape = call.request, call.request.shape

        def find_inputs() -> ProbeContext | None:
            whole = [(row, 0, shape.query_length) for row in range(shape.batch)]
            if [(span.sample, *span.queries) for span, *_ in texts] != whole or any(text.is_window for text in texts):
                return None
            found = self.context_of_texts(call, sample_spans, texts, first=first, fewest=1)
            if found is None or not isinstance(found.first_key, Tensor):
                return found
            return replace(found, first_key=found.first_key.to(shape.device))

        inputs = shared.once(f"inputs of {id(self)}", sample_spans, find_inputs)
        if inputs is None:
            return None
        return measure_parts_on_gpu(call, parts_of_probes(possible_probes(self.probes, request, inputs)), inputs)

    def measures_whole(self, request: AttentionRequest, sample_spans: SampleSpans, ids: CallTokenIds) -> bool:
        """Whether the texts of a first call are measured at once as if each were alone."""
        needs_ids = bool(self.needs & {"ids", "special_keys"}) and (ids.queries is not None or ids.keys is not None)
        if needs_ids and ids.key_ids(request) is None:
            return False
        sliceable = sample_spans.sliceable
        return sliceable.any_part and sliceable.includes_all(self.parts)

    def spread_evenly(self, call: AttentionCall) -> tuple[StatisticsMeasurer, AttentionCall]:
        """Return what measures chance levels, and the call with all scores 0, in one head unless heads' masks differ.

        The chance level of a probe is its value for weights spread evenly over the visible keys.
        """
        probes = tuple(each for each in self.probes if each.chance and "values" not in each.needs)
        request = with_zero_scores(call.request, exact=call.request.shape.dtype == torch.float64)
        wanted = parts_of_probes(each for each in probes if not each.needs)
        request = replace(request, origin=call.request.origin, requested_statistics=wanted)
        return replace(self, probes=probes), AttentionCall(request, attend(request, published=False))


def _length(ends: tuple[int, int]) -> int:
    return ends[1] - ends[0]


def _look_up_special_keys(
    call: AttentionCall, sample_spans: SampleSpans, context: ProbeContext
) -> dict[PartName, Tensor]:
    """Measure the weights on the special keys of each query's text, in rows of several texts with few special keys."""
    logsumexp, device, keys = call.result.logsumexp.detach(), call.request.shape.device, call.request.shape.key_length
    assert context.special_keys is not None
    text = sample_spans.sample_of_keys
    table = token_indices_per_text(context.special_keys.cpu().flatten(), text.flatten())  # (most, batch * keys)
    if len(table) > MAX_LOOKED_UP_SPECIAL_KEYS:
        return {}
    measured = MeasuredCall.from_request(call.request, logsumexp, context)
    first = call.result.statistics.get(FIRST_KEY_WEIGHT)
    first_key = sample_spans.first_keys[:, 0]  # (batch, keys)
    total = torch.zeros_like(logsumexp)
    for row in table.view(-1, *text.shape):
        key = torch.where(row >= 0, row % max(keys, 1), -1)
        if first is not None and torch.equal(key, first_key):
            total += first
        else:
            total += weight_at_keys(measured, key.to(device)).to(logsumexp.dtype)
    return {SPECIAL_MASS.name: total.masked_fill_(logsumexp.isnan(), torch.nan)}


def token_indices_per_text(flags: Tensor, text: Tensor) -> Tensor:
    """Find the flagged tokens in the text of each token.

    Args:
        flags: (tokens,) bool, True for the tokens to find, each of which is in a text.
        text: (tokens,) int64, number of each token's text, ascending; -1 for a token in no text.

    Returns:
        (n, tokens) int64: in row i, the index of the i-th flagged token in the same text, or -1; n is the largest
        number of flagged tokens in a text.
    """
    place, texts = flags.nonzero().flatten(), int(text.max()) + 1 if len(text) else 0
    row = text[place]
    count = row.bincount(minlength=texts)
    rank = torch.arange(len(place)) - (count.cumsum(0) - count)[row]
    table = torch.full((int(count.max()) if texts else 0, texts + 1), -1)  # the last column is that of no text
    table[rank, row] = place
    return table[:, text]


PROJECTION_NAMES = ("out_proj", "o_proj", "c_proj", "out_lin", "Wo", "W_o", "o", "dense")
"""Attribute names of output projections, as in: multihead, OPT, CLIP, Whisper; Llama; GPT-2; DistilBERT; ModernBERT;
d2l; T5; ALBERT, GPT-NeoX."""


def output_weight(owner: nn.Module, root: nn.Module, name: str, *, width: int) -> Tensor | None:
    """Return the weight of an output projection, found by name in the attention layer or its sibling module `output`.

    Args:
        owner: the attention layer.
        root: the model.
        name: qualified name of the layer in the model.
        width: heads * value_dim, the number of input features of the projection.

    Returns:
        (embed_dim, heads * value_dim), as in `nn.Linear`, multiplied by per-head gates (`head_gates`) if there are any;
        None if no weight has this shape.

    >>> import multihead as mh
    >>> output_weight(layer := mh.MultiHeadAttention(8, 2), layer, "", width=8) is layer.out_proj.weight
    True
    """
    for module in _candidate_projections(owner, root, name):
        weight = getattr(module, "weight", None)
        if not isinstance(weight, Tensor) or weight.dim() != 2 or not weight.is_floating_point():
            continue
        local = getattr(weight, "to_local", None)  # a DTensor has the columns for the heads of this process
        if local is not None:
            weight = local()
        # The Conv1D of transformers' GPT-2 stores its weight as (input, output).
        found = weight.mT if type(module).__name__ == "Conv1D" else weight
        if found.shape[1] == width:
            gates = getattr(owner, "head_gates", None)
            if isinstance(gates, Tensor) and gates.dim() == 1:
                found = found * torch.repeat_interleave(gates, width // len(gates))
            return found
    return None


def _candidate_projections(owner: nn.Module, root: nn.Module, name: str) -> Iterator[nn.Module]:
    places: list[object] = [owner]
    if "." in name:
        parent = root.get_submodule(name.rpartition(".")[0])
        places.append(getattr(parent, "output", None))  # BERT and ViT: attention.self and attention.output.dense
    for place, each in product(places, PROJECTION_NAMES):
        module = getattr(place, each, None)
        if isinstance(module, nn.Module):
            yield module
