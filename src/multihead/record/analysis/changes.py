"""Compare the heads of two runs of a model on one text, such as two checkpoints, and rank them by change."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from multihead.errors import ArgumentError
from multihead.errors.arguments import check_integer
from multihead.kinds import KINDS, Kind
from multihead.locale.escaping import escape_controls
from multihead.locale.texts import statistic_label, text
from multihead.probes.catalogue import SEPARATOR_MASS, SPECIAL_MASS, statistic
from multihead.probes.probe import SHARE_FORMAT, Statistic
from multihead.record.analysis.similar import divergence, evenly_spaced_queries, have_same_texts
from multihead.record.chance import Progress
from multihead.record.layer import LayerRecord, layer_profiles
from multihead.record.notebook import HeadList, HeadOfLayer
from multihead.record.profiles import LayerProfile
from multihead.record.sample import SampleRecord


class StatisticChange(NamedTuple):
    """A statistic of a head in two runs as text: label, value in the first run, value in the second run."""

    label: str
    before: str
    after: str


@dataclass(frozen=True, repr=False)
class ChangedHead(HeadOfLayer):
    """One head in two runs.

    Attributes:
        layer: number of the layer.
        head: index of the head in the layer.
        name: name of the layer.
        divergence: Jensen-Shannon divergence of the head's weights in the two runs, nats, from 0 (equal weights) to
            ln 2 (no key in common), averaged over the queries that see a key and have finite weights in both runs; NaN
            if there are no such queries.
        queries: number of queries that were compared.
        before: name of a statistic -> mean of the head in the first run.
        after: name of a statistic -> mean of the head in the second run.
        kinds_before: names of the head's kinds in the first run, see `multihead.kinds.KINDS`.
        kinds_after: names of the head's kinds in the second run.
        statistics: name -> statistic, for the statistics that are not built in.
    """

    divergence: float
    queries: int
    before: dict[str, float] = field(hash=False)
    after: dict[str, float] = field(hash=False)
    kinds_before: tuple[str, ...]
    kinds_after: tuple[str, ...]
    statistics: Mapping[str, Statistic] = field(default_factory=dict, compare=False)

    @property
    def differences(self) -> dict[str, float]:
        """Name of a statistic -> after - before, for the statistics that both runs have."""
        return {name: self.after[name] - value for name, value in self.before.items() if name in self.after}

    @property
    def largest_difference(self) -> str | None:
        """Name of the statistic in percent that changed most; None if none changed in the digits that are shown."""
        shares = {
            name: abs(value)
            for name, value in self.differences.items()
            if (shown := statistic(name, self.statistics)).number_format == SHARE_FORMAT
            and not (
                name == SPECIAL_MASS.name and SEPARATOR_MASS.name in self.differences
            )  # the first token has its own
            and not math.isnan(value)
            and shown.text(self.before[name]) != shown.text(self.after[name])
        }
        return max(shares, key=lambda name: shares[name], default=None)

    def change(self, lang: str = "en") -> StatisticChange | None:
        """Return the statistic in percent that changed most, as text; None if none changed."""
        if (name := self.largest_difference) is None:
            return None
        shown = statistic(name, self.statistics)
        label = escape_controls(statistic_label(name, lang, shown.label))
        return StatisticChange(label, shown.text(self.before[name]), shown.text(self.after[name]))

    def __str__(self) -> str:
        """Return one line, such as "L2 H3: 0.312 nats; previous 91 % -> 12 %; previous -> mixed"."""
        parts = [f"{self.divergence:.3f} nats"]
        if (change := self.change()) is not None:
            parts.append(f"{change.label} {change.before} -> {change.after}")
        if self.kinds_before != self.kinds_after:
            parts.append(f"{', '.join(self.kinds_before)} -> {', '.join(self.kinds_after)}")
        return f"L{self.layer} H{self.head}: " + "; ".join(parts)

    def cells(self) -> dict[str, str]:
        """Return the head as a row of a table: heading -> text."""
        change = self.change()
        return self.place_cells() | {
            "divergence (nats)": f"{self.divergence:.3f}",
            "change": "" if change is None else f"{change.label} {change.before} → {change.after}",
            "kinds before": ", ".join(self.kinds_before),
            "kinds after": ", ".join(self.kinds_after),
        }

    def row(self) -> dict[str, str | int | float]:
        """Return the head as a table row, with `entropy_before`, `entropy_after`, `entropy_difference` and so on."""
        found: dict[str, str | int | float] = {
            "layer": self.layer,
            "head": self.head,
            "name": self.name,
            "divergence": self.divergence,
            "queries": self.queries,
            "kind_before": "+".join(self.kinds_before),
            "kind_after": "+".join(self.kinds_after),
        }
        for name, difference in self.differences.items():
            found |= {
                f"{name}_before": self.before[name],
                f"{name}_after": self.after[name],
                f"{name}_difference": difference,
            }
        return found


def changes(
    before: Sequence[LayerRecord],
    after: Sequence[LayerRecord],
    *,
    sample: int = 0,
    top: int | None = None,
    queries: int | None = None,
    statistics: Mapping[str, Statistic] | None = None,
    among: Sequence[Kind] = KINDS,
    progress: Progress | None = None,
) -> HeadList[ChangedHead]:
    """Return the heads of two runs with their changes, the most changed first; see `Record.changed`."""
    if top is not None:
        check_integer("top", top)
    if queries is not None:
        check_integer("queries", queries)
    pairs = _layers_of_both_runs(before, after, sample)
    rows = {
        number: evenly_spaced_queries(one.num_queries, queries or one.num_queries) for number, (one, _) in pairs.items()
    }
    counts = {number: len(range(*rows[number].indices(one.num_queries))) for number, (one, _) in pairs.items()}
    layers = ([layer for layer in run if layer.number in pairs] for run in (before, after))
    first, second = (
        {one.number: one for one in layer_profiles(each, sample=sample, statistics=statistics, among=among)}
        for each in layers
    )
    done, total = 0, sum(counts.values())

    def add_compared_queries(more: int) -> None:
        nonlocal done
        done += more
        if progress is not None:
            progress(done, total)

    found = []
    for number, (one, other) in pairs.items():
        values = divergence(one, other, rows[number], progress=add_compared_queries)
        found += [
            ChangedHead(
                layer=number,
                head=head,
                name=first[number].name,
                divergence=float(values[head]),
                queries=counts[number],
                before=_means_of_head(first[number], head),
                after=_means_of_head(second[number], head),
                kinds_before=first[number].kinds[head],
                kinds_after=second[number].kinds[head],
                statistics=statistics or {},
            )
            for head in range(one.num_heads)
        ]
    # NaN has no order, so heads without finite weights are sorted last explicitly.
    return HeadList(sorted(found, key=lambda each: (math.isnan(each.divergence), -each.divergence))[:top])


def summarise_changes(found: Sequence[ChangedHead], before: str, after: str, lang: str) -> tuple[str, str]:
    """Return two sentences about all heads of two runs: their mean divergence, and how many changed their kinds."""
    known = [one.divergence for one in found if not math.isnan(one.divergence)]
    names = {"before": escape_controls(before), "after": escape_controls(after)}
    mean = f"{sum(known) / max(len(known), 1):.3f}"
    number = sum(one.kinds_before != one.kinds_after for one in found)
    return (
        text("compare.read", lang, **names, heads=len(found), mean=mean),
        text("compare.kinds changed", lang, number=number, heads=len(found)),
    )


def _means_of_head(profile: LayerProfile, head: int) -> dict[str, float]:
    return {name: float(values[head]) for name, values in profile.means.items()}


def _layers_of_both_runs(
    before: Sequence[LayerRecord], after: Sequence[LayerRecord], sample: int
) -> dict[int, tuple[SampleRecord, SampleRecord]]:
    """Return number of a layer -> its sample in each run, for layers with equal numbers of heads, queries and keys.

    Raises:
        ArgumentError: no layer has equal numbers in both runs, or the two texts differ.
    """
    others = {layer.number: layer for layer in after}
    found = {}
    for layer in before:
        if layer.number in others:
            one, other = layer.sample(sample), others[layer.number].sample(sample)
            _check_same_text(one, other)
            if one.num_heads == other.num_heads and have_same_texts(one, other):
                found[layer.number] = one, other
    if not found:
        raise ArgumentError(
            "The two records have no layer with the same number, heads and length.",
            "Compare two runs of one model on the same text.",
        )
    return found


def _check_same_text(one: SampleRecord, other: SampleRecord) -> None:
    """Raise ArgumentError if the token ids or the tokens of two samples are known and differ."""
    ids, tokens = (one.text.ids, other.text.ids), (one.text.tokens, other.text.tokens)
    differ = ids[0] is not None and ids[1] is not None and not torch.equal(ids[0], ids[1])
    if differ or (None not in tokens and tokens[0] != tokens[1]):
        raise ArgumentError(
            "The two records read different texts, so their weights cannot be compared.",
            "Run both models on the same text.",
        )
