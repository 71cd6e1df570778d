"""At its end, observe warns once about attention layers of PyTorch whose calls it did not hear."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn
from transformers import SiglipVisionConfig, SiglipVisionModel

import multihead as mh
from multihead.compat.torch_nn import replace


class Vendored(nn.MultiheadAttention):
    """A subclass, which is not replaced, because its forward may differ."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)


class Pool(nn.Module):
    """As the attention pool of CLIP: takes the weights of a layer, and does not call it."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.MultiheadAttention(16, 2)

    def forward(self, x: Tensor) -> Tensor:
        inputs = self.a.in_proj_weight, self.a.in_proj_bias, None, None, False, 0.0
        outputs = self.a.out_proj.weight, self.a.out_proj.bias
        return nn.functional.multi_head_attention_forward(x, x, x, 16, 2, *inputs, *outputs)[0]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.pool = Vendored(16, 2), nn.MultiheadAttention(16, 2), Pool()
        self.own = mh.MultiHeadAttention(16, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x, x, x)[0]
        x = self.own(self.second(x, x, x)[0])
        pooled: Tensor = self.pool(x)
        return pooled


def heard(model: nn.Module, *inputs: Tensor, **options: Any) -> tuple[list[str], list[str]]:
    """Observe one run, and return the recorded layers and the warnings."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with torch.no_grad(), mh.observe(model, **options) as seen:
            model(*inputs)
    return [layer.name for layer in seen.layers], [str(each.message) for each in said]


def sentence(names: str) -> str:
    return (
        f"The record is incomplete. No call of {names} was heard: it did not run, or its attention is computed "
        "elsewhere, by a class of its own or by a function that takes its weights. "
        "multihead.compat.torch_nn.replace(model, inplace=True) makes each plain nn.MultiheadAttention a layer that is "
        "recorded."
    )


def test_each_is_named_in_one_warning() -> None:
    net, x = Net().eval(), torch.randn(5, 2, 16)
    assert heard(net, x) == (
        ["own"],
        [sentence("first (Vendored), second (MultiheadAttention), pool.a (MultiheadAttention)")],
    )
    replace(net, inplace=True)
    unheard = sentence("first (Vendored), pool.a (MultiheadAttention)")
    assert heard(net, x) == (["second", "own"], [unheard])
    assert heard(net, x, layers=["own"]) == (["own"], [unheard])  # what was not chosen was heard


def test_a_model_whose_layers_are_all_heard_has_no_warning() -> None:
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32), 2, enable_nested_tensor=False).eval()
    replace(encoder, inplace=True)
    assert heard(encoder, torch.randn(5, 2, 16)) == (["layers.0.self_attn", "layers.1.self_attn"], [])


def test_a_head_that_a_hugging_face_model_does_not_run_is_not_named() -> None:
    config = SiglipVisionConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=8, patch_size=4
    )
    model = SiglipVisionModel(config).eval()
    (part,) = (module for module in model.modules() if hasattr(module, "use_head"))
    part.use_head = False
    names, said = heard(model, torch.randn(1, 3, 8, 8))
    assert len(names) == 1
    assert said == []
