"""Drawing masks."""

from __future__ import annotations

import torch

from multihead import masks


def test_a_picture_has_a_row_a_query_and_a_column_a_key() -> None:
    assert masks.picture(masks.Window(2), queries=2, keys=3, query_start=1) == "■ ■ ·\n· ■ ■"


def test_samples_and_heads_are_drawn_side_by_side() -> None:
    assert masks.picture(masks.Lengths((1, 2)), queries=1, keys=2) == "■ ·   ■ ■"
    heads = masks.Keep(torch.tensor([True, False]), "heads")
    assert masks.picture(heads, queries=1, keys=2) == "■ ■   · ·"
    assert masks.picture(masks.Causal(), queries=1, keys=2, query_start=torch.tensor([0, 1])) == "■ ·   ■ ■"
