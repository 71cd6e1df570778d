"""The data of the viewer's page: texts, layers, and the statistics and kinds of every head."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from multihead.errors import ArgumentError, ProbeError
from multihead.locale.escaping import escape_controls
from multihead.locale.texts import text
from multihead.probes.catalogue import POOLED_MAP, RECEIVED, SEPARATOR_MASS
from multihead.probes.choices import MARGINS_OF_MAP
from multihead.record.analysis.changes import ChangedHead, describe_kind_counts, summarise_changes
from multihead.record.analysis.highlights import MAX_TEXTS_COMPARED, Finding, findings
from multihead.record.analysis.roles import roles, rows_with_roles
from multihead.record.analysis.similar import affordable_queries
from multihead.record.profiles import LayerProfile
from multihead.record.texts import Text
from multihead.viewer.columns import (
    columns_not_recorded,
    describe_column,
    legend_of_kinds,
    names_of_statistics,
    without_repeated_special_tokens,
)
from multihead.viewer.facts import facts_of_record, lead_sentence, name_masks
from multihead.viewer.importance import describe_head_numbers
from multihead.viewer.levels import MAX_COARSEST_SIDE, number_of_levels
from multihead.viewer.page import installed_version, round_all_for_json, round_for_json
from multihead.viewer.page_types import (
    AllTextsDescription,
    ChangedHeads,
    FindingDescription,
    LayerDescription,
    LookingHead,
    LookingHeads,
    NearestHead,
    RunDescription,
    SampleDescription,
    StatisticChangeDescription,
    TokenLayout,
    ViewDescription,
)
from multihead.viewer.pictures import describe_pictures
from multihead.viewer.tiles import IsCancelled, raise_if_cancelled, visible_weights
from multihead.viewer.tokens import SPECIAL_FLAG, layout_of_tokens

if TYPE_CHECKING:
    from torch import Tensor

    from multihead.observation.record import Record
    from multihead.record.layer import LayerRecord
    from multihead.record.sample import SampleRecord


MAX_TOKENS_OF_FIRST_WORDS = 12  # number of tokens that the list of texts shows of each text

MAX_UNPOOLED_SIZE = 96
"""Largest number of queries and keys at which the small maps show single weights instead of means over blocks."""

MAX_LOOKING_HEADS, MAX_LOOKING_QUERIES = 8, 3
"""Numbers of heads, and of queries per head, that are listed as looking most at a token."""


@dataclass(frozen=True, eq=False)
class RecordedRun:
    """One record shown in the viewer.

    Attributes:
        name: name of the record's file.
        record: the record.
        levels_folder: folder for the coarse levels of the record's maps; None keeps the levels in memory.
    """

    name: str
    record: Record
    levels_folder: Path | None = None

    @property
    def num_samples(self) -> int:
        """Number of texts that all layers recorded."""
        return min((len(layer.samples) for layer in self.record.layers), default=0)

    def keeps_weights(self, sample: int) -> bool:
        """Return whether q and k of a sample were kept, so that its maps can be computed."""
        return all(layer.sample(sample).keeps_weights for layer in self.record.layers)


def describe_view(
    runs: Sequence[RunDescription], lang: str, *, similar: bool = True, looking: bool = True, served: bool = False
) -> ViewDescription:
    """Describe the viewer's page, its records and its abilities, as data for the page's script.

    Args:
        runs: the description of each record, see `describe_run`.
        lang: the language of the page.
        similar: whether the heads with similar weights can be listed.
        looking: whether the heads that look at a token can be listed.
        served: whether a server answers the page's requests, writes files and ranks changed heads; else the page is one
            file.
    """
    return {
        "lang": lang,
        "runs": list(runs),
        "foot": text("viewer.foot", lang, version=installed_version()),
        "precision": text("viewer.exact", lang),
        "similar": similar,
        "looking": looking,
        "served": served,
    }


def describe_run(run: RecordedRun) -> RunDescription:
    """Describe a record: its name, whether q and k were kept, its texts, and whether these are described together."""
    samples = [run.record.layers[0].sample(index) for index in range(run.num_samples)]
    return {
        "name": escape_controls(run.name),
        "title": escape_controls(run.record.title),
        "keep": "all" if all(run.keeps_weights(index) for index in range(run.num_samples)) else "statistics",
        "texts": run.num_samples,
        "comparable": 1 < run.num_samples <= MAX_TEXTS_COMPARED,
        "samples": [
            {
                "number": index + 1,
                "queries": one.num_queries,
                "keys": one.num_keys,
                "opening": _first_words(run.record, index),
            }
            for index, one in enumerate(samples)
        ],
    }


def describe_all_texts(run: RecordedRun, lang: str = "en") -> AllTextsDescription:
    """Describe the heads over all texts of a record: their findings, and how these differ from text to text."""
    found = run.record.findings(lang=lang)
    return {"texts": run.num_samples, "findings": [_describe_finding(one) for one in found]}


def _describe_finding(finding: Finding) -> FindingDescription:
    """Describe a finding with all its fields."""
    over = finding.over_texts
    return {
        "topic": finding.topic,
        "layer": finding.layer,
        "head": finding.head,
        "value": finding.value,
        "chance": finding.chance,
        "sentence": finding.sentence,
        "count": finding.count,
        "brief": finding.brief,
        "over_texts": None
        if over is None
        else {"number": over.number, "having": over.having, "spread": over.spread, "sentence": over.sentence},
    }


def _first_words(record: Record, sample: int) -> str:
    """Return the first words of a text, for a list of texts; "" if its tokens are unknown."""
    opening = sample_of_main_text(record, sample).text.slice_tokens(0, MAX_TOKENS_OF_FIRST_WORDS)
    if opening.tokens is None:
        return ""
    words = layout_of_tokens(opening.tokens, special=opening.special, gaps=opening.gaps)
    shown = "".join(
        gap + word
        for gap, word, flags in zip(words["gaps"], words["shown"], words["flags"], strict=True)
        if not flags & SPECIAL_FLAG
    )
    return " ".join(shown.split())[:40]


@dataclass(frozen=True, eq=False)
class PageText:
    """A text that a page shows.

    Attributes:
        length: number of tokens of the text.
        tokens: the tokens as text; None if they are unknown.
        special: whether each token is a special token; None if that is unknown.
        layout: the result of `layout_of_tokens`; None without tokens.
        given_by_caller: whether the caller of `write_report` passed the text; a layer may be matched to such a text by
            its number of tokens.
    """

    length: int
    tokens: Sequence[str] | None = None
    special: Sequence[bool] | None = None
    layout: TokenLayout | None = None
    given_by_caller: bool = False

    @classmethod
    def from_text(cls, text: Text, length: int) -> PageText:
        """Convert a recorded text of `length` tokens to a text of the page."""
        layout = None if text.tokens is None else layout_of_tokens(text.tokens, special=text.special, gaps=text.gaps)
        return cls(length, text.tokens, text.special, layout)


def texts_of_record(record: Record, sample: int) -> list[PageText]:
    """Return the recorded texts of a page: the main text, and the other text of cross-attention if it has tokens."""
    main = sample_of_main_text(record, sample)
    texts = [PageText.from_text(main.text, main.num_keys)]
    other = None if main.text.tokens is None else cross_attention_text(record, sample, main.text.tokens)
    return texts if other is None else [*texts, PageText.from_text(other, other.length)]


def describe_sample(
    run: RecordedRun,
    sample: int,
    lang: str = "en",
    *,
    texts: Sequence[PageText] = (),
    profiles: Sequence[LayerProfile] | None = None,
) -> SampleDescription:
    """Describe one text of a record, except for its maps: the tokens, layers, and statistics and kinds of all heads.

    Args:
        run: the recorded run of a model, which the page shows.
        sample: index of the text.
        lang: the language of labels and sentences.
        texts: the texts of the page, the main one first; by default those of the record.
        profiles: the result of `Record.profiles`; computed if None.
    """
    record = run.record
    shown = list(texts) or texts_of_record(record, sample)
    main, others = shown[0], [each for each in shown[1:] if each.tokens is not None]
    profiles = profiles if profiles is not None else record.profiles(sample=sample, special=main.special)
    layers = [
        _describe_layer(layer, layer.sample(sample), profile, role, shown)
        for layer, profile, role in zip(record.layers, profiles, roles(record.layers, sample=sample), strict=True)
    ]
    names = names_of_statistics(profiles)
    unrecorded = columns_not_recorded(names, lang)
    shown_names = without_repeated_special_tokens(names, profiles)
    columns = [describe_column(record.statistic(name), lang) for name in shown_names]
    images, pictures = describe_pictures(record, layers, sample)
    separator = _sole_special_token(main.tokens, main.special)
    for one in columns:
        if one["id"] == SEPARATOR_MASS.name and separator:
            one["label"] = separator
    found = findings(
        profiles,
        tokens=None if others else main.tokens,  # with two texts, "the first token" is not one token
        special=main.special,
        lang=lang,
        among=record.all_kinds,
    )
    heads, ids = [len(one.kinds) for one in profiles], [one["id"] for one in columns]
    return SampleDescription(
        lead=lead_sentence(record, profiles, main.length, sample=sample, lang=lang),
        facts=facts_of_record(record, profiles, [each.length for each in (main, *others)], sample=sample, lang=lang),
        pattern=name_masks(profiles, lang),
        texts=[each.layout for each in shown],
        received=_attention_received_per_token(record, layers, sample, main.length),
        labels={name: describe_column(record.statistic(name), lang)["label"] for name in MARGINS_OF_MAP},
        layers=layers,
        noMaps="" if any(layer["maps"] for layer in layers) else text("page.no maps", lang),
        kinds=[kinds for one in profiles for kinds in one.kinds],
        metrics=statistics_per_head([one.means for one in profiles], heads, ids),
        chance=statistics_per_head([one.chance for one in profiles], heads, ids),
        columns=columns,
        unrecorded=unrecorded,
        findings=[_describe_finding(one) for one in found],
        # The largest possible entropy of each head, nats; None where the class of the mask is unknown.
        full=round_all_for_json(torch.cat([one.visibility.largest_entropy for one in profiles])),
        legend=legend_of_kinds(record.all_kinds, profiles, lang),
        images=images,
        pictures=pictures,
        important=[each for each in describe_head_numbers(record, lang) if each["id"] in ids],
    )


def table_rows_of_heads(run: RecordedRun, sample: int) -> list[dict[str, Any]]:
    """List a table row per head: layer, head, name, kinds, and the mean and the chance level of each statistic."""
    profiles = run.record.profiles(sample=sample, special=sample_of_main_text(run.record, sample).text.special)
    rows = [
        {"layer": one.number, "head": head, "name": one.name, "kind": ""}
        | {name: float(values[head]) for name, values in one.means.items()}
        | one.row(head)
        for one in profiles
        for head in range(len(one.kinds))
    ]
    return rows_with_roles(run.record.layers, rows, sample=sample)


def nearest_heads(run: RecordedRun, sample: int, layer: int, head: int, top: int) -> list[NearestHead]:
    """List the heads whose weights are most similar to those of one head, nearest first; see `Record.nearest`.

    The divergence is None where no query has finite weights in both heads: JSON has no NaN.
    """
    return [
        {
            "layer": each.layer,
            "head": each.head,
            "divergence": round_for_json(each.divergence),
            "queries": each.queries,
        }
        for each in run.record.nearest(layer, head, top=top, sample=sample)
    ]


def heads_looking_at(
    run: RecordedRun, sample: int, key: int, layers: Sequence[LayerDescription], is_cancelled: IsCancelled
) -> LookingHeads:
    """List the heads that look most at a token of the main text, with the queries whose weights on it are largest.

    Args:
        run: the recorded run of a model, which the page shows.
        sample: index of the text.
        key: position of the token.
        layers: the descriptions of the layers; only layers whose keys are the main text are read.
        is_cancelled: called before each layer; if it returns True, CancelledError is raised.

    Returns:
        "heads": a list with the layer, head, share (mean weight on the token over the queries that may see it) and
        queries (pairs of position and weight) of each; "tokens": the weight of each token of the main text on the token
        `key`, averaged over the heads.
    """
    found: list[LookingHead] = []
    totals, heads = torch.zeros(layers[0]["keys"], dtype=torch.float64), 0
    for layer, described in zip(run.record.layers, layers, strict=True):
        raise_if_cancelled(is_cancelled)
        one = layer.sample(sample)
        if described["keyText"] != 0 or described["rows"] != "all" or key >= one.num_keys:
            continue
        weights = visible_weights(one, keys=slice(key, key + 1))[..., 0].double()  # (heads, queries)
        known = weights.nan_to_num(nan=0.0)
        best = known.topk(min(MAX_LOOKING_QUERIES, one.num_queries))
        rows = zip(weights.nanmean(-1).tolist(), best.indices.tolist(), best.values.tolist(), strict=True)
        for head, (share, queries, largest) in enumerate(rows):
            pairs = [(query, weight) for query, weight in zip(queries, largest, strict=True) if weight > 0]
            if math.isfinite(share) and pairs:
                found.append({"layer": layer.number, "head": head, "share": share, "queries": pairs})
        if not described["crosses"] and one.num_keys == len(totals):
            totals[one.query_start :] += known.sum(0)
            heads += one.num_heads
    found.sort(key=lambda each: -each["share"])
    return {"heads": found[:MAX_LOOKING_HEADS], "tokens": round_all_for_json(totals / max(1, heads))}


def changed_heads(
    before: RecordedRun, after: RecordedRun, sample: int, top: int, is_cancelled: IsCancelled, *, lang: str
) -> ChangedHeads:
    """List the heads that differ most between two runs, the most changed first; see `Record.changed`.

    Of a long text only as many queries are compared as take a second or two. On different texts the heads that changed
    clearly beyond chance are listed, and of two models the kinds of heads ("kinds"). If the two records cannot be
    compared, the list of heads is empty, and the result has a sentence with the reason.
    """
    after_sample = min(sample, after.num_samples - 1)
    names = before.name, after.name
    if not before.record.has_heads_of(after.record):
        among = (*before.record.all_kinds, *after.record.all_kinds)
        kinds = before.record.compared_kinds(after.record, sample=sample, after_sample=after_sample)
        sentence = text("compare.read models", lang, before=escape_controls(names[0]), after=escape_controls(names[1]))
        return {
            "every": 1,
            "heads": [],
            "kinds": [(one.kind, *describe_kind_counts(one, lang, among)) for one in kinds],
            "sentences": [sentence],
        }
    ones = [layer.sample(sample) for layer in before.record.layers]
    queries = affordable_queries(2 * sum(one.num_keys * one.num_heads for one in ones))
    try:
        found = before.record.changed(
            after.record,
            sample=sample,
            after_sample=after_sample,
            queries=queries,
            progress=lambda *_: raise_if_cancelled(is_cancelled),
        )
    except (ArgumentError, ProbeError) as error:
        return {"every": 1, "heads": [], "error": str(error)}
    read = sample_of_main_text(before.record, sample).text
    separator = _sole_special_token(read.tokens, read.special)
    same_texts = any(one.compares_weights for one in found)
    shown = found if same_texts else [one for one in found if one.is_clear]

    def describe_change(one: ChangedHead) -> StatisticChangeDescription | None:
        change = one.change(lang)
        if change is not None and separator and same_texts and one.largest_difference == SEPARATOR_MASS.name:
            change = change._replace(label=separator)  # as in the table of all heads
        return None if change is None else {"label": change.label, "before": change.before, "after": change.after}

    return {
        "every": max(-(-one.num_queries // queries) for one in ones) if same_texts else 1,
        "heads": [
            {
                "layer": one.layer,
                "head": one.head,
                "divergence": round_for_json(one.divergence),
                "kinds": (one.kinds_before, one.kinds_after),
                "change": describe_change(one),
            }
            for one in shown[:top]
        ],
        "all": len(shown),
        "sameTexts": same_texts,
        "sentences": summarise_changes(found, *names, lang),
    }


def sample_of_main_text(record: Record, sample: int) -> SampleRecord:
    """Return the sample of the first self-attention layer that has tokens; its keys are the main text of a page."""
    ones = [layer.sample(sample) for layer in record.layers]
    alone = [one for one in ones if not one.cross_attention] or ones
    return next((one for one in alone if one.text.tokens is not None), alone[0])


def cross_attention_text(record: Record, sample: int, tokens: Sequence[str]) -> Text | None:
    """Return the other text of the cross-attention layers, beside `tokens`; None if there is none with tokens."""
    crossing = [one for one in (layer.sample(sample) for layer in record.layers) if one.cross_attention]
    texts = [each for one in crossing for each in (one.query_text, one.text) if each.tokens is not None]
    return next((each for each in texts if each.tokens != list(tokens)), None)


def _describe_layer(
    layer: LayerRecord, one: SampleRecord, profile: LayerProfile, role: str, texts: list[PageText]
) -> LayerDescription:
    blocks, cross_attention = blocks_of_levels(one), one.cross_attention or profile.cross_attention
    key_text = _find_or_append_text(one.text, one.num_keys, texts, named=bool(role))
    query_text = key_text
    if cross_attention:  # the queries are from another text than the keys, whose tokens may be unknown
        of_queries = one.query_text if one.cross_attention else Text()
        query_text = _find_or_append_text(of_queries, one.num_queries, texts, named=bool(role))
    return {
        "number": layer.number,
        "name": escape_controls(layer.name),
        "role": role,
        "aligned": layer.alignment_heads,
        "heads": one.num_heads,
        "queries": one.num_queries,
        "keys": one.num_keys,
        "queryStart": one.query_start,
        "crosses": cross_attention,
        "pattern": profile.visibility.pattern,
        "hides": profile.visibility.hides_keys,
        "blind": profile.visibility.blind_queries,
        "maps": bool(blocks),
        "blocks": blocks,
        "rows": "all" if one.keeps_weights else "",
        "margins": [name for name in MARGINS_OF_MAP if name in one.statistics],
        "queryText": query_text,
        "keyText": key_text,
    }


def blocks_of_levels(sample: SampleRecord) -> list[tuple[int, int]]:
    """Return the rows and columns of weights per cell of each level of a map, the finest level first; [] without maps.

    A map has all levels if q and k were kept, else the level that the record stores, if any.
    """
    if sample.keeps_weights:
        return [(1 << level, 1 << level) for level in range(number_of_levels(sample.num_queries, sample.num_keys))]
    return [] if stored_small_maps(sample) is None else [weights_per_cell(sample)]


def small_map_level(sample: SampleRecord) -> int:
    """Return the level of the small maps: single weights of a short text, else the coarsest level."""
    short = max(sample.num_queries, sample.num_keys) <= MAX_UNPOOLED_SIZE
    return 0 if short else number_of_levels(sample.num_queries, sample.num_keys) - 1


def weights_per_cell(sample: SampleRecord) -> tuple[int, int]:
    """Return how many rows and columns of weights each cell of the small maps averages."""
    if stored_small_maps(sample) is not None:
        return -(-sample.num_queries // sample.map_size), -(-sample.num_keys // sample.map_size)
    block = 1 << small_map_level(sample)
    return block, block


def stored_small_maps(sample: SampleRecord) -> Tensor | None:
    """Return the small maps that a record stores, if a page shows them."""
    if sample.keeps_weights and small_map_level(sample) == 0:
        return None
    pooled = sample.statistics.get(POOLED_MAP.name)
    return None if pooled is None or max(pooled.shape[1:]) > MAX_COARSEST_SIDE else pooled


def _find_or_append_text(text: Text, length: int, texts: list[PageText], *, named: bool) -> int:
    """Return the index in `texts` of the text with equal tokens, or of a caller's text of equal length; or append it.

    The texts of an encoder and a decoder may have the same length, so a length does not identify a text where layers
    have roles (`named`).
    """
    for index, each in enumerate(texts):
        if text.tokens is not None and each.tokens is not None and list(each.tokens) == text.tokens:
            return index
    for index, each in enumerate(texts):
        if each.length == length and (
            (each.given_by_caller and not named) or (each.tokens is None and text.tokens is None)
        ):
            return index
    texts.append(PageText.from_text(text, length))
    return len(texts) - 1


def margin_of_map(sample: SampleRecord, head: int, name: str) -> Tensor:
    """Return the numbers drawn at a margin of a head's map: the mean weight (keys,) or entropy (queries,)."""
    values = sample.statistics[name][head].double()
    return values / max(1, sample.num_queries) if MARGINS_OF_MAP[name].axes == "keys" else values


def _attention_received_per_token(
    record: Record, layers: Sequence[LayerDescription], sample: int, tokens: int
) -> list[float | None] | None:
    """Average the weights on each token over the queries and heads of all layers whose keys are the main text."""
    total, heads = torch.zeros(tokens, dtype=torch.float64), 0
    for layer, described in zip(record.layers, layers, strict=True):
        one = layer.sample(sample)
        if described["keyText"] == 0 and one.num_keys == tokens and RECEIVED.name in one.statistics:
            total += one.statistics[RECEIVED.name].double().sum(0) / max(1, one.num_queries)
            heads += one.num_heads
    return round_all_for_json(total / heads) if heads else None


def _sole_special_token(tokens: Sequence[str] | None, special: Sequence[bool] | None) -> str:
    """Return the special token that occurs after the first position, if only one such token does; else ""."""
    marked = zip(tokens or (), special or (), strict=False)
    found = {token for token, mark in list(marked)[1:] if mark}
    return escape_controls(found.pop()) if len(found) == 1 else ""


def statistics_per_head(
    statistics: Sequence[Mapping[str, Tensor]], heads: Sequence[int], names: Iterable[str], digits: int = 6
) -> dict[str, list[float | None]]:
    """Return name -> the statistic of every head, layer after layer; None where it is missing or not finite.

    Args:
        statistics: per layer, name of a statistic -> (heads,).
        heads: number of heads per layer.
        names: names of statistics; those that no layer has are left out.
        digits: significant digits of the numbers.
    """
    return {
        name: [
            number
            for of_layer, num_heads in zip(statistics, heads, strict=True)
            for number in (round_all_for_json(of_layer[name], digits) if name in of_layer else [None] * num_heads)
        ]
        for name in names
        if any(name in of_layer for of_layer in statistics)
    }
