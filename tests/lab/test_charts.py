"""Curves and bars as SVG: well formed, in their places, with names that do not lie on each other."""

from __future__ import annotations

import itertools
from xml.etree import ElementTree as ET

from multihead_lab.charts import (
    BARS_LEFT,
    BARS_RIGHT,
    BOTTOM,
    HEIGHT,
    LEFT,
    MIN_LABEL_DISTANCE,
    RIGHT,
    TOP,
    WIDTH,
    Bar,
    Curve,
    draw_bar_chart,
    draw_line_chart,
)


def drawn(curves: list[Curve], **options):
    return ET.fromstring(draw_line_chart(curves, label="l & <l>", x_label="x", x_ticks=[0, 10], **options))


def flat(name: str, height: float) -> Curve:
    return Curve(name, "c0", [0, 10], [height] * 2, [height] * 2, [height] * 2)


def test_a_curve_runs_from_corner_to_corner_of_the_axes() -> None:
    svg = drawn([Curve("a", "c1", [0, 10], [0, 1], [0, 1], [0, 1])])
    (line,) = svg.findall("polyline")
    assert line.get("points") == f"{LEFT:.1f},{HEIGHT - BOTTOM:.1f} {WIDTH - RIGHT:.1f},{TOP:.1f}"
    assert line.get("class") == "curve c1"


def test_the_band_goes_along_its_upper_edge_and_back_along_its_lower() -> None:
    svg = drawn([Curve("a", "c0", [0, 10], [0.5, 0.5], [0, 0], [1, 1])])
    (band,) = svg.findall("polygon")
    heights = [float(point.split(",")[1]) for point in band.get("points").split()]
    assert heights == [TOP, TOP, HEIGHT - BOTTOM, HEIGHT - BOTTOM]


def test_names_at_the_same_height_are_set_apart_within_the_drawing() -> None:
    svg = drawn([flat(str(number), 0.01) for number in range(4)])
    heights = sorted(float(text.get("y")) for text in svg.findall("text") if text.get("class") == "name")
    assert all(after - before >= MIN_LABEL_DISTANCE - 0.11 for before, after in itertools.pairwise(heights))
    assert heights[-1] <= HEIGHT - BOTTOM + 4.1


def test_along_a_logarithmic_axis_equal_ratios_are_equal_steps() -> None:
    curve = Curve("a", "c0", [4, 8, 16], [0, 0, 0], [0, 0, 0], [0, 0, 0])
    svg = ET.fromstring(draw_line_chart([curve], label="", x_label="", x_ticks=[4, 16], logarithmic=True))
    places = [float(point.split(",")[0]) for point in svg.find("polyline").get("points").split()]
    assert abs((places[1] - places[0]) - (places[2] - places[1])) < 0.11


def test_words_cannot_become_markup() -> None:
    svg = drawn([flat('<b>"', 0.5)], level=(0.5, "<i>"))
    assert svg.get("aria-label") == "l & <l>"
    assert [text.text for text in svg.findall("text")][-2:] == ["<i>", '<b>"']


def test_a_bar_is_as_long_as_its_share_and_its_spread_is_a_line_around_its_end() -> None:
    svg = ET.fromstring(draw_bar_chart([("a", [Bar("x", "c0", 0.5, 0.25), Bar("y", "c1", 1.0)])], label="l"))
    whole = WIDTH - BARS_LEFT - BARS_RIGHT
    assert [float(bar.get("width")) for bar in svg.findall("rect")] == [whole / 2, whole]
    (line,) = [line for line in svg.findall("line") if line.get("class") == "spread"]
    assert (float(line.get("x1")), float(line.get("x2"))) == (BARS_LEFT + whole / 4, BARS_LEFT + whole * 3 / 4)


def test_bars_end_inside_the_drawing_and_are_named_with_their_numbers() -> None:
    svg = ET.fromstring(
        draw_bar_chart([('<b>"', [Bar("<i>", "c0", 1.3, 0.2)]), ("b", [Bar("c", "c0", 0.0)])], label="l & <l>")
    )
    texts = [text.text for text in svg.findall("text")]
    assert svg.get("aria-label") == "l & <l>"
    assert {'<b>"', "130 % <i>", "0 % c"} <= set(texts)
    assert max(float(bar.get("width")) for bar in svg.findall("rect")) <= WIDTH - BARS_LEFT - BARS_RIGHT
    low = max(float(bar.get("y")) + float(bar.get("height")) for bar in svg.findall("rect"))
    assert low < float(svg.get("viewBox").split()[-1])
