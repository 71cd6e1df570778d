"""Classify heads into kinds, and find and describe the most notable heads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, groupby, zip_longest
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from multihead.errors import ProbeError
from multihead.kinds import KINDS, MIXED, NEAR_MASS, Kind, kinds_named
from multihead.locale.escaping import escape_controls, isolate_direction, label_of_token
from multihead.locale.texts import section
from multihead.probes.catalogue import SEPARATOR_STATISTIC, statistic
from multihead.probes.probe import Statistic
from multihead.record import summaries
from multihead.record.analysis.chance import (
    ChanceCache,
    ChanceComparison,
    Progress,
    chance_of_probes,
    compare_with_chance,
    exceeds_chance,
    standard_error,
)
from multihead.record.analysis.visibility import Visibility, near_mass, visibility_of
from multihead.record.layer import LayerRecord, empty_layer_error
from multihead.record.notebook import CHANCE_SUFFIX, HeadList, HeadOfLayer, OneLineRepr
from multihead.record.repeated import RepeatedTokens
from multihead.record.sample import SampleRecord
from multihead.record.summaries import MeasuredStatistic

MIN_EXCESS_DISTANCE = 0.5
"""A head attends far away if its mean distance exceeds the chance level by this share of the chance level, and by
three standard errors."""

DISTANCE_TOPIC = "distance"
"""Topic of the finding about the head with the largest distance, which is not a kind."""

RANK_OF_DISTANCE_FINDING = 90
"""Rank of the finding about the largest distance among all findings, see `Kind.finding`."""

MAX_FINDINGS = 6


@dataclass(frozen=True, eq=False)
class LayerKinds:
    """The statistics of one layer's heads, their chance levels, and the kinds of the heads.

    Attributes:
        number: number of the layer.
        name: name of the layer.
        means: name of a statistic -> (heads,) float64, mean over the queries that count. "separator_mass" is added if
            special tokens after the first are known, and the statistics on repeated random tokens if measured.
        chance: name of a statistic -> (heads,) float64, chance level, for the statistics that have one.
        evidence: name of a statistic -> mean, chance level and standard error, for the statistics in `chance`, and for
            the share of attention near the query, which is not in `means`.
        kinds: names of each head's kinds, the most specific first.
        cross_attention: whether the keys come from another text than the queries (cross-attention).
        repeated: the attention on repeated random tokens; None if it was not measured.
    """

    number: int
    name: str
    means: dict[str, Tensor]
    chance: dict[str, Tensor]
    evidence: dict[str, ChanceComparison]
    kinds: tuple[tuple[str, ...], ...]
    cross_attention: bool
    repeated: RepeatedTokens | None = field(default=None, kw_only=True)

    def decides(self, kind: Kind) -> bool:
        """Return whether it was measured which heads of the layer have a kind."""
        return kind.statistic in self.evidence and not (kind.self_attention_only and self.cross_attention)

    def row(self, head: int) -> dict[str, str | float]:
        """Return the table columns of a head besides its means: its kinds, and the chance levels of its statistics.

        `kind` is a word such as "first+local", and the chance level of `previous_mass` is `previous_mass_chance`.
        """
        chances = {f"{name}{CHANCE_SUFFIX}": float(values[head]) for name, values in self.chance.items()}
        return {"kind": "+".join(self.kinds[head]), **chances}


@dataclass(frozen=True, eq=False)
class LayerProfile(LayerKinds):
    """The statistics, kinds and mask of one layer of a record, for the report and the terminal.

    Attributes:
        visibility: the visible keys of the queries.
    """

    visibility: Visibility


@dataclass(frozen=True, repr=False)
class HeadKind(HeadOfLayer):
    """A kind of a head, and the numbers that decide it.

    Attributes:
        layer: number of the layer.
        head: index of the head in the layer.
        name: name of the layer.
        kind: name of the kind.
        share: mean over the queries that count; for "broad", the entropy divided by the largest possible entropy.
        chance: chance level of the share (even weights over the visible keys); 1 for "broad".
        error: standard error of share - chance; inf if there are too few queries to estimate it.
        n: number of queries that count, or of texts of repeated random tokens.
    """

    kind: str
    share: float
    chance: float
    error: float
    n: int
    share_and_chance_texts: tuple[str, str] = field(compare=False)

    def __str__(self) -> str:
        """Return one line, such as "L16 H0: previous 88 % (chance 1.3 %)"."""
        share, chance = (each.replace("\u00a0", " ") for each in self.share_and_chance_texts)
        compared = f"(chance {chance})" if chance else "of what an even spread gives"
        return f"L{self.layer} H{self.head}: {self.kind} {share} {compared}"

    def cells(self) -> dict[str, str]:
        """Return the head as a row of a table: heading -> text."""
        share, chance = self.share_and_chance_texts
        return self.place_cells() | {"kind": self.kind, "share": share, "chance": chance or "–", "n": f"{self.n:,}"}


def heads_of_kinds(
    profiles: Sequence[LayerKinds], among: Sequence[Kind], names: Sequence[str] = ()
) -> HeadList[HeadKind]:
    """List the heads of each kind, or of some, kind after kind, the largest share first.

    Raises:
        ArgumentError: there is no such kind.
        ProbeError: a kind in `names` was not measured in any layer.
    """
    found = HeadList[HeadKind]()
    for kind in kinds_named(names, among):
        if names and profiles and not any(one.decides(kind) for one in profiles):
            measured = [other for other in among if any(one.decides(other) for one in profiles)]
            raise unmeasured_kind_error(kind, measured, cross_attention=all(one.cross_attention for one in profiles))
        for place, head, share, level in sorted(
            _heads_of_topic(kind, profiles), key=lambda each: (-each[2], *each[:2])
        ):
            one = profiles[place]
            measure = evidence_of_kind(kind, one.evidence)
            assert measure is not None
            error, n = float(measure.standard_error[head]), int(measure.num_observations[head])
            written = (kind.format_value(share), kind.format_value(level) if kind.has_chance else "")
            found.append(HeadKind(one.number, head, one.name, kind.name, share, level, error, n, written))
    return found


def unmeasured_kind_error(kind: Kind, measured: Sequence[Kind], *, cross_attention: bool = False) -> ProbeError:
    """Return the error for a kind that no layer has numbers for.

    Args:
        kind: the kind.
        measured: the kinds that a layer has numbers for; one with the same probe on other texts is named.
        cross_attention: whether all layers are cross-attention.
    """
    if kind.self_attention_only and cross_attention:
        needs = "self-attention, and all recorded layers are cross-attention"
    else:
        needs = kind.requirement
    others = [other.name for other in measured if other.probe == kind.probe and other.texts != kind.texts]
    also = f" The record has numbers for {others[0]!r}." if others else ""
    return ProbeError(f"The record has no numbers for {kind.name!r}.", f"It needs {needs}.{also}")


@dataclass(frozen=True, repr=False)
class Finding(OneLineRepr):
    """A notable head, described in a sentence.

    Attributes:
        topic: name of the kind that the sentence is about, or "distance".
        layer: number of the layer.
        head: index of the head in the layer.
        value: number in the sentence (a share from 0 to 1, or a distance in tokens).
        chance: chance level of the value (even weights over the visible keys).
        sentence: description of the head, whose subject is the head.
        count: a sentence on how many heads have the same kind.
        brief: description in one short line, for a terminal.
    """

    topic: str
    layer: int
    head: int
    value: float
    chance: float
    sentence: str
    count: str
    brief: str

    def __str__(self) -> str:
        """Return `brief`, such as "layer 2 head 7: 91 % on the previous token (chance 4.8 %)"."""
        return self.brief

    def cells(self) -> dict[str, str]:
        """Return the finding as a row of a table: heading -> text."""
        return {"layer": str(self.layer), "head": str(self.head), "finding": self.sentence, "heads": self.count}


def evidence_of_kind(kind: Kind, evidence: Mapping[str, ChanceComparison]) -> ChanceComparison | None:
    """Return the numbers that decide whether heads have a kind; None if the statistic of the kind was not measured.

    For a kind with `of_largest` all numbers are divided by the chance level, so `chance` is 1.
    """
    found = evidence.get(kind.statistic)
    if found is None or kind.of_largest is None:
        return found
    largest = found.chance.clamp(min=1e-12)
    return ChanceComparison(
        found.mean / largest, (found.chance > 0).double(), found.standard_error / largest, found.num_observations
    )


def heads_with_kind(kind: Kind, found: ChanceComparison) -> Tensor:
    """Return which heads have a kind: (heads,) bool."""
    named = torch.ones_like(found.mean, dtype=torch.bool)
    if kind.of_largest is not None:
        named = (found.chance > 0) & (found.mean >= kind.of_largest)
    if kind.at_least is not None:
        named = named & (found.mean >= kind.at_least)
    if kind.above_chance is not None:
        named = named & exceeds_chance(found.mean - found.chance, found.standard_error, kind.above_chance)
    return named


def kinds_of_heads(
    evidence: Mapping[str, ChanceComparison],
    *,
    heads: int,
    cross_attention: bool = False,
    among: Sequence[Kind] = KINDS,
) -> tuple[tuple[str, ...], ...]:
    """Return the names of the kinds of each head of a layer, the most specific first.

    Shares must exceed chance, so a head with even weights has only the kind "broad", however short the text is.

    Args:
        evidence: name of a statistic -> its evidence; kinds whose statistic is missing are left out.
        heads: number of heads.
        cross_attention: whether this is cross-attention, for which some kinds are not defined.
        among: the kinds to choose from.

    >>> def found(mean, chance):
    ...     return ChanceComparison(
    ...         torch.tensor(mean), torch.full((2,), chance), torch.full((2,), 0.01), torch.full((2,), 9)
    ...     )
    >>> kinds_of_heads({"entropy": found([0.2, 4.1], 4.2), "previous_mass": found([0.91, 0.02], 0.02)}, heads=2)
    (('previous',), ('broad',))
    """
    measured = {
        kind: found
        for kind in among
        if not (cross_attention and kind.self_attention_only)
        and (found := evidence_of_kind(kind, evidence)) is not None
    }
    which = {kind: heads_with_kind(kind, found) for kind, found in measured.items()}
    named = []
    for head in range(heads):
        of_head = [kind for kind, heads_reached in which.items() if heads_reached[head]]
        hidden = {name for kind in of_head for name in kind.hides}
        shown = [kind for kind in of_head if kind.name not in hidden]
        shown.sort(key=lambda kind: (kind.rank, -float(measured[kind].mean[head])))
        named.append(tuple(kind.name for kind in shown) or (MIXED.name,))
    return tuple(named)


def layer_profiles(
    layers: Sequence[LayerRecord],
    *,
    sample: int | None = 0,
    special: Sequence[bool] | None = None,
    statistics: Mapping[str, Statistic] | None = None,
    among: Sequence[Kind] = KINDS,
    progress: Progress | None = None,
) -> list[LayerProfile]:
    """Compute the means, chance levels, kinds and mask of every layer of a record.

    Args:
        layers: the layers of a record.
        sample: index of the text; None combines all texts.
        special: one flag per token, True for special tokens ([CLS], [SEP], <s>), from which "separator_mass", the
            attention on special tokens after the first, is computed. None takes the flags of the recorded text.
        statistics: name -> statistic, for the statistics of the record that are not built in.
        among: the kinds to choose from.
        progress: called with (queries done, all queries) of a text while its chance levels are computed.
    """
    measure = partial(_statistics_and_chance, special=special, shown=statistics or {}, known={}, progress=progress)
    return [_profile_of_layer(layer, sample, measure, among) for layer in layers]


def _profile_of_layer(
    layer: LayerRecord, sample: int | None, measure: Callable[..., Any], among: Sequence[Kind]
) -> LayerProfile:
    samples = [layer.sample(each) for each in (range(layer.num_samples) if sample is None else [sample])]
    if not samples:
        raise empty_layer_error(layer.name)
    cross_attention = any(one.cross_attention or one.query_start + one.num_queries != one.num_keys for one in samples)
    seen = [visibility_of(one) for one in samples]
    measured = [measure(*each, cross_attention=cross_attention) for each in zip(samples, seen, strict=True)]
    means = summaries.summarise_samples([values for values, _ in measured], "mean")
    found = {
        name: compare_with_chance(
            [values[name].values for values, _ in measured],
            [levels[name] for _, levels in measured],
            [values[name].counted for values, _ in measured],
        )
        for name in means
        if all(name in levels for _, levels in measured)
    }
    if layer.repeated is not None:
        means |= layer.repeated.means()
        found |= {
            name: ChanceComparison(
                means[name], layer.repeated.chance[name], standard_error(each), torch.full_like(each[0], len(each))
            )
            for name, each in layer.repeated.shares.items()
            if name in layer.repeated.chance
        }
    named = kinds_of_heads(found, heads=layer.num_heads, cross_attention=cross_attention, among=among)
    means.pop(NEAR_MASS.name, None)  # used for kinds only, because records do not store the share near the query
    chances = {name: found[name].chance for name in means if name in found}
    return LayerProfile(
        layer.number, layer.name, means, chances, found, named, cross_attention, seen[0], repeated=layer.repeated
    )


def _statistics_and_chance(
    one: SampleRecord,
    visibility: Visibility,
    *,
    cross_attention: bool,
    special: Sequence[bool] | None,
    shown: Mapping[str, Statistic],
    known: ChanceCache,
    progress: Progress | None,
) -> tuple[dict[str, MeasuredStatistic], dict[str, Tensor]]:
    """Return the statistics of a sample, including separator and near mass, and the chance level of each."""
    found = dict(one.measured())
    marks = one.text.special if special is None else special
    marks = marks if marks is not None and len(marks) == one.num_keys else None
    levels = chance_of_probes(
        one, [*(statistic(name, shown) for name in found), NEAR_MASS], special=marks, known=known, progress=progress
    )
    if marks is not None and any(marks[1:]) and "special_mass" in found:
        # special_mass includes the first token if that token is special; its mass is subtracted.
        both = marks[0] and "first_mass" in found
        values, counted, _ = found["special_mass"]
        found[SEPARATOR_STATISTIC.name] = MeasuredStatistic(
            (values - found["first_mass"].values if both else values).clamp(min=0), counted
        )
        if "special_mass" in levels:
            level = levels["special_mass"] - levels["first_mass"] if both else levels["special_mass"]
            levels[SEPARATOR_STATISTIC.name] = level.clamp(min=0)
    if not cross_attention:
        found[NEAR_MASS.name] = MeasuredStatistic(near_mass(one, visibility), one.sees)
    return found, levels


def findings(
    profiles: Sequence[LayerKinds],
    *,
    tokens: Sequence[str] | None = None,
    special: Sequence[bool] | None = None,
    lang: str = "en",
    among: Sequence[Kind] = KINDS,
) -> HeadList[Finding]:
    """Find the most notable heads, at most six, and describe what each does; no head twice.

    A notable head clearly exceeds chance: it has the kind that its sentence is about, see `kinds_of_heads`, or a mean
    distance far above the chance level, see `MIN_EXCESS_DISTANCE`. A model with random weights has no notable heads.

    Args:
        profiles: the layers of a record or of a census.
        tokens: tokens of the text, so that a sentence can name the first token.
        special: one flag per token, as in `layer_profiles`.
        lang: "en" or "zh".
        among: the kinds to choose from.
    """
    words = section(lang, "common", "findings")

    def quote(token: str) -> str:
        return words["quoted"].format(token=isolate_direction(escape_controls(label_of_token(token))))

    first = quote(tokens[0]) if tokens else words["a first token"]
    separators = {token for token, mark in zip(tokens or (), special or (), strict=False) if mark}
    separators -= {tokens[0]} if tokens else set()
    separator = quote(separators.pop()) if len(separators) == 1 else words["separators"]
    starts = {one.repeated.start_token for one in profiles if one.repeated is not None} - {""}
    after_start = words["after start"].format(token=quote(starts.pop())) if len(starts) == 1 else ""
    ranked = [(kind.finding, kind.name, kind) for kind in among if kind.finding is not None]
    topics: list[Kind | None] = [
        kind for *_, kind in sorted([*ranked, (RANK_OF_DISTANCE_FINDING, DISTANCE_TOPIC, None)], key=itemgetter(0))
    ]
    near = {kind.name for kind in among if DISTANCE_TOPIC in kind.hides}
    found = HeadList[Finding]()
    taken: set[tuple[int, int]] = set()
    for topic in topics:
        heads = [each for each in _heads_of_topic(topic, profiles, near) if each[:2] not in taken]
        if not heads:
            continue
        place, head, value, level = max(heads, key=lambda each: (each[2], -each[0], -each[1]))
        profile = profiles[place]
        if topic is None:
            values = {"value": _format_rounded(value), "chance": _format_rounded(level)}
            brief, sentence = (words[each].format(**values) for each in ("distance.brief", "distance.sentence"))
        else:
            names = {"first": first, "separator": separator, "after_start": after_start}
            brief, sentence = (topic.fill_sentence(part, lang, value, level, **names) for part in ("brief", "sentence"))
        opening = words["place"].format(layer=profile.number, head=head)
        brief = (opening + words["join.sentences"] + brief).replace("\u00a0", " ")
        name = DISTANCE_TOPIC if topic is None else topic.name
        count = _describe_count(topic, profiles, words)
        found.append(Finding(name, profile.number, head, value, level, sentence, count, brief))
        taken.add((place, head))
        if len(found) == MAX_FINDINGS:
            break
    return found


def heads_of_short_table(found: Sequence[Finding], kinds: Sequence[HeadKind]) -> dict[tuple[int, int], int]:
    """Return (layer, head) -> rank from 0, for the heads that a short table shows first.

    The heads of the findings come first, then the strongest head of each kind, the second strongest of each, and so on.
    """
    by_kind = [list(heads) for _, heads in groupby(kinds, key=lambda each: each.kind)]
    ranked = chain(found, *zip_longest(*by_kind))
    places = dict.fromkeys((each.layer, each.head) for each in ranked if each is not None)
    return {place: rank for rank, place in enumerate(places)}


def _format_rounded(value: float) -> str:
    return f"{value:.0f}" if value >= 9.95 else f"{value:.1f}"


def _heads_of_topic(
    topic: Kind | None, profiles: Sequence[LayerKinds], near: Collection[str] = ()
) -> Iterator[tuple[int, int, float, float]]:
    """Yield (index of the layer, head, value, chance level) for the heads that a finding may be about.

    Without a topic, yield the heads with a large mean distance and no kind in `near`.
    """
    for layer, one in enumerate(profiles):
        found = one.evidence.get("mean_distance") if topic is None else evidence_of_kind(topic, one.evidence)
        if found is None or (topic is None and one.cross_attention):
            continue
        if topic is None:
            level = found.chance
            far = exceeds_chance((found.mean - level) / level, found.standard_error / level, MIN_EXCESS_DISTANCE) & (
                level > 0
            )
            chosen = [bool(each) and not {*near} & {*named} for each, named in zip(far, one.kinds, strict=True)]
        else:
            chosen = [topic.name in named for named in one.kinds]
        for head, is_one in enumerate(chosen):
            if is_one:
                yield layer, head, float(found.mean[head]), float(found.chance[head])


def _describe_count(topic: Kind | None, profiles: Sequence[LayerKinds], words: Mapping[str, str]) -> str:
    if topic is None:
        values = torch.cat([one.means["mean_distance"] for one in profiles if "mean_distance" in one.means])
        return words["count.mean"].format(value=f"{float(values.nanmean()):.1f}")
    layers = Counter(layer for layer, *_ in _heads_of_topic(topic, profiles))
    number, heads = sum(layers.values()), sum(len(one.kinds) for one in profiles)
    most, in_one = layers.most_common(1)[0]
    if number <= 4 or len(layers) == 1:
        key = "count.one" if number == 1 else "count.some"
    else:
        key = "count.most" if in_one > number / 2 else "count.spread"
    return words[key].format(number=number, heads=heads, layer=profiles[most].number, layers=len(layers))
