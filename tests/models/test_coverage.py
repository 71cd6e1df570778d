"""Which attention of a model our kernels would not compute."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, update_wrapper
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaAttention

import multihead as mh
from multihead.errors import ModelError
from multihead.models.coverage import attention_outside_interface, require_attention_interface
from tests.families import FAMILIES, TEXT, family

SMALL = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1, "intermediate_size": 16}


def mpt() -> Any:
    return hf.MptModel(hf.MptConfig(d_model=16, n_heads=2, n_layers=2, vocab_size=20, expansion_ratio=1))


@pytest.mark.parametrize("name", list(FAMILIES))
def test_families_that_use_the_interface_have_no_attention_elsewhere(name: str) -> None:
    assert attention_outside_interface(family(name)) == {}


def test_layers_that_compute_weights_themselves_are_named() -> None:
    reason = "MptAttention computes its weights itself, without transformers' AttentionInterface."
    assert attention_outside_interface(mpt()) == {"blocks.0.attn": reason, "blocks.1.attn": reason}


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
    assert list(attention_outside_interface(hf.AutoModel.from_config(config))) == [module]


def test_the_pooling_head_of_siglip_is_named() -> None:
    model = hf.SiglipVisionModel(hf.SiglipVisionConfig(**SMALL, image_size=8, patch_size=4))
    expected = {
        "head.attention": "torch.nn.MultiheadAttention computes its attention itself; mh.use and mh.observe replace it."
    }
    assert {
        name.removeprefix("vision_model."): why for name, why in attention_outside_interface(model).items()
    } == expected


def test_layers_of_torch_and_ours_are_told_apart() -> None:
    class FusedAttention(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(x, x, x)

    model = nn.ModuleDict({"torch": nn.MultiheadAttention(8, 2), "ours": mh.MultiHeadAttention(8, 2)})
    model["fused"], model["linear"] = FusedAttention(), nn.Linear(2, 2)
    assert attention_outside_interface(model) == {
        "torch": "torch.nn.MultiheadAttention computes its attention itself; mh.use and mh.observe replace it.",
        "fused": "FusedAttention calls torch's scaled_dot_product_attention itself.",
    }


def test_routers_and_weights_that_are_no_attention_are_no_false_alarm() -> None:
    class Router(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.matmul(x.softmax(-1), x)

    assert attention_outside_interface(Router()) == {}


def called_by_closure(layer: Any) -> Any:
    original = layer.forward
    return lambda *args, **options: original(*args, **options)  # noqa: PLW0108


def called_by_partial(layer: Any) -> Any:
    return partial(type(layer).forward, layer)


def called_by_attribute(layer: Any) -> Any:
    layer._old_forward = layer.forward  # as accelerate does

    def forward(module: Any, *args: Any, **options: Any) -> Any:
        return module._old_forward(*args, **options)

    return update_wrapper(partial(forward, layer), layer.forward)


@pytest.mark.parametrize("wrapped", [called_by_closure, called_by_partial, called_by_attribute])
def test_a_forward_around_that_of_the_class_is_no_other_attention(wrapped: Any) -> None:
    model = family("llama")
    layer = model.model.layers[1].self_attn
    layer.forward = wrapped(layer)
    assert attention_outside_interface(model) == {}


def test_a_wrapper_is_judged_by_what_it_calls_and_not_by_what_it_wraps() -> None:
    model = family("llama")
    layer = model.model.layers[1].self_attn
    layer.forward = update_wrapper(lambda hidden_states, **_: (hidden_states, None), layer.forward)
    assert attention_outside_interface(model) == {
        "model.layers.1.self_attn": "The forward of this LlamaAttention was replaced. LlamaAttention replaces the "
        "forward of LlamaAttention, which calls transformers' AttentionInterface."
    }


eager: Any = None  # the eager attention of `Own`


def same(module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, scaling: float, **_: Any) -> Any:
    scores = query @ key.repeat_interleave(module.num_key_value_groups, 1).mT * scaling
    weights = (scores if attention_mask is None else scores + attention_mask).softmax(-1)
    return (weights @ value.repeat_interleave(module.num_key_value_groups, 1)).transpose(1, 2).contiguous(), weights


def scaled_twice(module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **options: Any) -> Any:
    return same(module, query, key, 2 * value, attention_mask, **options)


def with_more(module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, slopes: Any) -> Any:
    raise NotImplementedError


@pytest.mark.parametrize(("function", "equal"), [(same, True), (scaled_twice, False), (with_more, False)])
def test_eager_attention_of_ones_own_is_compared_with_ours(
    function: Any, equal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Own(LlamaAttention):  # type: ignore[misc]
        def forward(self, hidden_states: Tensor, **options: Any) -> Any:
            attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager)
            return attend(self, hidden_states, hidden_states, hidden_states, None)

    monkeypatch.setitem(globals(), "eager", function)
    model = family("llama")
    model.model.layers[1].self_attn.__class__ = Own
    expected = (
        f"The eager attention of Own, {function.__name__}, computes something else than "
        "softmax(scaling * q k' + mask) v."
    )
    assert attention_outside_interface(model) == ({} if equal else {"model.layers.1.self_attn": expected})


def test_the_error_names_the_first_module_and_its_reason() -> None:
    with pytest.raises(ModelError) as raised:
        require_attention_interface(mpt())
    assert str(raised.value) == (
        "MptModel computes attention where it cannot be replaced: blocks.0.attn (and 1 more). MptAttention computes "
        "its weights itself, without transformers' AttentionInterface. Use a family that supports transformers' "
        "AttentionInterface, such as BERT, GPT-2, Llama or T5."
    )


def wrapped(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def call(x: Tensor) -> Tensor:
        return function(x)

    return call


WEIGHTS, PRODUCT = wrapped(lambda x: x.softmax(-1)), wrapped(lambda x: x @ x)


def test_wrappers_of_different_functions_are_all_read_although_they_share_their_code() -> None:
    class WrappedAttention(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return PRODUCT(WEIGHTS(x))

    reason = "WrappedAttention computes its weights itself, without transformers' AttentionInterface."
    assert attention_outside_interface(WrappedAttention()) == {"": reason}
