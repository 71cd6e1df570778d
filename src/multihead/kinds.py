"""Kinds of heads: the statistic that measures a kind, its thresholds, and its name and picture on pages.

The built-in kinds are the values of `KINDS`. Tables, findings, `find`, pages and legends show the fields of a `Kind`,
so they also show kinds that you define: `mh.observe(model, kinds=(mine,))`.

No other file lists the kinds. A page gets the kinds of its record as data, so user-defined kinds are drawn like the
built-in ones. The texts of a kind are in both languages next to its thresholds and not in `locale/`, because a
user-defined kind cannot add texts there.

"broad" (attention spread evenly over many keys) is a kind, but neither a broad nor a focused head is reported as a
finding: the heads of a random model are broad, and how focused they are depends only on the scale of the weights.

A head has every kind whose threshold it reaches, and the colour of the first. Copying, measured on repeated random
tokens, comes first, because on ordinary text most copying heads put most of their weight on the first token. The other
kinds follow in the order of their share.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

from multihead.errors import ArgumentError
from multihead.errors.given import reject_given
from multihead.kernels.parts import NEAR_REACH
from multihead.probes.catalogue import (
    DUPLICATE_MASS,
    ENTROPY,
    FIRST_MASS,
    INDUCTION_MASS,
    NEAR_MASS,
    NEIGHBOUR_MASS,
    NEXT_MASS,
    ONE_WAY_MASS,
    PREVIOUS_MASS,
    SELF_MASS,
    SEPARATOR_MASS,
)
from multihead.probes.probe import MIN_SHARE_WITHOUT_DECIMAL, SHARE_FORMAT, Probe, Statistic

__all__ = ["KINDS", "Kind"]

KindOfTexts = Literal["given", "repeats"]
TextByLanguage = Mapping[str, str]
"""Language code -> text; English is used if a language is missing."""

RENAMED_KINDS = {f"{name}_token": name for name in ("previous", "next", "self", "first", "duplicate")}
"""Name of a kind in earlier versions -> present name."""

_GLYPH_PATTERN = re.compile(r"[MmLlHhVvZzCcSsQqTtAa0-9 .,-]*", re.ASCII)
_COLOUR_PATTERN = re.compile(r"#[0-9A-Fa-f]{6}", re.ASCII)
_SENTENCES = {  # of a kind without its own
    "sentence": {
        "en": "is a head of the kind “{label}”: {share}, where chance is {chance}.",
        "zh": "属于“{label}”：{share}，随机水平为 {chance}。",
    },
    "brief": {"en": "{label}, {share} (chance {chance})", "zh": "{label}，{share}（随机水平 {chance}）"},
}
_SENTENCES_OF_LARGEST = {  # of a kind whose share is one of what an even spread gives
    "sentence": {
        "en": "is a head of the kind “{label}”: {share} of what an even spread gives.",
        "zh": "属于“{label}”：为均匀分布时的 {share}。",
    },
    "brief": {"en": "{label}, {share} of an even spread", "zh": "{label}，均匀分布时的 {share}"},
}
_NOUN = {"en": "a head of the kind “{label}”", "zh": "“{label}”类的头"}
_DEFINITIONS = {
    "en": "{rules} (“{statistic}”).",
    "zh": "{rules}（“{statistic}”）。",
}
_THRESHOLD_TEXTS = {
    "above_chance": {"en": "At least {0} beyond chance", "zh": "比随机水平高出至少 {0}"},
    "at_least": {"en": "at least {0}", "zh": "不低于 {0}"},
    "of_largest": {"en": "at least {0} of what an even spread gives", "zh": "不低于均匀分布时的 {0}"},
}


@dataclass(frozen=True)
class Kind:
    """A kind of head.

    A head is of this kind if the mean of the probe over queries reaches all given thresholds.

    Attributes:
        name: an identifier, used in tables, files and `Record.find`.
        probe: the probe whose mean decides; it has one number per query, and a chance level.
        above_chance: the mean must exceed the chance level by this and three standard errors; None = no such threshold.
        at_least: the mean must be at least this; None = no such threshold.
        of_largest: the mean must be at least this fraction of its value for uniform attention; None = no such
            threshold.
        texts: "given" for the texts of the record, or "repeats" for texts of repeated random tokens.
        self_attention_only: whether cross-attention heads are excluded.
        hides: names of kinds that are not reported for a head of this kind; "distance" = the finding about the head
            with the largest distance.
        rank: sort order of the kinds of one head, ascending; equal ranks by descending mean. A head has the colour of
            its first kind.
        finding: sort order of the findings, ascending; None = not reported as a finding.
        labels: language -> label on pages; by default `name` with spaces.
        about: language -> definition, with the placeholders {above_chance}, {at_least}, {of_largest} and {reach}; by
            default generated from the thresholds.
        sentence: language -> predicate of a finding about a head, with the placeholders {share}, {chance}, {label},
            {first}, {separator} and {after_start} (" after “<s>”", the start token of repeated random tokens); by
            default with the label and the share.
        brief: language -> short form of `sentence`, with the same default.
        noun: language -> what a head of the kind is called in a sentence, such as "an induction head"; by default with
            the label.
        glyph: an icon of the attention pattern, as the `d` of an SVG path on 12 x 12 units.
        colour: colours on light and on dark pages, "#rrggbb" each.
        needs: what measuring the kind needs, for the message if it is missing; by default its statistic.

    Raises:
        ArgumentError: a field is invalid, or there is no threshold.

    >>> import torch
    >>> import multihead as mh
    >>> spread = mh.kinds.Kind("far", mh.probes.PROBES["mean_distance"], above_chance=5.0, labels={"en": "far away"})
    >>> spread.label("en"), spread.definition("en")
    ('far away', 'At least 5.0 tokens beyond chance (“distance”).')
    """

    name: str
    probe: Statistic | None
    above_chance: float | None = field(default=0.35, kw_only=True)
    at_least: float | None = field(default=None, kw_only=True)
    of_largest: float | None = field(default=None, kw_only=True)
    texts: KindOfTexts = field(default="given", kw_only=True)
    self_attention_only: bool = field(default=False, kw_only=True)
    hides: tuple[str, ...] = field(default=(), kw_only=True)
    rank: int = field(default=2, kw_only=True, repr=False)
    finding: int | None = field(default=0, kw_only=True, repr=False)
    labels: TextByLanguage = field(default_factory=dict, kw_only=True, repr=False, hash=False)
    about: TextByLanguage = field(default_factory=dict, kw_only=True, repr=False, hash=False)
    sentence: TextByLanguage = field(default_factory=dict, kw_only=True, repr=False, hash=False)
    brief: TextByLanguage = field(default_factory=dict, kw_only=True, repr=False, hash=False)
    noun: TextByLanguage = field(default_factory=dict, kw_only=True, repr=False, hash=False)
    glyph: str = field(default="M1 1h10v10h-10z", kw_only=True, repr=False)
    colour: tuple[str, str] = field(default=("#55565E", "#AEB1B7"), kw_only=True, repr=False)
    needs: str = field(default="", kw_only=True, repr=False)

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name.isidentifier():
            raise ArgumentError(f"A kind is called {self.name!r}.", 'Give a Python identifier, such as "verbs".')
        if self.probe is None:
            return  # MIXED, the kind of heads without another kind, has no probe
        if not isinstance(self.probe, Statistic) or (
            isinstance(self.probe, Probe) and not (self.probe.chance and self.probe.axes == "queries")
        ):
            raise ArgumentError(
                f"The kind {self.name} is measured by {self.probe!r}.",
                "Give a probe with a number per query and a chance, such as probes.offset_mass(-2).",
            )
        rules = (self.above_chance, self.at_least, self.of_largest)
        if rules == (None, None, None) or not all(isinstance(each, int | float | None) for each in rules):
            raise ArgumentError(
                f"The thresholds of the kind {self.name} are {rules}.",
                "Give a number for one of above_chance, at_least and of_largest, and None for the others.",
            )
        if self.texts not in get_args(KindOfTexts):
            raise ArgumentError(f"The texts of {self.name} are {self.texts!r}.", 'Give "given" or "repeats".')
        if not _GLYPH_PATTERN.fullmatch(self.glyph):
            raise ArgumentError(f"The glyph of {self.name} is {self.glyph!r}.", "Give the path of an SVG.")
        if len(self.colour) != 2 or not all(_COLOUR_PATTERN.fullmatch(each) for each in self.colour):
            raise ArgumentError(
                f"The colour of {self.name} is {self.colour!r}.", 'Give two, such as ("#C8501E", "#FF8A57").'
            )

    @property
    def statistic(self) -> str:
        """Name of the statistic whose mean decides: `name` if measured on repeated random tokens, else the probe's name."""
        return self.name if self.texts == "repeats" or self.probe is None else self.probe.name

    @property
    def requirement(self) -> str:
        """What a record or census needs to have numbers for the kind, as the end of a sentence."""
        if self.texts == "repeats":
            return "texts of repeated random tokens: look --textbook, or add_repeated in observation.textbook"
        given = f'the statistic "{self.statistic}": probes=[..., "{self.statistic}"] of observe or census'
        return self.needs or given

    def label(self, lang: str) -> str:
        """Return the label of the kind on pages, in a language."""
        return _in_language(self.labels, lang) or self.name.replace("_", " ")

    def noun_phrase(self, lang: str) -> str:
        """Return what a head of the kind is called in a sentence, in a language: "an induction head"."""
        return _in_language(self.noun, lang) or _in_language(_NOUN, lang).format(label=self.label(lang))

    def definition(self, lang: str) -> str:
        """Return the definition of the kind in a language."""
        rules = {
            name: self.format_value(value) for name in _THRESHOLD_TEXTS if (value := getattr(self, name)) is not None
        }
        about = _in_language(self.about, lang)
        if about or self.probe is None:
            return about.format(**rules, reach=NEAR_REACH)
        joined = ", ".join(_in_language(_THRESHOLD_TEXTS[name], lang).format(value) for name, value in rules.items())
        return _in_language(_DEFINITIONS, lang).format(
            rules=joined[:1].upper() + joined[1:], statistic=self.probe.label
        )

    def format_value(self, value: float) -> str:
        """Format a value of the statistic with its unit, such as "91 %"."""
        if self.probe is None or self.of_largest is not None or self.probe.number_format == SHARE_FORMAT:
            return format_percent(value)
        return self.probe.text(value)

    @property
    def has_chance(self) -> bool:
        """Whether shares are shown next to chance, which is 100 % for a share of what an even spread gives."""
        return self.of_largest is None

    def fill_sentence(
        self, part: Literal["sentence", "brief"], lang: str, share: float, chance: float, **names: str
    ) -> str:
        """Return `sentence` or `brief` in a language, with its placeholders filled in."""
        values = {"share": self.format_value(share), "chance": self.format_value(chance), "label": self.label(lang)}
        default = (_SENTENCES if self.has_chance else _SENTENCES_OF_LARGEST)[part]
        own = self.sentence if part == "sentence" else self.brief
        return _in_language(own or default, lang).format(**values, **names)


def check_kinds(kinds: object, among: Sequence[Kind]) -> tuple[Kind, ...]:
    """Return kinds that a user gave; reject what is no Kind, and two kinds with one name, those in `among` included."""
    if isinstance(kinds, (str, bytes, Kind)) or not isinstance(kinds, Iterable):
        reject_given(
            "kinds", kinds, "a list of kinds of heads", "Give values of multihead.kinds.Kind, or leave it out."
        )
    given = tuple(kinds)
    names = {MIXED.name, *(kind.name for kind in among)}
    for kind in given:
        if not isinstance(kind, Kind):
            raise ArgumentError(f"{kind!r} is not a kind of head.", "Give values of multihead.kinds.Kind.")
        if kind.name in names:
            raise ArgumentError(f"Two kinds are called {kind.name}.", "Give one of them another name.")
        names.add(kind.name)
    return given


def another_probe_error(kind: Kind) -> ArgumentError:
    """Return the error for a kind whose probe has the name of a statistic that was measured by another function."""
    return ArgumentError(
        f"The kind {kind.name} is measured by {kind.statistic!r}, and the statistic of this name was measured by "
        "another function.",
        "Give the probe that was measured, or measure this one under another name.",
    )


def kinds_named(names: Sequence[str], among: Sequence[Kind]) -> list[Kind]:
    """Return the kinds of these names, in the order of `among`; all of them without a name.

    Raises:
        ArgumentError: there is no kind of a name.
    """
    known = {kind.name: kind for kind in among}
    for name in names:
        if not isinstance(name, str):
            reject_given(
                "A kind", name, "the name of a kind", 'Give each name as an argument: "induction", "previous".'
            )
        if name not in known:
            labelled = [kind.name for kind in among if name in kind.labels.values()]
            meant = RENAMED_KINDS.get(name) or next(iter(labelled), None)
            raise ArgumentError(
                f"There is no kind {name!r}.",
                f"Give some of {', '.join(sorted(known))}." if meant is None else f"It is called {meant!r}.",
            )
    return [kind for kind in among if not names or kind.name in names]


def probes_of(kinds: Sequence[Kind]) -> list[Probe]:
    """Return the probes of the kinds that are measured on given texts, not on repeated random tokens."""
    return [kind.probe for kind in kinds if isinstance(kind.probe, Probe) and kind.texts == "given"]


def kinds_by_name(kinds: Sequence[Kind]) -> dict[str, Kind]:
    """Return name -> kind of the given kinds and of `MIXED`, the kind of heads without another kind."""
    return {kind.name: kind for kind in (*kinds, MIXED)}


def format_percent(share: float) -> str:
    r"""Format a fraction as a percentage, with one decimal below 10 % and a no-break space before the sign.

    >>> format_percent(0.673), format_percent(0.0132)
    ('67\xa0%', '1.3\xa0%')
    """
    return f"{share * 100:.{1 if share < MIN_SHARE_WITHOUT_DECIMAL else 0}f}\u00a0%"


def _in_language(words: TextByLanguage, lang: str) -> str:
    return words.get(lang) or words.get("en", "")


KINDS: tuple[Kind, ...] = (
    Kind(
        "previous",
        PREVIOUS_MASS,
        self_attention_only=True,
        hides=("local",),
        finding=20,
        labels={"en": "previous", "zh": "前一个"},
        about={
            "en": "At least {above_chance} of the attention, beyond chance, is on the previous token.",
            "zh": "前一个词元的权重占比比随机水平高出至少 {above_chance}。",
        },
        sentence={
            "en": "looks one token back: {share} of its attention is on the previous token, where chance is {chance}.",
            "zh": "回看一个词元：前一个词元的权重占比为 {share}，随机水平为 {chance}。",
        },
        brief={
            "en": "{share} on the previous token (chance {chance})",
            "zh": "{share} 落在前一个词元上（随机水平 {chance}）",
        },
        noun={"en": "a previous-token head", "zh": "前一词元头"},
        glyph="M0 4h4v4h4v4h-4v-4h-4z",
        colour=("#C8501E", "#FF8A57"),
    ),
    Kind(
        "next",
        NEXT_MASS,
        self_attention_only=True,
        hides=("local",),
        finding=30,
        labels={"en": "next", "zh": "后一个"},
        about={
            "en": "At least {above_chance} of the attention, beyond chance, is on the next token.",
            "zh": "后一个词元的权重占比比随机水平高出至少 {above_chance}。",
        },
        sentence={
            "en": "looks one token ahead: {share} of its attention is on the next token, where chance is {chance}.",
            "zh": "前看一个词元：后一个词元的权重占比为 {share}，随机水平为 {chance}。",
        },
        brief={
            "en": "{share} on the next token (chance {chance})",
            "zh": "{share} 落在后一个词元上（随机水平 {chance}）",
        },
        noun={"en": "a next-token head", "zh": "后一词元头"},
        glyph="M4 0h4v4h4v4h-4v-4h-4z",
        colour=("#A06F00", "#E9B646"),
    ),
    Kind(
        "self",
        SELF_MASS,
        self_attention_only=True,
        hides=("local", "neighbours"),
        finding=60,
        labels={"en": "self", "zh": "自身"},
        about={
            "en": "At least {above_chance} of the attention, beyond chance, is on the query’s own token.",
            "zh": "查询自身词元的权重占比比随机水平高出至少 {above_chance}。",
        },
        sentence={
            "en": "looks at itself: {share} of its attention is on the query’s own token, where chance is {chance}.",
            "zh": "看自己：查询自身词元的权重占比为 {share}，随机水平为 {chance}。",
        },
        brief={
            "en": "{share} on the query’s own token (chance {chance})",
            "zh": "{share} 落在自身上（随机水平 {chance}）",
        },
        noun={"en": "a self-token head", "zh": "自身词元头"},
        glyph="M0 0h4v4h4v4h4v4h-4v-4h-4v-4h-4z",
        colour=("#B0407E", "#F08CC0"),
    ),
    Kind(
        "first",
        FIRST_MASS,
        # Weight on the first token makes the mean distance large, whatever the weights on other tokens are.
        hides=("distance",),
        finding=40,
        labels={"en": "first token", "zh": "首词元"},
        about={
            "en": "At least {above_chance} of the attention, beyond chance, is on the first token, often called an attention sink.",
            "zh": "首词元的权重占比比随机水平高出至少 {above_chance}；这样的词元常称为注意力汇聚点。",
        },
        sentence={
            "en": "rests on {first}: {share} of its attention is on the first token, where chance is {chance}.",
            "zh": "停在{first}上：首词元的权重占比为 {share}，随机水平为 {chance}。",
        },
        brief={
            "en": "{share} on the first token (chance {chance})",
            "zh": "{share} 落在首词元上（随机水平 {chance}）",
        },
        noun={"en": "a first-token head", "zh": "首词元头"},
        glyph="M0 0h4v12h-4z",
        colour=("#0072B2", "#5BB8F5"),
    ),
    Kind(
        "separator",
        SEPARATOR_MASS,
        finding=100,
        needs="special tokens: give `tokenizer` or `special_ids` to observe",
        labels={"en": "separator", "zh": "分隔符"},
        about={
            "en": "At least {above_chance} of the attention, beyond chance, is on special tokens after the first token, such as [SEP].",
            "zh": "首词元之后的特殊词元（例如 [SEP]）的权重占比比随机水平高出至少 {above_chance}。",
        },
        sentence={
            "en": "rests on {separator}: {share} of its attention is there, where chance is {chance}.",
            "zh": "停在{separator}上：权重占比为 {share}，随机水平为 {chance}。",
        },
        brief={
            "en": "{share} on {separator} (chance {chance})",
            "zh": "{share} 落在{separator}上（随机水平 {chance}）",
        },
        noun={"en": "a separator head", "zh": "分隔符头"},
        glyph="M8 0h4v12h-4z",
        colour=("#5B4FB0", "#AC9FFF"),
    ),
    Kind(
        "duplicate",
        DUPLICATE_MASS,
        self_attention_only=True,
        finding=80,
        labels={"en": "duplicate", "zh": "重复"},
        about={
            "en": "At least {above_chance} of the attention, beyond chance, is on earlier copies of the query’s token, averaged over the queries that have one.",
            "zh": "在先前出现过相同词元的查询中，这些相同词元的平均权重占比比随机水平高出至少 {above_chance}。",
        },
        sentence={
            "en": "looks at earlier copies of the same token: {share} of its attention is on them, where chance is {chance}.",
            "zh": "找到相同的词元：与查询相同的先前词元的权重占比为 {share}，随机水平为 {chance}。",
        },
        brief={
            "en": "{share} on earlier copies of the query’s token (chance {chance})",
            "zh": "{share} 落在先前的相同词元上（随机水平 {chance}）",
        },
        noun={"en": "a duplicate-token head", "zh": "重复词元头"},
        glyph="M0 5h3v3h-3zM4.5 5h3v3h-3zM9 5h3v3h-3z",
        colour=("#3A7D8C", "#6FC3D3"),
    ),
    Kind(
        "induction",
        INDUCTION_MASS,
        self_attention_only=True,
        finding=70,
        labels={"en": "induction", "zh": "归纳"},
        about={
            "en": "At least {above_chance} of the attention, beyond chance, is on the tokens that followed earlier copies of the query’s token, averaged over the queries that have one (arXiv:2209.11895).",
            "zh": "在先前出现过相同词元的查询中，这些相同词元的后一个词元的平均权重占比比随机水平高出至少 {above_chance}（arXiv:2209.11895）。",
        },
        sentence={
            "en": "looks at what came next last time: {share} of its attention is on the tokens that followed earlier copies of the query’s token, where chance is {chance}.",
            "zh": "看上一次的下文：与查询相同的先前词元的后一个词元，权重占比为 {share}，随机水平为 {chance}。",
        },
        brief={
            "en": "{share} on what followed the same token before (chance {chance})",
            "zh": "{share} 落在相同词元先前的后一个上（随机水平 {chance}）",
        },
        noun={"en": "an induction head", "zh": "归纳头"},
        glyph="M0 8h4v4h-4zM4 4h4v4h-4zM8 0h4v4h-4z",
        colour=("#8A4FA8", "#CF9BEF"),
    ),
    Kind(
        "local",
        NEAR_MASS,
        at_least=0.5,
        self_attention_only=True,
        rank=3,
        finding=None,
        labels={"en": "local", "zh": "局部"},
        about={
            "en": "At least {at_least} of the attention is within {reach} tokens of the query, and {above_chance} beyond chance.",
            "zh": "距查询 {reach} 个词元以内的权重占比不低于 {at_least}，且比随机水平高出至少 {above_chance}。",
        },
        noun={"en": "a local head", "zh": "局部头"},
        glyph="M0 0h6v3h3v3h3v6h-6v-3h-3v-3h-3z",
        colour=("#00805F", "#4FD1A5"),
    ),
    Kind(
        "one_way",
        ONE_WAY_MASS,
        self_attention_only=True,
        hides=("neighbours",),
        finding=35,
        needs="pictures: give `processor` to observe",
        labels={"en": "one way", "zh": "单一方向"},
        about={
            "en": "At least {above_chance} of the attention, beyond chance, is on the patch at one distance in rows and columns, the same for all patches, such as the one above.",
            "zh": "位于同一行列距离处的图块（对所有图块相同，例如上方的一个）的权重占比比随机水平高出至少 {above_chance}。",
        },
        sentence={
            "en": "looks one way: {share} of its attention is on the patch at one distance in rows and columns, where chance is {chance}.",
            "zh": "朝一个方向看：同一行列距离处的图块的权重占比为 {share}，随机水平为 {chance}。",
        },
        brief={
            "en": "{share} on the patch one way (chance {chance})",
            "zh": "{share} 落在同一方向的图块上（随机水平 {chance}）",
        },
        noun={"en": "a one-way head", "zh": "单一方向头"},
        glyph="M0 5h8v-3l4 4-4 4v-3h-8z",
        colour=("#5E7A1E", "#A9C95C"),
    ),
    Kind(
        "neighbours",
        NEIGHBOUR_MASS,
        self_attention_only=True,
        finding=95,
        needs="pictures: give `processor` to observe",
        labels={"en": "neighbours", "zh": "相邻图块"},
        about={
            "en": "At least {above_chance} of the attention, beyond chance, is on the patch itself and the eight around it.",
            "zh": "图块自身及其周围八个图块的权重占比比随机水平高出至少 {above_chance}。",
        },
        sentence={
            "en": "looks at its neighbours: {share} of its attention is on the patch itself and the eight around it, where chance is {chance}.",
            "zh": "看相邻图块：图块自身及其周围八个图块的权重占比为 {share}，随机水平为 {chance}。",
        },
        brief={
            "en": "{share} on neighbouring patches (chance {chance})",
            "zh": "{share} 落在相邻图块上（随机水平 {chance}）",
        },
        noun={"en": "a neighbours head", "zh": "相邻图块头"},
        glyph="M3 3h6v6h-6z",
        colour=("#3A7D8C", "#6FC3D3"),
    ),
    Kind(
        "broad",
        ENTROPY,
        above_chance=None,
        of_largest=0.85,
        rank=4,
        finding=None,
        labels={"en": "broad", "zh": "分散"},
        about={
            "en": "The entropy is at least {of_largest} of its largest possible value, the mean of ln(number of keys that a query sees).",
            "zh": "熵不低于可能最大值的 {of_largest}；最大值是 ln(查询可见的键数) 的平均。",
        },
        noun={"en": "a broad head", "zh": "分散头"},
        glyph="M0 0h3v3h-3zM4.5 0h3v3h-3zM9 0h3v3h-3zM0 4.5h3v3h-3zM4.5 4.5h3v3h-3zM9 4.5h3v3h-3zM0 9h3v3h-3zM4.5 9h3v3h-3zM9 9h3v3h-3z",
        colour=("#6A7682", "#9AA7B4"),
    ),
    Kind(
        "repeated_induction",
        INDUCTION_MASS,
        texts="repeats",
        rank=0,
        finding=10,
        labels={"en": "induction on random repeats", "zh": "归纳（随机重复词元）"},
        about={
            "en": "On texts of random tokens that repeat (look --textbook), at least {above_chance} of the attention, beyond chance, is on the tokens that followed earlier copies of the query’s token (arXiv:2209.11895).",
            "zh": "在重复的随机词元文本上（look --textbook），与查询相同的先前词元的后一个词元的权重占比比随机水平高出至少 {above_chance}（arXiv:2209.11895）。",
        },
        sentence={
            "en": "is an induction head: on repeated random tokens{after_start} {share} of its attention is on the tokens that followed earlier copies of the query’s token, where chance is {chance}.",
            "zh": "是归纳头：在{after_start}重复的随机词元上，与查询相同的先前词元的后一个词元，权重占比为 {share}，随机水平为 {chance}。",
        },
        brief={
            "en": "induction, {share} on repeated random tokens{after_start} (chance {chance})",
            "zh": "归纳，在{after_start}重复的随机词元上为 {share}（随机水平 {chance}）",
        },
        glyph="M0 8h4v4h-4zM4 4h4v4h-4zM8 0h4v4h-4z",
        colour=("#8A4FA8", "#CF9BEF"),
    ),
    Kind(
        "repeated_duplicate",
        DUPLICATE_MASS,
        texts="repeats",
        rank=1,
        finding=50,
        labels={"en": "duplicate on random repeats", "zh": "重复（随机重复词元）"},
        about={
            "en": "On texts of random tokens that repeat (look --textbook), at least {above_chance} of the attention, beyond chance, is on earlier copies of the query’s token.",
            "zh": "在重复的随机词元文本上（look --textbook），与查询相同的先前词元的权重占比比随机水平高出至少 {above_chance}。",
        },
        sentence={
            "en": "finds copies: on repeated random tokens{after_start} {share} of its attention is on earlier copies of the query’s token, where chance is {chance}.",
            "zh": "找到副本：在{after_start}重复的随机词元上，与查询相同的先前词元的权重占比为 {share}，随机水平为 {chance}。",
        },
        brief={
            "en": "duplicate tokens, {share} on repeated random tokens{after_start} (chance {chance})",
            "zh": "重复词元，在{after_start}重复的随机词元上为 {share}（随机水平 {chance}）",
        },
        glyph="M0 5h3v3h-3zM4.5 5h3v3h-3zM9 5h3v3h-3z",
        colour=("#3A7D8C", "#6FC3D3"),
    ),
    Kind(
        "repeated_previous",
        PREVIOUS_MASS,
        texts="repeats",
        rank=5,
        finding=110,
        labels={"en": "previous on random repeats", "zh": "前一个（随机重复词元）"},
        about={
            "en": "On texts of random tokens that repeat (look --textbook), at least {above_chance} of the attention, beyond chance, is on the previous token.",
            "zh": "在重复的随机词元文本上（look --textbook），前一个词元的权重占比比随机水平高出至少 {above_chance}。",
        },
        sentence={
            "en": "looks one token back on random tokens too: on repeated random tokens{after_start} {share} of its attention is on the previous token, where chance is {chance}.",
            "zh": "在随机词元上也回看一个词元：在{after_start}重复的随机词元上，前一个词元的权重占比为 {share}，随机水平为 {chance}。",
        },
        brief={
            "en": "previous token, {share} on repeated random tokens{after_start} (chance {chance})",
            "zh": "前一个词元，在{after_start}重复的随机词元上为 {share}（随机水平 {chance}）",
        },
        glyph="M0 4h4v4h4v4h-4v-4h-4z",
        colour=("#C8501E", "#FF8A57"),
    ),
    Kind(
        "repeated_first",
        FIRST_MASS,
        texts="repeats",
        rank=6,
        finding=120,
        labels={"en": "first token on random repeats", "zh": "首词元（随机重复词元）"},
        about={
            "en": "On texts of random tokens that repeat (look --textbook), at least {above_chance} of the attention, beyond chance, is on the first token.",
            "zh": "在重复的随机词元文本上（look --textbook），首词元的权重占比比随机水平高出至少 {above_chance}。",
        },
        sentence={
            "en": "rests on the first token on random tokens too: on repeated random tokens{after_start} {share} of its attention is there, where chance is {chance}.",
            "zh": "在随机词元上也停在首词元上：在{after_start}重复的随机词元上，它的权重占比为 {share}，随机水平为 {chance}。",
        },
        brief={
            "en": "first token, {share} on repeated random tokens{after_start} (chance {chance})",
            "zh": "首词元，在{after_start}重复的随机词元上为 {share}（随机水平 {chance}）",
        },
        glyph="M0 0h4v12h-4z",
        colour=("#0072B2", "#5BB8F5"),
    ),
)
"""The built-in kinds, in the order in which they are listed."""

MIXED = Kind(
    "mixed",
    None,
    above_chance=None,
    rank=7,
    finding=None,
    labels={"en": "mixed", "zh": "混合"},
    about={
        "en": "None of these thresholds is reached.",
        "zh": "以上阈值都未达到。",
    },
    glyph="M0 0h4v4h-4zM8 3h4v4h-4zM3 8h4v4h-4z",
    colour=("#B9B5AA", "#4A515B"),
)
"""The kind of heads that have none of `KINDS`."""
