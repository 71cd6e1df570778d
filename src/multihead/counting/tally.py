"""Measure the heads of a model on batches of texts, and sum their statistics layer by layer."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from multihead.call import AttentionCall, listen
from multihead.counting.batches import Batch
from multihead.counting.sums import LayerSums
from multihead.errors import ModelError, ProbeError
from multihead.hooks.huggingface import installed
from multihead.hooks.packed import packed
from multihead.hooks.pretrained import crosses
from multihead.kernels.choose import temporary_plans
from multihead.kernels.native.statistics import FIRST_KEY, SPECIAL_KEYS
from multihead.observation.layer_filter import LayerFilter
from multihead.observation.output_projection import output_weight
from multihead.parts import Part
from multihead.probes.catalogue import DEFAULT, PROBES
from multihead.probes.context import ProbeContext
from multihead.probes.lookups import at_keys
from multihead.probes.measured_call import MeasuredCall
from multihead.probes.probe import Probe
from multihead.probes.statistics import Wanted, completed, parts_of, possible, resolved
from multihead.record.summaries import queries_that_count

LARGEST_KEY = PROBES["largest_key"]
FEW_SPECIAL = 4  # with more special tokens per text, another pass over all keys takes less time than looking them up


def counted_probes(wanted: Wanted | Sequence[Wanted] | None) -> tuple[Probe, ...]:
    """Return the probes of a census, by default those of `multihead.probes.DEFAULT` that have a mean.

    Raises:
        ProbeError: a statistic is unknown, or has no number per query that can be added up.
    """
    found = resolved([name for name in DEFAULT if name != LARGEST_KEY.name] if wanted is None else wanted)
    for probe in found:
        if probe.axes != "queries" or probe.name == LARGEST_KEY.name:
            raise ProbeError(
                f"{probe.name} has no number per query that can be added up.", 'Give probes such as "entropy".'
            )
        if "sets" in probe.needs:
            raise ProbeError(
                f"{probe.name} needs a set of tokens.",
                f"Give their ids: probes.tokens_mass({probe.name.removesuffix('_mass')!r}, ids).",
            )
    return found


@dataclass(eq=False)
class Tally:
    """A listener that adds the attention calls of a model to sums per layer.

    Attributes:
        model: the model whose layers are measured.
        probes: the statistics.
        special_ids: the token ids that `special_mass` counts.
        examples: how many of the strongest examples are kept per head and statistic.
        layer_filter: which layers are measured; None measures all.
        layers: the layers so far by number, counted in the order in which they run.
        wanted: the parts that a kernel may measure while it computes.
    """

    model: nn.Module
    probes: tuple[Probe, ...]
    special_ids: tuple[int, ...]
    examples: int
    layer_filter: LayerFilter | None = None
    layers: dict[int, LayerSums] = field(default_factory=dict)
    wanted: frozenset[Part] = field(init=False)
    _names: dict[int, str] = field(init=False)
    _numbers: dict[str, int] = field(default_factory=dict)
    _calls: dict[str, int] = field(default_factory=dict)  # of each module in the current batch
    _batch: Batch | None = None

    def __post_init__(self) -> None:
        free = [probe for probe in (*self.probes, LARGEST_KEY) if not probe.needs]
        self.wanted = parts_of(free)
        self._names = {id(module): name for name, module in self.model.named_modules()}

    @contextmanager
    def of_batch(self, batch: Batch) -> Iterator[None]:
        """Add the calls in this context, which are those of one forward pass on a batch."""
        self._batch = batch
        self._calls.clear()
        try:
            with listen(self):
                yield
        finally:
            self._batch = None

    @torch.no_grad()
    def hear(self, call: AttentionCall) -> None:
        """Add one call."""
        origin, batch = call.request.origin, self._batch
        if origin is None or id(origin.layer) not in self._names or batch is None:
            return
        name = self._names[id(origin.layer)]
        self._calls[name] = self._calls.get(name, 0) + 1
        if self._calls[name] > 1:  # a layer that runs again in one forward pass, as in ALBERT
            name = f"{name}#{self._calls[name]}"
        number = self._numbers.setdefault(name, len(self._numbers))
        if self.layer_filter is not None and not self.layer_filter.takes(name, number):
            return
        _check_reads_texts(call, batch, name, crosses=crosses(origin, name))
        context = self._context(call, batch, origin.layer, name)
        probes = possible((*self.probes, LARGEST_KEY), call.request, context)
        found = _measured(call, batch, probes, context)
        statistics = tuple(probe.name for probe in probes if probe is not LARGEST_KEY)
        if number not in self.layers:
            self.layers[number] = LayerSums(name, call.request.shape.num_heads, statistics, self.examples)
        layer = self.layers[number]
        values = torch.stack([batch.flat(found[each]).cpu() for each in layer.statistics])
        sees = (batch.flat(call.attended.logsumexp) != -torch.inf).cpu()  # (heads, tokens)
        rules = {probe.name: probe.counted for probe in probes}
        place = batch.position, batch.stop - batch.start, lambda: batch.occurred
        counted = torch.stack([queries_that_count(rules[each], sees, *place) for each in layer.statistics])
        keys = batch.flat(found[LARGEST_KEY.name]).cpu()
        if call.request.packed_lengths is not None:
            keys = torch.where(keys >= 0, keys - batch.start, keys)
        layer.add(values, counted, batch, keys)

    def _context(self, call: AttentionCall, batch: Batch, layer: nn.Module, name: str) -> ProbeContext:
        """Return what the probes need besides q and k; of a packed row, or of a padded batch."""
        shape, needs = call.request.shape, frozenset[str]().union(*(probe.needs for probe in self.probes))
        ids, distinct = batch.ids.masked_fill(~batch.mask, -1), None
        if call.request.packed_lengths is not None:
            ids, distinct = batch.flat_ids[None], batch.distinct_ids[None]  # equal tokens of two texts are different
        special = weight = None
        if "special_keys" in needs and self.special_ids:
            special = torch.isin(ids, torch.tensor(self.special_ids)).to(shape.device)
        if "output_weight" in needs:
            width = shape.num_heads * shape.value_dim
            weight = output_weight(layer, self.model, name.partition("#")[0], width=width)
        sets = {}
        for probe in self.probes:
            for part in probe.parts:
                if probe.tokens is not None and part[0] == "tokens_mass":
                    sets[str(part[1])] = torch.isin(ids, torch.tensor(sorted(probe.tokens))).to(shape.device)
        known = (ids if distinct is None else distinct).to(shape.device) if "ids" in needs else None
        return ProbeContext(special_keys=special, ids=known, sets=sets, output_weight=weight)

    def check_complete(self) -> None:
        """Check that the forward passes so far called attention that can be measured.

        Raises:
            ModelError: no attention call was captured, or a layer that was chosen did not run.
        """
        if not self._numbers:
            raise ModelError(
                f"No attention call of {type(self.model).__name__} was captured.",
                "Give a Hugging Face model that uses AttentionInterface; docs/families.md lists those that work.",
            )
        missed = [] if self.layer_filter is None else self.layer_filter.missed(list(self._numbers))
        if missed:
            names = ", ".join(f"{number}: {name}" for name, number in self._numbers.items())
            raise ModelError(
                f"No layer that ran matches {' or '.join(repr(each) for each in missed)}.", f"Choose among {names}."
            )


def _check_reads_texts(call: AttentionCall, batch: Batch, name: str, *, crosses: bool) -> None:
    """Reject a layer whose queries and keys are not the tokens of the batch."""
    shape = call.request.shape
    if call.request.packed_lengths is not None:
        expected = (1, batch.num_tokens)
    else:
        expected = (len(batch.lengths), batch.ids.shape[1])
    if crosses or (shape.batch, shape.query_length) != expected or shape.key_length != expected[1]:
        raise ModelError(
            f"{name} attends from {shape.query_length} queries to {shape.key_length} keys, and the batch has "
            f"{expected[1]} tokens.",
            "Give a model whose layers read each token of a text once, or choose others of its layers.",
        )


def _measured(call: AttentionCall, batch: Batch, probes: Sequence[Probe], context: ProbeContext) -> dict[str, Tensor]:
    """Compute statistics of a call that has run, from parts of its kernel where it measured them.

    Returns:
        (batch, heads, queries) each.
    """
    request, attended = call.request, call.attended
    logsumexp, parts = attended.logsumexp.detach(), attended.statistics
    if request.packed_lengths is not None:
        parts = {**parts, **_of_packed(call, batch, parts_of(probes) - parts.keys(), context)}
    output = None if request.dropout else attended.output
    return completed(request, logsumexp, probes, context, parts=parts, output=output)


def _of_packed(
    call: AttentionCall, batch: Batch, missing: frozenset[Part], context: ProbeContext
) -> dict[Part, Tensor]:
    """Measure what depends on each query's own text in a packed row: its position, and the first and special keys."""
    found: dict[Part, Tensor] = {}
    counts = {part: part[1] for part in missing if part[0] == "first_keys_mass" and isinstance(part[1], int)}
    logsumexp, device = call.attended.logsumexp.detach(), call.request.shape.device
    if "position" in missing:
        found["position"] = batch.position.to(logsumexp).expand_as(logsumexp)
    if not counts and SPECIAL_KEYS not in missing:
        return found
    measured = MeasuredCall.of(call.request, logsumexp, context)

    def weights(keys: Tensor) -> Tensor:
        found = at_keys(measured, keys.to(device)[None]).to(logsumexp.dtype)
        return found.masked_fill_(logsumexp.isnan(), torch.nan)

    for part, count in counts.items():
        found[part] = torch.zeros_like(logsumexp)
        for place in range(min(count, int(batch.lengths.max()))):
            found[part] += weights(batch.start + place)  # 0 after the end of the text, whose query does not see it
    if SPECIAL_KEYS in missing and context.special_keys is not None:
        first = found.get(FIRST_KEY, call.attended.statistics.get(FIRST_KEY))
        keys = batch.places_of(context.special_keys[0].cpu())  # (most, tokens)
        if len(keys) <= FEW_SPECIAL:
            total = torch.zeros_like(logsumexp)
            for each in keys:
                total += first if first is not None and torch.equal(each, batch.start) else weights(each)
            found[SPECIAL_KEYS] = total
    return found


@contextmanager
def measured_model(model: nn.Module) -> Iterator[bool]:
    """Run the attention of a model on this library's kernels, without padding where its family supports that.

    Returns:
        whether the model leaves padding out.

    Raises:
        ModelError: the model computes attention where it cannot be replaced.
    """
    with ExitStack() as stack:
        try:
            stack.enter_context(packed(model))
            leaves_out = True
        except ModelError:
            stack.enter_context(installed(model))
            leaves_out = False
        yield leaves_out


def run_batch(model: nn.Module, batch: Batch) -> None:
    """Run a model on a batch, for its attention alone."""
    device = next(model.parameters()).device
    names = inspect.signature(model.forward).parameters
    options: dict[str, Any] = {"use_cache": False} if "use_cache" in names else {}
    with torch.no_grad(), temporary_plans():
        model(input_ids=batch.ids.to(device), attention_mask=batch.mask.long().to(device), **options)
