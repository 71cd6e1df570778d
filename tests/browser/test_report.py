"""The page that `look` writes, opened from its file: the viewer's page, whatever it stores of the maps."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from multihead.errors import ArgumentError
from multihead.viewer import write_report
from tests.browser.records import causal, encoder_decoder, of_a_script, painted, repeated, words
from tests.browser.shown import DESKTOP, Shown, ink, percent
from tests.dense_record import random_weights, record_of

if TYPE_CHECKING:
    from playwright.sync_api import Browser

TOKENS = [f"w{place}" for place in range(12)]
Written = Callable[..., Shown]


def a_record(**given: Any) -> Any:
    return record_of(random_weights(3, 12, 12), random_weights(3, 12, 12), **given)


@pytest.fixture
def written(browser: Browser, tmp_path: Path, checked: Callable[[Shown], Shown]) -> Written:
    """Write a record as a page and open it."""

    def open_page(record: Any, place: str = "", **given: Any) -> Shown:
        write_report(record, tmp_path / "page.html", **{"title": "a model"} | given)
        page = checked(Shown(browser.new_context(**DESKTOP), (tmp_path / "page.html").as_uri()))
        page.visit(place)
        return page

    return open_page


def numbered(record: Any, *numbers: int) -> Any:
    for layer, number in zip(record.layers, numbers, strict=True):
        layer.number = number
    return record


def test_layers_keep_their_numbers_in_the_grid_the_table_the_findings_and_the_addresses(written: Written) -> None:
    shown = written(numbered(a_record(), 17, 18), tokens=TOKENS)
    assert shown.texts("#grid [role=rowheader]") == ["L17", "L18"]
    assert {name.split()[0] for name in shown.texts("#rows th")} == {"L17", "L18"}
    assert {name.split(" head")[0].lower() for name in shown.texts("#finds b")} <= {"layer 17", "layer 18"}
    shown.at("#filter").fill("L18")
    assert {name.split()[0] for name in shown.texts("#rows th")} == {"L18"}
    shown.at("#rows a").first.click()
    shown.settle()
    assert shown.place["a"].startswith("L18H")
    shown.page.wait_for_function("() => document.getElementById('map').getAttribute('aria-label')?.includes('18')")


def test_an_address_with_a_layers_number_opens_that_layer(written: Written) -> None:
    shown = written(numbered(a_record(), 17, 18), "#a=L18H2", tokens=TOKENS)
    assert shown.at("#headname").inner_text().startswith("Layer 18 head 2")
    shown.press("[", "[", "[")
    assert shown.place["a"] == "L17H2"


def test_a_probe_of_a_script_has_its_label_its_unit_and_its_number_format(written: Written) -> None:
    record = of_a_script()
    shown = written(record)
    labels = ["entropy, nats", "other keys, %", "relative <b>spread</b>, per token"]
    assert shown.texts("#cols button")[2:] == labels
    shown.at("#filter").fill("L1H1")
    means = {name: float(value[1]) for name, value in record.layers[1].means().items()}
    assert shown.texts("#rows td .v") == [record.statistic(name).number(value) for name, value in means.items()]


def looking_back(length: int) -> Any:
    """One head with all weight on the previous token, and one that spreads evenly."""
    back = torch.eye(length).roll(-1, 1)
    back[0], back[0, 0] = 0, 1
    return record_of(torch.stack([back, torch.full((length, length), 1 / length)]))


def test_the_inspector_shows_single_weights_where_they_fit(written: Written) -> None:
    shown = written(looking_back(130))
    shown.at("#grid [data-i='0']").hover()
    shown.page.wait_for_selector("#insp .note:has-text('one weight')")
    assert shown.text("#insp .note") == "Each cell is one weight. The scale ends at 100 %."
    assert shown.inspected_colour(50, 49, 130) == pytest.approx(ink(1), abs=4)
    assert shown.inspected_colour(50, 53, 130) == pytest.approx(ink(0), abs=4)


def test_a_long_texts_maps_use_the_whole_scale_and_say_what_a_cell_is(written: Written) -> None:
    shown = written(looking_back(1408), "#c=root", max_bytes=500_000)
    shown.at("#grid [data-i='0']").hover()
    shown.page.wait_for_selector("#insp .note")
    # A block of 22 x 22 on the diagonal holds 21 weights of 1, the first one 22.
    assert shown.text("#insp .note") == "Each cell is the mean of 22 × 22 weights. The scale ends at 5 %."
    assert shown.inspected_colour(30, 30, 64) == pytest.approx(ink((21 / 22**2 / 0.05) ** 0.5), abs=4)
    assert shown.texts("#scale .ticks span") == ["0", "0.05 %", "0.5 %", "1.25 %", "2.5 %", "5 %"]
    note = "Each cell is the mean of 22 × 22 weights. The scale ends at the largest mean shown, rounded up."
    assert note in shown.text("#scale .note")
    shown.visit("#a=L0H0&c=root&q=50")
    assert shown.text("#level").startswith("each cell is the mean of 22 × 22 weights, ±")
    assert percent(shown.texts("#legend > span")[0].split("\n")[-1]) == 0.05
    assert not shown.at("#zoomone").is_visible()


def test_a_word_of_the_filter_that_cannot_match_is_explained(written: Written) -> None:
    shown = written(a_record())
    for typed, why in (
        ("banana", "No kind of head and no layer name contains “banana”."),
        ("induction>5", '“induction” was not recorded. Observe with probes= that include "induction_mass".'),
    ):
        shown.at("#filter").fill(typed)
        assert shown.text("#why") == why
    shown.at("#filter").fill("H1")
    assert shown.at("#why").is_hidden()


def test_cross_attention_has_the_decoders_tokens_as_rows_and_the_encoders_as_columns(written: Written) -> None:
    record = encoder_decoder()
    shown = written(record, tokens=record.layers[0].sample().text.tokens)
    roles = ["encoder", "encoder", "decoder", "cross-attention", "decoder", "cross-attention"]
    assert [" ".join(name.split()) for name in shown.texts("#grid [role=rowheader]")] == [
        f"L{layer} {role}" for layer, role in enumerate(roles)
    ]
    assert shown.text("#lead") == (
        "24 attention heads of an encoder-decoder model: its encoder read 12 positions, its decoder 12."
    )
    assert shown.text("#othertext").split()[0] == "d0"
    shown.at("#filter").fill("alignment")
    assert [" ".join(name.split()) for name in shown.texts("#rows th")] == ["L3 H1 cross-attention"]
    assert shown.texts("#rows .aligned") == ["alignment"]
    shown.at("#rows a").first.click()
    shown.settle()
    assert shown.text("#shownhead").split(", ")[::2] == ["cross-attention", "alignment"]
    assert shown.text("#text").split()[0] == "e0"
    assert shown.text("#querytext").split()[0] == "d0"
    shown.at("#querytext .tk").nth(5).click()
    shown.page.mouse.move(5, 700)
    shown.settle()
    assert shown.place["q"] == "5"
    assert shown.texts("#read bdi")[0] == "d5"


# How many bytes the maps of 700 tokens, 4 layers of 3 heads, get beside the rest of the page, by what it then stores.
ROOM = {"whole": 19_000_000, "largest": 660_000, "pooled": 13_000, "none": 700}


def limited(mode: str) -> int:
    """The size of a page that stores so much of the maps of `causal`."""
    with pytest.raises(ArgumentError) as refusal:
        write_report(causal(), "page.html", title="a model", max_bytes=1)
    needed = re.search(r"needs ([\d,]+) bytes", str(refusal.value))
    assert needed is not None
    return int(needed[1].replace(",", "")) + ROOM[mode]


@pytest.mark.parametrize("mode", ROOM)
def test_a_head_is_shown_with_what_the_page_stores_of_it(written: Written, mode: str) -> None:
    shown = written(causal(), max_bytes=limited(mode))
    stored = {
        "whole": "Every weight is stored in",
        "largest": "largest weights, within",
        "pooled": "single weights are left out to stay under",
        "none": "All maps are left out to stay under",
    }[mode]
    assert stored in shown.text("#foot")
    assert shown.at("#scale").is_visible() == (mode != "none")
    shown.visit("#a=L2H1&q=300&x=250&y=280&n=40")
    if mode == "none":
        assert shown.text("#blank").startswith(stored)
        assert shown.at("#numbers tr").count() > 5
        return
    weights = causal().layers[2].weights(1)[300]
    assert [shown.at(part).is_visible() for part in ("#along", "#context", "#over")] == [mode != "pooled"] * 3
    assert shown.at("#nearest").is_visible() == (mode == "whole")
    if mode == "pooled":
        assert shown.text("#read").startswith("queries 264–307")
        assert shown.text("#read").endswith("mean of 44 × 44 weights")
        return
    assert shown.weight() == pytest.approx(float(weights.max()), abs=4e-3)
    assert shown.texts("#kwic .n")[0] == str(int(weights.argmax()))
    assert shown.at("#keptshare").is_visible() == (mode == "largest")


def test_the_first_token_can_be_hidden_and_this_is_remembered(written: Written) -> None:
    shown = written(painted())
    first, other = shown.at("#words .tk").nth(0), shown.at("#words .tk").nth(1)
    background = "span => getComputedStyle(span).backgroundColor"
    before = other.evaluate(background)
    shown.at("#sink").click()
    assert first.evaluate("span => span.style.background") == ""
    assert "is hidden" in shown.text("#textnote")
    shown.page.reload()
    shown.settle()
    assert shown.at("#sink").get_attribute("aria-pressed") == "true"
    assert first.evaluate("span => span.style.background") == ""
    shown.at("#sink").click()
    assert first.evaluate("span => span.style.background") != ""
    assert other.evaluate(background) == before


def test_similar_heads_of_a_report_are_those_of_the_record(written: Written) -> None:
    shown = written(repeated(), "#a=L1H0", tokens=words(60))
    shown.at("#nearest button").click()
    shown.page.wait_for_selector("#nearest li")
    found = [each.split() for each in shown.texts("#nearest a")]
    expected = repeated().nearest(1, 0)
    assert [(each[0], each[1]) for each in found] == [(f"L{one.layer}", f"H{one.head}") for one in expected]
    assert [float(each[-1]) for each in found] == pytest.approx([one.divergence for one in expected], abs=1e-3)


def test_a_report_compares_a_head_with_another(written: Written) -> None:
    shown = written(repeated(), "#a=L1H0&b=L0H1&v=ab&q=40", tokens=words(60))
    one, other = repeated().layers[1].weights(0)[40], repeated().layers[0].weights(1)[40]
    best = int(one.argmax())
    assert shown.weight() == pytest.approx(float(one[best]), abs=1e-4)
    assert percent(shown.texts("#read .w small")[0].split("H1")[-1]) == pytest.approx(float(other[best]), rel=0.1)
    assert shown.at("#differ tbody tr").count() >= 3


@pytest.mark.parametrize("mode", ["whole", "largest"])
def test_a_word_of_the_text_lists_the_heads_that_look_at_it(written: Written, mode: str) -> None:
    shown, key = written(causal(), max_bytes=limited(mode)), 30
    shown.at("#words .tk").nth(key).click()
    shown.page.wait_for_selector("#looking li")
    weights = torch.stack([causal().layers[layer].weights(head)[key:, key] for layer in range(4) for head in range(3)])
    order = weights.mean(-1).argsort(descending=True).tolist()[:8]
    names = [name.replace(" ", "") for name in shown.texts("#looking li > a")]
    if mode == "whole":
        assert names == [f"L{n // 3}H{n % 3}" for n in order]
    assert len(set(names)) == 8
    assert ("count as 0" in shown.text("#looking .note")) == (mode == "largest")


@pytest.mark.parametrize(
    ("first", "direction"),
    [(["[CLS]", "القطة", " جلست"], "rtl"), (["[CLS]", "החתול", " ישב"], "rtl"), (["[CLS]", "猫", "坐"], "ltr")],
)
def test_a_text_is_ordered_in_the_direction_of_its_first_letter(
    written: Written, first: list[str], direction: str
) -> None:
    tokens = [*first, *[" The", " cat", " sat", " 20", "24"], *first[1:], "."]
    shown = written(a_record(), tokens=[*tokens, "⤷"][:12], special=[place == 0 for place in range(12)])
    assert shown.at("#words").get_attribute("dir") == direction
    left = shown.page.eval_on_selector_all("#words .tk", "all => all.map(each => each.getBoundingClientRect().left)")
    assert (left[1] > left[2]) == (direction == "rtl")
    assert left[3:8] == sorted(
        left[3:8]
    )  # the words of the other direction, and the pieces of a number, in their order
    assert (left[8] < left[3]) == (direction == "rtl")
    shown.at("#words .tk").nth(1).click()
    shown.page.wait_for_selector("#looking li")
    quoted = f"\u2068{first[1]}\u2069" if direction == "rtl" else first[1]
    assert shown.text("#looking h3") == f"Who looks at “{quoted}”"
    shown.at("#looking li > a").first.click()
    shown.page.wait_for_selector("#kwic button")
    assert shown.at("#kwic").get_attribute("dir") == shown.at("#text").get_attribute("dir") == direction
