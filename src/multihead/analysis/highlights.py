"""Name the kind of each head, and find the heads worth a look."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from multihead.analysis.visibility import Visibility, near_mass, visibility_of
from multihead.escaping import visible
from multihead.locale.texts import section
from multihead.record.layer import LayerRecord

KINDS = ("previous", "next", "self", "first", "separator", "duplicate", "induction", "local", "broad", "mixed")
"""The kinds of heads, in the order in which they are listed."""

MASS_SHARE = 0.35
"""A head is named after one place (previous, next, self, first, separator, duplicate, induction) from this share of
its attention on, the mean over the queries that have such a key."""

LOCAL_SHARE = 0.5
"""A head is local if at least this share of its attention stays within `visibility.LOCAL_REACH` tokens."""

BROAD_SHARE = 0.85
"""A head is broad if its entropy is at least this share of the largest that its mask allows."""

_MASSES = {
    "previous": "previous_mass",
    "next": "next_mass",
    "self": "self_mass",
    "first": "first_mass",
    "duplicate": "duplicate_mass",
    "induction": "induction_mass",
}


@dataclass(frozen=True, eq=False)
class LayerProfile:
    """One layer of a record as the report and the terminal read it.

    Attributes:
        number: the layer's number.
        name: the layer's module path.
        means: statistic -> (heads,) float64, the means over the queries that see a key;
            "separator_mass" is added where special tokens after the first are known.
        kinds: one of `KINDS` a head.
        visibility: what the queries may see.
        crosses: whether the keys are another text than the queries (cross-attention).
    """

    number: int
    name: str
    means: dict[str, Tensor]
    kinds: tuple[str, ...]
    visibility: Visibility
    crosses: bool


@dataclass(frozen=True)
class Finding:
    """One head that stands out, described in a sentence.

    Attributes:
        topic: what it is about: one of `KINDS`, "distance" or "focused".
        layer: the layer's number.
        head: the head's index in its layer.
        value: the number in the sentence (a share from 0 to 1, keys, or tokens).
        sentence: what the head does; its subject is the head.
        count: how many heads do the same, a sentence.
        brief: the finding in one short line, for a terminal.
    """

    topic: str
    layer: int
    head: int
    value: float
    sentence: str
    count: str
    brief: str

    def __str__(self) -> str:
        """The brief line: "layer 2 head 7: 91 % on the previous token"."""
        return self.brief


def kinds(
    means: Mapping[str, Tensor], *, largest_entropy: Tensor, near: Tensor | None = None, crosses: bool = False
) -> tuple[str, ...]:
    """Name the kind of each head of a layer by the thresholds of this file.

    Broad heads are tested first (in a short text an even spread would pass other thresholds as well), then
    the place with the largest share, then local, then mixed.

    Args:
        means: statistic -> (heads,) means over queries; missing statistics name no head.
        largest_entropy: (heads,) nats, the entropy of an even spread over all that may be seen.
        near: (heads,) share of attention within `visibility.LOCAL_REACH` tokens of the query.
        crosses: whether the keys are another text, where previous, next, self and local mean nothing.

    >>> shares = {"entropy": torch.tensor([0.2, 4.1, 2.0]), "previous_mass": torch.tensor([0.91, 0.02, 0.1])}
    >>> kinds(shares, largest_entropy=torch.full((3,), 4.2), near=torch.tensor([0.95, 0.1, 0.6]))
    ('previous', 'broad', 'local')
    """
    places = {"first": "first_mass"} if crosses else {**_MASSES, "separator": "separator_mass"}
    named = []
    for head in range(len(largest_entropy)):
        shares = {kind: float(means[name][head]) for kind, name in places.items() if name in means}
        best = max(shares, key=lambda kind: shares[kind], default="")
        highest = float(largest_entropy[head])
        if "entropy" in means and highest > 0 and float(means["entropy"][head]) >= BROAD_SHARE * highest:
            named.append("broad")
        elif best and shares[best] >= MASS_SHARE:
            named.append(best)
        elif near is not None and not crosses and float(near[head]) >= LOCAL_SHARE:
            named.append("local")
        else:
            named.append("mixed")
    return tuple(named)


def layer_profiles(
    layers: Sequence[LayerRecord],
    *,
    sample: int = 0,
    special: Sequence[bool] | None = None,
) -> list[LayerProfile]:
    """Read the means, the kinds and the masks of every layer of a record, for one sample.

    Args:
        layers: the layers of a record.
        sample: index of the text.
        special: one flag per token, True for special tokens ([CLS], [SEP], <s>); with it, attention on special
            tokens after the first is listed as "separator_mass". None takes the flags of the recorded text.
    """
    profiles = []
    for layer in layers:
        one = layer.sample(sample)
        marks = one.text.special if special is None else special
        means = {name: value.double() for name, value in one.means.items()}
        crosses = one.crosses or one.query_start + one.num_queries != one.num_keys
        if marks is not None and any(marks[1:]) and len(marks) == one.num_keys and "special_mass" in means:
            # special_mass counts the first token too if that is a special token itself.
            first = means["first_mass"] if marks[0] and "first_mass" in means else torch.zeros(())
            means["separator_mass"] = (means["special_mass"] - first).clamp(min=0)
        seen = visibility_of(one)
        named = kinds(means, largest_entropy=seen.largest_entropy, near=near_mass(one, seen), crosses=crosses)
        profiles.append(LayerProfile(layer.number, layer.name, means, kinds=named, visibility=seen, crosses=crosses))
    return profiles


def findings(
    layers: Sequence[LayerRecord],
    *,
    sample: int = 0,
    tokens: Sequence[str] | None = None,
    special: Sequence[bool] | None = None,
    lang: str = "en",
    profiles: Sequence[LayerProfile] | None = None,
) -> list[Finding]:
    """Find the most notable heads, at most six, and describe what each does; no head twice.

    Args:
        layers: the layers of a record.
        sample: index of the text.
        tokens: the text's tokens, so that a sentence can name the first one.
        special: one flag a token, as in `layer_profiles`.
        lang: "en" or "zh".
        profiles: the result of `layer_profiles`, if the caller has it.
    """
    words = section(lang, "common", "findings")
    read = profiles if profiles is not None else layer_profiles(layers, sample=sample, special=special)
    heads = _HeadList(read)
    first = visible(tokens[0]) if tokens else words["a first token"]
    separators = {token for token, mark in zip(tokens or (), special or (), strict=False) if mark}
    separators -= {tokens[0]} if tokens else set()
    separator = visible(separators.pop()) if len(separators) == 1 else words["separators"]
    found: list[Finding] = []
    taken: set[tuple[int, int]] = set()
    for topic in _TOPICS:
        best = topic.best(heads, taken)
        if best is None:
            continue
        layer, head, value = best
        number = read[layer].number
        passed = topic.kind is None or heads.kind(layer, head) == topic.kind or value >= topic.threshold
        short = words[f"{topic.name}.short"]
        short = short if passed else words.get(f"{topic.name}.short weak", short)
        values = {
            "share": percent(value),
            "value": f"{value:.0f}" if value >= 9.95 else f"{value:.1f}",
            "keys": f"{float(read[layer].visibility.mean_keys[head]):.0f}",
            "first": first,
            "separator": separator,
        }
        sentence = words[f"{topic.name}.{'strong' if passed else 'weak'}"].format(**values)
        place = words["place"].format(layer=number, head=head)
        brief = (place + words["join.sentences"] + short.format(**values)).replace("\u00a0", " ")
        found.append(Finding(topic.name, number, head, value, sentence, _count(topic, heads, words), brief))
        taken.add((layer, head))
        if len(found) == 6:
            break
    return found


def percent(share: float) -> str:
    r"""A share as a percentage, with a decimal below ten; the space before the sign does not break.

    >>> percent(0.673), percent(0.0132)
    ('67\xa0%', '1.3\xa0%')
    """
    return f"{share * 100:.{1 if share < 0.0995 else 0}f}\u00a0%"


class _HeadList:
    """All heads of the readings, each found by the place of its layer in the record and its index."""

    def __init__(self, profiles: Sequence[LayerProfile]) -> None:
        self.profiles = profiles
        self.places = [(layer, head) for layer, read in enumerate(profiles) for head in range(len(read.kinds))]

    def kind(self, layer: int, head: int) -> str:
        return self.profiles[layer].kinds[head]

    def value(self, layer: int, head: int, name: str) -> float:
        means = self.profiles[layer].means
        return float(means[name][head]) if name in means else math.nan


def _value(value: float, visibility: Visibility, head: int) -> float:
    return value


def _evenness(value: float, visibility: Visibility, head: int) -> float:
    # In keys, not nats; the mask allows a late query more of them than an early one.
    return value / max(1e-9, float(visibility.mean_keys[head]))


def _sharpness(value: float, visibility: Visibility, head: int) -> float:
    return -value


@dataclass(frozen=True)
class _Topic:
    """One thing to look for: the statistic that ranks heads, and the kind whose heads are counted."""

    name: str
    statistic: str
    kind: str | None
    threshold: float = MASS_SHARE
    needs_self: bool = True  # whether it means something only where queries and keys are one text
    rank: Callable[[float, Visibility, int], float] = _value
    least: float = 0.01  # smaller values are not reported

    def best(self, heads: _HeadList, taken: set[tuple[int, int]]) -> tuple[int, int, float] | None:
        ranked = []
        for layer, head in heads.places:
            read = heads.profiles[layer]
            value = heads.value(layer, head, self.statistic)
            if (layer, head) in taken or (self.needs_self and read.crosses) or not value >= self.least:
                continue
            ranked.append((self.rank(value, read.visibility, head), -layer, -head, value))
        if not ranked:
            return None
        _, layer, head, value = max(ranked)
        return -layer, -head, value


_TOPICS = (
    _Topic("previous", "previous_mass", "previous"),
    _Topic("next", "next_mass", "next"),
    _Topic("first", "first_mass", "first", needs_self=False),
    _Topic("broad", "effective_keys", "broad", threshold=math.inf, needs_self=False, rank=_evenness),
    _Topic("self", "self_mass", "self"),
    _Topic("induction", "induction_mass", "induction"),
    _Topic("duplicate", "duplicate_mass", "duplicate"),
    _Topic("distance", "mean_distance", None),
    _Topic("separator", "separator_mass", "separator", needs_self=False),
    _Topic("focused", "effective_keys", None, needs_self=False, rank=_sharpness),
)


def _count(topic: _Topic, heads: _HeadList, words: Mapping[str, str]) -> str:
    if topic.kind is None:
        values = [heads.value(*place, topic.statistic) for place in heads.places]
        values = [value for value in values if not math.isnan(value)]
        return words["count.mean"].format(value=f"{sum(values) / len(values):.1f}")
    layers = Counter(layer for layer, head in heads.places if heads.kind(layer, head) == topic.kind)
    number = sum(layers.values())
    share = percent(BROAD_SHARE if topic.kind == "broad" else MASS_SHARE)
    if not number:
        return words["count.none"].format(share=share)
    key = "count.one" if number == 1 else "count.most" if number > 4 and len(layers) > 1 else "count.some"
    most = min(layers, key=lambda layer: (-layers[layer], layer))
    return words[key].format(number=number, heads=len(heads.places), layer=heads.profiles[most].number)
