"""Say in words what the heads of a record do: the kind of each head, and the findings worth a look."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import torch
from torch import Tensor

from multihead.errors import ArgumentError
from multihead.escaping import visible
from multihead.observation.seeing import Sight, near_mass, read_sight
from multihead.observation.speech import SPEECH
from multihead.observation.texts import Text

if TYPE_CHECKING:
    from multihead.observation.record import Record

KINDS = ("previous", "next", "self", "first", "separator", "duplicate", "induction", "local", "broad", "mixed")
"""The kinds of heads, in the order in which they are listed."""

MASS_SHARE = 0.35
"""A head is named after one place (previous, next, self, first, separator, duplicate, induction) from this share of
its attention on, the mean over the queries that have such a key."""

LOCAL_SHARE = 0.5
"""A head is local if at least this share of its attention stays within `seeing.LOCAL_REACH` tokens."""

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
class LayerReading:
    """One layer of a record as the report and the terminal read it.

    Attributes:
        number: the layer's number.
        name: the layer's module path.
        means: statistic -> (heads,) float64, the means over the queries that see a key;
            "separator_mass" is added where special tokens after the first are known.
        kinds: one of `KINDS` a head.
        sight: what the queries may see.
        crosses: whether the keys are another text than the queries (cross-attention).
    """

    number: int
    name: str
    means: dict[str, Tensor]
    kinds: tuple[str, ...]
    sight: Sight
    crosses: bool


@dataclass(frozen=True)
class Finding:
    """One thing that stands out, in words.

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

    Broad heads are told first (in a short text an even spread would pass other thresholds as well), then
    the place with the largest share, then local, then mixed.

    Args:
        means: statistic -> (heads,) means over queries; missing statistics name no head.
        largest_entropy: (heads,) nats, the entropy of an even spread over all that may be seen.
        near: (heads,) share of attention within `seeing.LOCAL_REACH` tokens of the query.
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


def read_layers(
    record: Record,
    *,
    sample: int = 0,
    special: Sequence[bool] | None = None,
    layers: Sequence[int] | None = None,
) -> list[LayerReading]:
    """Read the means, the kinds and the masks of every layer of a record, for one sample.

    Args:
        record: what was observed.
        sample: which text of the record.
        special: one flag a token, True for the model's own marks ([CLS], [SEP], <s>); with it, attention on
            special tokens after the first is told apart as "separator_mass". None = as the record's own text says.
        layers: which layers, by their place in the record; None reads all.
    """
    readings = []
    if special is None and isinstance(record, _KnowsTexts):
        texts = record.texts
        special = texts[sample].special if -len(texts) <= sample < len(texts) else None
    for layer in record.layers if layers is None else [record.layers[index] for index in layers]:
        one = layer.sample(sample)
        means = {name: value.double() for name, value in one.means.items()}
        crosses = one.query_start + one.num_queries != one.num_keys
        if special is not None and any(special[1:]) and len(special) == one.num_keys and "special_mass" in means:
            # special_mass counts the first token too where that is a mark itself.
            first = means["first_mass"] if special[0] and "first_mass" in means else torch.zeros(())
            means["separator_mass"] = (means["special_mass"] - first).clamp(min=0)
        sight = read_sight(one)
        named = kinds(means, largest_entropy=sight.largest_entropy, near=near_mass(one, sight), crosses=crosses)
        readings.append(LayerReading(layer.number, layer.name, means, kinds=named, sight=sight, crosses=crosses))
    return readings


def findings(
    record: Record,
    *,
    sample: int = 0,
    tokens: Sequence[str] | None = None,
    special: Sequence[bool] | None = None,
    lang: str = "en",
    readings: Sequence[LayerReading] | None = None,
) -> list[Finding]:
    """Find the heads worth a look, at most six, and say of each what it does; no head twice.

    Args:
        record: what was observed.
        sample: which text of the record.
        tokens: the text's tokens, so that a sentence can name the first one.
        special: one flag a token, as in `read_layers`.
        lang: "en" or "zh".
        readings: the result of `read_layers`, where it is at hand already.
    """
    if lang not in SPEECH:
        raise ArgumentError(f'lang is "{lang}", and the findings speak {_languages()}.', f"Give {_languages()}.")
    read = readings if readings is not None else read_layers(record, sample=sample, special=special)
    heads = _HeadList(read)
    words = SPEECH[lang]
    first = words["first token"].format(token=visible(tokens[0])) if tokens else words["a first token"]
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
        texts = words[topic.name if passed else f"{topic.name} weak"].split("|")
        given = {
            "share": percent(value),
            "value": f"{value:.0f}" if value >= 9.95 else f"{value:.1f}",
            "keys": f"{float(read[layer].sight.mean_keys[head]):.0f}",
            "first": first,
            "separator": separator,
        }
        sentence, short = (text.format(**given) for text in texts)
        brief = f"{words['place'].format(layer=number, head=head)}{short}".replace("\u00a0", " ")
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


@runtime_checkable
class _KnowsTexts(Protocol):
    @property
    def texts(self) -> list[Text]: ...


class _HeadList:
    """All heads of the readings, each found by the place of its layer in the record and its index."""

    def __init__(self, readings: Sequence[LayerReading]) -> None:
        self.readings = readings
        self.places = [(layer, head) for layer, read in enumerate(readings) for head in range(len(read.kinds))]

    def kind(self, layer: int, head: int) -> str:
        return self.readings[layer].kinds[head]

    def value(self, layer: int, head: int, name: str) -> float:
        means = self.readings[layer].means
        return float(means[name][head]) if name in means else math.nan


def _value(value: float, sight: Sight, head: int) -> float:
    return value


def _evenness(value: float, sight: Sight, head: int) -> float:
    # Keys, not nats, are told; the mask allows a late query more of them than an early one.
    return value / max(1e-9, float(sight.mean_keys[head]))


def _sharpness(value: float, sight: Sight, head: int) -> float:
    return -value


@dataclass(frozen=True)
class _Topic:
    """One thing to look for: the statistic that ranks heads, and the kind whose heads are counted."""

    name: str
    statistic: str
    kind: str | None
    threshold: float = MASS_SHARE
    needs_self: bool = True  # whether it means something only where queries and keys are one text
    rank: Callable[[float, Sight, int], float] = _value
    least: float = 0.01  # below this there is nothing to tell

    def best(self, heads: _HeadList, taken: set[tuple[int, int]]) -> tuple[int, int, float] | None:
        ranked = []
        for layer, head in heads.places:
            read = heads.readings[layer]
            value = heads.value(layer, head, self.statistic)
            if (layer, head) in taken or (self.needs_self and read.crosses) or not value >= self.least:
                continue
            ranked.append((self.rank(value, read.sight, head), -layer, -head, value))
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
        return words["mean"].format(value=f"{sum(values) / len(values):.1f}")
    layers = Counter(layer for layer, head in heads.places if heads.kind(layer, head) == topic.kind)
    number = sum(layers.values())
    share = percent(BROAD_SHARE if topic.kind == "broad" else MASS_SHARE)
    if not number:
        return words["none"].format(share=share)
    most = min(layers, key=lambda layer: (-layers[layer], layer))
    tail = words["most"].format(layer=heads.readings[most].number) if number > 4 and len(layers) > 1 else ""
    return words["one" if number == 1 else "some"].format(number=number, heads=len(heads.places)) + tail


def _languages() -> str:
    return " or ".join(f'"{name}"' for name in SPEECH)
