"""Say what a report's page says: its words in each language, its facts, and the data its script reads."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from multihead.analysis import visibility
from multihead.analysis.highlights import BROAD_SHARE, KINDS, LOCAL_SHARE, MASS_SHARE, LayerProfile, percent
from multihead.escaping import visible
from multihead.viewer.page_budget import Store, keeps_weights

if TYPE_CHECKING:
    from multihead.observation.record import Record
    from multihead.record.sample import SampleRecord

_COLUMNS = {
    "entropy": "entropy",
    "keys": "effective_keys",
    "distance": "mean_distance",
    "spread": "distance_spread",
    "self": "self_mass",
    "previous": "previous_mass",
    "next": "next_mass",
    "first": "first_mass",
    "separator": "separator_mass",
    "largest": "largest_weight",
}


@cache
def all_words() -> dict[str, dict[str, str]]:
    """The page's words, language -> name -> sentence with {holes}."""
    found: dict[str, dict[str, str]] = json.loads(
        (resources.files(__package__) / "static" / "words.json").read_text("utf-8")
    )
    return found


def page_data(
    record: Record,
    profiles: Sequence[LayerProfile],
    texts: dict[str, Any],
    *,
    sample: int,
    special: Sequence[bool] | None,
    tokens: Sequence[str],
    words: dict[str, str],
) -> dict[str, Any]:
    """All that the page's script needs to know, the maps and the findings aside."""
    return {
        "texts": texts,
        "layers": [_layer(layer.number, layer.name, layer.sample(sample), texts) for layer in record.layers],
        "metrics": {column: values for column, name in _COLUMNS.items() if (values := _column(profiles, name))},
        "kinds": [kind for one in profiles for kind in one.kinds],
        "top": _numbers(torch.cat([one.visibility.largest_entropy for one in profiles])),
        "sight": {
            "hides": any(one.visibility.hides for one in profiles),
            "later": all(one.visibility.pattern in ("full", "causal") for one in profiles),
            "blind": sum(one.visibility.blind_queries > 0 for one in profiles),
        },
        "received": _received(record, sample, len(tokens)),
        "bound": not keeps_weights(record, sample),
        "separator": _separator(tokens, special) or words["special"],
        "thresholds": {
            "mass": percent(MASS_SHARE),
            "local": percent(LOCAL_SHARE),
            "broad": percent(BROAD_SHARE),
            "reach": visibility.LOCAL_REACH,
        },
    }


def facts(
    record: Record, profiles: Sequence[LayerProfile], texts: dict[str, Any], *, sample: int, words: dict[str, str]
) -> list[tuple[str, str]]:
    """The row of facts under the title: label and value, each read off the record."""
    heads = [len(one.kinds) for one in profiles]
    if len(set(heads)) == 1:
        found = [(words["fact grid"], f"{len(heads)} × {heads[0]}")]
    else:
        found = [(words["fact layers"], str(len(heads))), (words["fact heads"], str(sum(heads)))]
    found.append((words["fact tokens"], f"{len(texts['main']['shown']):,}"))
    if "keys" in texts:
        found.append((words["fact keys"], f"{len(texts['keys']['shown']):,}"))
    found.append((words["fact attention"], _attention(profiles, words)))
    kinds = {kind for one in profiles for kind in one.kinds}
    # Separators need marks after the first token, others token ids; without them they are no kinds that could be there.
    missing = ("separator_mass", "duplicate_mass", "induction_mass")
    possible = len(KINDS) - sum(all(name not in one.means for one in profiles) for name in missing)
    found.append((words["fact kinds"], words["{kinds} of {all} present"].format(kinds=len(kinds), all=possible)))
    return found


def lead(profiles: Sequence[LayerProfile], tokens: int, words: dict[str, str]) -> str:
    """The sentence under the title."""
    heads = sum(len(one.kinds) for one in profiles)
    return words["lead" if heads > 1 and tokens > 1 else "lead one"].format(heads=f"{heads:,}", tokens=f"{tokens:,}")


def foot(store: Store, *, max_bytes: int, version: str, words: dict[str, str]) -> str:
    """The last line: who made the page, what it holds, how far a stored weight may be off, what is left out."""
    rows, columns = store.map_size
    given = {
        "bits": store.bits,
        "rounding": rounding(store),
        "rows": rows,
        "columns": columns,
        "n": store.number,
        "size": size(max_bytes, words),
    }
    holds = {"whole": "foot whole", "largest": "foot largest", "pooled": "foot pooled", "none": "foot no room"}[
        store.mode
    ]
    if store.mode == "largest" and store.number == 1:
        holds = "foot largest one"
    if store.reason == "statistics":
        holds = "foot statistics maps" if store.mode == "pooled" else "foot statistics"
    return words["foot"].format(version=version) + words["between sentences"] + words[holds].format(**given)


def rounding(store: Store) -> str:
    """The largest rounding in percentage points, with two digits, rounded up so that it stays a bound.

    >>> rounding(Store(rounding=0.0000152)), rounding(Store())
    ('0.0016', '0')
    """
    points = store.rounding * 100
    if points <= 0:
        return "0"
    decimals = 1 - math.floor(math.log10(points))
    return f"{math.ceil(points * 10**decimals) / 10**decimals:.{max(0, decimals)}f}"


def size(num_bytes: int, words: dict[str, str]) -> str:
    """A size in MB, or below one in kB."""
    if num_bytes < 1_000_000:
        return words["kilobytes"].format(n=f"{num_bytes / 1e3:.0f}")
    return words["megabytes"].format(n=f"{num_bytes / 1e6:.1f}".removesuffix(".0"))


def _layer(number: int, name: str, one: SampleRecord, texts: dict[str, Any]) -> dict[str, Any]:
    queries, keys = _sources(one, {key: len(text["shown"]) for key, text in texts.items()})
    return {
        "number": number,
        "name": visible(name),
        "heads": one.num_heads,
        "queries": one.num_queries,
        "keys": one.num_keys,
        "queryStart": one.query_start if queries["text"] == keys["text"] else 0,
        "queryTokens": queries,
        "keyTokens": keys,
    }


def _sources(one: SampleRecord, lengths: dict[str, int]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Which text a layer's queries and keys are, told by length; none where no text has that length."""
    for text, length in lengths.items():
        if one.num_keys == length and one.query_start + one.num_queries == length:
            return {"text": text, "from": one.query_start}, {"text": text, "from": 0}

    def called(count: int, order: Sequence[str]) -> dict[str, Any]:
        return {"text": next((text for text in order if lengths.get(text) == count), "none"), "from": 0}

    return called(one.num_queries, ("main", "keys")), called(one.num_keys, ("keys", "main"))


def _column(profiles: Sequence[LayerProfile], name: str) -> list[float | None]:
    """One statistic of every head, layer after layer; empty if no layer has it."""
    if not any(name in one.means for one in profiles):
        return []
    return _numbers(
        torch.cat([one.means.get(name, torch.full((len(one.kinds),), math.nan)).double() for one in profiles])
    )


def _received(record: Record, sample: int, tokens: int) -> list[float | None] | None:
    """What each token receives, the mean over the queries and heads of the layers whose keys are the text."""
    total, heads = torch.zeros(tokens, dtype=torch.float64), 0
    for one in _samples(record, sample):
        if one.num_keys == tokens and "received" in one.statistics:
            total += one.statistics["received"].double().sum(0) / max(1, one.num_queries)
            heads += one.num_heads
    return _numbers(total / heads) if heads else None


def _attention(profiles: Sequence[LayerProfile], words: dict[str, str]) -> str:
    """What the masks of the layers are, the commonest first."""

    def called(one: LayerProfile) -> str:
        seen = one.visibility
        name = "cross" if one.crosses and seen.pattern == "full" else seen.pattern
        return words[f"pattern {name}"].format(tokens=seen.before, before=seen.before, after=seen.after)

    patterns = Counter(called(one) for one in profiles)
    if len(patterns) == 1:
        return next(iter(patterns))
    parts = [
        words["{pattern} in one layer" if layers == 1 else "{pattern} in {layers} layers"].format(
            pattern=name, layers=layers
        )
        for name, layers in patterns.most_common()
    ]
    return words["between parts"].join(parts)


def _separator(tokens: Sequence[str], special: Sequence[bool] | None) -> str:
    """The one mark that stands after the first token, or nothing where there are several kinds or none."""
    marks = {token for token, mark in list(zip(tokens, special or (), strict=False))[1:] if mark}
    return visible(marks.pop()) if len(marks) == 1 else ""


def _numbers(values: Tensor) -> list[float | None]:
    """Numbers for JSON with six digits; None for what is no number."""
    return [float(f"{value:.6g}") if math.isfinite(value) else None for value in values.tolist()]


def _samples(record: Record, sample: int) -> Iterator[SampleRecord]:
    for layer in record.layers:
        yield layer.sample(sample)
