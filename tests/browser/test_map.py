"""One head's map: deep zoom, exact at every level, and the panel of the query under the pointer."""

from __future__ import annotations

import math
import re
from collections.abc import Callable

import pytest
import torch

from multihead.record.sample import SampleRecord
from tests.browser.records import LENGTH, causal, translating, words
from tests.browser.shown import Shown, ink, percent
from tests.viewer.watching import block_means

Opened = Callable[..., Shown]
LAYER, HEAD = 2, 1
PLACE = f"#a=L{LAYER}H{HEAD}"


def sample() -> SampleRecord:
    return causal().layers[LAYER].sample(0)


def logarithmic(weight: float) -> float:
    return 0.0 if weight <= 1e-5 else 1 + math.log10(weight) / 5


def near(found: tuple[int, ...], expected: tuple[int, ...], most: int = 3) -> bool:
    return all(abs(a - b) <= most for a, b in zip(found, expected, strict=False))


def test_zooming_in_ends_at_single_weights_with_the_exact_number(opened: Opened) -> None:
    shown = opened(place=PLACE)
    query, key = 500, 321
    assert int(shown.at("#map").get_attribute("data-level") or 0) > 0
    for _ in range(40):
        shown.page.mouse.move(*shown.cell(query, key))
        shown.page.mouse.wheel(0, -240)
        shown.settle()
        if float(shown.place["n"]) <= 30:
            break
    assert shown.at("#map").get_attribute("data-level") == "0"
    assert shown.text("#level").startswith("each cell is one weight, exact")
    for q, k in ((query, key), (query, key - 3), (query + 4, key + 2)):
        shown.point(q, k)
        expected = float(sample().weights(HEAD, queries=slice(q, q + 1), keys=slice(k, k + 1)))
        assert shown.weight() == pytest.approx(expected, rel=1e-5)
        assert f"query {q}" in shown.text("#read")
        assert f"key {k}" in shown.text("#read")


@pytest.mark.parametrize(("size", "level"), [(40, 0), (300, 0), (500, 1), (640, 1), (700, 2)])
def test_every_cell_on_the_screen_has_the_colour_of_the_mean_it_stands_for(
    opened: Opened, size: int, level: int
) -> None:
    start = (LENGTH - size) // 2
    shown = opened(place=f"{PLACE}&x={start}&y={start}&n={size}&q=699&c=log")
    assert int(shown.at("#map").get_attribute("data-level") or -1) == level
    means, block = block_means(sample(), HEAD, level), 2**level
    generator = torch.Generator().manual_seed(1)
    checked = 0
    for _ in range(25):
        query, key = (int(torch.randint(start, start + size, (), generator=generator)) for _ in range(2))
        mean = float(means[query // block, key // block])
        middle = ((query // block + 0.5) * block, (key // block + 0.5) * block)
        if math.isnan(mean) or not all(start <= each < start + size for each in middle):
            continue
        checked += 1
        assert near(shown.colour(*middle), ink(logarithmic(mean))), (query, key, mean)
    assert checked > 5


def test_keys_that_may_not_be_seen_are_hatched_and_zero_is_paper(opened: Opened) -> None:
    shown = opened(place=f"{PLACE}&x=100&y=100&n=24&q=123&c=log")
    found = shown.colours(102, 115)
    assert {(251, 250, 247), (226, 222, 213)} <= found  # the paper and the lines on it
    shown.point(103, 118)
    assert shown.text("#read data") == "a later key: masked"


def test_pointing_at_a_query_paints_its_weights_over_the_text(opened: Opened) -> None:
    shown = opened(place=f"{PLACE}&x=180&y=180&n=40&q=190&c=log")
    query = 205
    shown.point(query, 200)
    row = sample().weights(HEAD, queries=slice(query, query + 1))[0]
    spans = shown.page.eval_on_selector_all(
        "#text .tk", "all => all.map(s => [s.textContent, s.style.background, s.title, s.className])"
    )
    start = int(shown.text("#span").split("–")[0].replace(",", ""))
    assert shown.text("#text .tk.on") == words(LENGTH)[query]
    for place, (token, painted, title, classes) in enumerate(spans, start):
        assert token == words(LENGTH)[place]
        if place > query:
            assert (painted, title) == ("", "a later key: masked")
            assert "unseen" in classes
            continue
        weight, tone = float(row[place]), logarithmic(float(row[place]))
        colour = tuple(int(part) for part in painted[4:-1].split(",")) if painted else ink(0)
        assert near(colour, ink(tone if tone > 0.02 else 0), 4), (place, weight, painted)


def test_the_strongest_keys_stand_in_context_with_their_weights(opened: Opened) -> None:
    shown = opened(place=f"{PLACE}&q=333&n=60&x=300&y=300")
    row = sample().weights(HEAD, queries=slice(333, 334))[0, :334]
    best = row.topk(9)
    assert [int(n) for n in shown.texts("#kwic .n")] == best.indices.tolist()
    for text, weight in zip(shown.texts("#kwic .p"), best.values.tolist(), strict=True):
        assert percent(text) == pytest.approx(weight, rel=0.5 if weight < 1e-3 else 0.08)
    keyed = best.indices[3].item()
    shown.at("#kwic button").nth(3).click()
    shown.settle()
    middle = float(shown.place["x"]) + float(shown.place["n"]) / 2
    assert abs(middle - keyed) < 2 or keyed < 30


def test_a_click_keeps_the_query(opened: Opened) -> None:
    shown = opened(place=f"{PLACE}&x=100&y=100&n=40&q=120")
    shown.page.mouse.click(*shown.cell(131, 110))
    shown.page.mouse.move(10, 500)
    shown.settle()
    assert shown.place["q"] == "131"
    assert "query 131" in shown.text("#read")


def test_dragging_moves_the_map_with_the_pointer(opened: Opened) -> None:
    shown = opened(place=f"{PLACE}&x=300&y=300&n=100&q=320")
    x, y = shown.cell(350, 350)
    step = shown.pane()["x"]
    shown.page.mouse.move(x, y)
    shown.page.mouse.down()
    shown.page.mouse.move(x + 10 * step, y + 20 * step, steps=4)
    shown.page.mouse.up()
    shown.settle()
    assert (shown.place["x"], shown.place["y"]) == ("290", "280")
    assert shown.place["q"] == "320"


def test_the_masked_sink_leaves_the_map_and_stays_in_words(opened: Opened) -> None:
    heads = {(at, head): layer.sample(0).weights(head) for at, layer in enumerate(causal().layers) for head in range(3)}
    layer, head = max(heads, key=lambda each: float(heads[each][20:45, 0].max()))
    weights = heads[layer, head]
    query = 20 + int(weights[20:45, 0].argmax())
    shown = opened(place=f"#a=L{layer}H{head}&x=0&y=20&n=30&q=49&c=linear")
    plain = shown.colour(query + 0.5, 0.5)
    shown.at("#sink").click()
    shown.settle()
    assert shown.text("#level").endswith("first token hidden")
    assert shown.place["s"] == "1"
    assert not near(shown.colour(query + 0.5, 0.5), plain)
    shown.point(query, 0)
    assert shown.weight() == pytest.approx(float(weights[query, 0]), rel=1e-5)


def test_linear_runs_to_the_largest_in_view_and_the_legend_says_so(opened: Opened) -> None:
    shown = opened(place=f"{PLACE}&x=400&y=420&n=40&q=425&c=linear")
    pane = shown.pane()
    rows = round(pane["height"] / pane["y"])
    largest = sample().weights(HEAD, queries=slice(420, 420 + rows), keys=slice(400, 440)).max()
    assert percent(shown.texts("#legend > span")[0].split("\n")[-1]) == pytest.approx(float(largest), rel=0.08)


def test_tiles_that_are_no_longer_wanted_are_given_up(opened: Opened) -> None:
    shown = opened(place=f"{PLACE}&x=0&y=0&n=60&q=20")
    tiles = re.compile(r"/heads/0/0/tile")
    shown.page.route(tiles, lambda route: None)  # Held: no answer ever comes.
    with shown.page.expect_request(tiles):
        shown.page.evaluate("location.hash = '#a=L0H0&x=0&y=0&n=60&q=20'")
    with shown.page.expect_event("requestfailed", lambda request: bool(tiles.search(request.url))):
        shown.page.evaluate("location.hash = '#a=L3H2&x=0&y=0&n=60&q=20'")
    shown.page.wait_for_function("() => document.getElementById('headname').textContent.startsWith('Layer 3')")
    shown.settle()


def test_the_parent_level_is_shown_until_the_tile_arrives(opened: Opened) -> None:
    shown = opened(place=f"{PLACE}&x=0&y=0&n=640&q=600&c=log")
    held: list[object] = []
    shown.page.route("**/tile?level=0*", lambda route: held.append(route))  # noqa: PLW0108 - playwright marks what it calls
    with shown.page.expect_request(re.compile("tile.level=0")):
        shown.page.evaluate("location.hash = '#a=L2H1&x=300&y=400&n=40&q=420&c=log'")
    shown.page.wait_for_function("() => document.getElementById('map').dataset.whole === 'false'")
    means, weights = block_means(sample(), HEAD, 1), sample().weights(HEAD)
    # The strongest cells of some rows, so that no two neighbours could be taken for each other.
    places = [(query, 302 + int(weights[query, 302:338].argmax())) for query in range(404, 430, 5)]
    for query, key in places:
        mean = float(means[query // 2, key // 2])
        assert near(shown.colour(query + 0.5, key + 0.5), ink(logarithmic(mean))), (query, key)
    for route in held:
        route.continue_()  # type: ignore[attr-defined]
    shown.settle()
    for query, key in places:
        assert near(shown.colour(query + 0.5, key + 0.5), ink(logarithmic(float(weights[query, key])))), (query, key)


def test_the_weights_in_view_can_be_had_as_files(opened: Opened) -> None:
    shown = opened(place=f"{PLACE}&x=10&y=20&n=12&q=25")
    with shown.page.expect_download() as download:
        shown.at("#export a:has-text('CSV')").click()
    text = download.value.path().read_text("utf-8")
    assert str(float(sample().weights(HEAD)[22, 12]))[:6] in text


def test_a_map_of_few_queries_over_another_text_is_drawn_whole(opened: Opened) -> None:
    shown = opened("translating", place="#a=L1H0&q=5&c=root")
    pane = shown.pane()
    assert pane["y"] > pane["x"]
    shown.point(7, 44)
    assert shown.weight() == pytest.approx(float(translating().layers[1].weights(0)[7, 44]), rel=1e-5)
