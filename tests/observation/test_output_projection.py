"""The output projection of a layer is found by name, and is what its heads' outputs are multiplied by."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import multihead as mh
from multihead.observation.output_projection import output_weight
from multihead.probes import PROBES
from tests.families import batch_of, family
from tests.observation.recorded import asked

HELD_BY = {
    "bert": "encoder.layer.0.attention.output.dense",
    "albert": "encoder.albert_layer_groups.0.albert_layers.0.attention.dense",
    "modernbert": "layers.0.attn.Wo",
    "gpt2": "transformer.h.0.attn.c_proj",
    "llama": "model.layers.0.self_attn.o_proj",
    "t5": "encoder.block.0.layer.0.SelfAttention.o",
    "vit": "encoder.layer.0.attention.output.dense",
}


@pytest.mark.parametrize("name", ["bert", "albert", "gpt2", "llama", "t5"])
def test_each_family_keeps_it_under_its_own_name(name: str) -> None:
    model = family(name)
    held = model.get_submodule(HELD_BY[name])
    expected = held.weight.mT if name == "gpt2" else held.weight
    with torch.no_grad(), mh.observe(model, layers=0, probes=["output_norm", "contribution"]) as seen:
        model(**batch_of(name))
    sample = seen.layers[0].sample()
    owner = model.get_submodule(seen.layers[0].name)
    found = output_weight(owner, model, seen.layers[0].name, width=expected.shape[1])
    assert found is not None
    assert torch.equal(found, expected)
    assert bool((sample.statistics["output_norm"] <= sample.statistics["contribution"] * (1 + 1e-5)).all())


def test_the_norm_of_a_heads_output_is_that_of_its_part_of_the_layers() -> None:
    layer = mh.MultiHeadAttention(16, 4, bias=False).eval()
    x = torch.randn(1, 7, 16)
    with torch.no_grad(), mh.observe(layer, probes=["output_norm"]) as seen:
        layer(x)
    sample = seen.layers[0].sample()
    v = mh.split_heads(layer.v_proj(x), 4)[0]  # (heads, keys, head_dim)
    parts = layer.out_proj.weight.unflatten(1, (4, -1))  # (embed_dim, heads, head_dim)
    outputs = torch.einsum("hqk,hkd,ehd->hqe", sample.weights(), v, parts)
    torch.testing.assert_close(sample.statistics["output_norm"], outputs.norm(dim=-1), atol=1e-5, rtol=1e-5)


def test_gates_of_the_heads_are_counted_in() -> None:
    layer = mh.MultiHeadAttention(8, 2, head_gates=True)
    with torch.no_grad():
        layer.head_gates.copy_(torch.tensor([2.0, 0.5]))  # type: ignore[union-attr]
    found = output_weight(layer, layer, "", width=8)
    expected = layer.out_proj.weight * torch.tensor([2.0] * 4 + [0.5] * 4)
    assert torch.equal(found, expected)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "weight", [torch.randn(8), torch.randn(8, 9), torch.zeros(8, 8, dtype=torch.int8)], ids=["1-D", "other", "int8"]
)
def test_a_weight_that_does_not_fit_is_none(weight: Tensor) -> None:
    owner = nn.Module()
    owner.o_proj = nn.Module()
    owner.o_proj.weight = weight
    assert output_weight(owner, owner, "", width=8) is None


def test_without_one_what_needs_it_is_left_out() -> None:
    assert not {"contribution", "output_norm"} & set(
        asked(watch={"probes": tuple(PROBES)}).layers[0].sample().statistics
    )
