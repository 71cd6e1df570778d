"""Find heads by the range of a statistic, or of a textbook kind such as previous_token or induction."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from multihead.analysis.highlights import layer_profiles
from multihead.errors import ArgumentError, ProbeError
from multihead.escaping import visible
from multihead.probes.catalogue import REPEATED, statistic
from multihead.probes.probe import SHARE, Statistic
from multihead.record.layer import LayerRecord
from multihead.record.summaries import Of

SCORES = {
    "previous_token": "previous_mass",
    "next_token": "next_mass",
    "self_token": "self_mass",
    "first_token": "first_mass",
    "separator": "separator_mass",
    "duplicate_token": "duplicate_mass",
    "induction": "induction_mass",
    "broad": "evenness",
    "local": "near_mass",
}
"""Textbook kind -> the statistic that measures it, a share from 0 to 1 each."""

ABOUT = {
    "separator": "special tokens after the first: give `tokenizer` or `special_ids` to observe",
    "duplicate_token": 'the statistic "duplicate_mass": observe(probes=[..., "duplicate_mass"])',
    "induction": 'the statistic "induction_mass": observe(probes=[..., "induction_mass"])',
    "broad": 'the statistic "entropy": observe(probes=[..., "entropy"])',
}


@dataclass(frozen=True)
class FoundHead:
    """One head that was found.

    Attributes:
        layer: the layer's number.
        head: the head's index in its layer.
        name: the layer's name.
        values: statistic or kind -> the head's number.
        statistics: how each of them is shown.
    """

    layer: int
    head: int
    name: str
    values: dict[str, float]
    statistics: Mapping[str, Statistic] = field(default_factory=dict, repr=False, compare=False)

    def __str__(self) -> str:
        """The head in a line: "L16 H0: previous token 88 %, entropy 0.52 nats"."""
        shown = (statistic(name, self.statistics) for name in self.values)
        return f"L{self.layer} H{self.head}: " + ", ".join(
            visible(f"{each.label} {each.text(self.values[each.name])}") for each in shown
        )


Range = tuple[float | None, float | None]
"""Lowest and highest value of a statistic, both included; None for no limit."""


def find(
    layers: Sequence[LayerRecord],
    wanted: Mapping[str, Range],
    *,
    of: Of = "mean",
    statistics: Mapping[str, Statistic] | None = None,
) -> list[FoundHead]:
    """Find heads; see `Record.find`. `statistics` has the labels of statistics that are not built in."""
    shown = {**{kind: Statistic(kind, number_format=SHARE) for kind in SCORES}, **(statistics or {})}
    if not wanted:
        raise ArgumentError(
            "find has no condition.", "Give the range of a statistic, for example find(previous_token=(0.8, 1))."
        )
    ranges = {name: _checked_range(name, limits) for name, limits in wanted.items()}
    numbers = [_numbers(layer, tuple(wanted), of) for layer in layers]
    for name in wanted:
        if layers and not any(name in each for each in numbers):
            raise _unknown(layers, name)
    found = []
    for layer, each in zip(layers, numbers, strict=True):
        if not all(name in each for name in wanted):
            continue
        for head in range(layer.num_heads):
            values = {name: float(each[name][head]) for name in wanted}
            if all(_is_within(values[name], limits) for name, limits in ranges.items()):
                found.append(FoundHead(layer.number, head, layer.name, values, shown))
    first, (lowest, _) = next(iter(ranges.items()))
    sign = 1 if lowest is None else -1
    return sorted(found, key=lambda one: sign * one.values[first])


def _is_within(value: float, limits: Range) -> bool:
    lowest, highest = limits
    return (lowest is None or value >= lowest) and (highest is None or value <= highest)


def _numbers(layer: LayerRecord, wanted: tuple[str, ...], of: Of) -> dict[str, Tensor]:
    """Return the wanted statistics that a layer has: (heads,) each."""
    summary = layer.summary(of)
    found = {}
    for name in wanted:
        if name in summary:
            found[name] = summary[name]
        elif name in ("broad", "local", "separator"):
            score = _score(layer, name)
            if score is not None:
                found[name] = score
        elif SCORES.get(name) in summary:
            found[name] = summary[SCORES[name]]
    return found


def _score(layer: LayerRecord, kind: str) -> Tensor | None:
    """Score a layer's heads by what is no statistic of its own, the mean over its samples: (heads,), or None."""
    if not layer.samples:
        return None
    total, count = torch.zeros(layer.num_heads, dtype=torch.float64), 0
    for number, one in enumerate(layer.samples):
        read = layer_profiles([layer], sample=number)[0]
        if kind == "separator":
            value = read.means.get("separator_mass")
        elif kind == "broad":
            entropy = read.means.get("entropy")
            value = None if entropy is None else entropy / read.visibility.largest_entropy.clamp(min=1e-12)
        else:
            value = read.near
        if value is None:
            return None
        total += value * one.num_queries
        count += one.num_queries
    return total / max(count, 1)


def _unknown(layers: Sequence[LayerRecord], name: str) -> ProbeError:
    """Say that no layer has a number."""
    statistics = list(dict.fromkeys(each for layer in layers for each in layer.summary()))
    if name in REPEATED:
        if any(layer.repeated is not None for layer in layers):
            return ProbeError(f"{name} is known per text, not per query, so it has only a mean.", 'Give of="mean".')
        return ProbeError(
            f"The record has no numbers for {name!r}.",
            "It needs texts of repeated random tokens: look --textbook, or add_repeated in observation.textbook.",
        )
    if name in SCORES:
        needs = ABOUT.get(name, f'the statistic "{SCORES[name]}": observe(probes=[..., "{SCORES[name]}"])')
        return ProbeError(f"The record has no numbers for {name!r}.", f"It needs {needs}.")
    return ProbeError(
        f"There is no statistic {name!r} in the record.",
        f"Give one of {', '.join(statistics)}, or a kind: {', '.join(SCORES)}.",
    )


def _checked_range(name: str, limits: object) -> Range:
    """Return the limits of one statistic; raise ArgumentError unless they are a pair (lowest, highest)."""
    if not isinstance(limits, (tuple, list)) or len(limits) != 2 or not all(_is_limit(each) for each in limits):
        raise ArgumentError(
            f"{name} is {limits!r}.",
            f"Give the lowest and the highest value, None for no limit: {name}=(0.8, None) or {name}=(None, 1).",
        )
    return limits[0], limits[1]


def _is_limit(value: object) -> bool:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return value is None or (number and value == value)  # noqa: PLR0124 - NaN differs from itself
