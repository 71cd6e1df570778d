"""The film of a series, opened in a browser from its file and in a notebook's frame: steps, play, statistics, kinds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from multihead.kinds import KINDS
from multihead.observation.time_series import TimeSeries
from tests.browser.shown import DESKTOP, PHONE, Shown, ruled, serious

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

HOSTILE = "</script><img src=x onerror=alert(1)>"


def without_kinds() -> TimeSeries:
    """Three steps of two layers; layer 1 has one statistic less."""
    series = TimeSeries()
    for step in (0, 1000, 2000):
        series.append(step, HOSTILE, 0, {"previous_mass": [step / 2000, 0.5, 0.25], "entropy": [3.0, 2.0, 1.0]})
        series.append(step, "b", 1, {"entropy": [2.5, 0.5, step / 1000]})
    return series


def with_kinds(heads: int = 4) -> TimeSeries:
    """Five steps of two layers: heads are broad, then those of layer 1 look back, the last of them not to the end."""
    series = TimeSeries(watched_kinds=KINDS)
    for step in (0, 500, 1000, 2000, 3000):
        back = [
            ["previous"] if step >= 1000 and (head < heads - 1 or step < 3000) else ["broad"] for head in range(heads)
        ]
        for layer, kinds in enumerate(([["broad"]] * heads, back)):
            means = {
                "previous_mass": [0.9 if each == ["previous"] else 0.1 for each in kinds],
                "entropy": [2.0] * heads,
            }
            series.append(step, "ab"[layer], layer, means, kinds=kinds)
    return series


@pytest.fixture
def shown(browser: Browser, tmp_path: Path, checked: Callable[[Shown], Shown]) -> Callable[..., Page]:
    """Open the page of a series, which may not be wider than the window."""

    def open_page(
        series: TimeSeries | None = None, *, lang: str = "en", width: int = 1440, framed: bool = False, **options: Any
    ) -> Page:
        series, path = without_kinds() if series is None else series, tmp_path / "page.html"
        if framed:
            path.write_text(series.view(lang=lang)._repr_html_(), "utf-8")
        else:
            series.report(path, lang=lang)
        context = browser.new_context(**{"viewport": {"width": width, "height": 900}} | options)
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
    assert "mh.Watch(model, kinds=True)" in page.inner_text("section:has(#defs) .note")
    assert page.locator("#changes, #chips, .strip").count() == 0
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


@pytest.mark.parametrize(
    "options", [DESKTOP, DESKTOP | {"color_scheme": "dark"}, PHONE], ids=["light", "dark", "phone"]
)
def test_a_sentence_says_when_a_head_became_a_kind_and_its_step_shows_the_heads_there(
    shown: Callable[..., Page], options: dict[str, Any]
) -> None:
    page = shown(with_kinds(), width=options["viewport"]["width"], **options)
    told = [each.replace("\u00a0", " ") for each in page.locator("#changes li").all_inner_texts()]
    assert told == [
        "L1 H0 became a previous-token head at step 1,000.",
        "L1 H1 became a previous-token head at step 1,000.",
        "L1 H2 became a previous-token head at step 1,000.",
        "L1 H3 became a previous-token head at step 1,000.",
        "L1 H3 was no longer a previous-token head from step 3,000 on.",
        "L1 H3 became a broad head at step 3,000.",
        "L1 H0 was no longer a broad head from step 1,000 on.",
        "L1 H1 was no longer a broad head from step 1,000 on.",
        "L1 H2 was no longer a broad head from step 1,000 on.",
        "L1 H3 was no longer a broad head from step 1,000 on.",
    ]
    page.select_option("#statistic", "entropy")
    page.focus("#changes li:nth-child(2) a")
    page.keyboard.press("Enter")
    assert page.inner_text("#at") == "step 1,000 (3 of 5)"
    assert page.input_value("#statistic") == "previous_mass"
    assert page.inner_text("#insp h3").split("\n") == ["Layer 1 head 1", "previous"]
    assert page.locator("#insp .changes li").count() == 2
    cell = page.locator("#grid button >> nth=5")
    assert cell.get_attribute("aria-label") == "Layer 1 head 1, previous, previous 90\u00a0%"
    assert cell.get_attribute("aria-current") == "true"
    box = cell.bounding_box()
    assert box is not None
    assert 0 <= box["y"] <= options["viewport"]["height"]  # it was scrolled to
    page.locator("#insp .changes a").first.click()
    assert (page.inner_text("#at"), page.inner_text("#insp h3")) == ("step 1,000 (3 of 5)", "Layer 1 head 1\nprevious")
    assert serious(page) == []
    assert ruled(page) == []


def test_a_mouse_that_rests_does_not_choose_the_head_to_which_a_sentence_scrolls(shown: Callable[..., Page]) -> None:
    page = shown(with_kinds(), width=390)
    for number in range(4):
        page.locator("#changes a").nth(number).click()
        assert page.inner_text("#insp h3").startswith(f"Layer 1 head {number}")


def test_the_heads_of_one_kind_are_shown_at_every_step(shown: Callable[..., Page]) -> None:
    page = shown(with_kinds(), lang="zh")
    assert page.locator("#chips button").all_inner_texts() == ["前一个\n3", "分散\n5"]
    page.click("#chips [data-kind=previous]")
    assert page.locator("#grid .dim").count() == 5
    page.focus("#step")
    page.keyboard.press("Home")
    assert page.locator("#chips button").all_inner_texts() == ["前一个\n0", "分散\n8"]
    assert page.locator("#grid .dim").count() == 8
    page.click("#chips [data-kind=previous]")
    assert page.locator("#grid .dim").count() == 0
    assert page.locator("#chips button:focus").get_attribute("data-kind") == "previous"
    assert page.inner_text("#changes li:first-child").replace("\u00a0", " ") == "L1 H0 在第 1,000 步成为前一词元头。"


def test_the_kinds_of_a_head_over_the_steps_are_a_strip_of_colours(shown: Callable[..., Page]) -> None:
    page = shown(with_kinds())
    page.hover("#grid button >> nth=7")
    pieces = page.locator(".strip path").evaluate_all(
        "found => found.map(each => [each.getAttribute('d'), getComputedStyle(each).fill])"
    )
    broad, previous = "rgb(106, 118, 130)", "rgb(200, 80, 30)"
    assert pieces == [
        ["M0.0000 0H0.2500V1H0.0000z", broad],
        ["M0.2500 0H0.8333V1H0.2500z", previous],
        ["M0.8333 0H1.0000V1H0.8333z", broad],
    ]


def test_all_changes_are_reachable_and_a_page_without_one_says_so(shown: Callable[..., Page]) -> None:
    page = shown(with_kinds(heads=9))
    assert page.locator("#changes li").count() == 12
    page.click("#more")
    assert page.locator("#changes li").count() == 20
    assert page.inner_text("#more") == "Show 12"
    still = TimeSeries(watched_kinds=KINDS)
    still.append(0, "a", 0, {"entropy": [2.0]}, kinds=[["broad"]])
    assert shown(still).inner_text("#changes") == "No head changed its kind over these steps."
