"""The page that `look` writes, opened in a browser from its file: names of heads, addresses, texts that try to act."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from multihead.viewer import write_report
from tests.browser.records import of_a_script
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
