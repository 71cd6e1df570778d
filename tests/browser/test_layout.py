"""What every page owes its reader: it fits the window and the paper, shows the map at once, and is accessible."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pypdfium2
import pytest

from multihead.locale.texts import LANGUAGES
from multihead.viewer import write_report
from multihead_lab.page import write_page
from tests.browser.records import HOSTILE, causal, deep, hostile, repeated, words
from tests.browser.shown import DESKTOP, PHONE, SETTLED, Shown, ruled, serious
from tests.lab.few import few_answers

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

Opened = Callable[..., Shown]
WIDTHS = (1440, 1024, 390)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Write the pages that are files; returns their addresses by name."""
    folder = tmp_path_factory.mktemp("pages")
    made = {name: folder / f"{name}.html" for name in ("report", "long report", "layers", "lab")}
    write_report(repeated(), made["report"], title="a model", tokens=words(60))
    write_report(causal(), made["long report"], title="a model")
    write_report(deep(), made["layers"], title="a model")
    write_page(few_answers(), made["lab"])
    return {name: path.as_uri() for name, path in made.items()}


@pytest.fixture
def page(browser: Browser, checked: Callable[[Shown], Shown]) -> Page:
    """Open a window for files."""
    return checked(Shown(browser.new_context(**DESKTOP, bypass_csp=True), "file:")).page


# The lab's page has no table of heads, and is drawn when it is loaded.
DRAWN = f"() => !document.getElementById('rows') || ({SETTLED})()"


def visit(page: Page, address: str) -> None:
    page.goto("about:blank")
    page.goto(address)
    page.wait_for_load_state()
    page.wait_for_function(DRAWN)


def overflow(page: Page) -> int:
    return int(page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth"))


@pytest.mark.parametrize("name", ["report", "report#a=L1H0", "long report", "long report#a=L2H1", "layers", "lab"])
def test_a_file_fits_windows_of_every_width(page: Page, files: dict[str, str], name: str) -> None:
    file, _, place = name.partition("#")
    for width in WIDTHS:
        page.set_viewport_size({"width": width, "height": 900})
        visit(page, files[file] + (f"#{place}" if place else ""))
        assert overflow(page) <= 0, width


def test_the_viewer_fits_windows_of_every_width(opened: Opened) -> None:
    shown = opened("repeated", "causal")
    for width in WIDTHS:
        shown.page.set_viewport_size({"width": width, "height": 900})
        for place in ("", "#a=L1H0", "#a=L1H0&b=L1H1&v=ab"):
            shown.visit(place)
            assert overflow(shown.page) <= 0, (width, place)


def test_the_map_of_a_head_is_above_the_fold(opened: Opened) -> None:
    shown = opened(place="#a=L1H0")
    pane, stage = shown.pane(), shown.at("#stage").bounding_box()
    assert stage is not None
    assert stage["y"] + stage["height"] <= 900
    assert pane["top"] + pane["height"] <= stage["y"] + stage["height"]
    assert pane["height"] > 500


def test_the_first_screen_of_a_long_text_shows_heads(page: Page, files: dict[str, str]) -> None:
    visit(page, files["long report"])
    box = page.locator("#grid [data-i='2']").bounding_box()
    assert box is not None
    assert box["y"] + box["height"] < 900


def test_many_layers_use_the_width_of_the_page(page: Page, files: dict[str, str]) -> None:
    visit(page, files["layers"])
    lefts = page.eval_on_selector_all("#grid .gr:not(.head)", "all => all.map(row => row.offsetLeft)")
    assert len(lefts) == 20
    assert len(set(lefts)) > 1


def test_the_table_with_all_statistics_needs_no_scrolling_at_1440(page: Page, files: dict[str, str]) -> None:
    visit(page, files["report"])
    assert page.locator("#cols th").count() > 8
    assert page.eval_on_selector(".scroll", "box => box.scrollWidth - box.clientWidth") <= 0


@pytest.mark.parametrize("file", ["report", "long report"])
def test_a4_paper_shows_every_column_and_the_whole_grid(page: Page, files: dict[str, str], file: str) -> None:
    visit(page, files[file])
    labels = page.eval_on_selector_all("#cols th", "all => all.map(head => head.dataset.label)")
    heads = page.locator("#grid [role=gridcell] a").count()
    page.emulate_media(media="print")
    bottom = page.eval_on_selector_all(
        "#grid [role=gridcell] a", "all => all.map(each => each.getBoundingClientRect().height)"
    )
    document = pypdfium2.PdfDocument(page.pdf(format="A4", print_background=True, prefer_css_page_size=True))
    found: dict[str, float] = {}
    for sheet in document:
        wide, text = sheet.get_width(), sheet.get_textpage()
        for label in labels:
            for word in label.split():  # a heading may wrap
                search = text.search(word, match_case=True, match_whole_word=False)
                while (hit := search.get_next()) is not None:
                    right = max(text.get_charbox(hit[0] + place)[2] for place in range(hit[1]))
                    assert right < wide, (label, right, wide)
                    found[label] = right
    assert set(found) == set(labels)
    assert len(bottom) == heads
    assert min(bottom) > 5


def test_paper_shows_every_row_and_column_of_the_viewer(opened: Opened) -> None:
    shown = opened("repeated")
    labels = shown.page.eval_on_selector_all("#cols th", "all => all.map(head => head.dataset.label)")
    shown.page.emulate_media(media="print")
    assert shown.page.evaluate("document.documentElement.scrollWidth") <= 1440
    document = pypdfium2.PdfDocument(shown.page.pdf(format="A4", prefer_css_page_size=True))
    text = " ".join(sheet.get_textpage().get_text_bounded() for sheet in document)
    text = text.replace("\u00a0", " ")  # some fonts have one glyph for both spaces
    assert all(word in text for label in labels for word in label.split())
    assert all(f"L{layer} H{head}" in text for layer in range(2) for head in range(2))


def test_no_focus_ring_is_shown_before_a_key_is_pressed(opened: Opened) -> None:
    shown = opened(place="#a=L1H0")
    ringed = "() => document.querySelector(':focus-visible')?.id ?? ''"
    assert shown.page.evaluate(ringed) == ""
    shown.at("#back").click()
    shown.settle()
    assert shown.page.evaluate(ringed) == ""
    shown.at("#grid [data-i='4']").click()
    shown.settle()
    assert shown.page.evaluate(ringed) == ""
    shown.press("Tab")
    assert shown.page.evaluate("() => !!document.querySelector(':focus-visible')")


def test_the_question_mark_lists_the_keys_and_explains_the_words(opened: Opened, page: Page, files: Any) -> None:
    shown = opened(place="#a=L1H0")
    shown.press("?")
    assert shown.at("dialog.help").is_visible()
    text = shown.text("dialog.help")
    assert "Colour follows the square root of the weight" in text
    assert "The first token often receives most of the attention" in text
    assert "Zoom in until each cell is one weight." in text
    before = shown.page.evaluate("location.hash")
    shown.page.keyboard.press("s")  # the page's keys rest
    shown.page.keyboard.press("Escape")
    assert not shown.at("dialog.help").is_visible()
    assert shown.page.evaluate("location.hash") == before
    visit(page, files["report"])
    page.click("#helps button")
    assert page.locator("dialog.help kbd").count() > 4


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", ["report", "report#a=L1H0", "long report", "lab"])
def test_axe_finds_nothing_serious_in_a_file(page: Page, files: dict[str, str], name: str, scheme: Any) -> None:
    page.emulate_media(color_scheme=scheme)
    file, _, place = name.partition("#")
    visit(page, files[file] + (f"#{place}" if place else ""))
    if file == "long report" and not place:
        page.click("#unfold")
    assert serious(page) == []


@pytest.mark.parametrize("window", [DESKTOP, PHONE], ids=["desktop", "phone"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("lang", LANGUAGES)
def test_landmarks_headings_and_targets_are_right_on_every_page(
    browser: Browser, tmp_path: Path, window: Any, scheme: Any, lang: str
) -> None:
    made = {name: tmp_path / f"{name}.html" for name in ("report", "lab")}
    write_report(repeated(), made["report"], title="a model", tokens=words(60), lang=lang)
    write_page(few_answers(), made["lab"], lang=lang)
    context = browser.new_context(**window | {"color_scheme": scheme}, bypass_csp=True)
    shown = context.new_page()
    for address in (made["report"].as_uri(), made["report"].as_uri() + "#a=L1H0", made["lab"].as_uri()):
        visit(shown, address)
        assert ruled(shown) == [], address
    context.close()


@pytest.mark.parametrize("place", ["", "#a=L1H0", "#a=L1H0&b=L1H1&v=ab"])
def test_axe_finds_nothing_serious_in_the_viewer(opened: Opened, place: str) -> None:
    shown = opened("causal", place=place, bypass_csp=True)
    assert serious(shown.page) + ruled(shown.page) == []
    shown.press("?")
    assert serious(shown.page) == []


def share(shown: Shown, path: Path) -> str:
    shown.at("#share").click()
    shown.page.wait_for_selector("#shared button")
    told = shown.text("#shared")
    with shown.page.expect_download() as saved:
        shown.at("#shared button").first.click()
    saved.value.save_as(path)
    size = path.stat().st_size
    assert told.startswith(
        f"One file, {size / 1e3:.0f} kB." if size < 1e6 else f"One file, {round(size / 1e6, 1):g} MB."
    )
    return saved.value.suggested_filename


def test_a_shared_view_opens_offline_at_its_place_with_the_viewers_own_weights(
    opened: Opened, page: Page, tmp_path: Path
) -> None:
    shown = opened(place="#a=L1H1&x=100&y=120&n=40&q=130&c=log")
    name = share(shown, tmp_path / "view.html")
    assert name == "ModuleList-L1H1.html"
    weight, place = shown.weight(), shown.place
    visit(page, (tmp_path / "view.html").as_uri())
    page.wait_for_function("() => document.getElementById('map').dataset.whole === 'true'")
    page.wait_for_function("() => document.getElementById('read').ariaBusy === 'false'")
    there = page.evaluate("Object.fromEntries(new URLSearchParams(location.hash.slice(1)))")
    assert there == place
    assert float(page.locator("#read data").get_attribute("value") or "nan") == weight
    assert "every weight" in page.inner_text("#shared")
    page.keyboard.press("0")
    page.keyboard.press("Escape")
    page.wait_for_selector("#rows tr")
    assert page.locator("#grid [role=gridcell] a").count() == 12
    assert not page.locator("#link").is_visible()


def test_a_shared_view_of_two_records_compares_them_offline(opened: Opened, page: Page, tmp_path: Path) -> None:
    shown = opened("causal", "other", place="#a=L1H1&b=L2H0&rb=1&v=ab&x=100&y=120&n=40&q=130")
    share(shown, tmp_path / "view.html")
    visit(page, (tmp_path / "view.html").as_uri())
    page.wait_for_function("() => document.getElementById('map').dataset.whole === 'true'")
    assert page.input_value("#runb") == "1"
    assert page.inner_text("#shared").startswith("This file holds L1 H1, L2 H0")


def test_hostile_tokens_stay_text_in_a_shared_view(opened: Opened, page: Page, tmp_path: Path) -> None:
    assert len(hostile().layers) == 2
    shown = opened("hostile", place="#a=L0H0")
    share(shown, tmp_path / "view.html")
    visit(page, (tmp_path / "view.html").as_uri())
    page.wait_for_function("() => document.querySelectorAll('#text .tk').length > 10")
    assert page.evaluate("window.broken") is None
    assert page.locator("#text img, #text script").count() == 0
    assert HOSTILE[1] in page.inner_text("#text")


def test_the_viewer_shows_the_findings_and_a_click_opens_the_head(opened: Opened) -> None:
    shown = opened("repeated")
    assert shown.text("#finds li >> nth=0").startswith("Layer 1 head 0 is an induction head")
    shown.at("#finds a").first.click()
    shown.settle()
    assert shown.place["a"] == "L1H0"


def test_kinds_on_random_repeats_have_marks_of_their_own(opened: Opened) -> None:
    shown = opened("repeated")
    found = {}
    for on_repeats in (False, True):
        kinds = shown.page.eval_on_selector_all("#chips .chip", "all => all.map(each => each.dataset.kind)")
        assert {kind.startswith("repeated_") for kind in kinds} == {on_repeats}
        marks = shown.page.eval_on_selector_all("#chips path", "all => all.map(path => path.getAttribute('fill'))")
        found[on_repeats] = set(marks)
        shown.at("#chips [role=switch]").click()
    assert found == {True: {"none"}, False: {"currentColor"}}


def test_the_page_shows_a_bar_until_the_record_is_read(opened: Opened) -> None:
    shown = opened("medium", wait=False)
    shown.page.route("**/samples/0", lambda route: None)  # held: no answer ever comes
    shown.page.goto("about:blank")
    shown.page.goto(shown.address)
    assert shown.at("#waiting progress").is_visible()
    assert shown.text("#waiting") == "Reading every head of the record"
