"""The tokens of image models are named by the rows and columns of their patches, where the configuration has them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from torch import nn

import multihead as mh
from multihead.observation.patches import text_of_patches
from tests.viewer.page import Page

SIZES = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}


def observed(model: nn.Module, height: int = 8, width: int = 12, **arguments: Any) -> mh.Record:
    with torch.no_grad(), mh.observe(model.eval()) as seen:
        model(pixel_values=torch.randn(2, 3, height, width), **arguments)
    return seen


def vit(size: int | tuple[int, int] = (8, 12)) -> nn.Module:
    return hf.ViTModel(hf.ViTConfig(**SIZES, image_size=size, patch_size=4))


def test_an_image_is_its_class_token_and_its_patches_row_by_row(tmp_path: Path) -> None:
    seen = observed(vit())
    assert repr(seen) == "<Record of ViTModel: 1 layer, 2 heads, 2 images of 2 x 3 patches>"
    for record in (seen, loaded(seen, tmp_path)):
        assert len(record.texts) == 2
        for text in record.texts:
            assert text.tokens == ["[CLS]", "r1 c1", "r1 c2", "r1 c3", "r2 c1", "r2 c2", "r2 c3"]
            assert text.special == [True] + [False] * 6
            assert text.gaps == [None, "\n", " ", " ", "\n", " ", " "]
            assert text.patches == (2, 3)
    page = Page(seen.report(tmp_path / "page.html").path)
    assert page.data["lead"] == "2 attention heads, as they look at one image of 2 x 3 patches. This is number 1 of 2."


def loaded(seen: mh.Record, folder: Path) -> mh.Record:
    seen.save(folder / "image.safetensors")
    return mh.Record.load(folder / "image.safetensors")


@pytest.mark.parametrize(
    ("model", "first"),
    [
        (hf.DeiTModel(hf.DeiTConfig(**SIZES, image_size=8, patch_size=4)), ["[CLS]", "[DIST]"]),
        (
            hf.Dinov2WithRegistersModel(
                hf.Dinov2WithRegistersConfig(**SIZES, image_size=8, patch_size=4, num_register_tokens=2)
            ),
            ["[CLS]", "[REG 1]", "[REG 2]"],
        ),
        (hf.CLIPVisionModel(hf.CLIPVisionConfig(**SIZES, image_size=8, patch_size=4)), ["[CLS]"]),
        (hf.SiglipVisionModel(hf.SiglipVisionConfig(**SIZES, image_size=8, patch_size=4)), []),
    ],
    ids=["DeiT", "DINOv2 with registers", "CLIP", "SigLIP"],
)
def test_the_tokens_before_the_patches_are_those_of_the_model(model: nn.Module, first: list[str]) -> None:
    text = observed(model, 8, 8)[0].sample().text
    assert text.tokens == [*first, "r1 c1", "r1 c2", "r2 c1", "r2 c2"]


def test_of_a_model_of_texts_and_images_only_the_images_are_patches() -> None:
    text = hf.CLIPTextConfig(**SIZES, vocab_size=20, max_position_embeddings=9)
    vision = hf.CLIPVisionConfig(**SIZES, image_size=8, patch_size=4)
    model = hf.CLIPModel(hf.CLIPConfig(text_config=text.to_dict(), vision_config=vision.to_dict(), projection_dim=8))
    seen = observed(model, 8, 8, input_ids=torch.randint(3, 9, (2, 5)))
    of_layers = {layer.name.partition(".")[0]: layer.sample().text for layer in seen.layers}
    assert of_layers["vision_model"].patches == (2, 2)
    assert of_layers["text_model"].patches is None
    assert of_layers["text_model"].length == 5
    assert "2 texts of up to 5 tokens" in repr(seen)


def test_an_image_of_another_size_and_windows_are_not_named() -> None:
    larger = observed(vit(8), 12, 12, interpolate_pos_encoding=True)
    assert larger[0].sample().text.tokens is None
    assert repr(larger) == "<Record of ViTModel: 1 layer, 2 heads, 2 texts of up to 10 tokens>"
    config = hf.SwinConfig(image_size=16, patch_size=2, embed_dim=8, depths=(1, 1), num_heads=(2, 2), window_size=4)
    seen = observed(hf.SwinModel(config), 16, 16)
    assert [layer.sample().num_keys for layer in seen.layers] == [64, 16]
    assert [layer.sample().text.tokens for layer in seen.layers] == [None, None]


@pytest.mark.parametrize("config", [{"image_size": 8}, {"image_size": "8", "patch_size": 4}, {"model_type": "bert"}])
def test_a_configuration_without_both_sizes_names_nothing(config: dict[str, Any]) -> None:
    model = vit()
    model.config = type("Config", (), config)()  # type: ignore[assignment]
    assert text_of_patches(model, "") is None
