"""The layers of an encoder-decoder model are told apart, and those of other models have no role."""

from __future__ import annotations

import pytest
import torch

import multihead as mh
from multihead.record.analysis.roles import roles, rows_with_roles
from multihead.record.layer import layer_profiles
from tests.families import batch_of, family


@pytest.mark.parametrize("name", ["t5", "whisper"])
def test_encoder_decoder_and_cross_attention_have_their_roles(name: str) -> None:
    model = family(name)
    with torch.no_grad(), mh.observe(model) as seen:
        model(**batch_of(name))
    assert roles(seen.layers) == ["encoder", "encoder", "decoder", "cross", "decoder", "cross"]


def test_a_model_without_cross_attention_has_no_roles() -> None:
    model = family("bert")  # its layers are named encoder.layer.0 and so on
    with torch.no_grad(), mh.observe(model) as seen:
        model(**batch_of("bert"))
    assert roles(seen.layers) == ["", ""]


def test_cross_attention_between_texts_of_one_length_is_no_self_attention() -> None:
    model, batch = family("t5"), batch_of("t5")
    with torch.no_grad(), mh.observe(model) as seen:
        model(input_ids=batch["input_ids"], decoder_input_ids=batch["input_ids"].flip(1))
    assert [one.cross_attention for one in layer_profiles(seen.layers)] == [False, False, False, True, False, True]
    assert {"previous", "next", "self", "local"}.isdisjoint(layer_profiles(seen.layers)[3].kinds)


def test_rows_are_marked_only_where_the_model_has_roles_or_alignment_heads() -> None:
    model = family("t5")
    with torch.no_grad(), mh.observe(model) as seen:
        model(**batch_of("t5"))
    rows = [{"layer": 2, "head": 0}, {"layer": 3, "head": 1}]
    expected = [{**rows[0], "role": "decoder"}, {**rows[1], "role": "cross"}]
    assert rows_with_roles(seen.layers, rows) == expected
    seen.layers[3].alignment_heads = (1,)
    assert rows_with_roles(seen.layers, rows) == [
        {**expected[0], "alignment": False},
        {**expected[1], "alignment": True},
    ]
    model = family("bert")
    with torch.no_grad(), mh.observe(model) as seen:
        model(**batch_of("bert"))
    assert rows_with_roles(seen.layers, [{"layer": 1, "head": 0}]) == [{"layer": 1, "head": 0}]
