"""The page as a whole: keyboard, address, hostile tokens, narrow windows, other languages, and when things go wrong."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

from multihead.viewer.payload import RecordedRun
from tests.browser.records import HEADS, HOSTILE, IMAGE, LAYERS, LENGTH, causal
from tests.browser.shown import PHONE, Shown
from tests.viewer.serving import TOKEN, serving

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Route

Opened = Callable[..., Shown]
# What reaches beyond the window, but for what scrolls or is cut within its own box.
BEYOND = """all => all.filter(one => one.getBoundingClientRect().right > 391
  && !one.closest('.scroll, .gridbox, .kwic, .vh, .skip, .nav')).map(one => one.outerHTML)"""
LOW = """all => all.map(one => [one.id || one.textContent, one.getBoundingClientRect().height])
  .filter(([, height]) => height && height < 31.5)"""
NAMELESS = """all => all.filter(one => one.offsetParent)
  .filter(one => !(one.ariaLabel || one.textContent.trim() || one.labels?.length)).map(one => one.outerHTML)"""
TAPPED = ".bar button, .bar select, .bar .btn, .foot button, #kwic button"
NAMED = "a:not([aria-hidden]), button, select, input, canvas:not([aria-hidden])"


def blocks(levels: int) -> list[list[int]]:
    """The blocks of a map of so many levels."""
    return [[1 << level, 1 << level] for level in range(levels)]


def view(shown: Shown) -> list[float]:
    return [float(shown.place[name]) for name in "xyn"]


class TestTheKeyboard:
    def test_plus_minus_nought_and_one_zoom(self, opened: Opened) -> None:
        shown = opened(place="#a=L2H1&q=500")
        assert view(shown) == [0, 0, LENGTH]
        shown.press("+")
        assert view(shown) == [LENGTH / 4, LENGTH / 4, LENGTH / 2]
        shown.press("-")
        assert view(shown) == [0, 0, LENGTH]
        shown.press("1")
        assert view(shown)[2] == 56
        assert view(shown)[1] < 500 < view(shown)[1] + 56
        shown.press("0")
        assert view(shown) == [0, 0, LENGTH]

    def test_arrows_move_the_view(self, opened: Opened) -> None:
        shown = opened(place="#a=L2H1&x=300&y=300&n=80&q=320")
        shown.press("ArrowRight", "ArrowDown", "ArrowDown")
        assert view(shown) == [310, 320, 80]
        shown.press("ArrowLeft", "ArrowUp")
        assert view(shown) == [300, 310, 80]

    def test_brackets_walk_over_the_heads_and_round_the_end(self, opened: Opened) -> None:
        shown = opened(place=f"#a=L{LAYERS - 1}H{HEADS - 1}&x=300&y=300&n=80&q=320")
        shown.press("]")
        assert shown.place["a"] == "L0H0"
        assert view(shown) == [300, 300, 80]
        shown.press("[", "[")
        assert shown.place["a"] == f"L{LAYERS - 1}H{HEADS - 2}"

    def test_letters_change_the_scale_the_sink_and_the_second_head(self, opened: Opened) -> None:
        shown = opened(place="#a=L2H1&q=320&c=log")
        shown.press("l")
        assert shown.place["c"] == "linear"
        shown.press("s")
        assert (shown.place["s"], shown.at("#sink").get_attribute("aria-pressed")) == ("1", "true")
        shown.press("c")
        assert shown.place["v"] == "ab"
        shown.press("c")
        shown.press("Escape")
        shown.at("#all").wait_for()  # the page of all heads is drawn later than the address changes

    def test_shift_and_an_arrow_go_from_cell_to_cell_and_enter_keeps_the_query(self, opened: Opened) -> None:
        shown = opened(place="#a=L2H1&x=300&y=300&n=40&q=310")
        shown.at("#map").focus()
        shown.press("Shift+ArrowDown", "Shift+ArrowDown", "Shift+ArrowLeft")
        assert "query 312" in shown.text("#read")
        assert "key 319" in shown.text("#read")
        shown.press("Enter")
        assert shown.place["q"] == "312"

    def test_what_is_typed_into_the_filter_moves_nothing(self, opened: Opened) -> None:
        shown = opened()
        shown.press("/")
        shown.page.keyboard.type("L1 s")
        assert shown.at("#filter").input_value() == "L1 s"


class TestTheAddress:
    @pytest.mark.parametrize(
        "place",
        [
            "#a=L2H1&x=300&y=410&n=60&q=430&c=linear&s=1",
            "#a=L2H1&b=L0H2&v=ab&x=100&y=120&n=200&q=222&c=root&s=0",
        ],
    )
    def test_it_reopens_the_same_view(self, opened: Opened, place: str) -> None:
        shown = opened(place=place)
        assert shown.page.url == shown.address + place
        shown.page.mouse.move(*shown.cell(431 if "410" in place else 230, 310 if "410" in place else 130))
        shown.page.mouse.wheel(0, -300)
        shown.page.mouse.move(5, 700)
        shown.settle()
        left = shown.page.url.removeprefix(shown.address)
        assert left != place
        picture = "() => document.getElementById('map').toDataURL()"
        shown.page.reload()
        shown.settle()
        again = opened(place=left)
        assert again.page.url.removeprefix(again.address) == left
        assert again.page.evaluate(picture) == shown.page.evaluate(picture)
        assert again.text("#read") == shown.text("#read")
        assert again.texts("#kwic .n") == shown.texts("#kwic .n")

    def test_bad_values_are_clamped(self, opened: Opened) -> None:
        shown = opened(place="#a=L99H99&r=7&t=-3&x=-5&y=1e9&n=nine&q=123456&c=rainbow&v=&b=hello")
        place = shown.place
        assert (place["a"], place["x"], place["q"]) == (f"L{LAYERS - 1}H{HEADS - 1}", "0", str(LENGTH - 1))
        assert "r" not in place
        assert "t" not in place

    def test_back_and_forward_walk_over_what_was_opened(self, opened: Opened) -> None:
        shown = opened()
        shown.at("#grid [data-i='4']").click()
        shown.settle()
        shown.page.go_back()
        shown.page.wait_for_function("() => !document.getElementById('all').hidden")
        shown.page.go_forward()
        shown.settle()
        assert shown.place["a"] == "L1H1"

    def test_copy_link_copies_it(self, opened: Opened) -> None:
        shown = opened(place="#a=L2H1&q=20", permissions=["clipboard-read", "clipboard-write"])
        shown.at("#link").click()
        shown.page.wait_for_function("() => document.getElementById('link').textContent === 'Copied'")
        assert shown.page.evaluate("navigator.clipboard.readText()") == shown.page.url


class TestHostileTokens:
    def test_they_stay_text(self, opened: Opened) -> None:
        shown = opened("hostile", place="#a=L0H0&q=1&x=0&y=0&n=25")
        for query in range(len(HOSTILE)):
            shown.point(query, (query + 1) % len(HOSTILE))
        shown.press("c")
        assert shown.page.evaluate("window.broken") is None
        assert shown.at("img, iframe, object, #text script, #kwic script").count() == 0
        assert IMAGE in shown.texts("#text .tk")
        assert shown.at("#differ").is_visible()

    def test_marks_that_turn_the_direction_are_named_and_do_nothing(self, opened: Opened) -> None:
        shown = opened("hostile", place="#a=L0H0&q=3&x=0&y=0&n=25")
        assert "\u202e" not in shown.at("#one").inner_text()
        assert "U+202Eturned round" in shown.texts("#text .tk")

    def test_a_long_one_does_not_widen_the_page(self, opened: Opened) -> None:
        shown = opened("hostile", place="#a=L0H0&q=4&x=0&y=0&n=25", **PHONE)
        assert shown.wide == 390
        assert max(len(text) for text in shown.texts("#text .tk")) < 80


class TestANarrowWindow:
    @pytest.mark.parametrize("place", ["", "#a=L2H1&q=300", "#a=L2H1&b=L0H0&v=ab&x=200&y=210&n=50&q=230"])
    def test_it_needs_no_sideways_scroll(self, opened: Opened, place: str) -> None:
        shown = opened(place=place, **PHONE)
        assert shown.wide == 390
        assert shown.page.eval_on_selector_all("body *", BEYOND) == []

    def test_a_tap_keeps_the_query_and_compare_shows_the_difference_alone(self, opened: Opened) -> None:
        shown = opened(place="#a=L2H1&x=100&y=100&n=30&q=110", **PHONE)
        shown.page.touchscreen.tap(*shown.cell(120, 112))
        shown.settle()
        assert shown.place["q"] == "120"
        assert "key 112" in shown.text("#read")
        shown.at("#compare").tap()
        shown.settle()
        file = "new URL('static/view/map.js', document.baseURI)"
        panes = f"async () => (await import({file})).shown.panes.map(pane => pane.which)"
        assert shown.page.evaluate(panes) == ["d"]

    def test_what_is_tapped_is_large_enough(self, opened: Opened) -> None:
        shown = opened(place="#a=L2H1&q=300", **PHONE)
        assert shown.page.eval_on_selector_all(TAPPED, LOW) == []


class TestWhatIsNotThere:
    def test_without_q_and_k_there_are_numbers_and_no_map(self, opened: Opened) -> None:
        shown = opened("statistics")
        shown.page.wait_for_selector("#gridstate:not([hidden])")
        assert "q and k were not recorded, so there is no map." in shown.text("#gridstate")
        shown.at("#grid [data-i='1']").click()
        shown.settle()
        assert shown.text("#blank") == "q and k were not recorded, so there is no map."
        assert shown.at("#numbers tr").count() > 5
        assert not shown.at("#map").is_visible()

    def test_coarse_levels_that_are_being_built_are_shown_with_their_share(self, opened: Opened) -> None:
        shown = opened(wait=False)

        def with_more_levels(route: Route) -> None:
            body = route.fetch().json()
            route.fulfill(json=body | {"layers": [layer | {"blocks": blocks(9)} for layer in body["layers"]]})

        shown.page.route("**/samples/0", with_more_levels)
        progress = [{"state": "building", "done": 6, "total": 12}]
        shown.page.route("**/levels", lambda route: route.fulfill(body=json.dumps(progress[0])))
        shown.page.reload()
        shown.page.wait_for_selector("#gridstate:not([hidden])")
        assert shown.text("#gridstate") == "Computing the coarse levels, 50 % (saved next to the record)"
        progress[0] = {"state": "ready", "done": 12, "total": 12}
        shown.page.wait_for_selector("#gridstate", state="hidden")

    def test_a_map_of_100_000_tokens_waits_for_its_coarse_levels_and_asks_for_few_tiles(self, opened: Opened) -> None:
        shown = opened(place="#a=L0H0", wait=False)
        progress, length = [{"state": "building", "done": 3, "total": 12}], 100_000
        requested: list[str] = []

        def as_if_longer(route: Route) -> None:
            body = route.fetch().json()
            size = {"queries": length, "keys": length, "blocks": blocks(12), "keyText": 9, "queryText": 9}
            route.fulfill(json=body | {"layers": [layer | size for layer in body["layers"]]})

        def tile(route: Route) -> None:
            requested.append(route.request.url)
            (level,) = re.findall(r"level=(\d+)", route.request.url)
            side = min(256, -(-length // 2 ** int(level)))
            route.fulfill(body=b"\x00\x00\x00\x3f" * side**2, headers={"X-Shape": f"{side},{side}"})

        row = {"body": b"\x00\x00\x80\x3a" * length, "headers": {"X-Shape": str(length)}}
        shown.page.route("**/samples/0", as_if_longer)
        shown.page.route("**/levels", lambda route: route.fulfill(json=progress[0]))
        shown.page.route(re.compile(r"/tile\?"), tile)
        shown.page.route(re.compile(r"/row\?"), lambda route: route.fulfill(**row))
        shown.page.reload()
        shown.page.wait_for_function("() => document.getElementById('level').textContent.includes('25')")
        assert shown.text("#level") == "Computing the coarse levels, 25 % (saved next to the record)"
        assert requested == []
        progress[0] = {"state": "ready", "done": 12, "total": 12}
        shown.settle()
        assert shown.text("#level") == "each cell is the mean of 512 × 512 weights, exact"
        assert 0 < len(requested) <= 6
        for _ in range(20):
            shown.press("+")
        assert shown.place["n"] == "12"
        assert shown.text("#level") == "each cell is one weight, exact"
        assert len(requested) < 120

    def test_a_server_that_is_gone_is_told_with_how_to_start_it(self, browser: Browser) -> None:
        with serving(RecordedRun("run.safetensors", causal())) as server:
            shown = Shown(browser.new_context(), f"http://127.0.0.1:{server.port}/{TOKEN}/")
            shown.visit("#a=L0H0&x=0&y=0&n=40&q=20")
        shown.page.evaluate("location.hash = '#a=L3H1&x=0&y=0&n=40&q=20'")
        shown.page.wait_for_selector("#gone:not([hidden])")
        assert shown.text("#gone") == "The viewer no longer responds. Start it again: multihead view run.safetensors"
        shown.close()

    def test_a_query_that_sees_no_key_says_so(self, opened: Opened) -> None:
        shown = opened(place="#a=L0H0&x=0&y=0&n=40&q=20", wait=False)
        shown.page.route(
            "**/row?query=20",
            lambda route: route.fulfill(body=b"\x00\x00\xc0\x7f" * LENGTH, headers={"X-Shape": str(LENGTH)}),
        )
        shown.page.reload()
        shown.settle()
        assert shown.text("#read data") == "sees no key: weights 0"


class TestOtherLooks:
    def test_the_page_speaks_chinese(self, opened: Opened) -> None:
        shown = opened(lang="zh")
        assert shown.page.evaluate("document.documentElement.lang") == "zh-CN"
        assert shown.text("#hg") == "每个头"
        shown.at("#filter").fill("熵<0")
        assert shown.text("#rows").startswith("没有符合条件的头。")
        shown.visit("#a=L2H1&x=300&y=300&n=40&q=320")
        assert shown.text("#level") == "每格是一个权重，精确"

    def test_in_the_dark_zero_is_the_colour_of_the_page(self, opened: Opened) -> None:
        shown = opened(place="#a=L2H1&x=100&y=300&n=30&q=310", color_scheme="dark")
        background = shown.page.evaluate("getComputedStyle(document.documentElement).backgroundColor")
        assert background == "rgb(16, 19, 23)"
        assert (16, 19, 23) in shown.colours(301, 101, 100)

    def test_everything_that_can_be_operated_has_a_name(self, opened: Opened) -> None:
        for place in ("", "#a=L2H1&q=300"):
            shown = opened(place=place)
            assert shown.page.eval_on_selector_all(NAMED, NAMELESS) == []
