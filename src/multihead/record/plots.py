"""Plot recorded heads with matplotlib, in the colours of the report and the viewer."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from multihead.errors.optional import require
from multihead.locale.escaping import escape_controls, label_of_token
from multihead.probes.probe import Statistic
from multihead.record.blocks import checked_slice_ends
from multihead.record.layer import LayerRecord
from multihead.record.sample import SampleRecord

MAX_DRAWN_CELLS = 512
"""Largest number of rows and columns of a drawn map; a larger map is drawn as the means of blocks."""

MAX_TOKEN_LABELS = 48
"""Largest number of tokens that are drawn as labels along an axis of a map."""

MAX_GRID_MAP_CELLS = 96  # largest number of rows and columns of each map in a grid
_COLOURS_OF_SCALE = (
    "#FBFAF7 #BFDFF1 #86C2E6 #54A3DA #387FCA #325AB4 #32388E #281E5E #150D2C"  # the colours of static/shared/colour.js
)
_COLOURS_OF_SIGNED_SCALE = "#7F3203 #C7692C #EEB88C #FBFAF7 #98CCEB #458ACE #2D4498"  # orange below 0, blue above
_COLOUR_OF_HIDDEN_CELLS = "#E4E2DC"


def plot_map(
    sample: SampleRecord,
    head: int,
    *,
    title: str,
    queries: slice = slice(None),
    keys: slice = slice(None),
    ax: Any = None,
) -> Any:
    """Draw the attention map of a head, or a rectangle of the map, labelled with tokens if there is room.

    Args:
        sample: the sample.
        head: which head.
        title: the title.
        queries: the rows, a slice of step 1.
        keys: the columns, a slice of step 1.
        ax: the matplotlib axes to draw on; None makes new ones.

    Returns:
        the axes. The colour scale is linear in the square root of the weight.

    Raises:
        ProbeError: only statistics were kept.
        ArgumentError: the head does not exist, or a slice has another step.
        MissingPackageError: matplotlib is not installed.
    """
    plt = import_pyplot()
    weights = sample.map(head, queries=queries, keys=keys, bins=MAX_DRAWN_CELLS).numpy()
    rows, columns = checked_slice_ends(queries, sample.num_queries), checked_slice_ends(keys, sample.num_keys)
    block = math.ceil((rows[1] - rows[0]) / MAX_DRAWN_CELLS), math.ceil((columns[1] - columns[0]) / MAX_DRAWN_CELLS)
    if ax is None:
        ax = plt.subplots(figsize=(7, 6), layout="constrained")[1]
    image = _draw_map(
        ax, weights, end := end_of_color_scale(weights, single=max(block) <= 1), extent=(*columns, rows[1], rows[0])
    )
    for axis, (first, last), tokens in (
        (ax.yaxis, rows, sample.query_text.tokens if sample.cross_attention else sample.text.tokens),
        (ax.xaxis, columns, sample.text.tokens),
    ):
        if tokens is not None and last - first <= MAX_TOKEN_LABELS:
            axis.set_ticks(
                np.arange(first, last) + 0.5, [escape_controls(label_of_token(token)) for token in tokens[first:last]]
            )
            axis.set_tick_params(length=0, labelsize="small")
    ax.tick_params("x", rotation=90 if columns[1] - columns[0] <= MAX_TOKEN_LABELS else 0)
    ax.set(xlabel="key", ylabel="query", title=title)
    _add_color_bar(ax, image, end, block)
    return ax


def plot_statistic(
    layers: Sequence[LayerRecord],
    shown: Statistic,
    values: Mapping[int, Tensor],
    *,
    hatched: Mapping[int, Tensor] | None = None,
    ax: Any = None,
) -> Any:
    """Draw a statistic of all heads, one row per layer and one column per head.

    Values below 0 have a signed scale, linear in the square root of the size, as on the page.

    Args:
        layers: the layers that have the statistic.
        shown: the statistic.
        values: number of a layer -> (heads,).
        hatched: number of a layer -> (heads,) bool, the cells that are hatched; None for none.
        ax: the matplotlib axes to draw on; None makes new ones.

    Returns:
        the axes.

    Raises:
        MissingPackageError: matplotlib is not installed.
    """
    plt = import_pyplot()
    heads = max(layer.num_heads for layer in layers)
    cells = np.full((len(layers), heads), np.nan)
    for row, layer in enumerate(layers):
        cells[row, : layer.num_heads] = values[layer.number].numpy()
    if ax is None:
        size = (1.5 + 0.4 * min(heads, 32), 1.5 + 0.3 * min(len(layers), 48))
        ax = plt.subplots(figsize=size, layout="constrained")[1]
    end = float(np.nanmax(np.abs(cells))) if (cells < 0).any() else None  # of a signed scale
    scale = {"cmap": report_colormap(), "vmin": 0.0} if end is None else _signed_scale(end)
    image = ax.imshow(cells, aspect="auto", **scale)
    for row, layer in enumerate(layers):
        for head in [] if hatched is None else hatched[layer.number].nonzero()[:, 0].tolist():
            ax.add_patch(_hatched_cell(row, head))
    ax.set(xlabel="head", ylabel="layer", title=shown.label)
    ax.set_xticks(range(0, heads, max(1, heads // 16)))
    step = max(1, len(layers) // 24)
    ax.set_yticks(range(0, len(layers), step), [str(layer.number) for layer in layers[::step]])
    marks = {} if end is None else {"ticks": [share * end for share in (-1, -0.25, 0, 0.25, 1)], "format": "%.2g"}
    ax.figure.colorbar(image, ax=ax, label=shown.heading, **marks)
    return ax


def _signed_scale(end: float) -> dict[str, Any]:
    """Return the colours of an image, and its scale from -end to end, linear in the square root of the size."""
    from matplotlib.colors import FuncNorm

    def root(values: Any) -> Any:
        return np.sign(values) * np.sqrt(np.abs(values))

    ramp = _ramp("multihead signed", _COLOURS_OF_SIGNED_SCALE)
    return {"cmap": ramp, "norm": FuncNorm((root, lambda values: values * np.abs(values)), -end, end)}


def _hatched_cell(row: int, column: int) -> Any:
    """Return the hatching of a cell, which lies over its colour."""
    from matplotlib.patches import Rectangle

    return Rectangle((column - 0.5, row - 0.5), 1, 1, fill=False, hatch="////", edgecolor="#8A93A0", linewidth=0)


def plot_grid(layers: Sequence[LayerRecord], sample: int) -> Any:
    """Draw a small attention map of every head, one row per layer, with a common colour scale.

    Args:
        layers: the layers.
        sample: which sample.

    Returns:
        the matplotlib figure.

    Raises:
        ProbeError: only statistics were kept.
        MissingPackageError: matplotlib is not installed.
    """
    plt = import_pyplot()
    heads = max(layer.num_heads for layer in layers)
    figure, axes = plt.subplots(
        len(layers), heads, figsize=(0.5 + 0.9 * heads, 0.5 + 0.9 * len(layers)), squeeze=False, layout="constrained"
    )
    maps = [layer.map(None, sample=sample, bins=MAX_GRID_MAP_CELLS).numpy() for layer in layers]
    ones = [layer.sample(sample) for layer in layers]
    longest = max(one.num_queries for one in ones), max(one.num_keys for one in ones)
    block = math.ceil(longest[0] / MAX_GRID_MAP_CELLS), math.ceil(longest[1] / MAX_GRID_MAP_CELLS)
    end = end_of_color_scale(np.concatenate([each.ravel() for each in maps]), single=max(block) <= 1)
    for row, (layer, weights) in enumerate(zip(layers, maps, strict=True)):
        for head, ax in enumerate(axes[row]):
            ax.set(xticks=[], yticks=[])
            ax.set_visible(head < layer.num_heads)
            if head < layer.num_heads:
                image = _draw_map(ax, weights[head], end)
            if head == 0:
                ax.set_ylabel(f"L{layer.number}", rotation=0, ha="right", va="center")
            if row == 0:
                ax.set_title(f"H{head}", fontsize="small")
    _add_color_bar(axes, image, end, block)
    if "inline" in plt.get_backend():
        plt.close(figure)  # otherwise a notebook would show this figure twice
    return figure


def import_pyplot() -> Any:
    """Import and return matplotlib.pyplot.

    Raises:
        MissingPackageError: matplotlib is not installed.
    """
    require("matplotlib", purpose="A plot", extra="plot")
    import matplotlib.pyplot as plt

    return plt


def save_png(draw: Callable[[], Any], file: str) -> None:
    """Write what a function draws, which returns its axes, as a PNG file; no window opens."""
    import matplotlib as mpl

    mpl.use("agg", force=False)
    draw().figure.savefig(file, format="png", dpi=120)


def report_colormap() -> Any:
    """Return the colormap of the report and the viewer, from white (paper) to dark blue (ink)."""
    return _ramp("multihead", _COLOURS_OF_SCALE)


def _ramp(name: str, colours: str) -> Any:
    from matplotlib.colors import LinearSegmentedColormap

    ramp = LinearSegmentedColormap.from_list(name, colours.split())
    return ramp.with_extremes(bad=_COLOUR_OF_HIDDEN_CELLS)  # hidden cells, which are NaN, are grey


def end_of_color_scale(weights: Any, *, single: bool) -> float:
    """Return the upper end of the colour scale: 1 for single weights, else the largest mean, rounded up."""
    finite = weights[np.isfinite(weights)]
    largest = float(finite.max()) if finite.size else 0.0
    if single or largest <= 0:
        return 1.0
    ten = 10.0 ** math.floor(math.log10(largest))
    return min(1.0, next(step for step in (1, 2, 5, 10) if step * ten >= largest * 0.999) * ten)


def _draw_map(ax: Any, weights: Any, end: float, extent: tuple[int, int, int, int] | None = None) -> Any:
    from matplotlib.colors import PowerNorm

    norm = PowerNorm(0.5, vmin=0, vmax=end, clip=True)
    return ax.imshow(weights, cmap=report_colormap(), norm=norm, extent=extent, interpolation="nearest", aspect="equal")


def _add_color_bar(axes: Any, image: Any, end: float, block: tuple[int, int]) -> None:
    means = "" if max(block) <= 1 else f", mean of {block[0]} x {block[1]}"
    ticks = [share * end for share in (0, 0.01, 0.1, 0.25, 0.5, 1)]
    figure = image.axes.figure
    bar = figure.colorbar(image, ax=axes, label=f"attention weight{means}", shrink=0.8)
    bar.set_ticks(ticks, labels=[f"{100 * tick:.3g} %" for tick in ticks])
