"""A batch that a model has read with all heads on, in as many copies as heads are switched off in one forward pass."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from multihead.errors import ArgumentError
from multihead.interventions.ablate import Intervention, Positions
from multihead.interventions.followed import follow_calls
from multihead.interventions.heads import HeadKey
from multihead.interventions.means import run_batch
from multihead.interventions.measures import Measure, SeveralMeasures
from multihead.interventions.replacements import Replacement, ResampledOutput, gated
from multihead.interventions.replay import Replay, repeat_batch
from multihead.interventions.swept import ReadLayers, SweptLayer

_MAX_BYTES = 1 << 29  # of what all copies of a batch need in one forward pass: 512 MiB


@dataclass(eq=False)
class PreparedBatch:
    """A batch that a model has read with all heads on.

    Attributes:
        model: the model.
        batch: what it is called with.
        measure: the number of each text, or several.
        replay: the outputs of the blocks, of all copies of the batch.
        copies: number of copies in each forward pass.
        layers: the layers that ran, with the heads that are switched off.
        baseline: (texts,) or (texts, numbers) float64, the measure with all heads on, on the path and in the batch
            shape of the heads.
        read: all layers that ran on one copy.
    """

    model: nn.Module
    batch: Any
    measure: Measure | SeveralMeasures
    replay: Replay
    copies: int
    layers: list[SweptLayer]
    baseline: Tensor
    read: ReadLayers

    def effects(
        self, replacement: Replacement, *, positions: Positions = None, layers: Sequence[SweptLayer] | None = None
    ) -> Iterator[tuple[SweptLayer, Tensor]]:
        """Switch off each head once; yield layer by layer the measure without each minus `baseline`.

        Of several numbers these are (texts, heads, numbers), else (texts, heads). Each head is off in another copy of
        the batch. Layers of which no head is switched off are left out; by default all layers are swept.
        """
        if isinstance(replacement, ResampledOutput):
            replacement = replace(replacement, copies=self.copies)
        batch = repeat_batch(self.batch, self.copies)
        for layer in self.layers if layers is None else layers:
            first = self.replay.block_of(layer.name) if self.replay.is_exact else 0
            found: list[Tensor] = []  # per head (texts, ...)
            for start in range(0, len(layer.heads), self.copies):
                heads = layer.heads[start : start + self.copies]
                without = self._without(layer, heads, replacement, positions)
                with torch.no_grad(), without, self.replay.start_at_block(first):
                    output = run_batch(self.model, batch)
                    found += [self._measure_copy(output, copy) for copy in range(len(heads))]
            if found:
                yield layer, torch.stack(found, 1) - self.baseline[:, None]

    def _measure_copy(self, output: Any, index: int) -> Tensor:
        """Return the measure of the texts of a copy, (texts, ...) float64."""
        part = _part_of(output, index, self.copies)
        return self.measure.of_texts(part, self.batch, (len(self.baseline),))

    def _without(
        self, layer: SweptLayer, heads: Sequence[int], replacement: Replacement, positions: Positions
    ) -> Intervention:
        """Return the context in which each copy of the batch has another one of some heads off."""
        if self.copies == 1:
            return Intervention(self.model, {HeadKey(layer.name, heads[0]): 0.0}, replacement, positions)
        assert layer.texts is not None
        on = torch.ones(self.copies, layer.num_heads)  # all heads are on in copies that are left over
        on[range(len(heads)), list(heads)] = 0
        gates = {HeadKey(layer.name, None): on.repeat_interleave(layer.texts, 0)}
        return Intervention(self.model, gates, gated(replacement), positions)


def prepare(
    model: nn.Module,
    batch: Any,
    measure: Measure | SeveralMeasures,
    *,
    keys: Sequence[HeadKey] | None = None,
    one_by_one: bool = False,
) -> PreparedBatch:
    """Read a batch with all heads on; the model must run on this library's attention, without gradients.

    Args:
        model: the model.
        batch: what it is called with.
        measure: the number of each text, or several.
        keys: the heads that are switched off; None for all.
        one_by_one: whether each head needs a forward pass of its own.

    Raises:
        ArgumentError: the batch has a key/value cache, or the measure does not fit.
    """
    if isinstance(batch, Mapping):
        batch = dict(batch)  # a batch of a tokenizer
        if batch.get("past_key_values") is not None:
            raise ArgumentError(
                "A batch has a key/value cache, which each forward pass would continue.", "Give whole texts."
            )
    found, replay = ReadLayers(), Replay(model)
    with follow_calls(model, found.add), replay.store_block_outputs():
        output = run_batch(model, batch)
    layers = found.choose(keys)
    baseline = measure.of_texts(output, batch, numbers_of_texts(batch, found))
    needed = sum(each.nbytes for each in (*_tensors_in(output), *_tensors_in([*replay.block_outputs.values()])))
    copies = 1 if one_by_one else _copies_per_pass(layers, needed)
    prepared = PreparedBatch(model, batch, measure, replay, 1, layers, baseline, found)
    replay.check_exactness(lambda: _tensors_in(run_batch(model, batch)), _tensors_in(output))
    return (_in_copies(prepared, output, copies) if copies > 1 else None) or prepared


def _copies_per_pass(layers: Sequence[SweptLayer], bytes_per_copy: int) -> int:
    """Return how many heads are switched off in one forward pass: as few passes per layer as memory allows."""
    heads = max((len(layer.heads) for layer in layers), default=1)
    if any(layer.texts is None for layer in layers):
        return 1
    passes = -(-heads // max(1, _MAX_BYTES // max(bytes_per_copy, 1)))
    return -(-heads // max(passes, 1)) or 1


def numbers_of_texts(batch: Any, layers: ReadLayers) -> set[int]:
    """Return the numbers of texts that a batch may have: its rows, or the texts that its layers count in them."""
    rows = next((len(each) for each in _tensors_in(batch) if each.dim()), 1)
    return {rows, *(layer.texts for layer in layers.found.values() if layer.texts)}


def _in_copies(one: PreparedBatch, expected: Any, copies: int) -> PreparedBatch | None:
    """Read a batch in copies; return None if the model does not read them as texts.

    Replays are exact if they are with one copy: the stored outputs are those of a run in the same batch shape.

    Args:
        one: the batch, read once.
        expected: the output then.
        copies: number of copies.
    """
    again, replay, found = ReadLayers(), Replay(one.model), one.read
    try:
        with follow_calls(one.model, again.add), replay.store_block_outputs():
            output = run_batch(one.model, repeat_batch(one.batch, copies))
        parts = [_part_of(output, index, copies) for index in range(copies)]
        alike = all(
            _is_close(*pair) for part in parts for pair in zip(_tensors_in(part), _tensors_in(expected), strict=True)
        )
    except Exception:  # noqa: BLE001 - not every argument of a model has a row per text, and a model can raise any error
        return None
    as_texts = all(
        (each.texts or 0) * copies == again.found[name].texts
        for name, each in found.found.items()
        if name in again.found
    )
    if not alike or not as_texts or again.found.keys() != found.found.keys():
        return None
    baseline = one.measure.of_texts(parts[0], one.batch, (len(one.baseline),))
    replay.is_exact = one.replay.is_exact and len(replay.block_outputs) == len(replay.blocks)
    return PreparedBatch(one.model, one.batch, one.measure, replay, copies, one.layers, baseline, found)


def _is_close(found: Tensor, expected: Tensor) -> bool:
    """Whether two tensors differ by rounding errors at most, and not as the outputs for other texts do."""
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return False
    if not found.is_floating_point():
        return torch.equal(found, expected)
    difference = (found - expected).nan_to_num(0, 0, 0).norm()
    return bool(difference <= torch.finfo(found.dtype).eps ** 0.5 * expected.nan_to_num(0, 0, 0).norm())


def _tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors in what a model or a block returned or was given, without those of a key/value cache."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, Mapping):
        value = [each for name, each in value.items() if name != "past_key_values"]
    return [tensor for each in value for tensor in _tensors_in(each)] if isinstance(value, (list, tuple)) else []


def _part_of(output: Any, index: int, copies: int) -> Any:
    """Return what a model returned for one copy of a batch: (copies * rows, ...) -> (rows, ...)."""
    if copies == 1:
        return output
    if isinstance(output, Tensor):
        whole = output.dim() > 0 and len(output) % copies == 0
        return output.unflatten(0, (copies, -1))[index] if whole else output
    if isinstance(output, Mapping):
        part: Any = copy.copy(output)
        for name, each in output.items():
            part[name] = _part_of(each, index, copies)
        return part
    if type(output) in (list, tuple):
        return type(output)(_part_of(each, index, copies) for each in output)
    return output
