"""The page that `look` writes, opened in a browser from its file: names of heads, addresses, texts that try to act."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from multihead.viewer import write_report
from tests.browser.records import encoder_decoder, of_a_script
from tests.browser.shown import ink
from tests.dense_record import random_weights, record_of

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

TOKENS = [f"w{place}" for place in range(12)]


def a_record(**given: Any) -> Any:
    return record_of(random_weights(3, 12, 12), random_weights(3, 12, 12), **given)


@pytest.fixture
def written(browser: Browser, tmp_path: Path) -> Iterator[Callable[..., Page]]:
    """Write a record as a page and open it; fails at the end if it logged an error or requested anything."""
    complaints: list[str] = []
    context = browser.new_context(viewport={"width": 1280, "height": 900})

    def open_page(record: Any, place: str = "", **given: Any) -> Page:
        write_report(record, tmp_path / "page.html", **{"title": "a model", "tokens": TOKENS} | given)
        page = context.new_page()
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("console", lambda message: complaints.append(message.text) if message.type == "error" else None)
        page.goto(f"{(tmp_path / 'page.html').as_uri()}{place}")
        page.wait_for_selector("#rows tr", state="attached")
        return page

    yield open_page
    context.close()
    assert complaints == []


def shown(page: Page, selector: str) -> list[str]:
    return [each.replace("\u00a0", " ").strip() for each in page.locator(selector).all_inner_texts()]


def test_layers_keep_their_numbers_in_the_grid_the_table_the_findings_and_the_addresses(
    written: Callable[..., Page],
) -> None:
    record = a_record()
    for layer, number in zip(record.layers, (17, 18), strict=True):
        layer.number = number
    page = written(record)
    assert shown(page, "#grid [role=rowheader]") == ["L17", "L18"]
    assert {name.split()[0] for name in shown(page, "#rows th")} == {"L17", "L18"}
    assert {name.split(" head")[0] for name in shown(page, "#finds b")} <= {
        "layer 17",
        "layer 18",
        "Layer 17",
        "Layer 18",
    }
    page.fill("#filter", "L18")
    assert {name.split()[0] for name in shown(page, "#rows th")} == {"L18"}
    page.click("#rows a >> nth=0")
    assert page.evaluate("location.hash").startswith("#L18H")
    assert "18" in shown(page, "#head h1")[0]
    assert "18" in (page.get_attribute("#big", "aria-label") or "")


def test_an_address_with_a_layers_number_opens_that_layer(written: Callable[..., Page]) -> None:
    record = a_record()
    for layer, number in zip(record.layers, (17, 18), strict=True):
        layer.number = number
    page = written(record, "#L18H2")
    page.wait_for_selector("#big")
    assert shown(page, "#head .path") == [record.layers[1].name]
    page.keyboard.press("ArrowUp")
    page.wait_for_function("location.hash === '#L17H2'")


def test_a_probe_of_a_script_has_its_label_its_unit_and_its_number_format(written: Callable[..., Page]) -> None:
    record = of_a_script()
    page = written(record, tokens=[f"w{place}" for place in range(30)])
    labels = ["entropy, nats", "other keys, %", "relative <b>spread</b>, per token"]
    assert shown(page, "#cols button")[2:] == labels
    page.fill("#filter", "L1H1")
    means = {name: float(value[1]) for name, value in record.layers[1].means().items()}
    assert shown(page, "#rows td .v") == [record.statistic(name).number(value) for name, value in means.items()]


CELL = """([row, column]) => {
  const canvas = document.querySelector('#insp canvas');
  return [canvas.width, ...canvas.getContext('2d').getImageData(column, row, 1, 1).data.slice(0, 3)];
}"""


def looking_back(length: int) -> Any:
    """One head with all weight on the previous token, and one that spreads evenly."""
    back = torch.eye(length).roll(-1, 1)
    back[0], back[0, 0] = 0, 1
    return record_of(torch.stack([back, torch.full((length, length), 1 / length)]))


def test_the_inspector_shows_single_weights_where_they_fit(written: Callable[..., Page]) -> None:
    page = written(looking_back(130), tokens=[str(place) for place in range(130)])
    page.hover("#grid [data-i='0']")
    page.wait_for_function("document.querySelector('#insp canvas').width === 130")
    assert shown(page, "#insp .note") == ["Each cell is one weight. The scale ends at 100 %."]
    assert page.evaluate(CELL, [50, 49]) == [130, *ink(1)]
    assert page.evaluate(CELL, [50, 50]) == [130, *ink(0)]


def test_a_long_texts_maps_use_the_whole_scale_and_say_what_a_cell_is(written: Callable[..., Page]) -> None:
    page = written(looking_back(1408), tokens=[str(place) for place in range(1408)], max_bytes=400_000)
    page.hover("#grid [data-i='0']")
    page.wait_for_selector("#insp .note")
    # A block of 22 x 22 on the diagonal holds 21 weights of 1, the first one 22.
    assert shown(page, "#insp .note") == ["Each cell is the mean of 22 × 22 weights. The scale ends at 5 %."]
    assert page.evaluate(CELL, [30, 30]) == pytest.approx([64, *ink((21 / 22**2 / 0.05) ** 0.5)], abs=1)
    assert shown(page, "#scale .ticks span") == ["0", "0.05 %", "0.5 %", "1.25 %", "2.5 %", "5 %"]
    assert (
        "Each cell is the mean of 22 × 22 weights. The scale ends at the largest mean shown"
        in shown(page, "#scale .note")[0]
    )
    page.click("#grid [data-i='0']")
    page.wait_for_selector("#big")
    assert shown(page, "#head .ticks span")[-1] == "5 %"


def test_a_word_of_the_filter_that_cannot_match_is_explained(written: Callable[..., Page]) -> None:
    page = written(a_record())
    for words, why in (
        ("banana", "No kind of head and no layer name contains “banana”."),
        ("induction>5", '“induction” was not recorded. Observe with probes= that include "induction_mass".'),
    ):
        page.fill("#filter", words)
        assert shown(page, "#why") == [why]
    page.fill("#filter", "H1")
    assert page.locator("#why").is_hidden()


def test_cross_attention_has_the_decoders_tokens_as_rows_and_the_encoders_as_columns(
    written: Callable[..., Page],
) -> None:
    record = encoder_decoder()
    page = written(record, tokens=record.layers[0].sample().text.tokens)
    roles = ["encoder", "encoder", "decoder", "cross-attention", "decoder", "cross-attention"]
    assert [" ".join(name.split()) for name in shown(page, "#grid [role=rowheader]")] == [
        f"L{layer} {role}" for layer, role in enumerate(roles)
    ]
    assert shown(page, ".lead") == [
        "24 attention heads of an encoder-decoder model: its encoder read 12 positions, its decoder 12."
    ]
    assert shown(page, "#othertext")[0].split()[0] == "d0"
    page.fill("#filter", "alignment")
    assert [" ".join(name.split()) for name in shown(page, "#rows th")] == ["L3 H1 cross-attention"]
    assert shown(page, "#rows .aligned") == ["alignment"]
    page.click("#rows a >> nth=0")
    page.wait_for_selector("#big")
    assert shown(page, "#head .sub .aligned") == ["alignment"]
    assert "cross-attention" in shown(page, "#head .sub")[0]
    page.wait_for_selector("#keytext")
    assert shown(page, "#keytext")[0].split()[0] == "e0"
    assert shown(page, "#querytext")[0].split()[0] == "d0"
