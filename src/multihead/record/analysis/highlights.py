"""Classify heads into kinds, and find and describe the most notable heads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, groupby, zip_longest
from operator import itemgetter

import torch

from multihead.errors import ProbeError
from multihead.kinds import KINDS, Kind, kinds_named
from multihead.locale.escaping import escape_controls, isolate_direction, label_of_token
from multihead.locale.texts import section
from multihead.probes.catalogue import MEAN_DISTANCE
from multihead.record.chance import (
    exceeds_chance,
)
from multihead.record.profiles import LayerKinds, evidence_of_kind
from multihead.record.table import HeadList, HeadOfLayer, OneLineRepr

MIN_EXCESS_DISTANCE = 0.5
"""A head attends far away if its mean distance exceeds the chance level by this share of the chance level, and by
three standard errors."""

DISTANCE_TOPIC = "distance"
"""Topic of the finding about the head with the largest distance, which is not a kind."""

RANK_OF_DISTANCE_FINDING = 90
"""Rank of the finding about the largest distance among all findings, see `Kind.finding`."""

MAX_FINDINGS = 6

MAX_TEXTS_COMPARED = 200
"""Largest number of texts whose heads are also described text by text: each takes tenths of a second."""


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


@dataclass(frozen=True)
class OverTexts:
    """What a head does on each of several texts.

    Attributes:
        number: number of texts.
        having: number of texts on which the head, taken alone, has the kind that the finding is about.
        spread: standard deviation of the value over the texts.
        sentence: these numbers as a sentence.
    """

    number: int
    having: int
    spread: float
    sentence: str


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
        over_texts: how the value differs from text to text; None for one text, and for kinds measured on other texts.
    """

    topic: str
    layer: int
    head: int
    value: float
    chance: float
    sentence: str
    count: str
    brief: str
    over_texts: OverTexts | None = None

    def __str__(self) -> str:
        """Return `brief`, such as "layer 2 head 7: 91 % on the previous token (chance 4.8 %)"."""
        return self.brief

    def cells(self) -> dict[str, str]:
        """Return the finding as a row of a table: heading -> text."""
        found = {"layer": str(self.layer), "head": str(self.head), "finding": self.sentence, "heads": self.count}
        return found if self.over_texts is None else found | {"texts": self.over_texts.sentence}


def findings(
    profiles: Sequence[LayerKinds],
    *,
    tokens: Sequence[str] | None = None,
    special: Sequence[bool] | None = None,
    lang: str = "en",
    among: Sequence[Kind] = KINDS,
    by_text: Sequence[Sequence[LayerKinds]] = (),
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
        by_text: the layers on each of several texts alone, where `profiles` are over all of them.
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
        over_texts = _describe_texts(topic, place, head, by_text, near, words)
        if over_texts is not None:
            brief = f"{brief}; {over_texts.sentence}"
        found.append(Finding(name, profile.number, head, value, level, sentence, count, brief, over_texts))
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
        found = one.evidence.get(MEAN_DISTANCE.name) if topic is None else evidence_of_kind(topic, one.evidence)
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


def _describe_texts(
    topic: Kind | None,
    place: int,
    head: int,
    by_text: Sequence[Sequence[LayerKinds]],
    near: Collection[str],
    words: Mapping[str, str],
) -> OverTexts | None:
    """Describe a topic of one head, of the layer with the index `place`, on each of several texts."""
    if len(by_text) < 2 or (topic is not None and topic.texts == "repeats"):
        return None
    values, having = [], 0
    for profiles in by_text:
        of_layer = profiles[place].evidence
        found = of_layer.get(MEAN_DISTANCE.name) if topic is None else evidence_of_kind(topic, of_layer)
        if found is not None and found.num_observations[head]:
            values.append(float(found.mean[head]))
        having += any(each[:2] == (place, head) for each in _heads_of_topic(topic, profiles, near))
    spread = float(torch.tensor(values, dtype=torch.float64).std()) if len(values) > 1 else 0.0
    written = _format_rounded(spread) if topic is None else topic.format_value(spread)
    values_of_sentence = {"number": f"{len(by_text):,}", "having": f"{having:,}", "spread": written}
    return OverTexts(len(by_text), having, spread, words["over texts"].format(**values_of_sentence))


def _describe_count(topic: Kind | None, profiles: Sequence[LayerKinds], words: Mapping[str, str]) -> str:
    if topic is None:
        values = torch.cat([one.means[MEAN_DISTANCE.name] for one in profiles if MEAN_DISTANCE.name in one.means])
        return words["count.mean"].format(value=f"{float(values.nanmean()):.1f}")
    layers = Counter(layer for layer, *_ in _heads_of_topic(topic, profiles))
    number, heads = sum(layers.values()), sum(len(one.kinds) for one in profiles)
    most, in_one = layers.most_common(1)[0]
    if number <= 4 or len(layers) == 1:
        key = "count.one" if number == 1 else "count.some"
    else:
        key = "count.most" if in_one > number / 2 else "count.spread"
    return words[key].format(number=number, heads=heads, layer=profiles[most].number, layers=len(layers))
