"""Write a time series as one self-contained HTML page: a film of all heads over the steps of a training."""

from __future__ import annotations

import os
from bisect import bisect_left
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from multihead.errors import ArgumentError
from multihead.errors.arguments import check_integer
from multihead.errors.given import check_path
from multihead.files import write_atomically
from multihead.locale.escaping import escape_controls
from multihead.locale.texts import check_language, section, text
from multihead.observation.time_series import most_telling_first
from multihead.probes.probe import SHARE_FORMAT
from multihead.viewer.columns import describe_column, legend_of_kinds
from multihead.viewer.page import render_heads_page, round_all_for_json
from multihead.viewer.page_types import SeriesData, SeriesKinds, SeriesNumbers

if TYPE_CHECKING:
    from multihead.observation.time_series import TimeSeries

MAX_NUMBERS = 1 << 21
"""Largest number of values in a page, about 12 MB; of a longer series the page has every n-th step and the last one."""


@dataclass(frozen=True, eq=False, repr=False)
class HeadFilm:
    """The page of a time series in a notebook: shown if it is the last value of a cell, and saved with the notebook.

    Attributes:
        page: the page as HTML.
        height: height of the page in the notebook, pixels.
        title: what the page shows, in one line.
    """

    page: str
    height: int
    title: str

    def __repr__(self) -> str:
        """Return one line: what the film shows, and how to see it outside of a notebook."""
        return f"<HeadFilm: {self.title}; series.report(path) writes it as a page>"

    def _repr_html_(self) -> str:
        # The frame has an origin of its own, so its script cannot reach the notebook.
        return (
            f'<iframe title="{escape(self.title)}" sandbox="allow-scripts" srcdoc="{escape(self.page)}" '
            f'style="width:100%;height:{self.height}px;border:0"></iframe>'
        )


def film_of_series(series: TimeSeries, *, lang: str = "en", height: int = 720) -> HeadFilm:
    """Return the page of a series for a notebook; see `TimeSeries.view`."""
    check_integer("height", height)
    page = render_series(series, lang)
    return HeadFilm(page, height, text("series.title", lang))


def write_series_page(series: TimeSeries, path: str | os.PathLike[str], *, lang: str = "en") -> Path:
    """Write the page of a series, completely or not at all; see `TimeSeries.report`."""
    check_path("path", path)
    write_atomically(path, render_series(series, lang))
    return Path(path)


def render_series(series: TimeSeries, lang: str) -> str:
    """Render the page: one HTML file with its style, script and data, which makes no network requests.

    Raises:
        ArgumentError: nothing was observed, or there is no such language.
    """
    check_language(lang)
    if not series.steps or not series.statistics:
        raise ArgumentError("The series has no step to show.", "Run some training steps inside the watch first.")
    words = section(lang, "series")
    data, every = page_data(series, lang)
    return render_heads_page(
        "series",
        "series",
        lang,
        data=data,
        title=words["title"],
        lead=_lead_sentence(series, every, lang),
        last=len(data["steps"]) - 1,
        kinds=bool(series.watched_kinds),
        facts=[
            (words["fact.grid"], f"{len(series.layers)} × {max(series.num_heads.values())}"),
            (words["fact.steps"], f"{len(series.steps):,}"),
            (words["fact.statistics"], str(len(series.statistics))),
        ],
    )


def page_data(series: TimeSeries, lang: str) -> tuple[SeriesData, int]:
    """Return the data of the page's script, and n if it has every n-th step; None stands for a missing number."""
    heads = sum(series.num_heads.values())
    every = -(-len(series.steps) * heads * (len(series.statistics) + bool(series.watched_kinds)) // MAX_NUMBERS)
    chosen = sorted({*range(0, len(series.steps), every), len(series.steps) - 1})
    columns = [describe_column(shown, lang) for shown in series.statistics.values()]
    values = {each["id"]: series.values_of_all_heads(each["id"]) for each in columns}
    data: SeriesNumbers = {
        "steps": [series.steps[place] for place in chosen],
        "layers": [
            {"number": number, "name": escape_controls(series.layers[number]), "heads": heads}
            for number, heads in series.num_heads.items()
        ],
        "columns": columns,
        "ends": {each["id"]: _ends_of_scale(values[each["id"]], each["format"]) for each in columns},
        "values": {
            name: [round_all_for_json(found[place], digits=4) for place in chosen] for name, found in values.items()
        },
    }
    return SeriesData(**data, **_data_of_kinds(series, chosen, lang)), every


def _data_of_kinds(series: TimeSeries, chosen: list[int], lang: str) -> SeriesKinds:
    """Return the legend of the kinds, the kinds of each head at each chosen step, and when heads changed in them.

    A change has the index of the first chosen step that shows it, besides its own step. Without watched kinds all lists
    are empty.
    """
    if not series.watched_kinds:
        return {"legend": [], "combinations": [], "kinds": [], "changes": []}
    nouns = {kind.name: escape_controls(kind.noun_phrase(lang)) for kind in series.watched_kinds}
    legend = legend_of_kinds(series.watched_kinds, [series], lang)
    named = series.kinds_of_all_heads()
    places: dict[tuple[str, ...], int] = {}
    kinds = [[places.setdefault(each, len(places)) for each in named[place]] for place in chosen]
    steps = [series.steps[place] for place in chosen]
    return {
        "legend": [each | {"noun": nouns.get(each["id"], "")} for each in legend],
        "combinations": list(places),  # of names of kinds
        "kinds": kinds,  # index of the combination of each head
        "changes": [
            {
                "layer": each.layer,
                "head": each.head,
                "kind": each.kind,
                "gained": each.gained,
                "step": each.step,
                "at": bisect_left(steps, each.step),
            }
            for each in most_telling_first(series.changes())
        ],
    }


def _lead_sentence(series: TimeSeries, every: int, lang: str) -> str:
    sizes = {"heads": sum(series.num_heads.values()), "first": f"{series.steps[0]:,}", "last": f"{series.steps[-1]:,}"}
    sentences = [text("series.lead", lang, **sizes)]
    if every > 1:
        sentences.append(text("series.thinned", lang, n=every))
    return section(lang, "common")["join.sentences"].join(sentences)


def _ends_of_scale(values: NDArray[np.float32], number_format: str) -> tuple[float, float]:
    """Return the values at which the colours of a statistic begin and end, the same at all steps.

    The scale of a share is 0 to 1; that of other statistics is from the smallest value, at most 0, to the largest.
    """
    if number_format == SHARE_FORMAT:
        return 0.0, 1.0
    known = values[np.isfinite(values)]
    low, high = min(0.0, float(known.min(initial=0))), float(known.max(initial=0))
    return (low, high) if high > low else (low, low + 1)
