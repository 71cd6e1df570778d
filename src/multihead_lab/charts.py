"""Draw the lab's curves and bars as SVG, coloured by the style sheet of the page."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Bar", "Curve", "draw_bar_chart", "draw_line_chart"]

WIDTH, HEIGHT = 420, 250
LEFT, RIGHT, TOP, BOTTOM = 44, 70, 14, 38
MIN_LABEL_DISTANCE = 14  # minimum vertical distance of the names at the ends of curves
BAR, BAR_STEP, GROUP_GAP = 9, 13, 8  # the height of a bar, the distance of two bars, and of two groups of bars
BARS_LEFT, BARS_RIGHT = 150, 110  # room for the names of groups at the left, and of bars at the right


@dataclass(frozen=True)
class Curve:
    """One line: its name, its CSS class, its points, and the band around them (low and high)."""

    name: str
    css_class: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float]
    high: Sequence[float]


@dataclass(frozen=True)
class Bar:
    """One bar: its name, its CSS class, its share from 0 to 1, and the standard deviation of the share."""

    name: str
    css_class: str
    share: float
    deviation: float = 0.0


def draw_bar_chart(groups: Sequence[tuple[str, Sequence[Bar]]], *, label: str) -> str:
    """Draw groups of horizontal bars from 0 to 100 % as SVG; each bar is named at its end, with its number.

    The label describes the chart to screen readers.

    >>> svg = draw_bar_chart([("noise 1", [Bar("long", "c0", 0.5), Bar("short", "c1", 0.25, 0.1)])], label="")
    >>> svg.count("<rect"), svg.count("50 % long")
    (2, 1)
    """
    across = WIDTH - BARS_LEFT - BARS_RIGHT
    height = TOP + sum(len(each) * BAR_STEP + GROUP_GAP for _, each in groups) + BOTTOM / 2
    parts = [f'<svg class="chart" viewBox="0 0 {WIDTH} {height:g}" role="img" aria-label="{_strip_markup(label)}">']
    for share in (0, 0.25, 0.5, 0.75, 1):
        x = BARS_LEFT + share * across
        parts.append(f'<line class="rule" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{height - BOTTOM / 2:g}"/>')
        parts.append(f'<text class="tick" x="{x:.1f}" y="{height - 4:g}" text-anchor="middle">{share:.0%}</text>')
    y = float(TOP)
    for name, each in groups:
        middle = y + len(each) * BAR_STEP / 2 + 3
        parts.append(
            f'<text class="name" x="{BARS_LEFT - 8}" y="{middle:g}" text-anchor="end">{_strip_markup(name)}</text>'
        )
        for bar in each:
            wide = min(max(bar.share, 0.0), 1.0) * across
            parts.append(
                f'<rect class="bar {bar.css_class}" x="{BARS_LEFT}" y="{y + 2:g}" width="{wide:.1f}" height="{BAR}"/>'
            )
            low, high = (min(max(bar.share + side * bar.deviation, 0.0), 1.0) * across for side in (-1, 1))
            if bar.deviation > 0:
                parts.append(
                    f'<line class="spread" x1="{BARS_LEFT + low:.1f}" x2="{BARS_LEFT + high:.1f}" '
                    f'y1="{y + 2 + BAR / 2:g}" y2="{y + 2 + BAR / 2:g}"/>'
                )
            end = BARS_LEFT + max(wide, high if bar.deviation > 0 else 0.0) + 5
            words = f"{100 * bar.share:.0f} % {bar.name}"
            parts.append(f'<text class="tick" x="{end:.1f}" y="{y + 10:g}">{_strip_markup(words)}</text>')
            y += BAR_STEP
        y += GROUP_GAP
    return "".join([*parts, "</svg>"])


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

    >>> svg = draw_line_chart(
    ...     [Curve("2 heads", "c1", [0, 1], [0, 1], [0, 1], [0, 1])], label="", x_label="step", x_ticks=[0, 1]
    ... )
    >>> svg.count("<polyline")
    1
    """
    scale = math.log if logarithmic else float
    first, last = scale(min(x_ticks)), scale(max(x_ticks))

    def at(x: float, y: float) -> tuple[float, float]:
        along = (scale(x) - first) / (last - first or 1)
        return LEFT + along * (WIDTH - LEFT - RIGHT), HEIGHT - BOTTOM - y * (HEIGHT - TOP - BOTTOM)

    parts = [f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{_strip_markup(label)}">']
    for share in (0, 0.25, 0.5, 0.75, 1):
        (x0, y), (x1, _) = at(min(x_ticks), share), at(max(x_ticks), share)
        parts.append(f'<line class="rule" x1="{x0:.1f}" x2="{x1:.1f}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="tick" x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{share:.0%}</text>')
    for tick in x_ticks:
        x, y = at(tick, 0)
        parts.append(f'<text class="tick" x="{x:.1f}" y="{y + 15:.1f}" text-anchor="middle">{tick:g}</text>')
    parts.append(
        f'<text class="tick" x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 6}" text-anchor="middle">'
        f"{_strip_markup(x_label)}</text>"
    )
    if level is not None:
        (x0, y), (x1, _) = at(min(x_ticks), level[0]), at(max(x_ticks), level[0])
        parts.append(f'<line class="level" x1="{x0:.1f}" x2="{x1:.1f}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(
            f'<text class="tick" x="{x1 - 2:.1f}" y="{y - 4:.1f}" text-anchor="end">{_strip_markup(level[1])}</text>'
        )
    for curve in curves:
        above = [at(x, y) for x, y in zip(curve.x, curve.high, strict=True)]
        below = [at(x, y) for x, y in zip(curve.x, curve.low, strict=True)]
        parts.append(
            f'<polygon class="band {curve.css_class}" points="{_format_svg_points([*above, *reversed(below)])}"/>'
        )
    for curve in curves:
        line = [at(x, y) for x, y in zip(curve.x, curve.y, strict=True)]
        parts.append(f'<polyline class="curve {curve.css_class}" points="{_format_svg_points(line)}"/>')
    ends = [at(curve.x[-1], curve.y[-1]) for curve in curves]
    for curve, (x, y), height in zip(curves, ends, _space_names_apart([y for _, y in ends]), strict=True):
        parts.append(
            f'<line class="lead {curve.css_class}" x1="{x + 2:.1f}" y1="{y:.1f}" x2="{x + 9:.1f}" y2="{height:.1f}"/>'
        )
        parts.append(f'<text class="name" x="{x + 12:.1f}" y="{height + 4:.1f}">{_strip_markup(curve.name)}</text>')
    return "".join([*parts, "</svg>"])


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


def _format_svg_points(places: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in places)


def _strip_markup(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").replace('"', "&quot;")
