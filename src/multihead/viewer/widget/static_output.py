"""HTML without scripts, a picture and a table, for notebooks that cannot run the widget.

The picture and the table are a separate output of the cell, because a widget's output is empty without its kernel, and
notebook programs show no other format of the same output. The widget hides them while it is shown.
"""

from __future__ import annotations

import base64
import io
import math
from html import escape
from typing import TYPE_CHECKING, Any

import numpy as np

from multihead.locale.texts import text
from multihead.probes.catalogue import POOLED_MAP
from multihead.probes.choices import FOCUS
from multihead.record.plots import end_of_color_scale, import_pyplot, report_colormap

if TYPE_CHECKING:
    from multihead.observation.record import Record

MAX_CELLS_PER_MAP_SIDE = 32
"""Largest number of rows and columns of a small map in the picture."""

MAX_COMPUTED_WEIGHTS = 1 << 27
"""Largest number of weights that are computed for the picture, which takes about a tenth of a second."""

# A saved notebook has no widget any more, and JupyterLab shows an error in its place, which this style hides.
_STYLE_HIDING_LOST_WIDGET = (
    "<style>.jp-OutputArea-child:not(:has(.multihead-view)):has(+ .jp-OutputArea-child [data-multihead-static])"
    "{display:none}</style>"
)
_MAPS_PER_ROW = 8  # number of small maps side by side if only some heads are shown


def static_html(record: Record, *, mark: str, lang: str) -> str:
    """Return HTML with a picture of the heads and the table of their numbers.

    Args:
        record: the record.
        mark: a name by which the widget finds this output, to hide it as long as the widget is shown.
        lang: the language of the captions, "en" or "zh".
    """
    shown, caption = picture_of_heads(record, lang=lang)
    source = base64.b64encode(shown).decode()
    return (
        f'<div data-multihead-static="{escape(mark)}">{_STYLE_HIDING_LOST_WIDGET}'
        f'<p>{escape(caption)}</p><img alt="{escape(caption)}" src="data:image/png;base64,{source}">'
        f"{record._repr_html_()}</div>"
    )


def picture_of_heads(record: Record, *, lang: str = "en") -> tuple[bytes, str]:
    """Draw the small maps of all heads; of a long text those of the most focused heads; without maps, the entropy.

    Returns:
        the picture as PNG, and its caption.
    """
    plt = import_pyplot()
    heads = [(place, head) for place, layer in enumerate(record.layers) for head in range(layer.num_heads)]
    ones = [layer.sample() if layer.samples else None for layer in record.layers]
    cells = max((one.num_queries * one.num_keys for one in ones if one is not None), default=0)
    number = MAX_COMPUTED_WEIGHTS // max(1, cells) if record.keeps_weights else 0
    if all(one is not None and POOLED_MAP.name in one.statistics for one in ones):
        number = len(heads)  # all heads have stored maps, so no weight must be computed
    whole = number >= len(heads)
    means = [] if whole else [layer.summary("mean") for layer in record.layers]
    if number < min(len(heads), _MAPS_PER_ROW // 2):
        name = FOCUS.name if all(FOCUS.name in each for each in means) else next(iter(means[0]))
        figure = record.plot(name).figure
        label = record.statistic(name).translated_label(lang)
        return _png_in_few_colours(figure), text("widget.statistic", lang, label=label)
    if not whole:
        heads.sort(key=lambda at: float(means[at[0]][FOCUS.name][at[1]]) if FOCUS.name in means[at[0]] else math.inf)
        heads = sorted(heads[: max(number // _MAPS_PER_ROW * _MAPS_PER_ROW, _MAPS_PER_ROW // 2)])
    rows = len(record.layers) if whole else math.ceil(len(heads) / _MAPS_PER_ROW)
    across = max(layer.num_heads for layer in record.layers) if whole else min(_MAPS_PER_ROW, len(heads))
    maps = {at: _small_map(ones[at[0]], at[1]) for at in heads}
    side = max(max(each.shape) for each in maps.values())
    high, wide = side + (2 if whole else 7), side + 2  # if only some heads are shown, each map has a name above it
    single = all(one is None or max(one.num_queries, one.num_keys) <= MAX_CELLS_PER_MAP_SIDE for one in ones)
    end = end_of_color_scale(np.concatenate([each.ravel() for each in maps.values()]), single=single)
    size = min(1.0, 10 / across)
    figure, ax = plt.subplots(figsize=(0.6 + across * size, 0.4 + rows * size), layout="constrained")
    shades = np.ones((rows * high, across * wide, 4))  # white around the maps
    for count, (place, head) in enumerate(heads):
        row, column = (place, head) if whole else divmod(count, across)
        top, left = row * high + high - side - 1, column * wide + 1
        drawn = report_colormap()(np.sqrt(np.clip(maps[place, head].astype(np.float64) / end, 0, 1)))
        shades[top : top + drawn.shape[0], left : left + drawn.shape[1]] = drawn
        layer = record.layers[place].number
        if not whole:
            ax.text(left, top - 1, f"L{layer} H{head}", fontsize=7, va="bottom", ha="left")
            continue
        if head == 0:
            ax.text(-1, top + side / 2, f"L{layer}", fontsize=7, va="center", ha="right")
        if place == 0:
            ax.text(left + side / 2, -1, f"H{head}", fontsize=7, va="bottom", ha="center")
    ax.imshow(shades, interpolation="nearest")
    ax.set_axis_off()
    key = "widget.maps" if whole else "widget.some maps"
    return _png_in_few_colours(figure), text(key, lang, n=len(heads), end=f"{100 * end:.3g} %")


def _small_map(sample: Any, head: int) -> Any:
    if POOLED_MAP.name in sample.statistics:
        return sample.statistics[POOLED_MAP.name][head].float().numpy()
    return sample.map(head, bins=MAX_CELLS_PER_MAP_SIDE).numpy()


def _png_in_few_colours(figure: Any) -> bytes:
    """Return a figure as a PNG file with 48 colours, which takes a fifth of the bytes."""
    from PIL import Image  # PIL is a dependency of matplotlib

    drawn, written = io.BytesIO(), io.BytesIO()
    figure.savefig(drawn, format="png", dpi=80)
    import_pyplot().close(figure)
    Image.open(drawn).convert("RGB").quantize(48).save(written, format="png", optimize=True)
    return written.getvalue()
