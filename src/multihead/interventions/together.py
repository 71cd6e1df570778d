"""`mh.off_together`: the most important heads off together, next to random heads of the same layers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from multihead.errors import ArgumentError
from multihead.errors.arguments import check_integer
from multihead.errors.given import reject_given
from multihead.interventions.ablate import Intervention
from multihead.interventions.followed import run_followable
from multihead.interventions.heads import HeadKey
from multihead.interventions.importance import Importance, ImportantHead, Method
from multihead.interventions.means import checked_batches, count_batches, run_batch
from multihead.interventions.measures import Measure
from multihead.interventions.swept import SweptLayer
from multihead.locale.texts import text, unit_label
from multihead.probes.head_statistic import HeadStatistic, HeadsTogether
from multihead.record.head_numbers import HeadColumn, number_with_error, standard_error
from multihead.record.table import HeadList
from multihead.tensors.tracing import original_module

MAX_NAMED_HEADS = 16
"""How many heads `OffTogether.describe` names."""


@dataclass(frozen=True)
class DrawnHeads:
    """Random heads, and what changes without them.

    Attributes:
        heads: (number of the layer, head) of each.
        effects: (texts,) float64, the measure without them minus the measure with all heads on.
    """

    heads: tuple[tuple[int, int], ...]
    effects: Tensor

    @property
    def effect(self) -> float:
        """The mean effect over texts."""
        return float(self.effects.mean())


@dataclass(frozen=True, repr=False)
class OffTogether:
    """What changes without the most important heads of a model, and without random ones; `mh.off_together` returns it.

    Attributes:
        measure: the number of each text.
        by: what replaced the output, see `Importance`.
        method: "exact", or "gradient": the effects of single heads are first-order estimates, the others exact.
        heads: the heads, the most important first, with their effects on the texts that chose them.
        effects: (texts,) float64, the measure without all of these heads minus the measure with all heads on, of the
            other texts.
        single_effects: (texts, heads) float64, the effect of each of these heads alone on the same texts.
        draws: random heads, as many of each layer.
        shared: how many heads of each draw are among `heads`, because their layers have too few others.
        choosing_texts: number of texts that chose the heads.
        statistic: the column of the effects of single heads in a record, and how an effect is shown.

    >>> import torch, multihead as mh
    >>> _ = torch.manual_seed(0)
    >>> layer, x = mh.MultiHeadAttention(embed_dim=16, num_heads=8), torch.randn(6, 5, 16)
    >>> found = mh.importance(layer, x, mh.Measure(lambda output, batch: output.norm(dim=(1, 2)), more_is_better=True))
    >>> together = mh.off_together(layer, x, found, 3)
    >>> together
    <OffTogether of 3 heads for measure over 3 texts>
    >>> together.effect < 0, together.standard_error > 0, together.spread_of_draws > 0
    (True, True, True)
    """

    measure: Measure
    by: str
    method: Method
    heads: HeadList[ImportantHead]
    effects: Tensor
    single_effects: Tensor
    draws: tuple[DrawnHeads, ...]
    shared: int
    choosing_texts: int
    statistic: HeadStatistic

    def columns(self) -> list[HeadColumn]:
        """Return what `Record.add` adds to the column of the effects of single heads: what these heads do together."""
        together = HeadsTogether(
            tuple((each.layer, each.head) for each in self.heads),
            tuple(self.effects.tolist()),
            tuple(self.single_effects.sum(1).tolist()),
            tuple(draw.effect for draw in self.draws),
        )
        return [HeadColumn(replace(self.statistic, together=together), dict.fromkeys(each.name for each in self.heads))]

    @property
    def texts(self) -> int:
        """Number of texts on which the effects were measured."""
        return len(self.effects)

    @property
    def effect(self) -> float:
        """The mean effect over texts."""
        return float(self.effects.mean())

    @property
    def standard_error(self) -> float:
        """The standard error of the mean effect; NaN for one text."""
        return float(standard_error(self.effects))

    @property
    def sum_of_single_effects(self) -> float:
        """The sum of the mean effects that each head has alone on the same texts."""
        return float(self.single_effects.sum(1).mean())

    @property
    def mean_of_draws(self) -> float:
        """The mean effect of the draws."""
        return float(self._effects_of_draws.mean())

    @property
    def spread_of_draws(self) -> float:
        """The standard deviation of the effects of the draws; NaN for one draw."""
        return float(self._effects_of_draws.std()) if len(self.draws) > 1 else math.nan

    @property
    def draws_beyond(self) -> int:
        """Number of draws with at least this effect, in the direction in which the measure gets worse."""
        least = self.statistic.importance_of(self.effect)
        return sum(self.statistic.importance_of(draw.effect) >= least for draw in self.draws)

    @property
    def _effects_of_draws(self) -> Tensor:
        return torch.tensor([draw.effect for draw in self.draws], dtype=torch.float64)

    def rows(self) -> list[dict[str, Any]]:
        """Return a row of a table for the heads off together, the sum of their single effects, and each draw."""
        names = " ".join(_name_of_head(each.layer, each.head) for each in self.heads)
        singles = "sum of single effects" if self.method == "exact" else "sum of single estimates"
        sets = [("together", names, self.effects), (singles, names, self.single_effects.sum(1))]
        sets += [("draw", " ".join(_name_of_head(*each) for each in draw.heads), draw.effects) for draw in self.draws]
        return [
            {
                "set": kind,
                "heads": heads,
                "effect": float(effects.mean()),
                "standard_error": float(standard_error(effects)),
                "texts": self.texts,
            }
            for kind, heads, effects in sets
        ]

    def describe(self, lang: str = "en") -> str:
        """Describe the result in sentences, next to the draws and the sum of single effects.

        Args:
            lang: "en" or "zh".
        """

        def shown(value: float, error: float = math.nan) -> str:
            return "+" * (value > 0) + number_with_error(self.statistic, value, error)

        names = [f"L{each.layer}\u00a0H{each.head}" for each in self.heads[:MAX_NAMED_HEADS]]
        more = [] if len(self.heads) <= MAX_NAMED_HEADS else ["…"]
        values = {
            "number": len(self.heads),
            "heads": text("common.join.comma", lang).join(names + more),
            "choosing": self.choosing_texts,
            "texts": self.texts,
            "effect": f"{shown(self.effect, self.standard_error)} {unit_label(self.statistic.unit, lang)}".rstrip(),
            "draws": len(self.draws),
            "mean": shown(self.mean_of_draws),
            "spread": self.statistic.number(self.spread_of_draws),
            "beyond": self.draws_beyond,
            "value": shown(self.effect),
            "sum": shown(self.sum_of_single_effects),
            "shared": self.shared,
        }
        parts = ["together", "draws", *["shared"] * bool(self.shared), *[f"sum.{self.method}"] * (len(self.heads) > 1)]
        return text("common.join.sentences", lang).join(text(f"importance.{part}", lang, **values) for part in parts)

    def __str__(self) -> str:
        return self.describe()

    def __repr__(self) -> str:
        return f"<OffTogether of {len(self.heads)} heads for {self.measure.name} over {self.texts} texts>"


def off_together(
    model: nn.Module,
    batches: Iterable[Any],
    importance: Importance,
    number: int = 10,
    *,
    draws: int = 10,
    seed: int = 0,
    progress: Callable[[int, int | None], object] | None = None,
) -> OffTogether:
    """Switch off the most important heads together, on other texts than those that chose them, and random heads.

    The largest of many effects are too large on the texts that chose them. So the heads are ranked by the texts of even
    index, and switched off on the others, next to random draws of as many heads of each layer, none of them among the
    chosen heads where the layer has enough others.

    Args:
        model: the model.
        batches: the batches that `mh.importance` read.
        importance: what it returned; its measure, replacement and positions are used again.
        number: number of heads.
        draws: number of random draws.
        seed: the seed of the draws.
        progress: called with the number of batches that are done, and of all (None if unknown).

    Returns:
        the effects, with the draws and the single effects of the heads on the same texts.

    Raises:
        ArgumentError: there is one text, the model has too few heads, or these are other batches.

    >>> import torch, multihead as mh
    >>> _ = torch.manual_seed(0)
    >>> layer, x = mh.MultiHeadAttention(embed_dim=16, num_heads=8), torch.randn(6, 5, 16)
    >>> found = mh.importance(layer, x, mh.Measure(lambda output, batch: output.norm(dim=(1, 2)), more_is_better=True))
    >>> together = mh.off_together(layer, x, found, 3)
    >>> len(together.heads), len(together.draws), together.texts, together.shared
    (3, 10, 3, 0)
    """
    if not isinstance(importance, Importance):
        reject_given("importance", importance, "what mh.importance returned", "Measure the importance first.")
    check_integer("number", number)
    check_integer("draws", draws)
    check_integer("seed", seed, least=0)
    check_off_together(
        number, importance.texts, len(importance.heads()), sum(layer.num_heads for layer in importance.layers)
    )
    root = original_module(model)
    choosing = {name: effects[::2] for name, effects in importance.effects_of_texts.items()}
    heads = replace(importance, effects_of_texts=choosing, baseline=importance.baseline[::2]).heads(number)
    chosen: dict[str, list[int]] = {}
    for each in heads:
        chosen.setdefault(each.name, []).append(each.head)
    layers = [layer for layer in importance.layers if layer.name in chosen]
    generator = torch.Generator().manual_seed(seed)
    drawn = [_draw(layers, chosen, generator) for _ in range(draws)]
    total = count_batches(batches)
    effects: list[Tensor] = []  # (sets, texts that did not choose) of each batch
    read = 0  # texts of earlier batches
    with run_followable(root), torch.no_grad():
        for done, batch in enumerate(checked_batches(root, batches), start=1):
            if read == importance.texts:
                raise _other_batches_error(importance)
            baseline = _measured(root, batch, importance.measure, range(1, importance.texts - read + 1))
            measured = slice(1 - read % 2, None, 2)
            read += len(baseline)
            if len(baseline[measured]):
                found = [
                    _measured_without(root, batch, importance, each, (len(baseline),)) for each in (chosen, *drawn)
                ]
                effects.append((torch.stack(found) - baseline)[:, measured])
            if progress is not None:
                progress(done, total)
    if read < importance.texts:
        raise _other_batches_error(importance)
    without, *without_drawn = torch.cat(effects, 1)
    numbers = {layer.name: layer.number for layer in layers}
    return OffTogether(
        importance.measure,
        importance.by,
        importance.method,
        heads,
        without,
        torch.stack([importance.effects_of_texts[each.name][1::2, each.head] for each in heads], 1),
        tuple(
            DrawnHeads(tuple((numbers[name], head) for name, found in each.items() for head in found), result)
            for each, result in zip(drawn, without_drawn, strict=True)
        ),
        sum(len({*found} & {*chosen[name]}) for name, found in drawn[0].items()),
        len(importance.baseline[::2]),
        importance.statistic,
    )


def check_off_together(number: int, texts: int, switched_off: int, all_heads: int) -> None:
    """Reject heads that cannot be switched off together, before anything runs.

    Args:
        number: how many.
        texts: number of texts.
        switched_off: number of heads whose importance is measured.
        all_heads: number of heads of the model.

    Raises:
        ArgumentError: there is one text, or there are too few heads.
    """
    if texts < 2:
        raise ArgumentError(
            "There is one text, and heads that it chooses are switched off together on other texts.",
            "Give several texts.",
        )
    most = min(switched_off, all_heads - 1)
    if number > most:
        measured = "" if switched_off == all_heads else f", of which {switched_off} are measured"
        raise ArgumentError(
            f"{number} heads cannot be switched off together: the model has {all_heads}{measured}.",
            f"Give at most {most}, so that one stays on." if most == all_heads - 1 else f"Give at most {most}.",
        )


def _other_batches_error(importance: Importance) -> ArgumentError:
    return ArgumentError(
        f"The batches do not have the {importance.texts} texts on which the importance was measured.",
        "Give the same batches.",
    )


def _draw(
    layers: Sequence[SweptLayer], chosen: dict[str, list[int]], generator: torch.Generator
) -> dict[str, list[int]]:
    """Draw as many heads of each layer as are chosen, others where there are enough: name of a layer -> heads."""
    drawn = {}
    for layer in layers:
        wanted, taken = len(chosen[layer.name]), {*chosen[layer.name]}
        order = torch.randperm(layer.num_heads, generator=generator).tolist()
        drawn[layer.name] = sorted(sorted(order, key=taken.__contains__)[:wanted])  # others come first, in their order
    return drawn


def _measured(model: nn.Module, batch: Any, measure: Measure, texts: Sequence[int]) -> Tensor:
    """Return the measure of the texts of a batch, (texts,) float64 on the CPU."""
    return measure.of_texts(run_batch(model, batch), batch, texts)


def _measured_without(
    model: nn.Module, batch: Any, importance: Importance, heads: dict[str, list[int]], texts: Sequence[int]
) -> Tensor:
    """Return the measure without some heads, name of a layer -> heads."""
    keys = {HeadKey(name, head): 0.0 for name, found in heads.items() for head in found}
    with Intervention(model, keys, importance.replacement, importance.positions):
        return _measured(model, batch, importance.measure, texts)


def _name_of_head(layer: int, head: int) -> str:
    return f"L{layer}H{head}"
