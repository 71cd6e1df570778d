"""Where attention would not run on our kernels, transformers raises our error instead of accepting the name."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from torch import nn

import multihead as mh
from multihead.errors import ModelError
from multihead.models.config_in_use import configurations_of
from tests.families import ENCODER, TEXT, VOCABULARY, family

mh.use()


def choices(model: nn.Module) -> list[str]:
    return [config._attn_implementation for config in configurations_of(model)]


def bloom() -> Any:
    return hf.BloomConfig(vocab_size=VOCABULARY, hidden_size=32, n_layer=2, n_head=4)


def siglip() -> Any:
    sizes = {name: value for name, value in ENCODER.items() if name != "max_position_embeddings"}
    return hf.SiglipVisionConfig(**sizes, image_size=8, patch_size=4)


def gptj() -> Any:
    return hf.GPTJConfig(vocab_size=VOCABULARY, n_embd=32, n_layer=1, n_head=4, rotary_dim=4, n_positions=32)


ITSELF = "computes its weights itself, without transformers' AttentionInterface."


class TestRejection:
    """Every way of requesting our attention raises the same error, and changes nothing."""

    END = "Use a family that supports transformers' AttentionInterface, such as BERT, GPT-2, Llama or T5."
    FAMILIES: dict[str, tuple[Callable[[], Any], str]] = {  # noqa: RUF012
        "BloomModel": (
            bloom,
            f"h.0.self_attention (and 1 more). BloomAttention {ITSELF}",
        ),
        "GPTJModel": (
            gptj,
            f"h.0.attn. GPTJAttention {ITSELF}",
        ),
    }

    def sentence(self, name: str) -> str:
        return f"{name} computes attention where it cannot be replaced: {self.FAMILIES[name][1]} {self.END}"

    @pytest.mark.parametrize("name", ["BloomModel", "GPTJModel"])
    def test_by_use(self, name: str) -> None:
        model = hf.AutoModel.from_config(self.FAMILIES[name][0]())
        before = choices(model)
        with pytest.raises(ModelError) as caught:
            mh.use(model)
        assert str(caught.value) == self.sentence(name)
        assert choices(model) == before

    @pytest.mark.parametrize("name", FAMILIES)
    def test_by_set_attn_implementation(self, name: str) -> None:
        model = hf.AutoModel.from_config(self.FAMILIES[name][0]())
        before = choices(model)
        with pytest.raises(ModelError) as caught:
            model.set_attn_implementation("multihead")
        assert str(caught.value) == self.sentence(name)
        assert choices(model) == before

    @pytest.mark.parametrize("name", ["BloomModel"])
    def test_by_from_pretrained(self, name: str, tmp_path: Path) -> None:
        hf.AutoModel.from_config(self.FAMILIES[name][0]()).save_pretrained(tmp_path)
        with pytest.raises(ModelError) as caught:
            hf.AutoModel.from_pretrained(tmp_path, attn_implementation="multihead")
        assert str(caught.value) == self.sentence(name)

    def test_by_from_pretrained_of_a_family_that_looks_classes_up_by_the_name(self, tmp_path: Path) -> None:
        hf.GPTJModel(gptj()).save_pretrained(tmp_path)
        with pytest.raises(ModelError) as caught:
            hf.AutoModel.from_pretrained(tmp_path, attn_implementation="multihead")
        assert str(caught.value) == (
            "GPTJModel computes attention where it cannot be replaced: GPTJAttention. GPTJAttention is chosen by the "
            f"name of the implementation, among those of transformers. {self.END}"
        )

    def test_of_one_part_only_where_that_part_is_concerned(self) -> None:
        model = siglip_with_texts()
        model.vision_model.head.attention.__class__ = type("Pooling", (nn.MultiheadAttention,), {})
        model.set_attn_implementation({"text_config": "multihead"})
        assert model.text_model.config._attn_implementation == "multihead"
        assert model.vision_model.config._attn_implementation == "sdpa"
        with pytest.raises(ModelError) as caught:
            model.set_attn_implementation({"vision_config": "multihead"})
        assert str(caught.value) == (
            "SiglipModel computes attention where it cannot be replaced: vision_model.head.attention. Pooling may "
            f"replace the forward of torch.nn.MultiheadAttention. {self.END}"
        )


def siglip_with_texts() -> Any:
    text = {**ENCODER, **TEXT, "projection_size": 32}
    return hf.SiglipModel(hf.SiglipConfig(text_config=text, vision_config=siglip().to_dict())).eval()


def test_a_pooling_head_of_pytorch_is_the_drop_in_while_our_attention_is_selected_by_name(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = siglip_with_texts().double()
    head, images = model.vision_model.head.attention, torch.randn(2, 3, 8, 8, dtype=torch.float64)
    model.save_pretrained(tmp_path)
    with torch.no_grad():
        expected = model.vision_model(images).pooler_output
        model.set_attn_implementation({"text_config": "multihead"})
        assert type(head) is nn.MultiheadAttention
        for _ in range(2):
            model.set_attn_implementation("multihead")
            assert type(head) is mh.compat.torch_nn.MultiheadAttention
            torch.testing.assert_close(model.vision_model(images).pooler_output, expected, atol=1e-12, rtol=0)
            model.set_attn_implementation("eager")
            assert type(head) is nn.MultiheadAttention
        loaded = hf.SiglipModel.from_pretrained(tmp_path, attn_implementation="multihead", dtype=torch.float64)
        assert type(loaded.vision_model.head.attention) is mh.compat.torch_nn.MultiheadAttention
        torch.testing.assert_close(loaded.vision_model(images).pooler_output, expected, atol=1e-12, rtol=0)


def test_a_head_of_pytorch_that_a_larger_model_never_runs_is_no_reason_to_reject_it() -> None:
    sizes = {name: ENCODER[name] for name in ("hidden_size", "intermediate_size", "num_attention_heads")}
    text = {**sizes, "num_hidden_layers": 1, "vocab_size": VOCABULARY, "num_key_value_heads": 2, "head_dim": 8}
    config = hf.Gemma3Config(
        text_config=text, vision_config=siglip().to_dict(), mm_tokens_per_image=4, image_token_index=VOCABULARY - 1
    )
    model = hf.Gemma3ForConditionalGeneration._from_config(config, attn_implementation="multihead").eval()
    image = torch.full((1, 4), VOCABULARY - 1)
    inputs = {
        "input_ids": torch.cat([torch.tensor([[5, 6]]), image, torch.tensor([[7]])], 1),
        "pixel_values": torch.randn(1, 3, 8, 8),
        "token_type_ids": torch.tensor([[0, 0, 1, 1, 1, 1, 0]]),
    }
    with torch.no_grad():
        found = model(**inputs).logits
        model.set_attn_implementation("eager")
        torch.testing.assert_close(found, model(**inputs).logits, atol=1e-5, rtol=1e-5)


def test_every_other_name_works_as_before() -> None:
    model = hf.AutoModel.from_config(bloom(), attn_implementation="eager")
    model.set_attn_implementation("eager")
    assert choices(model) == ["eager"]


def test_layers_with_a_copy_of_the_configuration_change_too() -> None:
    model = family("llama")
    layer = model.model.layers[1].self_attn
    layer.config = copy.deepcopy(model.config)
    model.set_attn_implementation("multihead")
    assert choices(model) == ["multihead", "multihead"]
    model.set_attn_implementation("eager")
    assert choices(model) == ["eager", "eager"]
    with mh.use(model):
        assert choices(model) == ["multihead", "multihead"]
    assert choices(model) == ["eager", "eager"]
