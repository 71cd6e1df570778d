"""A recorded layer hands out its samples, and summarises over all of them."""

from __future__ import annotations

import pytest
import torch

from multihead.errors import ArgumentError
from multihead.record.layer import texts_of
from tests.observation.recorded import asked, ids, read


def test_a_layers_weights_and_map_are_those_of_its_sample() -> None:
    layer = asked().layers[0]
    assert torch.equal(layer.weights(1, queries=slice(0, 2)), layer.sample(0).weights(1, queries=slice(0, 2)))
    assert torch.equal(layer.map(1, keys=slice(0, 6), bins=3), layer.sample(0).map(1, keys=slice(0, 6), bins=3))


@pytest.mark.parametrize(
    ("index", "sentence"),
    [
        (1, "There is no sample 1; Asking has 1. Give 0."),
        (True, "sample is True. Give the index of one sample, an integer."),
    ],
)
def test_a_sample_that_does_not_exist_is_rejected(index: int, sentence: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        asked().layers[0].sample(index)
    assert str(caught.value) == sentence


def test_the_texts_of_layers_are_one_per_sample() -> None:
    record = read(ids(1, 9), ids(1, 4))
    assert [text.length for text in texts_of(record.layers)] == [9, 4]
    assert texts_of([]) == []
