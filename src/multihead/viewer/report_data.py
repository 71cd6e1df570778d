"""The contents of a report's page: its facts, its sentences, and the data its script reads."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from multihead.locale.escaping import visible
from multihead.locale.texts import section, text
from multihead.probes.catalogue import SEPARATOR
from multihead.record.analysis.highlights import LayerProfile
from multihead.record.analysis.roles import roles
from multihead.viewer.columns import columns_not_recorded, describe_column, legend_of_kinds, names_of_statistics
from multihead.viewer.page_budget import StoredMaps, keeps_weights

if TYPE_CHECKING:
    from multihead.observation.record import Record
    from multihead.record.layer import LayerRecord
    from multihead.record.sample import SampleRecord


def page_data(
    record: Record,
    profiles: Sequence[LayerProfile],
    texts: dict[str, Any],
    *,
    sample: int,
    special: Sequence[bool] | None,
    tokens: Sequence[str],
    other: Sequence[str] | None = None,
    lang: str,
) -> dict[str, Any]:
    """Return the data that the page's script reads, except for the maps and the findings."""
    known = {"main": list(tokens)} | ({} if other is None else {"other": list(other)})
    layers = [
        _describe_layer(layer, role, layer.sample(sample), texts, known)
        for layer, role in zip(record.layers, roles(record.layers, sample=sample), strict=True)
    ]
    names = names_of_statistics(profiles)
    if SEPARATOR.name in names:  # the first token has a column of its own
        names.remove("special_mass")
    columns = [describe_column(record.statistic(name), lang) for name in names]
    separator = _sole_special_token(tokens, special)
    for one in columns:
        if one["id"] == SEPARATOR.name and separator:
            one["label"] = separator
    return {
        "texts": texts,
        "layers": layers,
        "columns": columns,
        "unrecorded": columns_not_recorded(names_of_statistics(profiles), lang),
        "labels": {name: describe_column(record.statistic(name), lang)["label"] for name in ("entropy", "received")},
        "metrics": {
            one["id"]: _column_of_statistic(profiles, [each.means for each in profiles], one["id"]) for one in columns
        },
        "chance": {
            one["id"]: _column_of_statistic(profiles, [each.chance for each in profiles], one["id"])
            for one in columns
            if any(one["id"] in each.chance for each in profiles)
        },
        "kinds": [kinds for one in profiles for kinds in one.kinds],
        "top": _finite_numbers_or_none(torch.cat([one.visibility.largest_entropy for one in profiles])),
        "sight": {
            "hides": any(one.visibility.hides for one in profiles),
            "later": all(one.visibility.pattern in ("full", "causal") for one in profiles),
            "blind": sum(one.visibility.blind_queries > 0 for one in profiles),
        },
        "received": _attention_received_per_token(record, layers, sample, len(tokens)),
        "legend": legend_of_kinds(record.all_kinds, profiles, lang, bound=not keeps_weights(record, sample)),
    }


def facts_of_record(
    record: Record, profiles: Sequence[LayerProfile], texts: dict[str, Any], *, sample: int, lang: str
) -> list[tuple[str, str]]:
    """Return the (label, value) pairs in the row under the page's title, such as the number of heads and tokens."""
    words = section(lang, "report")
    heads = [len(one.kinds) for one in profiles]
    if len(set(heads)) == 1:
        found = [(words["fact.grid"], f"{len(heads)} × {heads[0]}")]
    else:
        found = [(words["fact.layers"], str(len(heads))), (words["fact.heads"], str(sum(heads)))]
    found.append((words["fact.tokens"], f"{len(texts['main']['shown']):,}"))
    if "keys" in texts:
        found.append((words["fact.keys"], f"{len(texts['keys']['shown']):,}"))
    if "other" in texts:
        found.append((words["fact.decoder tokens"], f"{len(texts['other']['shown']):,}"))
    found.append((words["fact.attention"], _name_masks(profiles, lang)))
    kinds = {kind for one in profiles for named in one.kinds for kind in named}
    possible = sum(each["measured"] for each in legend_of_kinds(record.all_kinds, profiles, lang))
    found.append((words["fact.kinds"], words["kinds present"].format(kinds=len(kinds), all=possible)))
    return found


def lead_sentence(record: Record, profiles: Sequence[LayerProfile], tokens: int, *, sample: int, lang: str) -> str:
    """Return the sentence under the page's title: how many heads and tokens it shows."""
    heads = sum(len(one.kinds) for one in profiles)
    crossing = [layer.sample(sample) for layer in record.layers if layer.sample(sample).crosses]
    if crossing and "encoder" in roles(record.layers, sample=sample):
        one = crossing[0]
        values = {"heads": f"{heads:,}", "keys": f"{one.num_keys:,}", "queries": f"{one.num_queries:,}"}
        return text("report.lead two", lang, **values)
    key = "report.lead" if heads > 1 and tokens > 1 else "report.lead one"
    return text(key, lang, heads=f"{heads:,}", tokens=f"{tokens:,}")


def sentence_on_stored_maps(store: StoredMaps, *, max_bytes: int, lang: str) -> str:
    """Return a sentence on what the page stores, the precision of its weights, and what it leaves out and why."""
    rows, columns = store.map_size
    key = store.mode
    if store.mode == "largest" and store.number == 1:
        key = "largest 1"
    if store.reason == "statistics":
        key = f"{store.mode} statistics"
    return text(
        f"report.stored.{key}",
        lang,
        bits=store.bits,
        rounding=format_rounding_error(store),
        rows=rows,
        columns=columns,
        n=store.number,
        size=readable_size(max_bytes, lang),
    )


def format_rounding_error(store: StoredMaps) -> str:
    """Write the largest rounding error in percentage points, two digits, rounded up so that it stays a bound.

    >>> format_rounding_error(StoredMaps(rounding=0.0000152)), format_rounding_error(StoredMaps())
    ('0.0016', '0')
    """
    points = store.rounding * 100
    if points <= 0:
        return "0"
    decimals = 1 - math.floor(math.log10(points))
    return f"{math.ceil(points * 10**decimals) / 10**decimals:.{max(0, decimals)}f}"


def readable_size(num_bytes: int, lang: str) -> str:
    """Write a size in MB, or in kB below 1 MB."""
    if num_bytes < 1_000_000:
        return text("report.kilobytes", lang, n=f"{num_bytes / 1e3:.0f}")
    return text("report.megabytes", lang, n=f"{num_bytes / 1e6:.1f}".removesuffix(".0"))


def _describe_layer(
    layer: LayerRecord, role: str, one: SampleRecord, texts: dict[str, Any], known: dict[str, list[str]]
) -> dict[str, Any]:
    found = _match_texts_by_tokens(one, known)
    if found is None:
        # The texts of an encoder and a decoder may have the same length, and a length then does not identify a text.
        queries, keys = _match_texts_by_length(
            one, {} if role else {key: len(text["shown"]) for key, text in texts.items()}
        )
    else:
        queries, keys = found
    return {
        "number": layer.number,
        "name": visible(layer.name),
        "role": role,
        "aligned": layer.alignment_heads,
        "heads": one.num_heads,
        "queries": one.num_queries,
        "keys": one.num_keys,
        "queryStart": one.query_start if queries["text"] == keys["text"] else 0,
        "queryTokens": queries,
        "keyTokens": keys,
    }


def _match_texts_by_tokens(
    one: SampleRecord, known: dict[str, list[str]]
) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """Find which of the known texts a layer's queries and keys are, by their tokens; None if none matches."""

    def name_of_text(tokens: list[str] | None) -> str:
        return next((name for name, each in known.items() if each == tokens), "none")

    keys = name_of_text(one.text.tokens)
    if not one.crosses:
        return None if keys == "none" else ({"text": keys, "from": one.query_start}, {"text": keys, "from": 0})
    queries = name_of_text(one.query_text.tokens)
    if keys == queries == "none":
        return None
    return {"text": queries, "from": 0}, {"text": keys, "from": 0}


def _match_texts_by_length(one: SampleRecord, lengths: dict[str, int]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Find which texts a layer's queries and keys are, by their lengths; "none" if no text has that length."""
    for name, length in lengths.items():
        if one.num_keys == length and one.query_start + one.num_queries == length:
            return {"text": name, "from": one.query_start}, {"text": name, "from": 0}

    def text_of_length(count: int, order: Sequence[str]) -> dict[str, Any]:
        return {"text": next((name for name in order if lengths.get(name) == count), "none"), "from": 0}

    return text_of_length(one.num_queries, ("main", "keys")), text_of_length(one.num_keys, ("keys", "main"))


def _column_of_statistic(
    profiles: Sequence[LayerProfile], values: Sequence[Mapping[str, Tensor]], name: str
) -> list[float | None]:
    """Return one statistic of every head, layer after layer; None where a layer does not have it."""
    absent = (torch.full((len(one.kinds),), math.nan) for one in profiles)
    return _finite_numbers_or_none(
        torch.cat([each.get(name, none).double() for each, none in zip(values, absent, strict=True)])
    )


def _attention_received_per_token(
    record: Record, layers: Sequence[dict[str, Any]], sample: int, tokens: int
) -> list[float | None] | None:
    """Average the weights on each token over the queries and heads of all layers whose keys are the page's text."""
    total, heads = torch.zeros(tokens, dtype=torch.float64), 0
    for one, layer in zip(_samples_of_layers(record, sample), layers, strict=True):
        elsewhere = layer["role"] and layer["keyTokens"]["text"] != "main"
        if one.num_keys == tokens and not elsewhere and "received" in one.statistics:
            total += one.statistics["received"].double().sum(0) / max(1, one.num_queries)
            heads += one.num_heads
    return _finite_numbers_or_none(total / heads) if heads else None


def _name_masks(profiles: Sequence[LayerProfile], lang: str) -> str:
    """Name the masks of the layers, the most common first."""
    words = section(lang, "common", "page", "report")

    def name_mask(one: LayerProfile) -> str:
        seen = one.visibility
        name = "cross" if one.crosses and seen.pattern == "full" else seen.pattern
        return words[f"pattern.{name}"].format(tokens=seen.before, before=seen.before, after=seen.after)

    patterns = Counter(name_mask(one) for one in profiles)
    if len(patterns) == 1:
        return next(iter(patterns))
    parts = [
        words["pattern in 1 layer" if layers == 1 else "pattern in layers"].format(pattern=name, layers=layers)
        for name, layers in patterns.most_common()
    ]
    return words["join.parts"].join(parts)


def _sole_special_token(tokens: Sequence[str], special: Sequence[bool] | None) -> str:
    """Return the special token after the first position, if there is only one kind; else ""."""
    marks = {token for token, mark in list(zip(tokens, special or (), strict=False))[1:] if mark}
    return visible(marks.pop()) if len(marks) == 1 else ""


def _finite_numbers_or_none(values: Tensor) -> list[float | None]:
    """Return the values for JSON, rounded to six significant digits; None where a value is not finite."""
    return [float(f"{value:.6g}") if math.isfinite(value) else None for value in values.tolist()]


def _samples_of_layers(record: Record, sample: int) -> Iterator[SampleRecord]:
    for layer in record.layers:
        yield layer.sample(sample)
