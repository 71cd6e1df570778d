"""Find heads by the range of a statistic, or of the share of a kind such as previous or induction."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from multihead.errors import ArgumentError, MultiheadError, ProbeError
from multihead.kinds import KINDS, RENAMED_KINDS, Kind
from multihead.locale.escaping import escape_controls
from multihead.probes.catalogue import statistic
from multihead.probes.probe import SHARE_FORMAT, Statistic
from multihead.record.analysis.highlights import unmeasured_kind_error
from multihead.record.layer import LayerRecord, layer_profiles
from multihead.record.profiles import evidence_of_kind
from multihead.record.table import HeadList, HeadOfLayer
from multihead.record.text_rows import SummaryName


@dataclass(frozen=True, repr=False)
class FoundHead(HeadOfLayer):
    """A head that `find` returns.

    Attributes:
        layer: number of the layer.
        head: index of the head in the layer.
        name: name of the layer.
        values: name of a statistic or kind -> value of the head.
        statistics: name -> how its value is shown, for kinds and statistics that are not built in.
    """

    values: dict[str, float] = field(hash=False)
    statistics: Mapping[str, Statistic] = field(default_factory=dict, compare=False)

    def __str__(self) -> str:
        """Return one line, such as "L16 H0: previous 88 %, entropy 0.52 nats"."""
        shown = (statistic(name, self.statistics) for name in self.values)
        return f"L{self.layer} H{self.head}: " + ", ".join(
            escape_controls(f"{each.label} {each.text(self.values[each.name])}") for each in shown
        )

    def cells(self) -> dict[str, str]:
        """Return the head as a row of a table: heading -> text."""
        shown = (statistic(name, self.statistics) for name in self.values)
        numbers = {each.heading: each.number(self.values[each.name]) for each in shown}
        return self.place_cells() | numbers


ValueRange = tuple[float | None, float | None]
"""Lowest and highest allowed value of a statistic; None for no limit."""


def find(
    layers: Sequence[LayerRecord],
    wanted: Mapping[str, ValueRange],
    *,
    of: SummaryName = "mean",
    statistics: Mapping[str, Statistic] | None = None,
    among: Sequence[Kind] = KINDS,
) -> HeadList[FoundHead]:
    """Find the heads with values in the wanted ranges, see `Record.find`; `statistics` are the user-defined ones."""
    by_name = {kind.name: kind for kind in among}
    shown = {**{name: _format_of_kind(kind) for name, kind in by_name.items()}, **(statistics or {})}
    if not wanted:
        raise ArgumentError(
            "find has no condition.", "Give the range of a statistic, for example find(previous=(0.8, 1))."
        )
    ranges = {name: _checked_range(name, limits) for name, limits in wanted.items()}
    numbers = [_wanted_values(layer, tuple(wanted), of, by_name, statistics or {}) for layer in layers]
    for name in wanted:
        if layers and not any(name in each for each in numbers):
            raise _missing_value_error(layers, name, by_name)
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
    return HeadList(sorted(found, key=lambda one: sign * one.values[first]))


def _is_within(value: float, limits: ValueRange) -> bool:
    lowest, highest = limits
    return (lowest is None or value >= lowest) and (highest is None or value <= highest)


def _format_of_kind(kind: Kind) -> Statistic:
    """Return a statistic with the label and number format of a kind."""
    number_format = SHARE_FORMAT if kind.probe is None or kind.of_largest is not None else kind.probe.number_format
    return Statistic(kind.name, label=kind.label("en"), number_format=number_format)


def _wanted_values(
    layer: LayerRecord,
    wanted: tuple[str, ...],
    of: SummaryName,
    by_name: Mapping[str, Kind],
    statistics: Mapping[str, Statistic],
) -> dict[str, Tensor]:
    """Return the values of the wanted statistics and kinds that a layer has: name -> (heads,)."""
    summary = layer.summary(of)
    found = {}
    for name in wanted:
        kind = by_name.get(name)
        if name in summary:
            found[name] = summary[name]
        elif kind is not None and kind.of_largest is None and kind.statistic in summary:
            found[name] = summary[kind.statistic]
        elif kind is not None and kind.texts == "given" and layer.has_kinds:
            (profile,) = layer_profiles([layer], sample=None, statistics=statistics, among=(kind,))
            if (measured := evidence_of_kind(kind, profile.evidence)) is not None:
                found[name] = measured.mean
    return found


def _missing_value_error(layers: Sequence[LayerRecord], name: str, by_name: Mapping[str, Kind]) -> MultiheadError:
    """Return the error for a statistic or kind that no layer has a value of; the error explains how to record one."""
    statistics = list(dict.fromkeys(each for layer in layers for each in layer.summary()))
    kind = by_name.get(name)
    if name in RENAMED_KINDS:
        new = RENAMED_KINDS[name]
        return ArgumentError(f"{name} is called {new}, as in tables.", f"Give a range of it: find({new}=(0.8, None)).")
    if kind is not None and kind.texts == "repeats" and any(layer.repeated is not None for layer in layers):
        return ProbeError(f"{name} is known per text, not per query, so it has only a mean.", 'Give of="mean".')
    if kind is not None:
        return unmeasured_kind_error(kind, [other for other in by_name.values() if other.statistic in statistics])
    return ProbeError(
        f"There is no statistic {name!r} in the record.",
        f"Give one of {', '.join(statistics)}, or a kind: {', '.join(by_name)}.",
    )


def _checked_range(name: str, limits: object) -> ValueRange:
    """Return the limits of a range as a pair (lowest, highest); raise ArgumentError if they are no such pair."""
    if not isinstance(limits, (tuple, list)) or len(limits) != 2 or not all(_is_limit(each) for each in limits):
        raise ArgumentError(
            f"{name} is {limits!r}.",
            f"Give the lowest and the highest value, None for no limit: {name}=(0.8, None) or {name}=(None, 1).",
        )
    return limits[0], limits[1]


def _is_limit(value: object) -> bool:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return value is None or (number and value == value)  # noqa: PLR0124 - NaN differs from itself
