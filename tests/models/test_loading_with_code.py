"""A model that would run code is rejected, without the advice of other libraries to allow it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers as hf

import multihead as mh
from multihead.errors import ModelError
from multihead.models.loading import load


def refusal(folder: Path) -> str:
    with pytest.raises(ModelError) as caught:
        load(str(folder))
    return str(caught.value)


@pytest.mark.parametrize("broken", [False, True])
def test_a_pickle_of_more_than_tensors_is_rejected_with_an_error_of_our_own(tmp_path: Path, *, broken: bool) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    if broken:
        (tmp_path / "pytorch_model.bin").write_bytes(b"no pickle")
    else:
        torch.save({"weight": print}, tmp_path / "pytorch_model.bin")
    assert refusal(tmp_path) == (
        f"{tmp_path} stores its weights in a pickle, and this one is broken or contains more than tensors, which may "
        "run code when it is opened. Give the model with its weights as safetensors."
    )


def test_a_model_with_code_of_its_own_is_rejected_with_an_error_of_our_own(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "own", "auto_map": {"AutoConfig": "code.Config"}}')
    assert refusal(tmp_path) == (
        f"{tmp_path} needs Python code of its own, and multihead runs no code of a model. "
        "Give a model of a family that is part of transformers."
    )


def test_a_configuration_that_names_a_kernel_of_the_hub_loads_without_it_and_can_be_observed(tmp_path: Path) -> None:
    sizes = {"vocab_size": 30, "n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 20}
    hf.GPT2LMHeadModel(hf.GPT2Config(**sizes)).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    for name in ("_attn_implementation", "attn_implementation"):
        config[name] = "kernels-community/flash-attn"
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = load(str(tmp_path)).model
    ids = torch.tensor([[3, 4, 5]])
    with torch.no_grad():
        expected = model(ids)[0]
        with mh.observe(model) as seen:
            torch.testing.assert_close(model(ids)[0], expected)
        with mh.use(model):
            torch.testing.assert_close(model(ids)[0], expected)
    assert len(seen.layers) == 1
