"""A batch that a model has read with all heads on, in as many copies as heads are switched off in one forward pass."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from multihead.errors import ArgumentError, ModelError
from multihead.errors.arguments import join_first
from multihead.interventions.ablate import Positions
from multihead.interventions.followed import FollowedCall, follow_calls
from multihead.interventions.heads import HeadKey, require_head_of_layer
from multihead.interventions.means import run_batch
from multihead.interventions.measures import Measure, SeveralMeasures
from multihead.interventions.replacements import Replacement, ResampledOutput
from multihead.interventions.replay import Replay, repeat_batch
from multihead.interventions.sweep import SweptLayer, copies_per_pass, sweep_layers


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

        Of several numbers these are (texts, heads, numbers), else (texts, heads).
        Layers of which no head is switched off are left out; by default all layers are swept.
        """
        if isinstance(replacement, ResampledOutput):
            replacement = replace(replacement, copies=self.copies)
        for layer, results in sweep_layers(
            self.replay,
            self.batch,
            [layer for layer in (self.layers if layers is None else layers) if layer.heads],
            lambda batch, copies: self._measure(run_batch(self.model, batch), copies),
            copies=self.copies,
            stored_copies=self.copies,
            replacement=replacement,
            positions=positions,
        ):
            yield layer, (results - self.baseline).transpose(0, 1)

    def _measure(self, output: Any, copies: int) -> Tensor:
        """Return the measure of the texts of each copy, (copies, texts, ...) float64."""
        parts = (_part_of(output, index, copies) for index in range(copies))
        return torch.stack([self.measure.of_texts(part, self.batch, (len(self.baseline),)) for part in parts])


@dataclass(eq=False)
class ReadLayers:
    """The layers that run in one forward pass, in the order in which they ran.

    Attributes:
        found: name of a layer -> the layer, with all of its heads.
        tokens: name of a layer -> the number of tokens of each text; without layers where it is unknown.
    """

    found: dict[str, SweptLayer] = field(default_factory=dict)
    tokens: dict[str, list[int]] = field(default_factory=dict)

    def add(self, call: FollowedCall, output: Tensor) -> tuple[Tensor, None]:
        """Add the layer of a call; the output stays as it is."""
        call.require_all_heads("heads cannot be switched off")
        try:
            text, position = call.tokens
            self.tokens[call.layer_name] = text[position >= 0].bincount().tolist()
            texts = call.tokens.num_texts
        except ModelError:  # which token belongs to which text is unknown
            texts = None
        heads = call.request.shape.num_heads
        self.found[call.layer_name] = SweptLayer(call.layer_number, call.layer_name, heads, range(heads), texts)
        return output, None

    def choose(self, keys: Sequence[HeadKey] | None) -> list[SweptLayer]:
        """Return the layers with those of their heads that are named; None names all.

        Raises:
            ModelError: a layer never ran.
            ArgumentError: a layer has fewer heads, or the model has one head.
        """
        layers = sorted(self.found.values(), key=lambda layer: layer.number)
        if sum(layer.num_heads for layer in layers) == 1:
            raise ArgumentError("The model has one head, and nothing is left without it.", "Give a model with several.")
        if keys is None:
            return layers
        chosen: dict[str, set[int]] = {layer.name: set() for layer in layers}
        for key in keys:
            layer = next((each for each in layers if key.layer in (each.number, each.name)), None)
            if layer is None:
                ran = join_first([f"L{each.number} {each.name}" for each in layers], 4) or "none"
                raise ModelError(f"{key} was never reached. The layers that ran are {ran}.", "Give some of them.")
            require_head_of_layer(layer.number, layer.name, layer.num_heads, key.head or 0)
            chosen[layer.name] |= {*range(layer.num_heads)} if key.head is None else {key.head}
        return [replace(layer, heads=sorted(chosen[layer.name])) for layer in layers]


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
    copies = 1 if one_by_one else copies_per_pass(layers, needed)
    prepared = PreparedBatch(model, batch, measure, replay, 1, layers, baseline, found)
    replay.check_exactness(lambda: _tensors_in(run_batch(model, batch)), _tensors_in(output))
    return (_in_copies(prepared, output, copies) if copies > 1 else None) or prepared


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
