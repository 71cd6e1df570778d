"""Conversion of PyTorch's layer to ours and back: equal outputs, and errors for unsupported options."""

from __future__ import annotations

import re
from typing import Any

import peft
import pytest
import torch
import transformers as hf
from torch import nn

from multihead import MultiHeadAttention
from multihead.compat.huggingface import from_bert, from_gpt2, from_llama
from multihead.compat.torch_nn import MultiheadAttention, from_torch, to_torch
from multihead.errors import ArgumentError
from multihead.layer.qk_norm import QKNorm
from multihead.rotary import Rotary
from multihead.scores import ALiBi


@pytest.mark.parametrize("kind", [nn.MultiheadAttention, MultiheadAttention])
@pytest.mark.parametrize("options", [{}, {"bias": False}, {"kdim": 5, "vdim": 7}, {"vdim": 7}, {"dropout": 0.5}])
def test_there_and_back_every_output_and_every_parameter_is_equal(
    kind: type[nn.MultiheadAttention], options: dict[str, Any]
) -> None:
    original = kind(12, 3, batch_first=True, dtype=torch.float64, **options).eval()
    for parameter in original.parameters():
        nn.init.normal_(parameter)
    x, memory = torch.randn(2, 4, 12).double(), torch.randn(2, 6, original.kdim or 0).double()
    values = torch.randn(2, 6, original.vdim or 0).double()
    state = torch.get_rng_state()
    layer = from_torch(original)
    back = to_torch(layer)
    assert torch.equal(torch.get_rng_state(), state)
    assert type(back) is nn.MultiheadAttention
    assert (layer.training, back.training, back.dropout) == (False, False, original.dropout)
    expected = original(x, memory, values)[0]
    torch.testing.assert_close(layer(x, memory, values), expected, rtol=0, atol=1e-10)
    torch.testing.assert_close(back(x, memory, values)[0], expected, rtol=0, atol=1e-10)
    for name, tensor in original.state_dict().items():
        assert torch.equal(back.state_dict()[name], tensor)


def test_weights_are_copies_with_the_originals_requires_grad() -> None:
    original = nn.MultiheadAttention(12, 3)
    original.in_proj_weight.requires_grad_(requires_grad=False)
    with torch.no_grad():
        layer = from_torch(original)
        layer.q_proj.weight.zero_()
    assert original.in_proj_weight[:12].abs().sum() > 0
    learning = {name: parameter.requires_grad for name, parameter in layer.named_parameters()}
    assert learning == {name: "proj.weight" not in name or "out" in name for name in learning}
    assert not to_torch(layer).in_proj_weight.requires_grad
    assert to_torch(layer).in_proj_bias.requires_grad


@pytest.mark.parametrize("options", [("add_bias_kv",), ("add_zero_attn",), ("add_bias_kv", "add_zero_attn")])
def test_added_keys_are_converted_both_ways(options: tuple[str, ...]) -> None:
    original = nn.MultiheadAttention(12, 3, batch_first=True, dtype=torch.float64, **dict.fromkeys(options, True))  # type: ignore[arg-type]
    layer = from_torch(original)
    x = torch.randn(2, 5, 12, dtype=torch.float64)
    expected = original(x, x, x)[0]
    assert torch.allclose(layer(x), expected, atol=1e-12)
    back = to_torch(layer)
    assert torch.allclose(back(x, x, x)[0], expected, atol=1e-12)
    assert list(back.state_dict()) == list(original.state_dict())


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"output_projection": False}, "has no output projection|output_projection=True"),
        ({"merge": "mean"}, "merges its heads by 'mean'|merge=\"concat\""),
        ({"num_kv_heads": 1}, "has 3 heads and 1 key/value heads|one key/value head per head"),
        (
            {"value_head_dim": 2},
            "has heads of 4 features and values of 2|heads and values of embed_dim / num_heads = 4",
        ),
        ({"head_dim": 5}, "has heads of 5 features and values of 5|heads and values of embed_dim / num_heads = 4"),
        ({"output_dim": 7}, "has output_dim 7|output_dim=12"),
        ({"scale": 1.0}, "has the scale 1.0|the scale 1 / sqrt(head_dim) = 0.5"),
        ({"rotary": Rotary()}, "rotates queries and keys (rotary)|rotary=None"),
        ({"qk_norm": QKNorm()}, "normalises queries and keys|qk_norm=None"),
        ({"position_bias": ALiBi(3)}, "has a position bias|position_bias=None"),
        ({"softcap": 5.0}, "has the softcap 5.0|softcap=None"),
        ({"sinks": True}, "has learned sinks|sinks=False"),
        ({"head_gates": True}, "has gates on its heads|head_gates=False"),
    ],
)
def test_what_pytorchs_layer_does_not_support_is_rejected(options: dict[str, Any], sentence: str) -> None:
    finding, mend = sentence.split("|")
    whole = f"The layer {finding}, which nn.MultiheadAttention does not support. Convert a layer with {mend}."
    with pytest.raises(ArgumentError, match=f"^{re.escape(whole)}$"):
        to_torch(MultiHeadAttention(12, 3, **options))


def test_an_explicit_default_scale_is_accepted() -> None:
    assert to_torch(MultiHeadAttention(12, 3, scale=0.5)).embed_dim == 12


SMALL = {"hidden_size": 12, "num_hidden_layers": 1, "num_attention_heads": 3, "intermediate_size": 8, "vocab_size": 5}
BERT, LLAMA = hf.BertConfig(**SMALL), hf.LlamaConfig(**SMALL)
GPT2 = hf.GPT2Config(vocab_size=5, n_embd=12, n_head=3, n_layer=1)


def adapted(target: str, model: nn.Module) -> nn.Module:
    """Add a LoRA adapter to the linear layers of a name, as PEFT does."""
    peft.get_peft_model(model, peft.LoraConfig(target_modules=[target]))  # type: ignore[arg-type]
    return model


@pytest.mark.filterwarnings("ignore")  # of PEFT, about a model without a configuration
@pytest.mark.parametrize(
    ("convert", "model", "target"),
    [
        (lambda model: to_torch(model[0]), nn.Sequential(MultiHeadAttention(12, 3)), "q_proj"),
        (lambda model: from_torch(model[0]), nn.Sequential(nn.MultiheadAttention(12, 3)), "out_proj"),
        (lambda model: from_bert(model.encoder.layer[0].attention), hf.BertModel(BERT), "value"),
        (lambda model: from_gpt2(model.h[0].attn), hf.GPT2Model(GPT2), "c_attn"),
        (lambda model: from_llama(model.layers[0].self_attn), hf.LlamaModel(LLAMA), "o_proj"),
    ],
)
def test_a_projection_with_an_adapter_is_rejected(convert: Any, model: nn.Module, target: str) -> None:
    convert(model)
    with pytest.raises(ArgumentError) as caught:
        convert(adapted(target, model))
    assert str(caught.value) == (
        f"The layer's {target} is a peft.tuners.lora.layer.Linear, not an nn.Linear. "
        "Merge its wrapper (an adapter, a quantisation) into an nn.Linear first."
    )


def test_a_projection_whose_weight_is_computed_is_converted() -> None:
    original = nn.MultiheadAttention(12, 3, batch_first=True)
    nn.utils.parametrizations.weight_norm(original.out_proj)
    x = torch.randn(2, 5, 12)
    torch.testing.assert_close(from_torch(original)(x), original(x, x, x)[0], atol=1e-6, rtol=1e-5)


def test_a_subclass_of_pytorchs_layer_is_rejected() -> None:
    class Doubled(nn.MultiheadAttention):
        def forward(self, *inputs: Any, **options: Any) -> Any:
            output, weights = super().forward(*inputs, **options)
            return 2 * output, weights

    with pytest.raises(
        ArgumentError, match=r"^module is a module \(Doubled\), and must be an nn\.MultiheadAttention\. "
    ):
        from_torch(Doubled(12, 3))
