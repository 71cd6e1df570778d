"""The data of the viewer's page: texts, layers, and the numbers and kinds of every head."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from multihead.locale.escaping import visible
from multihead.record.analysis.highlights import LayerProfile, findings
from multihead.record.analysis.roles import roles, rows_with_roles
from multihead.record.analysis.similar import affordable_queries
from multihead.record.texts import Text
from multihead.viewer.columns import columns_not_recorded, describe_column, legend_of_kinds, names_of_statistics
from multihead.viewer.levels import SIDE, number_of_levels
from multihead.viewer.tokens import SPECIAL, layout_of_tokens

if TYPE_CHECKING:
    from torch import Tensor

    from multihead.observation.record import Record
    from multihead.record.sample import SampleRecord


OPENING = 12  # tokens


@dataclass(frozen=True, eq=False)
class RecordedRun:
    """One record shown in the viewer.

    Attributes:
        name: the name of its file.
        record: the record.
        folder: the folder of its coarse levels; None keeps them in memory.
    """

    name: str
    record: Record
    folder: Path | None = None

    @property
    def num_samples(self) -> int:
        """Number of texts that all layers recorded."""
        return min((len(layer.samples) for layer in self.record.layers), default=0)

    def keeps_weights(self, sample: int) -> bool:
        """Return whether q and k of a sample were kept, so that its maps can be computed."""
        return all(layer.sample(sample).keeps_weights for layer in self.record.layers)


def describe_run(run: RecordedRun) -> dict[str, Any]:
    """Describe a run: its name, what was kept, and the lengths of its texts."""
    samples = [run.record.layers[0].sample(index) for index in range(run.num_samples)]
    return {
        "name": visible(run.name),
        "title": visible(run.record.title),
        "keep": "all" if all(run.keeps_weights(index) for index in range(run.num_samples)) else "statistics",
        "samples": [
            {"queries": one.num_queries, "keys": one.num_keys, "opening": _first_words(run.record, index)}
            for index, one in enumerate(samples)
        ],
    }


def _first_words(record: Record, sample: int) -> str:
    """Return the first words of a text, for a list of texts; "" if its tokens are unknown."""
    text = main_sample(record, sample).text.part(0, OPENING)
    if text.tokens is None:
        return ""
    words = layout_of_tokens(text.tokens, special=text.special, gaps=text.gaps)
    opening = "".join(
        gap + word
        for gap, word, flags in zip(words["gaps"], words["shown"], words["flags"], strict=True)
        if not flags & SPECIAL
    )
    return " ".join(opening.split())[:40]


def describe_sample(run: RecordedRun, sample: int, lang: str = "en") -> dict[str, Any]:
    """Describe a sample except for its maps: texts, layers, and the numbers and the kind of every head."""
    main = main_sample(run.record, sample).text
    profiles = run.record.profiles(sample=sample, special=main.special)
    texts: list[Text] = [main]
    named = roles(run.record.layers, sample=sample)
    layers = [_describe_layer(run, index, sample, profiles[index], texts) for index in range(len(profiles))]
    layers = [layer | {"role": role} for layer, role in zip(layers, named, strict=True)]
    names = names_of_statistics(profiles)
    columns = [describe_column(run.record.statistic(name), lang) for name in names]
    # With two texts, "the first token" is not one token.
    tokens = None if main.tokens is None or cross_attention_text(run.record, sample, main.tokens) else main.tokens
    found = findings(
        run.record.layers,
        sample=sample,
        tokens=tokens,
        special=main.special,
        lang=lang,
        profiles=profiles,
        among=run.record.all_kinds,
    )
    heads = [len(one.kinds) for one in profiles]
    return {
        "texts": [
            None if each.tokens is None else layout_of_tokens(each.tokens, special=each.special, gaps=each.gaps)
            for each in texts
        ],
        "layers": layers,
        "kinds": [kinds for one in profiles for kinds in one.kinds],
        "metrics": {
            one["id"]: _statistic_per_head([profile.means for profile in profiles], heads, one["id"]) for one in columns
        },
        "chance": {
            one["id"]: _statistic_per_head([profile.chance for profile in profiles], heads, one["id"])
            for one in columns
            if any(one["id"] in profile.chance for profile in profiles)
        },
        "columns": columns,
        "unrecorded": columns_not_recorded(names, lang),
        "findings": [asdict(one) for one in found],
        # The largest possible entropy of each head; None where the class of its mask is unknown.
        "full": _statistic_per_head([{"full": one.visibility.largest_entropy} for one in profiles], heads, "full"),
        "legend": legend_of_kinds(run.record.all_kinds, profiles, lang),
    }


def table_rows_of_heads(run: RecordedRun, sample: int) -> list[dict[str, Any]]:
    """List the numbers of every head: layer, head, name, kinds, and the mean and the chance of each statistic."""
    profiles = run.record.profiles(sample=sample, special=main_sample(run.record, sample).text.special)
    rows = [
        {"layer": one.number, "head": head, "name": one.name, "kind": ""}
        | {name: float(values[head]) for name, values in one.means.items()}
        | one.row(head)
        for one in profiles
        for head in range(len(one.kinds))
    ]
    return rows_with_roles(run.record.layers, rows, sample=sample)


def nearest_heads(run: RecordedRun, sample: int, layer: int, head: int, top: int) -> list[dict[str, Any]]:
    """List the heads whose weights are most similar to those of one head, nearest first; see `Record.nearest`.

    The divergence is None where no query has finite weights in both heads: JSON has no NaN.
    """
    return [
        {
            "layer": each.layer,
            "head": each.head,
            "divergence": None if math.isnan(each.divergence) else each.divergence,
            "queries": each.queries,
        }
        for each in run.record.nearest(layer, head, top=top, sample=sample)
    ]


def changed_heads(
    before: RecordedRun, after: RecordedRun, sample: int, top: int, *, lang: str, progress: Callable[[], None]
) -> dict[str, Any]:
    """List the heads whose weights differ most between two runs, the most changed first; see `Record.changed`.

    Of a long text only some queries are compared: as many as take a second or two.
    """
    ones = [layer.sample(sample) for layer in before.record.layers]
    queries = affordable_queries(2 * sum(one.num_keys * one.num_heads for one in ones))
    found = before.record.changed(
        after.record, sample=sample, top=top, queries=queries, progress=lambda done, total: progress()
    )
    return {
        "every": max(-(-one.num_queries // queries) for one in ones),
        "heads": [
            {
                "layer": one.layer,
                "head": one.head,
                "divergence": None if math.isnan(one.divergence) else one.divergence,
                "kinds": [one.kinds_before, one.kinds_after],
                "change": None if (change := one.change(lang)) is None else change._asdict(),
            }
            for one in found
        ],
    }


def has_maps(one: SampleRecord) -> bool:
    """Return whether the small maps of a layer are available: stored in the record, or computed from q and k."""
    pooled = one.statistics.get("pooled_map")
    return one.keeps_weights or (pooled is not None and max(pooled.shape[1:]) <= SIDE)


def main_sample(record: Record, sample: int) -> SampleRecord:
    """Return the sample of the first self-attention layer that has tokens; its keys are the main text of a page."""
    ones = [layer.sample(sample) for layer in record.layers]
    alone = [one for one in ones if not one.crosses] or ones
    return next((one for one in alone if one.text.tokens is not None), alone[0])


def cross_attention_text(record: Record, sample: int, tokens: Sequence[str]) -> Text | None:
    """Return the other text of the cross-attention layers, beside `tokens`; None if there is none with tokens."""
    crossing = [one for one in (layer.sample(sample) for layer in record.layers) if one.crosses]
    texts = [text for one in crossing for text in (one.query_text, one.text) if text.tokens is not None]
    return next((text for text in texts if text.tokens != list(tokens)), None)


def _describe_layer(
    run: RecordedRun, index: int, sample: int, reading: LayerProfile, texts: list[Text]
) -> dict[str, Any]:
    one = run.record.layers[index].sample(sample)
    crosses = one.crosses or reading.crosses
    # In cross-attention, the queries are of another text than the keys; its tokens may be unknown.
    of_queries = one.text if not crosses else one.query_text if one.crosses else Text()
    return {
        "number": reading.number,
        "name": visible(reading.name),
        "heads": one.num_heads,
        "maps": has_maps(one),
        "queries": one.num_queries,
        "keys": one.num_keys,
        "queryStart": one.query_start,
        "crosses": crosses,
        "aligned": run.record.layers[index].alignment_heads,
        "pattern": reading.visibility.pattern,
        "levels": number_of_levels(one.num_queries, one.num_keys) if one.keeps_weights else 0,
        "queryText": _find_or_append_text(of_queries, texts),
        "keyText": _find_or_append_text(one.text, texts),
    }


def _find_or_append_text(text: Text, texts: list[Text]) -> int:
    """Return the index of a text in `texts`; append the text if it is missing."""
    for index, each in enumerate(texts):
        if (each.length, each.tokens, each.special) == (text.length, text.tokens, text.special):
            return index
    texts.append(text)
    return len(texts) - 1


def _statistic_per_head(values: Sequence[Mapping[str, Tensor]], heads: Sequence[int], name: str) -> list[float | None]:
    """Return a statistic of every head, layer after layer; None where it is missing or not finite."""
    found: list[float | None] = []
    for of_layer, number in zip(values, heads, strict=True):
        numbers = of_layer[name].tolist() if name in of_layer else [math.nan] * number
        found += [value if math.isfinite(value) else None for value in numbers]
    return found
