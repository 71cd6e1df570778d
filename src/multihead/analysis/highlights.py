"""Name the kinds of each head, and find the heads worth a look."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from multihead.analysis.chance import Known, Progress, chance, evidence, standard_error, stands_out
from multihead.analysis.visibility import NEAR, Visibility, near_mass, visibility_of
from multihead.escaping import visible
from multihead.locale.texts import section
from multihead.probes.catalogue import REPEATED, SEPARATOR, statistic
from multihead.probes.probe import Statistic
from multihead.record import summaries
from multihead.record.layer import LayerRecord
from multihead.record.sample import SampleRecord
from multihead.record.summaries import Measured

PLACES = {
    "previous": "previous_mass",
    "next": "next_mass",
    "self": "self_mass",
    "first": "first_mass",
    "separator": SEPARATOR.name,
    "duplicate": "duplicate_mass",
    "induction": "induction_mass",
}
"""Kinds named after a place in the text -> the statistic that measures the attention there."""

REPEATED_KINDS = tuple(REPEATED)
"""Kinds measured on repeated random tokens, see `observation.textbook`; each is the name of its statistic too."""

KINDS = (*PLACES, "local", "broad", *REPEATED_KINDS, "mixed")
"""The kinds of heads, in the order in which they are listed."""

MASS_SHARE = 0.35
"""A head is named after a place if its share of attention there, the mean over the queries that have such a key,
exceeds chance by this much, and by three standard errors."""

LOCAL_SHARE = 0.5
"""A head is local if at least this share of its attention stays within `visibility.LOCAL_REACH` tokens, and exceeds
chance as for a place."""

BROAD_SHARE = 0.85
"""A head is broad if its entropy is at least this share of the largest that its mask allows."""

FARTHER = 0.5
"""A head reaches far if its mean distance exceeds that of an even spread by this share of it, and by three standard
errors."""

MOST_FINDINGS = 6

_NEIGHBOURS = {"previous", "next", "self"}  # such a head is local too, which says nothing new
_TOPICS = (
    "repeated_induction",
    "previous",
    "next",
    "first",
    "repeated_duplicate",
    "self",
    "induction",
    "duplicate",
    "distance",
    "separator",
    "repeated_previous",
    "repeated_first",
)


@dataclass(frozen=True, eq=False)
class LayerProfile:
    """One layer of a record as the report and the terminal read it.

    Attributes:
        number: the layer's number.
        name: the layer's module path.
        means: statistic -> (heads,) float64, the means over the queries that see a key;
            "separator_mass" is added where special tokens after the first are known, and the statistics of repeated
            random tokens where they were measured.
        chance: statistic -> (heads,) float64, what an even spread over the visible keys gives; only the statistics
            that have such a number.
        errors: statistic -> (heads,) float64, the standard error of mean - chance, for the same statistics.
        kinds: per head, one or more of `KINDS`, the most specific first.
        near: (heads,) float64, the share of attention within `visibility.LOCAL_REACH` tokens of the query; None in
            cross-attention.
        visibility: what the queries may see.
        crosses: whether the keys are another text than the queries (cross-attention).
    """

    number: int
    name: str
    means: dict[str, Tensor]
    chance: dict[str, Tensor]
    errors: dict[str, Tensor]
    kinds: tuple[tuple[str, ...], ...]
    near: Tensor | None
    visibility: Visibility
    crosses: bool

    def row(self, head: int) -> dict[str, str | float]:
        """Return what a row of a table shows of a head next to its means: its kinds, and the chance of each statistic.

        The kinds are one word, such as "first+local", and the chance of `previous_mass` is `previous_mass_chance`.
        """
        chances = {f"{name}_chance": float(values[head]) for name, values in self.chance.items()}
        return {"kind": "+".join(self.kinds[head]), **chances}


@dataclass(frozen=True)
class Finding:
    """One head that stands out, described in a sentence.

    Attributes:
        topic: what it is about: one of `KINDS`, or "distance".
        layer: the layer's number.
        head: the head's index in its layer.
        value: the number in the sentence (a share from 0 to 1, or tokens).
        chance: what an even spread over the visible keys gives.
        sentence: what the head does; its subject is the head.
        count: how many heads do the same, a sentence.
        brief: the finding in one short line, for a terminal.
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
        """The brief line: "layer 2 head 7: 91 % on the previous token (chance 4.8 %)"."""
        return self.brief


def kinds(
    means: Mapping[str, Tensor],
    chances: Mapping[str, Tensor],
    errors: Mapping[str, Tensor],
    *,
    heads: int,
    crosses: bool = False,
) -> tuple[tuple[str, ...], ...]:
    """Name the kinds of each head of a layer by the thresholds of this file; a head may have several.

    A share must exceed chance by `MASS_SHARE` and by three standard errors. So an even spread has no kind but broad,
    however short the text. Kinds measured on repeated random tokens come first if the
    head copies, then the places on the text from the largest share on.

    Args:
        means: statistic -> (heads,) means over queries; missing statistics name no head.
        chances: statistic -> (heads,), what an even spread gives; a statistic without it names no head.
        errors: statistic -> (heads,), the standard error of mean - chance.
        heads: how many heads.
        crosses: whether the keys are another text, where previous, next, self and local mean nothing.

    >>> means = {"entropy": torch.tensor([0.2, 4.1]), "previous_mass": torch.tensor([0.91, 0.02])}
    >>> chances = {"entropy": torch.full((2,), 4.2), "previous_mass": torch.full((2,), 0.02)}
    >>> kinds(means, chances, {"previous_mass": torch.full((2,), 0.01)}, heads=2)
    (('previous',), ('broad',))
    """
    places = {kind: PLACES[kind] for kind in (("first", "separator") if crosses else PLACES)}
    places |= {kind: kind for kind in REPEATED_KINDS}
    if not crosses:
        places["local"] = NEAR.name
    reached = {
        kind: stands_out(means[name] - chances[name], errors[name], MASS_SHARE)
        for kind, name in places.items()
        if name in means and name in chances
    }
    if "local" in reached:
        reached["local"] &= means[NEAR.name] >= LOCAL_SHARE
    if "entropy" in means and "entropy" in chances:
        reached["broad"] = (chances["entropy"] > 0) & (means["entropy"] >= BROAD_SHARE * chances["entropy"])

    def order(kind: str, head: int) -> tuple[int, float]:
        if kind in PLACES:
            return 1, -float(means[PLACES[kind]][head])
        return (0 if kind in REPEATED_KINDS[:2] else 2), KINDS.index(kind)

    named = []
    for head in range(heads):
        found = {kind for kind, heads_reached in reached.items() if heads_reached[head]}
        if found & _NEIGHBOURS:
            found.discard("local")
        named.append(tuple(sorted(found, key=lambda kind: order(kind, head))) or ("mixed",))
    return tuple(named)


def layer_profiles(
    layers: Sequence[LayerRecord],
    *,
    sample: int | None = 0,
    special: Sequence[bool] | None = None,
    statistics: Mapping[str, Statistic] | None = None,
    progress: Progress | None = None,
) -> list[LayerProfile]:
    """Read the means, their chance, the kinds and the masks of every layer of a record.

    Args:
        layers: the layers of a record.
        sample: index of the text; None reads all texts together.
        special: one flag per token, True for special tokens ([CLS], [SEP], <s>); with it, attention on special
            tokens after the first is listed as "separator_mass". None takes the flags of the recorded text.
        statistics: the statistics of the record that are not built in; those that are probes have a chance too.
        progress: called with the queries done and all queries of a text, while the chance of its mask is computed.
    """
    profiles = []
    known: Known = {}
    shown = statistics or {}
    for layer in layers:
        texts = range(layer.num_samples) if sample is None else [sample]
        levels = partial(_measured, special=special, shown=shown, known=known, progress=progress)
        profiles.append(_profile(layer, [layer.sample(each) for each in texts], levels))
    return profiles


def _profile(layer: LayerRecord, samples: Sequence[SampleRecord], measured_of: Callable[..., Any]) -> LayerProfile:
    crosses = any(one.crosses or one.query_start + one.num_queries != one.num_keys for one in samples)
    seen = [visibility_of(one) for one in samples]
    measured = [measured_of(*each, crosses=crosses) for each in zip(samples, seen, strict=True)]
    means = summaries.summary([values for values, _ in measured], "mean")
    found = {
        name: evidence(
            [values[name].values for values, _ in measured],
            [levels[name] for _, levels in measured],
            [values[name].counted for values, _ in measured],
        )
        for name in means
        if all(name in levels for _, levels in measured)
    }
    chances = {name: each.chance for name, each in found.items()}
    errors = {name: each.error for name, each in found.items()}
    if layer.repeated is not None:
        means |= layer.repeated.means()
        chances |= layer.repeated.chance
        errors |= {name: standard_error(shares) for name, shares in layer.repeated.shares.items()}
    named = kinds(means, chances, errors, heads=layer.num_heads, crosses=crosses)
    near, *_ = (each.pop(NEAR.name, None) for each in (means, chances, errors))  # it is no statistic of the record
    return LayerProfile(layer.number, layer.name, means, chances, errors, named, near, seen[0], crosses)


def _measured(
    one: SampleRecord,
    visibility: Visibility,
    *,
    crosses: bool,
    special: Sequence[bool] | None,
    shown: Mapping[str, Statistic],
    known: Known,
    progress: Progress | None,
) -> tuple[dict[str, Measured], dict[str, Tensor]]:
    """Return the statistics of a sample per query, with those that are derived here, and the chance of each."""
    found = dict(one.measured())
    marks = one.text.special if special is None else special
    marks = marks if marks is not None and len(marks) == one.num_keys else None
    levels = chance(
        one, [*(statistic(name, shown) for name in found), NEAR], special=marks, known=known, progress=progress
    )
    if marks is not None and any(marks[1:]) and "special_mass" in found:
        # special_mass counts the first token too if that is a special token itself.
        both = marks[0] and "first_mass" in found
        values, counted = found["special_mass"]
        found[SEPARATOR.name] = Measured(
            (values - found["first_mass"].values if both else values).clamp(min=0), counted
        )
        if "special_mass" in levels:
            level = levels["special_mass"] - levels["first_mass"] if both else levels["special_mass"]
            levels[SEPARATOR.name] = level.clamp(min=0)
    if not crosses:
        found[NEAR.name] = Measured(near_mass(one, visibility), one.sees)
    return found, levels


def findings(
    layers: Sequence[LayerRecord],
    *,
    sample: int | None = 0,
    tokens: Sequence[str] | None = None,
    special: Sequence[bool] | None = None,
    lang: str = "en",
    profiles: Sequence[LayerProfile] | None = None,
) -> list[Finding]:
    """Find the most notable heads, at most six, and describe what each does; no head twice.

    Each exceeds chance clearly: it has the kind that the sentence is about, see `kinds`, or reaches farther than an
    even spread by `FARTHER` and three standard errors. A model with random weights has none.

    Args:
        layers: the layers of a record.
        sample: index of the text; None takes all texts together.
        tokens: the text's tokens, so that a sentence can name the first one.
        special: one flag per token, as in `layer_profiles`.
        lang: "en" or "zh".
        profiles: the result of `layer_profiles`, if the caller has it.
    """
    words = section(lang, "common", "findings")
    read = profiles if profiles is not None else layer_profiles(layers, sample=sample, special=special)
    first = visible(tokens[0]) if tokens else words["a first token"]
    separators = {token for token, mark in zip(tokens or (), special or (), strict=False) if mark}
    separators -= {tokens[0]} if tokens else set()
    separator = visible(separators.pop()) if len(separators) == 1 else words["separators"]
    found: list[Finding] = []
    taken: set[tuple[int, int]] = set()
    for topic in _TOPICS:
        ranked = ((value, -layer, -head) for layer, head, value in _heads_of(topic, read) if (layer, head) not in taken)
        value, layer, head = max(ranked, default=(0.0, 1, 0))
        if layer > 0:
            continue  # no head
        profile, head = read[-layer], -head
        level = float(profile.chance[_statistic(topic)][head])
        far = topic == "distance"
        values = {
            "share": percent(value),
            "value": f"{value:.0f}" if value >= 9.95 else f"{value:.1f}",
            "chance": f"{level:.0f}" if far and level >= 9.95 else f"{level:.1f}" if far else percent(level),
            "first": first,
            "separator": separator,
        }
        place = words["place"].format(layer=profile.number, head=head)
        brief = (place + words["join.sentences"] + words[f"{topic}.brief"].format(**values)).replace("\u00a0", " ")
        sentence = words[f"{topic}.sentence"].format(**values)
        count = _count(topic, read, words)
        found.append(Finding(topic, profile.number, head, value, level, sentence, count, brief))
        taken.add((-layer, head))
        if len(found) == MOST_FINDINGS:
            break
    return found


def percent(share: float) -> str:
    r"""A share as a percentage, with a decimal below ten; the space before the sign does not break.

    >>> percent(0.673), percent(0.0132)
    ('67\xa0%', '1.3\xa0%')
    """
    return f"{share * 100:.{1 if share < 0.0995 else 0}f}\u00a0%"


def _statistic(topic: str) -> str:
    return "mean_distance" if topic == "distance" else PLACES.get(topic, topic)


def _heads_of(topic: str, profiles: Sequence[LayerProfile]) -> Iterator[tuple[int, int, float]]:
    """List the heads that a finding may be about: index of the layer, head, number."""
    name = _statistic(topic)
    for layer, one in enumerate(profiles):
        if topic == "distance":
            if one.crosses or name not in one.chance:
                continue
            excess, level = one.means[name] - one.chance[name], one.chance[name]
            far = (stands_out(excess / level, one.errors[name] / level, FARTHER) & (level > 0)).tolist()
            # The first token is far from most queries, and a head that rests on it does not read far.
            chosen = [each and "first" not in named for each, named in zip(far, one.kinds, strict=True)]
        else:
            chosen = [topic in named for named in one.kinds]
        yield from ((layer, head, float(one.means[name][head])) for head, is_one in enumerate(chosen) if is_one)


def _count(topic: str, profiles: Sequence[LayerProfile], words: Mapping[str, str]) -> str:
    if topic == "distance":
        values = torch.cat([one.means[_statistic(topic)] for one in profiles if _statistic(topic) in one.means])
        return words["count.mean"].format(value=f"{float(values.nanmean()):.1f}")
    layers = Counter(layer for layer, _, _ in _heads_of(topic, profiles))
    number, heads = sum(layers.values()), sum(len(one.kinds) for one in profiles)
    most, in_one = layers.most_common(1)[0]
    if number <= 4 or len(layers) == 1:
        key = "count.one" if number == 1 else "count.some"
    else:
        key = "count.most" if in_one > number / 2 else "count.spread"
    return words[key].format(number=number, heads=heads, layer=profiles[most].number, layers=len(layers))
