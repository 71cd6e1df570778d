"""The README's picture draws what a record holds."""

from __future__ import annotations

import torch

import multihead as mh
from tools import picture


def test_colours_run_from_stop_to_stop() -> None:
    assert picture.mixed(picture.LIGHT, 0) == "#fbfaf7"
    assert picture.mixed(picture.LIGHT, 1) == "#150d2c"
    assert picture.mixed("#000000 #FFFFFF", 0.5) == "#808080"


def test_cells_of_one_shade_beside_each_other_are_one_stroke_and_zero_is_none() -> None:
    cells = torch.tensor([[0.0, 1.0, 1.0], [torch.nan, 0.0, 0.25]])
    drawn = picture.inked(cells)
    assert f'<path class="s{picture.SHADES}" d="M1 0h2"/>' in drawn
    assert f'<path class="s{picture.SHADES // 2}" d="M2 1h1"/>' in drawn
    assert drawn.count("<path") == 2


def test_every_head_of_every_layer_is_drawn() -> None:
    model = torch.nn.Sequential(mh.MultiHeadAttention(8, 2), mh.MultiHeadAttention(8, 4))
    with torch.no_grad(), mh.observe(model, keep="statistics", probes=["pooled_map"], map_size=picture.MAP) as record:
        model(torch.randn(1, 5, 8))
    drawn = picture.drawn(record)
    assert drawn.count('<g transform="translate(0 1.0)') == 2 + 4
    assert all(f">{name}</text>" in drawn for name in ("L0", "L1", "H0", "H3"))
