"""The panel of pictures: what a query reads of a picture, in every head, by pointer and by keyboard."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from multihead.viewer import page_budget, pictures, write_report
from tests.browser.shown import DESKTOP, PHONE, Shown, percent, serious
from tests.picture_records import encoder, generated, written

if TYPE_CHECKING:
    from playwright.sync_api import Browser

Opened = Callable[..., Shown]
TO_FIRST_PATCH = ["ArrowLeft", "ArrowLeft", "ArrowLeft", "ArrowUp"]
OVER_THE_OTHERS = ["ArrowRight", "ArrowRight", "ArrowDown", "ArrowLeft", "ArrowLeft"]


def drawn(shown: Shown) -> Shown:
    """Wait until the weights of the query are drawn."""
    shown.at("#placed[data-drawn=true]").wait_for()
    shown.settle()
    return shown


def chosen(shown: Shown) -> tuple[str, str]:
    """The head and the token that the panel shows, as in the address."""
    return shown.place["p"], shown.place["q"]


def values_by_keyboard(shown: Shown) -> dict[str, float]:
    """Walk over the 2 x 3 patches with the arrow keys: the name of each patch -> times an even spread."""
    shown.at("#placed").focus()
    found = {}
    for keys in (TO_FIRST_PATCH, *OVER_THE_OTHERS):
        shown.press(*([keys] if isinstance(keys, str) else keys))
        found[shown.text("#placeread").partition(":")[0]] = float(
            shown.at("#placeread data").get_attribute("value") or "nan"
        )
    return found


def expected_values(layer: int, head: Any, query: Any) -> dict[str, float]:
    weights = encoder().image_weights(layer, head, query)
    return {f"r{row + 1} c{column + 1}": float(weights[row, column]) for row in range(2) for column in range(3)}


@pytest.fixture
def report(browser: Browser, tmp_path: Path, checked: Callable[[Shown], Shown]) -> Callable[..., Shown]:
    """Write a report and open it."""

    def open_page(record: Any, *, options: Any = DESKTOP, **given: Any) -> Shown:
        write_report(record, tmp_path / "page.html", title="a model", **given)
        page = checked(Shown(browser.new_context(**options), (tmp_path / "page.html").as_uri()))
        page.visit()
        return drawn(page)

    return open_page


@pytest.mark.parametrize("place", ["viewer", "report"])
def test_the_heat_of_every_patch_is_that_of_image_weights(opened: Opened, report: Any, place: str) -> None:
    shown = drawn(opened("encoder")) if place == "viewer" else report(encoder())
    head, query = chosen(shown)
    assert query == "0"
    every = {(layer, head): encoder().image_weights(layer, head, 0).max() for layer in range(3) for head in range(2)}
    layer, number = max(every, key=lambda each: every[each])  # the head furthest above an even spread
    assert head == f"L{layer}H{number}"
    close = {"abs": 1e-3 if place == "report" else 1e-6}
    assert values_by_keyboard(shown) == pytest.approx(expected_values(layer, number, 0), **close)
    shown.press("Enter")  # the patch at the pointer, r2 c1, becomes the query
    drawn(shown)
    assert chosen(shown) == (f"L{layer}H{number}", "4")
    assert values_by_keyboard(shown) == pytest.approx(expected_values(layer, number, "r2 c1"), **close)
    shown.at("#placeheads [aria-pressed=true]").focus()
    shown.press(*["ArrowUp"] * 3, *["ArrowLeft"] * 3)  # the mean of the first layer
    assert chosen(shown) == ("L0", "4")
    assert values_by_keyboard(shown) == pytest.approx(expected_values(0, "mean", "r2 c1"), **close)


def test_the_first_sentence_has_the_head_its_share_of_the_picture_and_its_strongest_patch(opened: Opened) -> None:
    shown = drawn(opened("encoder", place="#p=L1H1&q=0"))
    weights = encoder().layers[1].weights(1)[0]
    patch = list(expected_values(1, 1, 0))[int(weights[1:].argmax())]
    assert shown.text("#lead") == (
        "This model cuts the picture into 2 × 3 patches. L1 H1 reads for [CLS], the token that names the class: "
        f"{float(weights[1:].sum()) * 100:.0f} % from the picture, most from {patch}. "
        "Choose a patch to see what is read for it."
    )
    assert shown.at("#opening").is_hidden()
    shown.at("#placetitle a").click()
    shown.settle()
    assert (shown.place["a"], shown.place["q"]) == ("L1H1", "0")


def test_a_generated_word_shows_the_row_that_predicted_it(opened: Opened) -> None:
    shown = drawn(opened("generated", place="#p=L4H0&q=41"))
    assert shown.texts("#placewords .on") == ["cat"]
    assert "reads for “cat”, in the row that predicted it" in shown.text("#lead")
    row = generated().layers[4].weights(0)[40]
    shares = [float(row[slice(*each)].sum()) for each in ((3, 19), (21, 37), (40, 43))]
    found = [percent(each) for each in shown.texts("#placeshares b")]
    assert found[0] == pytest.approx(shares[0] + shares[1], abs=0.006)
    assert found[2] == pytest.approx(shares[2], abs=0.006)
    shown.at("#placewords .on").focus()
    shown.press("ArrowRight", "Enter")
    assert shown.texts("#placewords .on") == ["sits"]
    assert shown.at("#placewords .on").evaluate("e => e === document.activeElement")
    assert shown.texts("#placechoice button") == [
        "language model, layers 3 to 4", "image encoder, layers 0 to 2", "picture 1", "picture 2"
    ]  # fmt: skip


@pytest.mark.parametrize("place", ["viewer", "report"])
def test_a_word_of_a_decoder_shows_what_its_cross_attention_reads_of_the_picture(
    opened: Opened, report: Any, place: str
) -> None:
    shown = opened("written") if place == "viewer" else report(written())
    shown.visit("#p=L5H1&q=9")
    drawn(shown)
    assert shown.text("#lead").endswith(" Choose a word to see what is read for it.")
    expected = written().image_weights(5, 1, 1)  # the row that predicted the third token
    patches = {f"r{row + 1} c{column + 1}": float(expected[row, column]) for row in range(2) for column in range(3)}
    assert values_by_keyboard(shown) == pytest.approx(patches, abs=1e-3)
    shown.press("Enter")  # a patch is no query
    assert chosen(shown) == ("L5H1", "9")
    shown.at("#placewords .on").focus()
    shown.press("ArrowRight", "Enter")
    assert chosen(shown) == ("L5H1", "10")


def test_a_report_with_some_rows_shows_the_nearest_patch_or_says_that_it_has_none(
    report: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_budget, "MAX_READ_WEIGHTS", 0)  # as of a text whose maps do not fit
    monkeypatch.setattr(pictures, "RASTERS", (2,))
    shown = report(generated(), options=PHONE)
    assert shown.texts("#placewords .on") == ["cat"]
    assert shown.text("#placenote") == ""
    shown.at("#placechoice button").nth(1).click()  # the image encoder
    drawn(shown)
    shown.at("#placed").focus()
    shown.press("ArrowDown", "Enter")  # r1 c1, of whose neighbours r2 c2 is in the raster
    assert shown.text("#placenote") == (
        "This file does not hold the weights of r1 c1: those of r2 c2, the nearest patch that it holds, are shown."
    )


@pytest.mark.parametrize(("options", "lines"), [(DESKTOP, 2), (PHONE, 5)], ids=["desktop", "phone"])
def test_heads_that_do_not_fit_beside_each_other_are_on_several_lines(report: Any, options: Any, lines: int) -> None:
    shown = report(encoder(2, 32), options=options)
    boxes = [button.bounding_box() for button in shown.at("#placeheads button").all()]
    assert len(boxes) == 2 * 33
    assert len({box["y"] for box in boxes[:33]}) == lines
    assert boxes[32]["y"] < boxes[33]["y"]  # the next layer begins below
    assert all(40 <= box["width"] <= 56 for box in boxes)
    assert shown.at(".readers .gridbox").evaluate("box => box.scrollWidth - box.clientWidth") == 0


@pytest.mark.parametrize(("options", "scheme"), [(DESKTOP, "light"), (PHONE, "dark")], ids=["desktop", "phone"])
@pytest.mark.parametrize("name", ["encoder", "generated"])
def test_the_panel_fits_and_is_accessible(opened: Opened, name: str, options: Any, scheme: str) -> None:
    shown = drawn(opened(name, **options | {"color_scheme": scheme}))
    assert serious(shown.page, "#places") == []
    assert shown.page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0
    width = shown.page.evaluate("document.getElementById('placed').offsetWidth")
    assert width == (600 if options is DESKTOP and name == "encoder" else width) <= 600
    with shown.page.expect_download() as saved:
        shown.at("#placesave").click()
    assert saved.value.suggested_filename.endswith(".png")
    assert Path(saved.value.path()).read_bytes()[:4] == b"\x89PNG"
