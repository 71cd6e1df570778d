"""A configuration with sizes that no model has is rejected before a model is built from it."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from multihead.errors import ModelError
from multihead.models.claims import check_configured_sizes
from multihead.models.loading import load
from tests.gguf_file import written


@pytest.mark.parametrize(
    ("config", "name", "number", "most"),
    [
        ({"model_type": "bert", "num_hidden_layers": 10**8}, "num_hidden_layers", "100,000,000", "4,096"),
        ({"model_type": "gpt2", "n_layer": 5000}, "n_layer", "5,000", "4,096"),
        ({"model_type": "albert", "num_hidden_groups": 10**8}, "num_hidden_groups", "100,000,000", "4,096"),
        ({"model_type": "albert", "inner_group_num": 10**8}, "inner_group_num", "100,000,000", "4,096"),
        ({"model_type": "t5", "num_decoder_layers": 10**8}, "num_decoder_layers", "100,000,000", "4,096"),
        ({"model_type": "swin", "depths": [2, 10**8]}, "depths", "100,000,000", "4,096"),
        (
            {"model_type": "clip", "text_config": {"num_hidden_layers": 10**8}},
            "num_hidden_layers",
            "100,000,000",
            "4,096",
        ),
        ({"model_type": "bert", "num_labels": 10**9}, "num_labels", "1,000,000,000", "10,000,000"),
    ],
)
def test_a_configuration_that_no_model_has(
    config: dict[str, Any], name: str, number: str, most: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError) as caught:
        load(str(tmp_path))
    assert str(caught.value) == (
        f"{tmp_path} cannot be read: {name} is {number} in its configuration. "
        f"Give a model whose {name} is at most {most}."
    )


@pytest.mark.parametrize("first", [b"", b"general.tags"])
def test_more_layers_than_any_model_has(first: bytes, tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    pytest.importorskip("accelerate")
    content = written(tmp_path / "tiny.gguf").read_bytes()
    if first:  # a list of texts before it
        texts = b"".join(len(each).to_bytes(8, "little") + each for each in (b"a", b"bc"))
        head = len(first).to_bytes(8, "little") + first + struct.pack("<IIQ", 9, 8, 2) + texts
        count = int.from_bytes(content[16:24], "little") + 1
        content = content[:16] + count.to_bytes(8, "little") + head + content[24:]
    behind = content.index(b"llama.block_count") + len(b"llama.block_count") + 4
    claims = content[:behind] + (10**8).to_bytes(4, "little") + content[behind + 4 :]
    (deep := tmp_path / "deep.gguf").write_bytes(claims)
    with pytest.raises(ModelError) as caught:
        load(str(deep))
    assert str(caught.value) == (
        f"{deep} cannot be read: block_count is 100,000,000 in its configuration. "
        "Give a model whose block_count is at most 4,096."
    )


@pytest.mark.parametrize(
    "name",
    [
        *("num_attention_heads", "n_head", "encoder_attention_heads", "num_key_value_heads", "hidden_size", "n_embd"),
        *("num_hidden_layers", "n_layer", "attention.head_count", "block_count"),
    ],
)
@pytest.mark.parametrize("value", [-4, 2.5, "four"])
def test_a_size_that_is_no_count_is_rejected(name: str, value: object) -> None:
    with pytest.raises(ModelError) as caught:
        check_configured_sizes("model", {"text_config": {name: value}})
    assert str(caught.value) == (
        f"model cannot be read: {name} is {value!r} in its configuration. "
        f"Give a model whose {name} is a positive integer."
    )
