"""Compare the heads of two runs, such as two checkpoints or two texts, and rank them by change.

Weights are compared where both runs read the same tokens. Of other texts only statistics are, and these depend on the
number of keys: a head that spreads evenly has 10 effective keys of 10 and 1,000 of 1,000, and puts 10 % or 0.1 % on the
first key. So a change counts by what chance does not explain (`change_beyond_chance`), and only a clear one is named:
otherwise two samples of one corpus would differ by the lengths of their texts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from multihead.errors import ArgumentError
from multihead.errors.arguments import check_integer
from multihead.kinds import KINDS, Kind, kinds_by_name
from multihead.locale.escaping import escape_controls
from multihead.locale.texts import text, unit_label
from multihead.probes.catalogue import SEPARATOR_MASS, SPECIAL_MASS, statistic
from multihead.probes.probe import SHARE_FORMAT, Statistic
from multihead.record.analysis.highlights import HeadKind, heads_of_kinds
from multihead.record.analysis.similar import divergence, evenly_spaced_queries, have_same_texts
from multihead.record.chance import MIN_STANDARD_ERRORS, Progress
from multihead.record.layer import LayerRecord, layer_profiles
from multihead.record.profiles import LayerKinds
from multihead.record.sample import SampleRecord
from multihead.record.table import CHANCE_SUFFIX, HeadList, HeadOfLayer, OneLineRepr

MIN_CHANGE = 0.1
"""Smallest change beyond chance that is clear: 10 percentage points of a share, or a tenth of another chance level."""


class StatisticChange(NamedTuple):
    """A statistic of a head in two runs as text: label, value in the first run, value in the second run."""

    label: str
    before: str
    after: str


def text_of_value(shown: Statistic, value: float, lang: str) -> str:
    """Return a value of a statistic with its unit, such as "1.25 nats", in a language."""
    number = shown.number(value)
    return f"{number} {unit_label(shown.unit, lang)}" if shown.unit and number != "-" else number


class ChangeBeyondChance(NamedTuple):
    """The change of a statistic that the change of its chance level does not explain.

    Attributes:
        size: from -1 to 1 for a share, else as a quotient by chance; 0 if chance explains all of the change.
        is_clear: whether it is at least `MIN_CHANGE`, and exceeds three standard errors.
    """

    size: float
    is_clear: bool


def change_beyond_chance(
    values: tuple[float, float],
    chances: tuple[float, float],
    errors: tuple[float, float],
    *,
    share: bool,
) -> ChangeBeyondChance:
    """Return the change of a statistic from one run to another, beyond what the change of its chance level explains.

    Other lengths of texts explain that the statistic keeps its value, or its quotient by chance. For a share s with the
    chance level c they also explain that the head keeps the part of its attention that it puts on these keys whatever
    the text, (s - c) / (1 - c), or that it keeps its odds ratio, s (1 - c) / (c (1 - s)): a constant added to the
    scores of these keys. The change is the distance from the range of these values, 0 inside of it.

    Args:
        values: the mean of the statistic in both runs.
        chances: its chance level in both runs.
        errors: the standard error of mean - chance in both runs.
        share: whether the statistic is a share of attention, from 0 to 1.

    >>> longer = change_beyond_chance((63.3, 88.1), (73.8, 101.9), (1, 1), share=False)  # effective keys
    >>> other = change_beyond_chance((0.9, 0.5), (0.02, 0.01), (0.01, 0.01), share=True)
    >>> f"{longer.size:.3f}", longer.is_clear, f"{other.size:.2f}", other.is_clear
    ('0.007', False, '-0.32', True)
    """
    (before, after), (level, later) = values, chances
    explained = [before]
    error = errors[0]
    if share:
        if 0 < level < 1:
            explained.append(later + (before - level) / (1 - level) * (1 - later))
            odds = min(before, 1 - 1e-12) / (1 - min(before, 1 - 1e-12)) * (1 - level) / level
            explained.append(odds * later / (1 - later + odds * later))
    elif level > 0:
        explained.append(before * later / level)
        if abs(after - explained[1]) < abs(after - before):
            error *= later / level
    distance = after - min(max(after, min(explained)), max(explained))
    size = distance if share else distance / (later if later > 0 else max(abs(before), abs(after), 1e-12))
    is_significant = abs(distance) > MIN_STANDARD_ERRORS * math.hypot(error, errors[1])
    return ChangeBeyondChance(size, abs(size) >= MIN_CHANGE and is_significant)


@dataclass(frozen=True, repr=False)
class ChangedHead(HeadOfLayer):
    """One head in two runs.

    Attributes:
        layer: number of the layer.
        head: index of the head in the layer.
        name: name of the layer.
        divergence: Jensen-Shannon divergence of the head's weights in the two runs, nats, from 0 (equal weights) to
            ln 2 (no key in common), averaged over the queries that see a key and have finite weights in both runs; NaN
            if there are no such queries, and if the runs read different texts.
        queries: number of queries that were compared; 0 if the runs read different texts.
        before: name of a statistic -> mean of the head in the first run.
        after: name of a statistic -> mean of the head in the second run.
        kinds_before: names of the head's kinds in the first run, see `multihead.kinds.KINDS`.
        kinds_after: names of the head's kinds in the second run.
        statistics: name -> statistic, for the statistics that are not built in.
        chance_before: name of a statistic -> its chance level in the first run.
        chance_after: name of a statistic -> its chance level in the second run.
        changes: name of a statistic -> its change beyond chance, for the statistics with a chance level in both runs.
    """

    divergence: float
    queries: int
    before: dict[str, float] = field(hash=False)
    after: dict[str, float] = field(hash=False)
    kinds_before: tuple[str, ...]
    kinds_after: tuple[str, ...]
    statistics: Mapping[str, Statistic] = field(default_factory=dict, compare=False)
    chance_before: dict[str, float] = field(default_factory=dict, hash=False)
    chance_after: dict[str, float] = field(default_factory=dict, hash=False)
    changes: dict[str, ChangeBeyondChance] = field(default_factory=dict, hash=False)

    @property
    def compares_weights(self) -> bool:
        """Whether the runs read the same tokens, so that weights were compared."""
        return self.queries > 0

    @property
    def is_clear(self) -> bool:
        """Whether a statistic changed clearly beyond chance."""
        return any(change.is_clear for change in self.changes.values())

    @property
    def differences(self) -> dict[str, float]:
        """Name of a statistic -> after - before, for the statistics that both runs have."""
        return {name: self.after[name] - value for name, value in self.before.items() if name in self.after}

    @property
    def largest_difference(self) -> str | None:
        """Name of the statistic that changed most; None if none changed in the digits that are shown.

        Of one text the statistics in percent are compared; of different texts all, by their changes beyond chance.
        """
        if not self.compares_weights:
            sizes = {name: (change.is_clear, abs(change.size)) for name, change in self.changes.items() if change.size}
            return max(sizes, key=lambda name: sizes[name], default=None)
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
        """Return the statistic that changed most, as text, of different texts with its chance; None if none changed."""
        if (name := self.largest_difference) is None:
            return None
        shown = statistic(name, self.statistics)
        label = escape_controls(shown.translated_label(lang))
        values = [text_of_value(shown, each[name], lang) for each in (self.before, self.after)]
        if not self.compares_weights:
            levels = [text_of_value(shown, each[name], lang) for each in (self.chance_before, self.chance_after)]
            values = [
                text("compare.with chance", lang, value=value, chance=level)
                for value, level in zip(values, levels, strict=True)
            ]
        return StatisticChange(label, *values)

    def __str__(self) -> str:
        """Return one line, such as "L2 H3: 0.312 nats; previous 91 % -> 12 %; previous -> mixed"."""
        parts = [f"{self.divergence:.3f} nats"] if self.compares_weights else []
        if (change := self.change()) is not None:
            parts.append(f"{change.label} {change.before} -> {change.after}")
        if self.kinds_before != self.kinds_after:
            parts.append(f"{', '.join(self.kinds_before)} -> {', '.join(self.kinds_after)}")
        return f"L{self.layer} H{self.head}: " + ("; ".join(parts) or "the same beyond chance")

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
        if not self.compares_weights:
            for name, change in self.changes.items():
                found |= {
                    f"{name}{CHANCE_SUFFIX}_before": self.chance_before[name],
                    f"{name}{CHANCE_SUFFIX}_after": self.chance_after[name],
                    f"{name}_beyond_chance": change.size,
                    f"{name}_clear": change.is_clear,
                }
        return found


def changes(
    before: Sequence[LayerRecord],
    after: Sequence[LayerRecord],
    *,
    sample: int | None = None,
    after_sample: int | None = None,
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
    after_sample = sample if after_sample is None else after_sample
    pairs = _layers_of_both_runs(before, after)
    samples = {
        number: (_samples_of(one, sample), _samples_of(other, after_sample)) for number, (one, other) in pairs.items()
    }
    texts_are_equal = all(_are_same_texts(*of_layer) for of_layer in samples.values())
    if texts_are_equal:
        found = {
            number: list(zip(*of_layer, strict=True))
            for number, of_layer in samples.items()
            if all(have_same_texts(*pair) for pair in zip(*of_layer, strict=True))
        }
        if not found:
            raise _no_layer_error()
    else:
        found = {number: [] for number in samples}
    rows = {
        number: [evenly_spaced_queries(one.num_queries, queries or one.num_queries) for one, _ in texts]
        for number, texts in found.items()
    }
    counts = {
        number: [len(range(*each.indices(one.num_queries))) for each, (one, _) in zip(rows[number], texts, strict=True)]
        for number, texts in found.items()
    }
    done, total = 0, sum(map(sum, counts.values()))

    def add_compared_queries(more: int) -> None:
        nonlocal done
        done += more
        if progress is not None:
            progress(done, total)

    divergences = {
        number: _mean_over_texts(
            [
                divergence(*pair, each, progress=add_compared_queries)
                for pair, each in zip(texts, rows[number], strict=True)
            ],
            counts[number],
            pairs[number][0].num_heads,
        )
        for number, texts in found.items()
    }
    runs: list[dict[int, LayerKinds]] = []
    for layers, of_run in ((before, sample), (after, after_sample)):
        chosen = [layer for layer in layers if layer.number in found]
        profiles = layer_profiles(chosen, sample=of_run, statistics=statistics, among=among)
        runs.append({one.number: one for one in profiles})
    heads = [
        _change_of_head(
            (runs[0][number], runs[1][number]),
            head,
            divergence=float(divergences[number][head]),
            queries=sum(counts[number]),
            statistics=statistics or {},
        )
        for number in found
        for head in range(pairs[number][0].num_heads)
    ]
    if texts_are_equal:
        # NaN has no order, so heads without finite weights are sorted last explicitly.
        heads.sort(key=lambda each: (math.isnan(each.divergence), -each.divergence))
    else:
        heads.sort(key=_rank_beyond_chance)
    return HeadList(heads[:top])


@dataclass(frozen=True, repr=False)
class ComparedKind(OneLineRepr):
    """The heads of one kind in two runs, of one model or of two.

    Attributes:
        kind: name of the kind.
        number_before: number of heads with this kind in the first run.
        heads_before: number of all heads of the first run.
        number_after: number of heads with this kind in the second run.
        heads_after: number of all heads of the second run.
        best_before: the head with the largest share in the first run; None without such heads.
        best_after: the head with the largest share in the second run; None without such heads.
    """

    kind: str
    number_before: int
    heads_before: int
    number_after: int
    heads_after: int
    best_before: HeadKind | None
    best_after: HeadKind | None

    def __str__(self) -> str:
        """Return one line, such as "previous: 2 of 72 heads -> 5 of 144 heads"."""
        counts = (self.number_before, self.heads_before), (self.number_after, self.heads_after)
        return f"{self.kind}: " + " -> ".join(f"{number} of {heads} heads" for number, heads in counts)

    def cells(self) -> dict[str, str]:
        """Return the kind as a row of a table: heading -> text."""
        return {
            "kind": self.kind,
            "before": f"{self.number_before} / {self.heads_before}",
            "after": f"{self.number_after} / {self.heads_after}",
            "strongest before": "" if self.best_before is None else str(self.best_before),
            "strongest after": "" if self.best_after is None else str(self.best_after),
        }

    def row(self) -> dict[str, str | int | float | None]:
        """Return the kind as a table row; columns of the strongest heads are None without such heads."""
        found: dict[str, str | int | float | None] = {"kind": self.kind}
        for when in ("before", "after"):
            best: HeadKind | None = getattr(self, f"best_{when}")
            found |= {
                f"number_{when}": getattr(self, f"number_{when}"),
                f"heads_{when}": getattr(self, f"heads_{when}"),
            }
            for name in ("layer", "head", "share", "chance"):
                found[f"strongest_{name}_{when}"] = None if best is None else getattr(best, name)
        return found


def heads_correspond(before: Mapping[int, int], after: Mapping[int, int], *, same_title: bool) -> bool:
    """Whether the heads of two records are those of one model, or of two checkpoints, so that equal places correspond.

    Args:
        before: number of a layer -> number of its heads, in the first record.
        after: the same of the second record.
        same_title: whether the records have equal titles, so that one may have only some of the layers.
    """
    common = before.keys() & after.keys()
    fewer = min(before, after, key=len)
    # A model with fewer layers has all layers from 0 on; a record of some layers of a model rarely does.
    is_part = same_title and len(common) == len(fewer) > 0 and list(fewer) != list(range(len(fewer)))
    is_part = is_part and all(before[number] == after[number] for number in common)
    return bool(before) and (before == after or is_part)


def compare_kinds(
    before: Sequence[LayerKinds], after: Sequence[LayerKinds], among: Iterable[Kind]
) -> HeadList[ComparedKind]:
    """Compare the heads of two runs kind by kind; see `Record.compared_kinds`."""
    found = HeadList[ComparedKind]()
    heads = [sum(len(one.kinds) for one in run) for run in (before, after)]
    for kind in among:
        if all(any(one.decides(kind) for one in run) for run in (before, after)):
            first, second = (heads_of_kinds(run, (kind,)) for run in (before, after))
            best = [max(each, key=lambda one: one.share, default=None) for each in (first, second)]
            found.append(ComparedKind(kind.name, len(first), heads[0], len(second), heads[1], *best))
    return found


def describe_kind_counts(one: ComparedKind, lang: str, among: Sequence[Kind] = KINDS) -> tuple[str, str, str]:
    """Return the label of a kind, and for each run the number of its heads and the strongest of them, as text."""
    kind = kinds_by_name(among)[one.kind]
    sides = (one.number_before, one.heads_before, one.best_before), (one.number_after, one.heads_after, one.best_after)
    label = escape_controls(kind.label(lang))
    if kind.texts == "repeats" and kind.probe is not None:
        label = escape_controls(kind.probe.translated_label(lang))
    counts = []
    for number, heads, best in sides:
        values: dict[str, object] = {"number": number, "heads": heads}
        if best is not None:
            values |= {"layer": best.layer, "head": best.head, "share": kind.format_value(best.share)}
        counts.append(text("compare.heads of" if best is None else "compare.strongest", lang, **values))
    return label, counts[0], counts[1]


def summarise_changes(found: Sequence[ChangedHead], before: str, after: str, lang: str) -> tuple[str, str]:
    """Return two sentences about all heads of two runs: how much they changed, and how many changed their kinds."""
    known = [one.divergence for one in found if not math.isnan(one.divergence)]
    values = {"before": escape_controls(before), "after": escape_controls(after), "heads": len(found)}
    number = sum(one.kinds_before != one.kinds_after for one in found)
    kinds = text("compare.kinds changed", lang, number=number, heads=len(found))
    if not any(one.compares_weights for one in found):
        clear = sum(one.is_clear for one in found)
        return text("compare.read texts", lang, number=clear, points=f"{100 * MIN_CHANGE:.0f}", **values), kinds
    return text("compare.read", lang, mean=f"{sum(known) / max(len(known), 1):.3f}", **values), kinds


def _rank_beyond_chance(one: ChangedHead) -> tuple[bool, float, int, int]:
    """Return the key that sorts heads on different texts: clear changes first, the largest first."""
    name = one.largest_difference
    return not one.is_clear, 0.0 if name is None else -abs(one.changes[name].size), one.layer, one.head


def _change_of_head(
    profiles: tuple[LayerKinds, LayerKinds],
    head: int,
    *,
    divergence: float,
    queries: int,
    statistics: Mapping[str, Statistic],
) -> ChangedHead:
    """Return a head in two runs, given the profiles of its layer."""
    first, second = profiles
    names = [name for name in first.evidence if name in second.evidence]
    evidence = {name: (first.evidence[name], second.evidence[name]) for name in names}

    def pair(name: str, of: str) -> tuple[float, float]:
        one, other = (float(getattr(each, of)[head]) for each in evidence[name])
        return one, other

    changed = {
        name: change_beyond_chance(
            pair(name, "mean"),
            pair(name, "chance"),
            pair(name, "standard_error"),
            share=statistic(name, statistics).number_format == SHARE_FORMAT,
        )
        for name in names
    }
    return ChangedHead(
        layer=first.number,
        head=head,
        name=first.name,
        divergence=divergence,
        queries=queries,
        before=_means_of_head(first, head),
        after=_means_of_head(second, head),
        kinds_before=first.kinds[head],
        kinds_after=second.kinds[head],
        statistics=statistics,
        chance_before={name: pair(name, "chance")[0] for name in names},
        chance_after={name: pair(name, "chance")[1] for name in names},
        changes=changed,
    )


def _means_of_head(profile: LayerKinds, head: int) -> dict[str, float]:
    return {name: float(values[head]) for name, values in profile.means.items()}


def _mean_over_texts(values: Sequence[Tensor], queries: Sequence[int], heads: int) -> Tensor:
    """Return the mean over texts, weighted by their numbers of queries: (heads,) float64; NaN without texts."""
    if not values:
        return torch.full((heads,), torch.nan, dtype=torch.float64)
    weights = torch.tensor(queries, dtype=torch.float64)[:, None]
    return (torch.stack(list(values)) * weights).sum(0) / weights.sum()


def _samples_of(layer: LayerRecord, sample: int | None) -> list[SampleRecord]:
    """Return one sample of a layer, or all; raises as `LayerRecord.sample` does."""
    return [layer.sample(sample)] if sample is not None else [layer.sample(each) for each in range(layer.num_samples)]


def _layers_of_both_runs(
    before: Sequence[LayerRecord], after: Sequence[LayerRecord]
) -> dict[int, tuple[LayerRecord, LayerRecord]]:
    """Return number of a layer -> the layer in each run, for layers with equal numbers of heads.

    Raises:
        ArgumentError: no layer has equal numbers in both runs.
    """
    others = {layer.number: layer for layer in after}
    found = {
        layer.number: (layer, others[layer.number])
        for layer in before
        if layer.number in others and layer.num_heads == others[layer.number].num_heads
    }
    if not found:
        raise _no_layer_error()
    return found


def _no_layer_error() -> ArgumentError:
    return ArgumentError(
        "The two records have no layer with the same number, heads and length.",
        "Compare two runs of one model; heads of different models can be compared kind by kind: "
        "before.compared_kinds(after).",
    )


def _are_same_texts(one: Sequence[SampleRecord], other: Sequence[SampleRecord]) -> bool:
    """Whether two runs read the same texts in the same order, as far as token ids and tokens are known."""
    if len(one) != len(other):
        return False
    for first, second in zip(one, other, strict=True):
        ids, tokens = (first.text.ids, second.text.ids), (first.text.tokens, second.text.tokens)
        if ids[0] is not None and ids[1] is not None and not torch.equal(ids[0], ids[1]):
            return False
        if None not in tokens and tokens[0] != tokens[1]:
            return False
        if None in ids and None in tokens and first.num_keys != second.num_keys:
            return False
    return True
