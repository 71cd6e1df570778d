"""Layers are chosen by index or by name, and what is chosen and does not exist is known."""

from __future__ import annotations

from typing import Any

import pytest

from multihead.errors import ArgumentError
from multihead.observation.layer_filter import LayerFilter

NAMES = [f"encoder.layer.{index}.attention.self" for index in range(12)] + ["decoder.attn#2"]


def chosen(layers: Any) -> list[int]:
    layer_filter = LayerFilter.from_argument(layers)
    return [index for index, name in enumerate(NAMES) if layer_filter.matches(name, index)]


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        (3, [3]),
        ([0, 11], [0, 11]),
        (range(2), [0, 1]),
        ("layer.1", [1]),  # and not layer.10 and layer.11
        ("decoder", [12]),
        (["layer.2.", "attn#2"], [2, 12]),
        ("encoder.layer.1*", [1, 10, 11]),
        ("*.1[01].*", [10, 11]),
    ],
)
def test_layers_are_chosen_by_index_part_or_glob(layers: Any, expected: list[int]) -> None:
    assert chosen(layers) == expected


def test_what_matches_nothing_is_known() -> None:
    assert LayerFilter.from_argument([0, 13, "decoder", "head"]).unmatched_items(NAMES) == [13, "head"]


@pytest.mark.parametrize("wrong", [-1, 1.5, True, ""])
def test_what_is_neither_an_index_nor_a_name_is_refused(wrong: Any) -> None:
    with pytest.raises(ArgumentError) as caught:
        LayerFilter.from_argument([0, wrong])
    assert str(caught.value) == f'layers holds {wrong!r}. Give indices from 0, or names such as "layer.3".'


def test_an_empty_choice_is_refused() -> None:
    with pytest.raises(ArgumentError) as caught:
        LayerFilter.from_argument([])
    assert str(caught.value) == "layers is empty. Give indices or names, or None for all layers."
