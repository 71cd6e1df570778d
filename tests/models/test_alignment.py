"""Alignment heads of Whisper: read from its generation config, marked in a record, kept in its file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import multihead as mh
from multihead.models.alignment import alignment_heads
from tests.families import batch_of, family

CROSSING = "model.decoder.layers.{}.encoder_attn"


def whisper(heads: Any) -> Any:
    model = family("whisper")
    model.generation_config.alignment_heads = heads
    return model


def test_alignment_heads_are_marked_in_their_cross_attention_layers_and_kept_in_the_file(tmp_path: Path) -> None:
    model = whisper([[1, 3], [0, 2], [1, 0]])
    with torch.no_grad(), mh.observe(model) as seen:
        model(**batch_of("whisper"))
    expected = {CROSSING.format(0): (2,), CROSSING.format(1): (0, 3)}
    assert {layer.name: layer.alignment_heads for layer in seen.layers if layer.alignment_heads} == expected
    seen.save(file := tmp_path / "run.safetensors")
    again = mh.Record.load(file)
    assert [layer.alignment_heads for layer in again.layers] == [layer.alignment_heads for layer in seen.layers]


def test_a_model_within_another_has_its_heads_by_its_qualified_name() -> None:
    outer = torch.nn.ModuleDict({"speech": whisper([[0, 1]])})
    assert alignment_heads(outer) == {"speech." + CROSSING.format(0): (1,)}


@pytest.mark.parametrize("heads", [None, [], [[2, 0]], [[0, 4]], [[-1, 0]], [[0]], ["x"], [[0.5, 1]], "heads"])
def test_entries_that_name_no_head_are_left_out(heads: Any) -> None:
    assert alignment_heads(whisper(heads)) == {}


def test_a_model_without_a_generation_config_or_without_hugging_face_has_none() -> None:
    assert alignment_heads(family("whisper").model) == {}
    assert alignment_heads(family("bert")) == {}
    assert alignment_heads(torch.nn.Linear(2, 2)) == {}
