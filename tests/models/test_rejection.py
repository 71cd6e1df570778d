"""Where attention would not run on our kernels, transformers raises our error instead of accepting the name."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
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


MULTIHEAD = "torch.nn.MultiheadAttention computes its attention itself; mh.use and mh.observe replace it."
ITSELF = "computes its weights itself, without transformers' AttentionInterface."


class TestRejection:
    """Every way of requesting our attention raises the same error, and changes nothing."""

    END = "Use a family that supports transformers' AttentionInterface, such as BERT, GPT-2, Llama or T5."
    FAMILIES: dict[str, tuple[Callable[[], Any], str]] = {  # noqa: RUF012
        "BloomModel": (
            bloom,
            f"h.0.self_attention (and 1 more). BloomAttention {ITSELF}",
        ),
        "SiglipVisionModel": (
            siglip,
            f"head.attention. {MULTIHEAD}",
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

    @pytest.mark.parametrize("name", ["BloomModel", "SiglipVisionModel"])
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
        text = {**ENCODER, **TEXT}
        config = hf.SiglipConfig(text_config={**text, "projection_size": 32}, vision_config=siglip().to_dict())
        model = hf.SiglipModel(config).eval()
        model.set_attn_implementation({"text_config": "multihead"})
        assert model.text_model.config._attn_implementation == "multihead"
        assert model.vision_model.config._attn_implementation == "sdpa"
        with pytest.raises(
            ModelError, match="SiglipModel computes attention where it cannot be replaced: vision_model"
        ):
            model.set_attn_implementation({"vision_config": "multihead"})


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
