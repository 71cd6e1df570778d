"""The page of a series holds the numbers of every head at every step, and a notebook shows it in a frame."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from multihead.errors import ArgumentError, InputError
from multihead.kinds import KINDS, MIXED
from multihead.observation.time_series import TimeSeries
from multihead.probes.probe import Statistic
from multihead.viewer import series_page


def series() -> TimeSeries:
    """Three steps of layers with two heads and one; layer 1 has no entropy, and one score is infinite."""
    made = TimeSeries()
    shown = {"mine": Statistic("mine", label="my own", number_format="share")}
    for step in (0, 100, 200):
        largest = {"largest_score": [-1.5, np.inf if step == 100 else step / 3]}
        made.append(step, "<a>", 0, {"entropy": [1.0 + step, 2.0], "mine": [0.25, 0.5], **largest}, shown)
        made.append(step, "b", 1, {"mine": [0.75]})
    return made


def data_of(page: str) -> Any:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    return json.loads(found[1])


def test_the_page_has_each_number_of_every_head_at_every_step(tmp_path: Path) -> None:
    path = series().report(tmp_path / "heads.html")
    data = data_of(path.read_text("utf-8"))
    assert data["steps"] == [0, 100, 200]
    assert data["layers"] == [{"number": 0, "name": "<a>", "heads": 2}, {"number": 1, "name": "b", "heads": 1}]
    assert data["values"] == {
        "entropy": [[1, 2, None], [101, 2, None], [201, 2, None]],
        "mine": [[0.25, 0.5, 0.75]] * 3,
        "largest_score": [[-1.5, 0, None], [-1.5, None, None], [-1.5, 66.67, None]],
    }


def test_a_scale_is_the_same_at_all_steps_and_begins_at_0_or_below() -> None:
    ends = data_of(series().view().page)["ends"]
    assert ends == {"entropy": [0, 201], "mine": [0, 1], "largest_score": [-1.5, pytest.approx(200 / 3)]}
    level = TimeSeries()
    level.append(0, "a", 0, {"entropy": [0.0]})
    assert data_of(level.view().page)["ends"] == {"entropy": [0, 1]}


def test_a_page_of_many_steps_leaves_some_out_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    many = TimeSeries()
    for step in range(8):
        many.append(step, "a", 0, {"entropy": [float(step)] * 2})
    assert "one step of every 3" not in many.view().page
    monkeypatch.setattr(series_page, "MAX_NUMBERS", 6)
    page = many.view().page
    assert data_of(page)["steps"] == [0, 3, 6, 7]
    assert data_of(page)["values"]["entropy"][-1] == [7, 7]
    assert "The page holds one step of every 3." in page


def test_the_page_has_the_kinds_of_every_head_and_when_they_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    made = TimeSeries(watched_kinds=KINDS)
    for step, kinds in enumerate((["mixed"], ["broad"], ["broad"], ["first", "local"], ["first", "local"])):
        made.append(step, "a", 0, {"entropy": [0.5], "first_mass": [0.5], "near_mass": [0.5]}, kinds=[kinds])
        made.append(step, "b", 1, {"entropy": [0.5]})
    data = data_of(made.view().page)
    assert [data["combinations"][each] for heads in data["kinds"] for each in heads] == [
        *(["mixed"], []),
        *(["broad"], []),
        *(["broad"], []),
        *(["first", "local"], []),
        *(["first", "local"], []),
    ]
    assert data["changes"] == [
        {"layer": 0, "head": 0, "kind": "first", "gained": True, "step": 3, "at": 3},
        {"layer": 0, "head": 0, "kind": "local", "gained": True, "step": 3, "at": 3},
        {"layer": 0, "head": 0, "kind": "broad", "gained": True, "step": 1, "at": 1},
        {"layer": 0, "head": 0, "kind": "broad", "gained": False, "step": 3, "at": 3},
    ]
    assert [each["id"] for each in data["legend"] if each["measured"]] == ["first", "local", "broad", MIXED.name]
    assert [each["noun"] for each in data["legend"] if each["id"] == "first"] == ["a first-token head"]
    monkeypatch.setattr(series_page, "MAX_NUMBERS", 20)  # 2 heads of 3 statistics and the kinds, at 5 steps
    thinned = data_of(made.view().page)
    assert thinned["steps"] == [0, 2, 4]
    assert [each["at"] for each in thinned["changes"]] == [2, 2, 1, 2]


def test_a_page_without_watched_kinds_says_how_to_watch_them() -> None:
    page = series().view().page
    assert [data_of(page)[name] for name in ("legend", "combinations", "kinds", "changes")] == [[]] * 4
    assert "With mh.Watch(model, kinds=True) this page also says" in page
    assert "What heads became" not in re.sub(r"<script.*?</script>", "", page, flags=re.DOTALL)


def test_names_cannot_act_on_the_page_and_it_makes_no_requests() -> None:
    page = series().view().page
    assert "<a>" not in page
    assert "default-src 'none'" in page
    assert re.search(r"(?:src|href)=\"(?!#)", page) is None


def test_a_notebook_shows_the_page_in_a_frame_with_an_origin_of_its_own() -> None:
    class Frames(HTMLParser):
        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            found.append((tag, dict(attrs)))

    found: list[tuple[str, dict[str, str | None]]] = []
    film = series().view(height=500)
    Frames().feed(film._repr_html_())
    assert [tag for tag, _ in found] == ["iframe"]
    assert found[0][1]["srcdoc"] == film.page
    assert found[0][1]["sandbox"] == "allow-scripts"
    assert "height:500px" in str(found[0][1]["style"])
    assert repr(film) == "<HeadFilm: Every head over the steps; series.report(path) writes it as a page>"


def test_the_page_is_in_chinese_too() -> None:
    page = series().view(lang="zh").page
    assert '<html lang="zh">' in page
    assert data_of(page)["columns"][0]["label"] == "熵"


def test_what_cannot_be_shown_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(
        ArgumentError, match=r"The series has no step to show\. Run some training steps inside the watch first\."
    ):
        TimeSeries().view()
    with pytest.raises(ArgumentError, match='lang is "fr", and must be "en" or "zh"'):
        series().report(tmp_path / "heads.html", lang="fr")
    with pytest.raises(ArgumentError, match="height is 0"):
        series().view(height=0)
    with pytest.raises(InputError):
        series().report(tmp_path / "missing" / "heads.html")
