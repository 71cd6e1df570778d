"""Draw the lab's line charts and bar charts as SVG, coloured by the style sheet of the page."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

__all__ = ["Bar", "BarGroup", "Curve", "draw_bar_chart", "draw_line_chart"]

WIDTH, HEIGHT = 420, 250  # of a line chart; the height of a bar chart follows from its bars
LEFT, RIGHT, TOP, BOTTOM = 44, 70, 14, 38  # the margins of a line chart
MIN_LABEL_DISTANCE = 14  # minimum vertical distance of the names at the ends of curves
BAR_HEIGHT, BAR_STEP, GROUP_GAP = 9, 13, 8  # a bar begins BAR_STEP below the one before, after a group GROUP_GAP more
BARS_LEFT, BARS_RIGHT = 150, 110  # room for the names of groups at the left, and of bars at the right
SHARES_ON_AXIS = (0, 0.25, 0.5, 0.75, 1)


@dataclass(frozen=True)
class Curve:
    """One curve of a line chart: its name, its CSS class, its points, and the band from low to high around them."""

    name: str
    css_class: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float]
    high: Sequence[float]


@dataclass(frozen=True)
class Bar:
    """One bar of a bar chart: its name, its CSS class, its share (0 to 1), and its standard deviation if known."""

    name: str
    css_class: str
    share: float
    deviation: float | None = None


BarGroup = tuple[str, Sequence[Bar]]
"""The name of a group of bars, and the bars."""


def draw_bar_chart(groups: Sequence[BarGroup], *, label: str) -> str:
    """Draw groups of horizontal bars from 0 to 100 % as SVG; each bar is named at its end, with its number.

    The label describes the chart to screen readers.

    >>> svg = draw_bar_chart([("noise 1", [Bar("long", "c0", 0.5), Bar("short", "c1", 0.25, 0.1)])], label="")
    >>> svg.count("<rect"), svg.count("50 % long")
    (2, 1)
    """

    def x_of_share(share: float) -> float:
        return BARS_LEFT + min(max(share, 0.0), 1.0) * (WIDTH - BARS_LEFT - BARS_RIGHT)

    bottom = TOP + sum(len(bars) * BAR_STEP + GROUP_GAP for _, bars in groups)
    elements = []
    for share in SHARES_ON_AXIS:
        x = x_of_share(share)
        elements += [_svg_line("rule", x, TOP, x, bottom), _svg_text("tick", x, bottom + 15, f"{share:.0%}", "middle")]
    y = float(TOP)
    for name, bars in groups:
        elements.append(_svg_text("name", BARS_LEFT - 8, y + len(bars) * BAR_STEP / 2 + 3, name, "end"))
        for bar in bars:
            end = x_of_share(bar.share)
            elements.append(
                f'<rect class="bar {bar.css_class}" x="{BARS_LEFT}" y="{y + 2:.1f}" width="{end - BARS_LEFT:.1f}" '
                f'height="{BAR_HEIGHT}"/>'
            )
            if bar.deviation:
                low, high = x_of_share(bar.share - bar.deviation), x_of_share(bar.share + bar.deviation)
                middle = y + 2 + BAR_HEIGHT / 2
                elements.append(_svg_line("spread", low, middle, high, middle))
                end = max(end, high)
            elements.append(_svg_text("tick", end + 5, y + 10, f"{100 * bar.share:.0f} % {bar.name}"))
            y += BAR_STEP
        y += GROUP_GAP
    return _svg_image(bottom + BOTTOM / 2, label, elements)


def draw_line_chart(
    curves: Sequence[Curve],
    *,
    label: str,
    x_label: str,
    x_ticks: Sequence[float],
    level: tuple[float, str] | None = None,
    logarithmic: bool = False,
) -> str:
    """Draw curves of shares from 0 to 100 % as SVG; each is named at its end, so colours are never the only key.

    The label describes the chart to screen readers; `level` is a value and its name, drawn as a dashed horizontal line.

    >>> curve = Curve("2 heads", "c1", [0, 1], [0, 1], [0, 1], [0, 1])
    >>> draw_line_chart([curve], label="", x_label="step", x_ticks=[0, 1]).count("<polyline")
    1
    """
    scale = math.log if logarithmic else float
    first, last, right = scale(min(x_ticks)), scale(max(x_ticks)), WIDTH - RIGHT

    def point_at(x: float, share: float) -> tuple[float, float]:
        along = (scale(x) - first) / (last - first or 1)
        return LEFT + along * (right - LEFT), HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)

    def points_of(curve: Curve, shares: Sequence[float]) -> list[str]:
        points = (point_at(x, share) for x, share in zip(curve.x, shares, strict=True))
        return [f"{x:.1f},{y:.1f}" for x, y in points]

    elements = []
    for share in SHARES_ON_AXIS:
        _, y = point_at(min(x_ticks), share)
        elements += [_svg_line("rule", LEFT, y, right, y), _svg_text("tick", LEFT - 6, y + 4, f"{share:.0%}", "end")]
    for tick in x_ticks:
        x, y = point_at(tick, 0)
        elements.append(_svg_text("tick", x, y + 15, f"{tick:g}", "middle"))
    elements.append(_svg_text("tick", (LEFT + right) / 2, HEIGHT - 6, x_label, "middle"))
    if level is not None:
        _, y = point_at(min(x_ticks), level[0])
        elements += [_svg_line("level", LEFT, y, right, y), _svg_text("tick", right - 2, y - 4, level[1], "end")]
    for curve in curves:
        band = " ".join([*points_of(curve, curve.high), *reversed(points_of(curve, curve.low))])
        elements.append(f'<polygon class="band {curve.css_class}" points="{band}"/>')
    for curve in curves:
        line = " ".join(points_of(curve, curve.y))
        elements.append(f'<polyline class="curve {curve.css_class}" points="{line}"/>')
    ends = [point_at(curve.x[-1], curve.y[-1]) for curve in curves]
    for curve, (x, y), height in zip(curves, ends, _space_names_apart([y for _, y in ends]), strict=True):
        elements.append(_svg_line(f"lead {curve.css_class}", x + 2, y, x + 9, height))
        elements.append(_svg_text("name", x + 12, height + 4, curve.name))
    return _svg_image(HEIGHT, label, elements)


def _space_names_apart(heights: Sequence[float]) -> list[float]:
    """Move overlapping names apart, and keep them inside the drawing."""
    order = sorted(range(len(heights)), key=lambda index: heights[index])
    placed = list(heights)
    lowest = -math.inf
    for index in order:
        placed[index] = lowest = max(heights[index], lowest + MIN_LABEL_DISTANCE)
    highest = float(HEIGHT - BOTTOM)
    for index in reversed(order):
        placed[index] = highest = min(placed[index], highest)
        highest -= MIN_LABEL_DISTANCE
    return placed


def _svg_image(height: float, label: str, elements: Iterable[str]) -> str:
    opening = f'<svg class="chart" viewBox="0 0 {WIDTH} {height:g}" role="img" aria-label="{escape(label)}">'
    return "".join([opening, *elements, "</svg>"])


def _svg_line(css_class: str, x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line class="{css_class}" x1="{x1:.1f}" x2="{x2:.1f}" y1="{y1:.1f}" y2="{y2:.1f}"/>'


def _svg_text(css_class: str, x: float, y: float, words: str, anchor: str = "start") -> str:
    return f'<text class="{css_class}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'
