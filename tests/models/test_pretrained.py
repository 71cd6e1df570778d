"""The models of transformers in a module, and the inputs from which the queries of a layer are computed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn

import multihead as mh
from multihead.models.pretrained import (
    InputTracker,
    TokenInputs,
    alignment_heads,
    is_submodule_of,
    pretrained_models,
    track_inputs,
)
from tests.families import batch_of, family


def test_models_are_found_at_any_depth_by_their_qualified_names() -> None:
    from transformers import BertConfig, BertModel

    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    model = BertModel(BertConfig(vocab_size=10, **sizes))
    around = nn.ModuleDict({"text": nn.Sequential(model), "head": nn.Linear(8, 2)})
    assert pretrained_models(model) == {"": model}
    assert pretrained_models(around) == {"text.0": model}
    assert pretrained_models(nn.Linear(2, 2)) == {}


def test_a_module_is_within_itself_and_those_around_it_and_not_within_one_with_a_longer_name() -> None:
    assert is_submodule_of("encoder.layers.1", "encoder.layers.1")
    assert is_submodule_of("encoder.layers.1.mlp", "encoder.layers.1")
    assert not is_submodule_of("encoder.layers.10", "encoder.layers.1")
    assert is_submodule_of("anything", "")


def ask_within(model: Any, module: nn.Module, name: str, batch: dict[str, Tensor]) -> tuple[TokenInputs, TokenInputs]:
    """Run a model and return the inputs of the queries and of the memory while one of its layers runs."""
    found: list[tuple[TokenInputs, TokenInputs]] = []
    with torch.no_grad(), track_inputs(model) as inputs:

        def ask(*_: object) -> None:
            assert inputs.is_running
            found.append((inputs.inputs_of_queries(name), inputs.encoder_inputs(name)))

        handle = module.register_forward_pre_hook(ask)
        model(**batch)
        handle.remove()
        assert not inputs.is_running
    return found[0]


def test_a_layer_of_an_encoder_has_the_encoders_ids_and_padding() -> None:
    model, batch = family("bert"), batch_of("bert", padding="right")
    name = "encoder.layer.1.attention.self"
    queries, memory = ask_within(model, model.get_submodule(name), name, batch)
    assert queries.ids is not None
    assert queries.is_token is not None
    assert torch.equal(queries.ids, batch["input_ids"])
    assert torch.equal(queries.is_token, batch["attention_mask"].bool())
    assert memory.ids is None


def test_a_layer_of_a_decoder_has_the_decoders_and_its_memory_the_encoders() -> None:
    model, batch = family("t5"), batch_of("t5", padding="right")
    name = "decoder.block.1.layer.1.EncDecAttention"
    queries, memory = ask_within(model, model.get_submodule(name), name, batch)
    assert queries.ids is not None
    assert queries.is_token is not None
    assert memory.ids is not None
    assert memory.is_token is not None
    assert torch.equal(queries.ids, batch["decoder_input_ids"])
    assert torch.equal(queries.is_token, batch["decoder_attention_mask"].bool())
    assert torch.equal(memory.ids, batch["input_ids"])
    assert torch.equal(memory.is_token, batch["attention_mask"].bool())


def test_a_decoder_that_is_given_no_padding_does_not_take_the_encoders() -> None:
    model, batch = family("t5"), batch_of("t5", padding="right")
    del batch["decoder_attention_mask"]
    name = "decoder.block.0.layer.0.SelfAttention"
    queries, _ = ask_within(model, model.get_submodule(name), name, batch)
    assert queries.is_token is None


def test_positional_arguments_are_understood() -> None:
    model, ids = family("bert"), batch_of("bert")["input_ids"]
    with torch.no_grad(), track_inputs(model) as inputs:
        model(ids, torch.ones_like(ids))
    found = inputs.inputs_of_queries("encoder.layer.0.attention.self")
    assert found.ids is not None
    assert torch.equal(found.ids, ids)
    assert found.is_token is not None
    assert found.is_token.all()


def test_passes_are_counted_and_an_exception_ends_one() -> None:
    model, batch = family("bert"), batch_of("bert")
    with torch.no_grad(), track_inputs(model) as inputs:
        model(**batch)
        with pytest.raises(IndexError):
            model(input_ids=batch["input_ids"] + 1000)
        model(**batch)
    assert inputs.num_passes == 3
    assert not inputs.is_running


def test_no_hook_is_left() -> None:
    model = family("t5")
    with track_inputs(model):
        assert model._forward_hooks
    assert all(not module._forward_hooks and not module._forward_pre_hooks for module in model.modules())


def test_a_module_of_ones_own_tells_its_ids_where_it_calls_them_so() -> None:
    class Reader(nn.Module):
        def forward(self, input_ids: Tensor) -> Tensor:
            return input_ids

    model, ids = Reader(), torch.tensor([[4, 5]])
    with track_inputs(model) as inputs:
        model(ids)
    assert torch.equal(inputs.inputs_of_queries("attention").ids, ids)


def test_what_nobody_was_given_is_told_as_nothing() -> None:
    assert InputTracker().inputs_of_queries("layer").ids is None
    assert InputTracker().encoder_inputs("layer").is_token is None


def test_the_patches_of_an_image_encoder_do_not_have_the_padding_of_the_text() -> None:
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1, "intermediate_size": 16}
    config = hf.CLIPConfig(
        text_config={**sizes, "vocab_size": 20, "bos_token_id": 1, "eos_token_id": 2},
        vision_config={**sizes, "image_size": 8, "patch_size": 4},
    )
    model = hf.CLIPModel(config).eval()
    batch = {
        "input_ids": torch.full((2, 9), 3),
        "attention_mask": torch.tensor([[1] * 9, [1] * 5 + [0] * 4]),
        "pixel_values": torch.zeros(2, 3, 8, 8),
    }
    name = next(each for each, _ in model.named_modules() if re.fullmatch(r"vision_model\..*self_attn", each))
    queries, _ = ask_within(model, model.get_submodule(name), name, batch)
    assert (queries.ids, queries.is_token) == (None, None)


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
