"""Find heads by what they do: by bounds on their statistics, or on how far they are of a textbook kind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from multihead.analysis.highlights import layer_profiles
from multihead.analysis.visibility import near_mass
from multihead.errors import ArgumentError, ProbeError
from multihead.escaping import visible
from multihead.probes.catalogue import statistic
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
"""The textbook kinds, and the number that tells how far a head is of one: a share from 0 to 1 each."""

ABOUT = {
    "separator": "special tokens after the first: give `tokenizer` or `special_ids` to observe",
    "duplicate_token": 'the statistic "duplicate_mass": observe(probes=[..., "duplicate_mass"])',
    "induction": 'the statistic "induction_mass": observe(probes=[..., "induction_mass"])',
    "broad": 'the statistic "entropy": observe(probes=[..., "entropy"])',
}


@dataclass(frozen=True)
class Bounds:
    """Numbers above one and below another; made by `above` and `below`, joined by `&`.

    >>> above(0.2) & below(0.5)
    above(0.2) & below(0.5)
    >>> 0.5 in below(0.5)
    False
    """

    least: float | None = None
    most: float | None = None

    def __contains__(self, value: float) -> bool:
        return (self.least is None or value > self.least) and (self.most is None or value < self.most)

    def __and__(self, other: Bounds) -> Bounds:
        """Return what both hold."""
        least = [each.least for each in (self, other) if each.least is not None]
        most = [each.most for each in (self, other) if each.most is not None]
        return Bounds(max(least, default=None), min(most, default=None))

    def __repr__(self) -> str:
        parts = [
            f"{name}({value})" for name, value in (("above", self.least), ("below", self.most)) if value is not None
        ]
        return " & ".join(parts)


def above(value: float) -> Bounds:
    """Say that a number is larger than this one; for `Record.find`.

    Raises:
        ArgumentError: it is no number.

    >>> 0.9 in above(0.8)
    True
    """
    return Bounds(least=_number(value, "above"))


def below(value: float) -> Bounds:
    """Say that a number is smaller than this one; for `Record.find`.

    Raises:
        ArgumentError: it is no number.

    >>> 0.9 in below(0.8)
    False
    """
    return Bounds(most=_number(value, "below"))


@dataclass(frozen=True)
class FoundHead:
    """One head that was found.

    Fields:
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


def find(
    layers: Sequence[LayerRecord],
    wanted: Mapping[str, Bounds],
    *,
    of: Of = "mean",
    statistics: Mapping[str, Statistic] | None = None,
) -> list[FoundHead]:
    """Find heads; see `Record.find`. `statistics` says how the statistics that are not built in are shown."""
    shown = {**{kind: Statistic(kind, number_format=SHARE) for kind in SCORES}, **(statistics or {})}
    if not wanted:
        raise ArgumentError("find was asked for nothing.", "Give bounds, for example find(previous_token=above(0.8)).")
    for name, bounds in wanted.items():
        if not isinstance(bounds, Bounds):
            raise ArgumentError(f"{name} is {bounds!r}.", f"Give bounds: {name}=above(0.8) or {name}=below(1).")
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
            if all(values[name] in bounds for name, bounds in wanted.items()):
                found.append(FoundHead(layer.number, head, layer.name, values, shown))
    first, bounds = next(iter(wanted.items()))
    sign = 1 if bounds.least is None else -1
    return sorted(found, key=lambda one: sign * one.values[first])


def _numbers(layer: LayerRecord, wanted: tuple[str, ...], of: Of) -> dict[str, Tensor]:
    """Give those of the numbers asked for that a layer has: (heads,) each."""
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
            value = None if read.crosses else near_mass(one, read.visibility)
        if value is None:
            return None
        total += value * one.num_queries
        count += one.num_queries
    return total / max(count, 1)


def _unknown(layers: Sequence[LayerRecord], name: str) -> ProbeError:
    """Say that no layer has a number."""
    statistics = list(dict.fromkeys(each for layer in layers for each in layer.summary()))
    if name in SCORES:
        needs = ABOUT.get(name, f'the statistic "{SCORES[name]}": observe(probes=[..., "{SCORES[name]}"])')
        return ProbeError(f"The record has no numbers for {name!r}.", f"It needs {needs}.")
    return ProbeError(
        f"There is no statistic {name!r} in the record.",
        f"Give one of {', '.join(statistics)}, or a kind: {', '.join(SCORES)}.",
    )


def _number(value: object, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value != value:  # noqa: PLR0124 - NaN
        raise ArgumentError(f"{name} was given {value!r}.", f"Give a number, for example {name}(0.8).")
    return value
