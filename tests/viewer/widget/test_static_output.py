"""What a saved notebook shows: a picture and a table, no script, and every text as text."""

from __future__ import annotations

import base64
import io
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib import image

from multihead import masks
from multihead.viewer.widget import static_output
from multihead.viewer.widget.static_output import picture_of_heads, static_html
from tests.viewer.watching import watch
from tests.viewer.widget.records import long, small, statistics_only


def pixels(png: bytes) -> Any:
    return image.imread(io.BytesIO(png), format="png")[..., :3]


def test_the_picture_has_a_map_of_every_head() -> None:
    png, caption = picture_of_heads(small())
    assert caption.startswith("Maps of all 6 heads: one row per layer, one column per head;")
    found = pixels(png)
    hidden = np.isclose(found, np.array([0xE4, 0xE2, 0xDC]) / 255, atol=0.01).all(axis=-1)
    # Nearly half of each map of a causal mask is hidden; the maps take most of the picture.
    assert 0.25 < hidden.mean() < 0.5
    assert found.reshape(-1, 3).std() > 0.05


def test_of_a_long_text_the_most_focused_heads_are_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    record = watch(40, mask=masks.Causal(), layers=6)
    monkeypatch.setattr(static_output, "MAX_COMPUTED_WEIGHTS", 8 * 40 * 40)
    assert picture_of_heads(record)[1].startswith("Maps of the 8 most focused heads:")
    monkeypatch.setattr(static_output, "MAX_COMPUTED_WEIGHTS", 3 * 40 * 40)
    assert picture_of_heads(record)[1] == "Of every head: entropy."


def test_recorded_maps_are_drawn_whatever_the_length(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(static_output, "MAX_COMPUTED_WEIGHTS", 0)
    record = watch(40, mask=masks.Causal(), probes=("entropy", "pooled_map"))
    assert picture_of_heads(record)[1].startswith("Maps of all 2 heads:")


def test_without_maps_the_picture_is_the_entropy() -> None:
    assert picture_of_heads(statistics_only())[1] == "Of every head: entropy."
    assert picture_of_heads(statistics_only(), lang="zh")[1] == "每个注意力头的熵。"


def test_the_scale_of_means_ends_near_the_largest() -> None:
    end = re.search(r"The colour scale ends at ([\d.]+) %", picture_of_heads(long())[1])
    assert end is not None
    assert 0 < float(end[1]) < 100


def test_the_output_has_no_script_and_no_markup_of_a_text() -> None:
    found = static_html(small(), mark="a mark", lang="en")
    assert 'data-multihead-static="a mark"' in found
    assert "&lt;b&gt;model&lt;/b&gt;" in found
    assert not re.search(r"<script|<b>|\son\w+=|https?:", found)
    source = re.search(r'src="data:image/png;base64,([^"]+)"', found)
    assert source is not None
    assert pixels(base64.b64decode(source[1])).shape[0] > 100
    assert found.count("<tr>") == 1 + 6 + 1  # the names, the heads, and chance


def test_nbconvert_shows_the_picture_and_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    import nbconvert  # here, because it takes seconds
    import nbformat

    # Its templates may be in another environment than that of the tests.
    shared = (each / "share/jupyter" for each in Path(nbconvert.__file__).parents)
    monkeypatch.setenv("JUPYTER_PATH", str(next(each for each in shared if (each / "nbconvert").is_dir())))
    view = {"version_major": 2, "version_minor": 1, "model_id": "0" * 32}
    widget = nbformat.v4.new_output(
        "display_data", {"application/vnd.jupyter.widget-view+json": view, "text/plain": "The live view of it"}
    )
    static = nbformat.v4.new_output("display_data", {"text/html": static_html(small(), mark="m", lang="en")})
    cell = nbformat.v4.new_code_cell("seen.view()", outputs=[widget, static])
    page, _ = nbconvert.HTMLExporter().from_notebook_node(nbformat.v4.new_notebook(cells=[cell]))
    assert page.count("data-multihead-static") >= 1
    assert "data:image/png;base64," in page
    assert "The live view of it" in page
