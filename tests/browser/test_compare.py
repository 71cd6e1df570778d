"""Side by side: two heads of a run, two runs, and their difference."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from torch import Tensor

from multihead.observation.record import Record
from tests.browser.records import causal, other_run
from tests.browser.shown import Shown, ink, percent

Opened = Callable[..., Shown]
APART = ["#7F3203", "#C7692C", "#EEB88C", "#FBFAF7", "#98CCEB", "#458ACE", "#2D4498"]
START, SIZE = 300, 40
VIEW = f"v=ab&x={START}&y={START}&n={SIZE}&q=320&c=linear"


def part(record: Record, layer: int, head: int) -> Tensor:
    """The weights in view, NaN where none may be seen."""
    span = slice(START, START + SIZE)
    one = record.layers[layer].sample(0)
    weights = one.weights(head, queries=span, keys=span).double()
    return weights.masked_fill(~one.visible(queries=span, keys=span), math.nan)


def check(shown: Shown, a: Tensor, b: Tensor) -> None:
    """The three maps, their legend and the table of differences, against the weights themselves."""
    difference = a - b
    flat = difference.abs().nan_to_num(0).flatten()
    order = flat.argsort(descending=True)
    rows = shown.at("#differ tbody tr")
    assert rows.count() >= 3
    for row, place in zip(rows.all(), order.tolist(), strict=False):
        query, key = divmod(place, SIZE)
        written = [text.replace("\u00a0", " ") for text in row.locator("td").all_inner_texts()]
        expected = (float(a[query, key]), float(b[query, key]), float(difference[query, key]))
        for text, value in zip(written, expected, strict=True):
            if abs(value) > 1e-3:  # below that one digit is written
                assert percent(text) == pytest.approx(value, rel=0.13)
    top = float(flat.max())
    assert percent(shown.texts("#legend > span")[1].split("\n")[-1]) == pytest.approx(top, rel=0.1)
    for query, key in ((330, 305), (338, 338), (312, 311)):
        value = float(difference[query - START, key - START])
        found = shown.colour(query + 0.5, key + 0.5, "d")
        assert all(abs(x - y) <= 3 for x, y in zip(found, ink(0.5 + value / top / 2, APART), strict=False)), (
            query,
            key,
            value,
        )


def test_two_heads_are_shown_side_by_side_with_their_difference(opened: Opened) -> None:
    shown = opened(place=f"#a=L2H1&b=L0H2&{VIEW}")
    check(shown, part(causal(), 2, 1), part(causal(), 0, 2))
    assert shown.at("#compare").get_attribute("aria-pressed") == "true"
    shown.point(333, 320, "b")
    assert shown.weight() == pytest.approx(float(part(causal(), 2, 1)[33, 20]), rel=1e-5)
    assert "L0 H2" in shown.text("#read .w")


def test_two_runs_stand_side_by_side_with_their_difference(opened: Opened) -> None:
    shown = opened("causal", "other", place=f"#a=L1H1&b=L1H1&rb=1&{VIEW}")
    check(shown, part(causal(), 1, 1), part(other_run(), 1, 1))
    assert shown.at("#runb").is_visible()
    assert shown.texts("#run option") == ["causal.safetensors", "other.safetensors"]


def test_compare_begins_with_the_same_head_of_the_other_run(opened: Opened) -> None:
    shown = opened("causal", "other", place=f"#a=L3H0&x={START}&y={START}&n={SIZE}&q=320&c=linear")
    shown.press("c")
    assert {name: shown.place[name] for name in ("a", "b", "rb", "v")} == {
        "a": "L3H0",
        "b": "L3H0",
        "rb": "1",
        "v": "ab",
    }
    check(shown, part(causal(), 3, 0), part(other_run(), 3, 0))
    shown.at("#headb").select_option(label="L0\u00a0H1, " + shown.texts("#headb option")[1].split(", ")[1])
    shown.settle()
    assert shown.place["b"] == "L0H1"
    check(shown, part(causal(), 3, 0), part(other_run(), 0, 1))


def test_a_difference_leads_to_its_place(opened: Opened) -> None:
    shown = opened(place=f"#a=L2H1&b=L0H2&{VIEW}".replace("n=40", "n=120"))
    query = int(shown.texts("#differ tbody tr th small")[0].replace(",", ""))
    shown.at("#differ tbody tr button").first.click()
    shown.settle()
    assert shown.place["q"] == str(query)
    assert float(shown.place["n"]) <= 56


def test_what_changed_between_two_records_is_ranked_and_leads_to_the_two_maps(opened: Opened) -> None:
    assert not opened("whole").at("#changedsec").is_visible()
    shown = opened("causal", "other")
    shown.page.wait_for_selector("#changed tbody tr")
    tops = [shown.at(part).bounding_box() for part in ("#changed", "#words")]
    assert tops[0] is not None
    assert tops[1] is not None
    assert tops[0]["y"] < tops[1]["y"]  # the page opens with it
    expected = causal().changed(other_run(), top=12)
    assert [name.replace(" ", "") for name in shown.texts("#changed th a")] == [
        f"L{one.layer}H{one.head}" for one in expected
    ]
    numbers = [float(text) for text in shown.texts("#changed .v")]
    assert numbers == [pytest.approx(one.divergence, abs=6e-4) for one in expected]
    shown.at("#changed th a").first.click()
    shown.settle()
    assert (shown.place["v"], shown.place["rb"]) == ("ab", "1")
    assert shown.place["a"] == shown.place["b"] == f"L{expected[0].layer}H{expected[0].head}"
    shown.press("Escape")
    assert len(shown.texts("#changed th a")) == 12  # what was computed is still there
