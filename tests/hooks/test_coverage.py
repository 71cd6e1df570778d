"""Which attention of a model our kernels would not compute."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn
from torch.nn import functional as F

import multihead as mh
from multihead.errors import ModelError
from multihead.hooks.coverage import attention_elsewhere, require_coverage
from tests.families import FAMILIES, TEXT, family

SMALL = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1, "intermediate_size": 16}


def mpt() -> Any:
    return hf.MptModel(hf.MptConfig(d_model=16, n_heads=2, n_layers=2, vocab_size=20, expansion_ratio=1))


@pytest.mark.parametrize("name", list(FAMILIES))
def test_families_that_use_the_interface_have_no_attention_elsewhere(name: str) -> None:
    assert attention_elsewhere(family(name)) == {}


def test_layers_that_compute_weights_themselves_are_named() -> None:
    reason = "MptAttention computes its weights itself, without transformers' AttentionInterface."
    assert attention_elsewhere(mpt()) == {"blocks.0.attn": reason, "blocks.1.attn": reason}


@pytest.mark.parametrize(
    ("config", "module"),
    [
        (hf.GPTJConfig(n_embd=16, n_layer=1, n_head=2, rotary_dim=4, **TEXT), "h.0.attn"),
        (hf.SqueezeBertConfig(**SMALL, embedding_size=16, **TEXT), "encoder.layers.0.attention"),
        (hf.WavLMConfig(**SMALL, conv_dim=(8,), conv_kernel=(2,), conv_stride=(2,)), "encoder.layers.0.attention"),
        (hf.XLNetConfig(d_model=16, n_layer=1, n_head=2, d_inner=16, **TEXT), "layer.0.rel_attn"),
        (hf.DebertaV2Config(**SMALL, **TEXT), "encoder.layer.0.attention.self"),
    ],
)
def test_attention_by_own_products_by_torch_functions_and_by_parts_is_found(config: Any, module: str) -> None:
    assert list(attention_elsewhere(hf.AutoModel.from_config(config))) == [module]


def test_the_pooling_head_of_siglip_is_named() -> None:
    model = hf.SiglipVisionModel(hf.SiglipVisionConfig(**SMALL, image_size=8, patch_size=4))
    expected = {"head.attention": "torch.nn.MultiheadAttention computes its attention itself."}
    assert {name.removeprefix("vision_model."): why for name, why in attention_elsewhere(model).items()} == expected


def test_layers_of_torch_and_ours_are_told_apart() -> None:
    class FusedAttention(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(x, x, x)

    model = nn.ModuleDict({"torch": nn.MultiheadAttention(8, 2), "ours": mh.MultiHeadAttention(8, 2)})
    model["fused"], model["linear"] = FusedAttention(), nn.Linear(2, 2)
    assert attention_elsewhere(model) == {
        "torch": "torch.nn.MultiheadAttention computes its attention itself.",
        "fused": "FusedAttention calls torch's scaled_dot_product_attention itself.",
    }


def test_routers_and_weights_that_are_no_attention_are_no_false_alarm() -> None:
    class Router(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.matmul(x.softmax(-1), x)

    assert attention_elsewhere(Router()) == {}


def test_the_error_names_the_first_module_and_its_reason() -> None:
    with pytest.raises(ModelError) as raised:
        require_coverage(mpt())
    assert str(raised.value) == (
        "MptModel computes attention where it cannot be replaced: blocks.0.attn (and 1 more). MptAttention computes "
        "its weights itself, without transformers' AttentionInterface. Use a family that supports transformers' "
        "AttentionInterface, such as BERT, GPT-2, Llama or T5."
    )
