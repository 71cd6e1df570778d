"""The page of a census, opened in a browser from its file: heads, examples, two censuses, texts that try to act."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

import multihead as mh
from tests.browser.shown import Shown, ruled
from tests.counting.tiny import bert, jsonl, random_texts, saved_bert, tokenizer

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

HOSTILE = "<img src=x onerror=alert(1)> </script><script>alert(1)</script> w1 w2 w3 \u202eevil"


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The page of a census of hostile texts, one that compares it with another, and one with a layer of even heads."""
    folder = tmp_path_factory.mktemp("census")
    model = saved_bert(folder / "tiny-bert")
    texts = [[HOSTILE] * 3 + random_texts(8), random_texts(8, seed=1, longest=6)]
    files = [jsonl(folder / f"{place}.jsonl", each) for place, each in enumerate(texts)]
    one, other = (
        mh.census(model, file, out=folder / f"census{place}", threads=1, probes=("entropy", "previous_mass"))
        for place, file in enumerate(files)
    )
    first = bert()
    torch.nn.init.zeros_(first.encoder.layer[0].attention.self.query.weight)
    spread = mh.census(first, files[0], out=folder / "even", tokenizer=tokenizer(), threads=1, probes="entropy")
    return {
        "one": one.report(folder / "one.html"),
        "two": one.report(folder / "two.html", other),
        "even": spread.report(folder / "even.html"),
    }


@pytest.fixture
def shown(browser: Browser, pages: dict[str, Path], checked: Callable[[Shown], Shown]) -> Callable[..., Page]:
    """Open a page, which may not be wider than the window."""

    def open_page(name: str, place: str = "", width: int = 1440) -> Page:
        context = browser.new_context(viewport={"width": width, "height": 900})
        opened = checked(Shown(context, pages[name].as_uri()))
        opened.visit(place, wait=False)
        opened.page.wait_for_selector("#rows tr", state="attached")
        assert opened.wide <= width
        return opened.page

    return open_page


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1440, 390])
def test_landmarks_headings_and_targets_are_right(
    browser: Browser, pages: dict[str, Path], width: int, scheme: str
) -> None:
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme, bypass_csp=True)  # type: ignore[arg-type]
    page = context.new_page()
    for name in ("one", "two", "even"):
        page.goto(pages[name].as_uri())
        page.wait_for_selector("#rows tr", state="attached")
        assert ruled(page) == [], name
    context.close()


@pytest.mark.parametrize("width", [1440, 390])
def test_a_cell_opens_the_head_with_its_distributions_and_examples(shown: Callable[..., Page], width: int) -> None:
    page = shown("one", width=width)
    assert page.locator("#grid a").count() == 8
    page.select_option("select[name=statistic]", "previous_mass")
    page.click("#grid a >> nth=5")
    page.wait_for_selector(".examples li")
    assert page.evaluate("location.hash") == "#L1H1/previous_mass"
    assert page.inner_text("#head h1") == "Layer 1 head 1"
    assert page.locator(".card").count() == 2
    assert page.locator(".examples li").count() == 5
    assert page.locator(".examples li >> nth=0 >> .tk.on").count() == 1
    assert page.evaluate("document.querySelector('.examples .tk.on').style.background") != ""
    texts = page.locator(".examples .reading").all_inner_texts()
    assert any("[CLS] " in text for text in texts)
    assert not any(re.search(r"\[CLS\]\S|\S\[SEP\]", text) for text in texts)
    assert set(page.locator(".examples .sp").all_inner_texts()) == {"[CLS]", "[SEP]"}
    page.click(".card >> nth=0")
    page.wait_for_function("location.hash === '#L1H1/entropy'")
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    page.keyboard.press("Escape")
    page.wait_for_selector("#grid a")


def test_one_click_copies_the_command_that_opens_the_text(shown: Callable[..., Page]) -> None:
    page = shown("one", "#L0H0/entropy")
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.click(".examples .btn >> nth=0")
    page.wait_for_selector(".examples [role=status]")
    command = page.inner_text(".examples code")
    assert page.evaluate("navigator.clipboard.readText()") == command
    assert command.startswith("multihead census ")
    assert " | multihead look " in command


def test_hostile_texts_stay_text(shown: Callable[..., Page]) -> None:
    page = shown("one")
    heads = [(layer, head) for layer in range(2) for head in range(4)]
    seen = ""
    for layer, head in heads:
        page.evaluate(f"location.hash = '#L{layer}H{head}/previous_mass'")
        page.wait_for_function(f"document.querySelector('#head h1')?.textContent === 'Layer {layer} head {head}'")
        seen += page.inner_text(".examples")
    assert "<img" in seen or "</script>" in seen
    assert "\u202e" not in seen
    assert page.locator("#head img, #head script").count() == 0


@pytest.mark.parametrize("width", [1440, 390])
def test_chance_is_next_to_every_mean_and_to_nothing_else(shown: Callable[..., Page], width: int) -> None:
    page = shown("one", width=width)
    headings = page.locator("#cols th small")
    assert [re.fullmatch(r"chance [\d.]+", each) is not None for each in headings.all_inner_texts()] == [True, True]
    assert page.locator("#insp td.level").count() == 3  # a heading and two statistics
    page.select_option("select[name=of]", "p95")
    assert (headings.count(), page.locator("#insp td.level").all_inner_texts()) == (0, ["", ""])
    page.click("#rows th a >> nth=0")
    assert page.inner_text("#head .card small >> nth=1").startswith("chance ")


@pytest.mark.parametrize("width", [1440, 390])
def test_the_first_screen_says_what_the_heads_do_and_a_head_opens_on_its_own_statistic(
    shown: Callable[..., Page], width: int
) -> None:
    page = shown("even", width=width)
    row = page.locator(".found tbody tr >> nth=0")
    assert row.inner_text().split()[:1] == ["broad"]
    row.locator("a >> nth=0").click()
    page.wait_for_function("location.hash === '#L0H0/entropy'")
    page = shown("one", width=width)
    page.click("#grid a >> nth=6")
    own = page.evaluate("JSON.parse(document.getElementById('data').textContent).own[6]")
    page.wait_for_function(f"location.hash === '#L1H2/{own}'")
    assert page.locator(".card[aria-pressed=true]").count() == 1
    page = shown("two", width=width)
    assert page.locator(".finds li").all_inner_texts() == [
        "No head differs by more than chance and the lengths of the texts explain."
    ]
    assert page.locator("#found h3").count() == 2


@pytest.mark.parametrize("width", [1440, 390])
def test_heads_are_filtered_by_their_kinds(shown: Callable[..., Page], width: int) -> None:
    page = shown("even", width=width)
    counts = {name: int(number) for name, number in (each.split() for each in page.locator(".chip").all_inner_texts())}
    assert (list(counts), sum(counts.values())) == (["broad", "mixed"], 8)
    assert counts["broad"] >= 4
    page.click(".chip >> nth=0")
    assert (page.locator("#rows tr").count(), page.locator("#grid a.dim").count()) == tuple(counts.values())
    label = page.get_attribute("#grid a[data-i='0']", "aria-label")
    assert label is not None
    assert re.fullmatch(r"Layer 0 head 0, broad, entropy ([\d.]+), chance \1", label)
    page.click("#rows th a >> nth=0")
    assert page.inner_text("#head .sub") == "broad"


@pytest.mark.parametrize("width", [1440, 390])
def test_a_second_census_is_next_to_the_first_one(shown: Callable[..., Page], width: int) -> None:
    page = shown("two", width=width)
    ranked = [float(each) for each in page.locator("#rows td:nth-child(3)").all_inner_texts()]
    assert len(ranked) == 8
    assert ranked == sorted(ranked, reverse=True)
    assert "→" in page.inner_text("#rows td:nth-child(4) >> nth=0")
    for each in ("B", "difference", "divergence"):
        page.select_option("select[name=shows]", each)
        assert page.input_value("select[name=shows]") == each
        assert page.locator("#grid .cell:not(.none)").count() == 8
    page.click("#rows a >> nth=0")
    page.wait_for_selector("#head .sides h3")
    assert page.locator("#head .sides > div").count() == 2
    assert page.locator(".card >> nth=0 >> .bins").count() == 2
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
