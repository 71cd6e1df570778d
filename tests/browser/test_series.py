"""The film of a series, opened in a browser from its file and in a notebook's frame: steps, play, statistics, heads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from multihead.observation.time_series import TimeSeries
from tests.browser.shown import Shown

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

HOSTILE = "</script><img src=x onerror=alert(1)>"


@pytest.fixture
def shown(browser: Browser, tmp_path: Path, checked: Callable[[Shown], Shown]) -> Callable[..., Page]:
    """Open the page of a series, which may not be wider than the window."""
    series = TimeSeries()
    for step in (0, 1000, 2000):
        series.append(step, HOSTILE, 0, {"previous_mass": [step / 2000, 0.5, 0.25], "entropy": [3.0, 2.0, 1.0]})
        series.append(step, "b", 1, {"entropy": [2.5, 0.5, step / 1000]})

    def open_page(*, lang: str = "en", width: int = 1440, framed: bool = False) -> Page:
        path = tmp_path / "page.html"
        if framed:
            path.write_text(series.view(lang=lang)._repr_html_(), "utf-8")
        else:
            series.report(path, lang=lang)
        context = browser.new_context(viewport={"width": width, "height": 900})
        opened = checked(Shown(context, path.as_uri()))
        opened.visit(wait=False)
        if not framed:
            opened.page.wait_for_selector("#grid button")
            assert opened.wide <= width
        return opened.page

    return open_page


@pytest.mark.parametrize("width", [1440, 390])
def test_the_slider_shows_the_numbers_of_another_step(shown: Callable[..., Page], width: int) -> None:
    page = shown(width=width)
    assert page.inner_text("#at") == "step 2,000 (3 of 3)"
    first = page.locator("#grid button >> nth=0")
    assert first.get_attribute("aria-label") == "Layer 0 head 0, previous 100\u00a0%"
    assert page.locator("#grid button.none").count() == 3  # layer 1 has no such statistic
    dark = page.evaluate("document.querySelector('#grid button').style.background")
    page.focus("#step")
    page.keyboard.press("ArrowLeft")
    assert page.inner_text("#at") == "step 1,000 (2 of 3)"
    assert first.get_attribute("aria-label") == "Layer 0 head 0, previous 50\u00a0%"
    assert page.evaluate("document.querySelector('#grid button').style.background") != dark
    assert page.is_visible(".line")


def test_the_film_plays_from_the_first_step_to_the_last_and_pauses(shown: Callable[..., Page]) -> None:
    page = shown()
    page.click("#play")
    assert page.inner_text("#at") == "step 0 (1 of 3)"
    assert page.inner_text("#play") == "Pause"
    page.wait_for_selector("#at:text-is('step 2,000 (3 of 3)')")
    page.wait_for_selector("#play:text-is('Play')")
    page.click("#play")
    page.click("#play")
    assert page.inner_text("#play") == "Play"


def test_another_statistic_has_its_own_scale_and_the_line_of_a_head_follows(shown: Callable[..., Page]) -> None:
    page = shown(lang="zh")
    page.select_option("#statistic", "entropy")
    assert page.locator("#grid button.none").count() == 0
    assert page.locator("#scale .ticks span").all_inner_texts() == ["0", "3"]
    page.hover("#grid button >> nth=5")
    assert page.inner_text("#insp h3") == "第 1 层第 2 头"
    assert page.get_attribute(".line .course", "d") == "M0.0000 1.0000L0.5000 0.6667L1.0000 0.3333"
    page.focus("#grid button >> nth=5")
    page.keyboard.press("ArrowUp")
    assert page.inner_text("#insp h3") == "第 0 层第 2 头"


def test_every_statistic_is_defined_on_the_page_and_in_the_list_of_words(shown: Callable[..., Page]) -> None:
    page = shown()
    assert page.locator("#defs dt").all_inner_texts() == ["Previous", "Entropy"]
    assert "mh.observe" in page.inner_text("section:has(#defs) .note")
    page.keyboard.press("?")
    words = page.locator("dialog[open] dl").last.locator("dt").all_inner_texts()
    assert words == ["previous", "entropy", "chance"]


def test_a_notebook_shows_the_film_in_its_frame(shown: Callable[..., Page]) -> None:
    page = shown(framed=True)
    film = page.frame_locator("iframe")
    film.locator("#grid button").first.wait_for()
    assert film.locator("#grid button").count() == 6
    film.locator("#play").click()
    assert film.locator("#at").inner_text() == "step 0 (1 of 3)"
