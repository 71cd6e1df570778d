"""`mh.importance`: which heads of a model matter, measured by switching each off once on texts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor, nn

from multihead.errors import ArgumentError
from multihead.errors.given import check_module
from multihead.interventions.ablate import AblationMethod, Positions, check_positions, replacement_of
from multihead.interventions.collected import CollectedNumbers
from multihead.interventions.followed import run_followable
from multihead.interventions.gates import gradients_of_gates
from multihead.interventions.heads import Head, resolve_heads
from multihead.interventions.means import HeadMeans, checked_batches, count_batches
from multihead.interventions.measures import Measure, measure_of
from multihead.interventions.prepared import prepare
from multihead.interventions.replacements import GivenOutput, OutputFunction, Replacement
from multihead.interventions.swept import SweptLayer
from multihead.locale.texts import text
from multihead.probes.catalogue import statistic_of_heads
from multihead.probes.head_statistic import HeadStatistic
from multihead.probes.probe import Statistic
from multihead.record.head_numbers import (
    HeadColumn,
    NumbersOverTexts,
    cells_with_error,
    number_with_error,
    stack_layers,
)
from multihead.record.table import HeadList, HeadOfLayer, HeadTable
from multihead.tensors.tracing import original_module

Method = Literal["exact", "gradient"]


@dataclass(frozen=True)
class EffectsOfLayer:
    """The effects of a layer's heads on one batch, for the caller's `progress`.

    Attributes:
        layer: number of the layer.
        name: name of the layer.
        batch: index of the batch.
        effects: (texts, heads) float64, the measure without each head minus the measure with it; NaN for a head that
            was not switched off.
        done: number of layers that are done, of all batches.
        total: number of layers of all batches; None if the number of batches is unknown.
        seconds: time so far.
        seconds_left: estimated time for the layers that are left; None if the number of batches is unknown.
        replayed: whether the blocks before the layer were left out, which gives equal outputs; else the whole model ran
            for each head.
    """

    layer: int
    name: str
    batch: int
    effects: Tensor
    done: int
    total: int | None
    seconds: float
    seconds_left: float | None
    replayed: bool


@dataclass(frozen=True, repr=False)
class ImportantHead(HeadOfLayer):
    """A head and its effect on a measure.

    Attributes:
        effect: the mean over texts of the measure without the head minus the measure with it.
        standard_error: that of the mean; NaN for one text.
        shown: how the effect is shown.
    """

    effect: float
    standard_error: float
    shown: Statistic = field(repr=False)

    def __str__(self) -> str:
        effect = number_with_error(self.shown, self.effect, self.standard_error)
        return f"L{self.layer} H{self.head}: {effect} {self.shown.unit}".rstrip()

    def cells(self) -> dict[str, str]:
        """Return the head as a row of a table in a notebook."""
        return self.place_cells() | cells_with_error(self.shown, self.effect, self.standard_error)


@dataclass(frozen=True, repr=False)
class Importance:
    """The effect of each head of a model on a measure, over texts; what `mh.importance` returned.

    Attributes:
        measure: the number of each text.
        by: what replaced the output: "zero", "mean", "resample", "vector" or "function".
        method: "exact", or "gradient": effects are first-order estimates.
        layers: the layers in the order in which they first ran.
        effects_of_texts: name of a layer -> (texts, heads) float64, the measure without each head minus the measure
            with it; NaN for a head that was not switched off.
        baseline: (texts,) float64, the measure with all heads on.
        replacement: the rule for the output of a head that is switched off.
        positions: the tokens whose output is replaced, see `mh.ablate`.
        replayed: whether the blocks before each layer were left out, with equal outputs; else the whole model ran.
        seconds: how long it took.

    >>> import torch, multihead as mh
    >>> layer, x = mh.MultiHeadAttention(embed_dim=8, num_heads=2), torch.randn(5, 6, 8)
    >>> found = mh.importance(layer, x, mh.Measure(lambda output, batch: output.norm(dim=(1, 2)), "norm"))
    >>> found
    <Importance of 2 heads for norm over 5 texts, by zero, exact>
    >>> found.effects.shape, len(found.heads(1))
    (torch.Size([1, 2]), 1)
    """

    measure: Measure
    by: str
    method: Method
    layers: tuple[SweptLayer, ...]
    effects_of_texts: Mapping[str, Tensor]
    baseline: Tensor
    replacement: Replacement
    positions: Positions
    replayed: bool
    seconds: float

    @property
    def texts(self) -> int:
        """Number of texts."""
        return len(self.baseline)

    @cached_property
    def _over_texts(self) -> NumbersOverTexts:
        return NumbersOverTexts([self.effects_of_texts[layer.name] for layer in self.layers])

    @cached_property
    def effects(self) -> Tensor:
        """The mean effect over texts: (layers, heads) float64, NaN where there is no such head."""
        return stack_layers(self._over_texts.means)

    @cached_property
    def standard_errors(self) -> Tensor:
        """The standard error of each mean effect: (layers, heads) float64, NaN for one text."""
        return stack_layers(self._over_texts.errors)

    @cached_property
    def sensitivities(self) -> Tensor:
        """The mean over texts of the size of each effect: (layers, heads) float64, NaN where there is no such head.

        Of method="gradient" this is the mean of |dL/dgate| (arXiv:1905.10650).
        """
        return stack_layers([self.effects_of_texts[layer.name].abs().mean(0) for layer in self.layers])

    @property
    def statistic(self) -> HeadStatistic:
        """How an effect is shown; its name is that of the column in a record."""
        return self._shown_as("effect" if self.method == "exact" else "estimate")

    def _shown_as(self, what: str) -> HeadStatistic:
        measure = self.measure
        return statistic_of_heads(what, measure.name, measure.unit, self.by, more_is_better=measure.more_is_better)

    def columns(self) -> list[HeadColumn]:
        """Return the columns that `Record.add` adds: the effects, and of estimates the sensitivities."""
        found = [HeadColumn(self.statistic, self.effects_of_texts)]
        if self.method == "gradient":
            sizes = {name: effects.abs() for name, effects in self.effects_of_texts.items()}
            found.append(HeadColumn(self._shown_as("sensitivity"), sizes))
        return found

    def heads(self, top: int | None = None) -> HeadList[ImportantHead]:
        """Return the heads that were switched off, the most important first.

        A head is important if the measure gets worse without it. Of a measure without a direction the size counts.

        Args:
            top: how many; None returns all.
        """
        effects, errors, shown = self.effects, self.standard_errors, self.statistic
        found = [
            ImportantHead(layer.number, head, layer.name, float(effects[row, head]), float(errors[row, head]), shown)
            for row, layer in enumerate(self.layers)
            for head in layer.heads
        ]
        found.sort(key=lambda each: -shown.importance_of(each.effect))
        return HeadList(found[:top])

    def table(self, *, sort: str = "layer", top: int | None = None) -> HeadTable:
        """Return a table with one row per head: layer, head, effect, standard error and number of texts.

        Args:
            sort: "layer", or a column, whose largest values come first.
            top: how many rows to keep; None keeps all.

        Raises:
            ArgumentError: there is no such column, or `top` is less than 1.
        """
        sizes, rows_of = self.sensitivities, {layer.name: row for row, layer in enumerate(self.layers)}
        rows = [
            {"layer": each.layer, "head": each.head, "name": each.name}
            | {"effect": each.effect, "standard_error": each.standard_error}
            | ({} if self.method == "exact" else {"sensitivity": float(sizes[rows_of[each.name], each.head])})
            | {"texts": self.texts}
            for each in self.heads()
        ]
        unit = self.measure.unit
        shown = {name: Statistic(name, unit=unit) for name in ("standard_error", "sensitivity")}
        shown["effect"] = Statistic("effect", label=self.statistic.label, unit=unit)
        return HeadTable.from_rows(rows, sort=sort, top=top, statistics=shown)

    @property
    def beyond_errors(self) -> int:
        """Number of heads whose effect is more than two standard errors from 0."""
        return self._over_texts.beyond_errors

    @property
    def expected_by_chance(self) -> float:
        """Number of heads of which this is expected if no head has an effect, by Student's t distribution."""
        return self._over_texts.expected_by_chance

    def describe(self, lang: str = "en") -> str:
        """Describe the result in sentences: how many heads have an effect, how many would by chance, and how it ran.

        Args:
            lang: "en" or "zh".
        """
        ran = self.method if self.method == "gradient" else "replayed" if self.replayed else "whole"
        return self._over_texts.describe(lang) + text(f"importance.{ran}", lang)

    def __str__(self) -> str:
        return self.describe()

    def __repr__(self) -> str:
        heads = int(self.effects.isfinite().sum())
        how = f"by {self.by}, {self.method}"
        return f"<Importance of {heads} heads for {self.measure.name} over {self.texts} texts, {how}>"

    def _repr_html_(self) -> str:
        return self.heads()._repr_html_()


def importance(
    model: nn.Module,
    batches: Iterable[Any],
    measure: Measure | Callable[[Any, Any], Tensor] | None = None,
    by: AblationMethod | Tensor | OutputFunction = "zero",
    method: Method = "exact",
    *,
    heads: Head | Iterable[Head] | None = None,
    positions: Positions = None,
    reference: HeadMeans | Iterable[Any] | None = None,
    seed: int = 0,
    progress: Callable[[EffectsOfLayer], object] | None = None,
) -> Importance:
    """Switch off each head of a model once, and return how much a measure of its output changes.

    Each effect is that of `mh.ablate` with one head: the measure without the head minus the measure with it, per text.
    All heads of a layer are switched off in few forward passes, each in a copy of the batch, and the blocks before the
    layer are not run again, if a replay with all heads on gives equal outputs. Texts count alike, whatever their
    length. The model keeps its mode: in training mode it applies dropout. No parameter gets a gradient.

    Args:
        model: a module with attention layers of this library, or a Hugging Face model.
        batches: what to call the model with, as for `mh.head_means`: dicts of arguments, tuples or tensors. Each batch
            is read to its end before the next one is taken.
        measure: a `mh.Measure` such as `mh.logit_difference(token, other)`, or a function f(output, batch) -> (texts,);
            None is the mean loss of the next token of each text, in nats.
        by: what replaces the output of a head, as for `mh.ablate`. A function takes a forward pass per head.
        method: "exact", or "gradient": a first-order estimate of each effect by zero or by the mean, from one forward
            and one backward pass per batch: minus the gradient of the measure for a gate on the head, which is 1 where
            the head writes its own output and 0 where it is replaced. Its size is the sensitivity (arXiv:1905.10650).
        heads: the heads to switch off, as for `mh.ablate`; None for all.
        positions: the tokens whose output is replaced, as for `mh.ablate`.
        reference: for by="mean", batches of the model's inputs, or the result of `mh.head_means`.
        seed: for by="resample", which other text each text gets.
        progress: called with the `EffectsOfLayer` of each layer and batch as it is done; the first call has an estimate
            of the time for all. An error that it raises ends the run.

    Returns:
        the effects, with standard errors over texts.

    Raises:
        ArgumentError: an option does not fit, the model has one head, or the measure is not one finite number per text,
            or has no gradient.
        ModelError: `model` has no attention layer, or a named head never ran.

    >>> import torch, multihead as mh
    >>> _ = torch.manual_seed(0)
    >>> layer = mh.MultiHeadAttention(embed_dim=8, num_heads=2)
    >>> found = mh.importance(layer, torch.randn(5, 6, 8), mh.Measure(lambda output, batch: output.norm(dim=(1, 2))))
    >>> found.effects.shape, found.standard_errors.shape, found.texts
    (torch.Size([1, 2]), torch.Size([1, 2]), 5)
    >>> found.table().rows[0].keys()
    dict_keys(['layer', 'head', 'name', 'effect', 'standard_error', 'texts'])
    """
    if method not in ("exact", "gradient"):
        raise ArgumentError(f"method is {method!r}.", 'Give "exact" or "gradient".')
    check_module(model)
    root = original_module(model)
    keys = None if heads is None else resolve_heads(root, heads)
    chosen = measure_of(root, measure)
    replacement = replacement_of(root, by, reference=reference, seed=seed)
    if method == "gradient" and (not isinstance(by, str) or by == "resample"):
        raise ArgumentError('method="gradient" estimates the effect by "zero" or "mean".', "Give one of them as by=.")
    one_by_one = isinstance(replacement, GivenOutput) and not isinstance(replacement.by, Tensor)
    collected = CollectedNumbers(count_batches(batches))
    with run_followable(root), torch.set_grad_enabled(method == "gradient"):
        for index, batch in enumerate(checked_batches(root, batches)):
            found: Iterable[tuple[SweptLayer, Tensor]]
            if method == "gradient":
                gates = gradients_of_gates(root, batch, chosen, replacement, check_positions(positions))
                layers = gates.layers.choose(keys)
                collected.begin(layers, gates.baseline, replayed=False)
                found = ((layer, -gates.gradients[layer.name][:, list(layer.heads)]) for layer in layers)
            else:
                prepared = prepare(root, batch, chosen, keys=keys, one_by_one=one_by_one)
                collected.begin(prepared.layers, prepared.baseline, replayed=prepared.replay.is_exact)
                found = prepared.effects(replacement, positions=positions)
            for layer, effects in found:
                of_layer = collected.add(layer, effects.cpu().double())
                if progress is not None:
                    per_batch = sum(bool(each.heads) for each in collected.layers)
                    step = EffectsOfLayer(
                        layer.number,
                        layer.name,
                        index,
                        of_layer,
                        collected.done,
                        None if collected.batches is None else per_batch * collected.batches,
                        collected.seconds,
                        collected.seconds_left,
                        collected.replayed,
                    )
                    progress(step)
    return Importance(
        chosen,
        by if isinstance(by, str) else "vector" if isinstance(by, Tensor) else "function",
        method,
        tuple(collected.layers),
        {name: values[:, :, 0] for name, values in collected.values.items()},
        collected.baseline,
        replacement,
        positions,
        collected.replayed,
        collected.seconds,
    )
