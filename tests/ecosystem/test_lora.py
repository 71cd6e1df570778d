"""LoRA (peft) finds the four projections by name, trains them alone, and merges into them."""

from __future__ import annotations

import copy
from typing import Any

import peft
import pytest
import torch
from torch import Tensor, nn

import multihead as mh
from multihead.compat import d2l
from tests.ecosystem.ways import EMBED, HEADS, LENGTHS, PROJECTIONS, WAYS, inputs, layer


class Model(nn.Module):
    """A model with one attention in it."""

    def __init__(self, attend: nn.Module) -> None:
        super().__init__()
        self.attend = attend

    def forward(self, *given: Tensor, **options: Any) -> Any:
        return self.attend(*given, **options)


def adapted(model: nn.Module, *names: str) -> peft.PeftModel:
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=list(names), init_lora_weights=False)
    return peft.get_peft_model(model, config)


@pytest.mark.parametrize("way", WAYS)
def test_a_fresh_adapter_changes_nothing_and_one_that_was_trained_merges_to_the_same_outputs(way: str) -> None:
    given = inputs(way)
    ours = Model(layer())
    expected = ours(*given, **WAYS[way])
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=list(PROJECTIONS))
    model = peft.get_peft_model(copy.deepcopy(ours), config)
    assert torch.equal(model(*given, **WAYS[way]), expected)
    target, before = torch.randn_like(expected), {name: each.clone() for name, each in model.named_parameters()}
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=0.02), []
    for _ in range(10):
        optimizer.zero_grad()
        loss = (model(*given, **WAYS[way]) - target).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.95 * losses[0]
    changed = {name for name, each in model.named_parameters() if not torch.equal(each, before[name])}
    places = [f"base_model.model.attend.{name}" for name in PROJECTIONS]
    assert changed == {f"{place}.lora_{letter}.default.weight" for place in places for letter in "AB"}
    trained = model(*given, **WAYS[way])
    assert not torch.allclose(trained, expected, atol=1e-3)
    merged = model.merge_and_unload()
    assert type(merged.attend.q_proj) is nn.Linear
    torch.testing.assert_close(merged(*given, **WAYS[way]), trained, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", PROJECTIONS)
def test_an_adapter_on_one_projection_is_a_sum_of_weights(name: str) -> None:
    given, base = inputs("padded"), Model(layer())
    by_hand, model = copy.deepcopy(base), adapted(base, name)
    adapter = model.get_submodule(f"base_model.model.attend.{name}")
    with torch.no_grad():
        low, high = (getattr(adapter, f"lora_{letter}")["default"].weight for letter in "AB")
        by_hand.get_submodule(f"attend.{name}").weight += 2 * high @ low  # type: ignore[operator]
    torch.testing.assert_close(model(*given, lengths=LENGTHS), by_hand(*given, lengths=LENGTHS))


def test_an_adapter_on_the_books_drop_in_merges_to_the_same_outputs() -> None:
    model = adapted(Model(d2l.MultiHeadAttention(EMBED, EMBED, EMBED, EMBED, HEADS, 0.0)), "W_q", "W_k", "W_v", "W_o")
    (x,), lengths = inputs("self-attention"), torch.tensor(LENGTHS)
    before = model(x, x, x, lengths)
    merged = model.merge_and_unload()
    torch.testing.assert_close(merged(x, x, x, lengths), before, atol=1e-5, rtol=1e-5)


def test_an_adapter_on_pytorchs_drop_in_trains_and_merges_as_on_the_original() -> None:
    (x,), found = inputs("self-attention"), []
    for kind in (nn.MultiheadAttention, mh.compat.torch_nn.MultiheadAttention):
        torch.manual_seed(0)
        model = adapted(Model(kind(EMBED, HEADS, batch_first=True)), "attend").double()
        output, weights = model(x.double(), x.double(), x.double())
        output.square().sum().backward()
        gradients = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
        assert all(".lora_" in name for name in gradients)
        merged = model.merge_and_unload()
        assert type(merged.attend) is kind
        again, _ = merged(x.double(), x.double(), x.double())
        torch.testing.assert_close(again, output, atol=1e-12, rtol=0)
        found.append((output, weights, gradients, merged.state_dict()))
    torch.testing.assert_close(found[1], found[0], atol=1e-10, rtol=1e-10)


@pytest.mark.filterwarnings("ignore:All adapters are already merged")  # with merge_adapter, the output is merged twice
@pytest.mark.parametrize("way", ["adapter", "merge_and_unload", "safe merge", "merge_adapter"])
def test_an_adapter_on_the_whole_drop_in_adds_each_change_once_where_its_output_is_scaled_by_half(way: str) -> None:
    """As docs/drop-ins.md describes; a PEFT that no longer adds the change of out_proj twice fails here."""
    encoder = nn.TransformerEncoderLayer(EMBED, HEADS, 32, 0.0, batch_first=True).eval()
    by_hand = copy.deepcopy(encoder)
    model = adapted(mh.compat.torch_nn.replace(encoder).model, "self_attn").eval()
    (adapter,) = (each for each in model.modules() if isinstance(each, peft.tuners.lora.layer.MultiheadAttention))
    output = adapter.base_layer.out_proj
    with torch.no_grad():
        by_hand.self_attn.in_proj_weight += adapter.get_delta_weight("default")
        by_hand.self_attn.out_proj.weight += output.get_delta_weight("default")
        output.scaling["default"] /= 2
        merged: Any = {
            "adapter": lambda: model,
            "merge_and_unload": model.merge_and_unload,
            "safe merge": lambda: model.merge_and_unload(safe_merge=True),
            "merge_adapter": lambda: (model.merge_adapter(), model)[1],
        }[way]()
        (x,) = inputs("self-attention")
        torch.testing.assert_close(merged(x), by_hand(x), atol=1e-5, rtol=1e-5)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
def test_adapters_on_drop_ins_act_in_an_encoder_without_gradients_too() -> None:
    """PyTorch's fused path would read the weights without the adapters: with the original it does."""
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(EMBED, HEADS, 32, 0.0, batch_first=True), 2)
    (x,) = inputs("self-attention")
    padding = torch.arange(x.shape[1]) >= torch.tensor(LENGTHS)[:, None]
    model = adapted(mh.compat.torch_nn.replace(encoder).model, "self_attn", "linear1").eval()
    expected = model(x, src_key_padding_mask=padding)
    with torch.no_grad():
        actual = model(x, src_key_padding_mask=padding)
        without = encoder.eval()(x, src_key_padding_mask=padding)
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(actual, without, atol=1e-2)


def test_a_model_with_adapters_is_watched_like_any_other() -> None:
    model = adapted(Model(layer()), "q_proj", "v_proj")
    with mh.observe(model) as seen:
        model(*inputs("padded"), lengths=LENGTHS)
    assert [each.name for each in seen.layers] == ["base_model.model.attend"]
