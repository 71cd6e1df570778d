"""All texts of a call are measured at once as each of them alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import multihead as mh
from multihead import probes
from multihead.observation.measuring import StatisticsMeasurer, output_weight, token_indices_per_text
from multihead.probes import PROBES
from multihead.tensors.shapes import AttentionShape
from tests.families import batch_of, family
from tests.observation.recorded import asked

SHAPE = AttentionShape(1, 2, 2, 5, 5, 4, 4, torch.device("cpu"), torch.float32)


def measuring(*chosen: str | probes.Probe, special_ids: tuple[int, ...] = ()) -> tuple[StatisticsMeasurer, nn.Module]:
    layer = mh.MultiHeadAttention(8, 2)
    found = tuple(probes.PROBES[each] if isinstance(each, str) else each for each in chosen)
    return StatisticsMeasurer(layer, {id(layer): "layer"}, found, special_ids), layer


class TestContext:
    ids = torch.tensor([[7, 8, 7, 9, 8]])

    def test_it_holds_what_the_probes_need_and_nothing_else(self) -> None:
        wanted, layer = measuring("entropy", special_ids=(7,))
        context = wanted.probe_context(layer, SHAPE, self.ids)
        assert (context.ids, context.special_keys, context.output_weight, context.sets) == (None, None, None, {})
        wanted, layer = measuring("induction_mass", "special_mass", "output_norm", special_ids=(7, 9))
        context = wanted.probe_context(layer, SHAPE, self.ids)
        assert context.ids is not None
        assert torch.equal(context.ids, self.ids)
        assert context.special_keys is not None
        assert context.special_keys.tolist() == [[True, False, True, True, False]]
        assert context.output_weight is layer.out_proj.weight

    def test_sets_of_tokens_are_found_by_their_ids_where_other_numbers_are_compared(self) -> None:
        wanted, layer = measuring(probes.tokens_mass("few", ids=(8,)))
        context = wanted.probe_context(layer, SHAPE, self.ids, distinct=self.ids + 100)
        assert context.ids is not None
        assert torch.equal(context.ids, self.ids + 100)
        assert context.sets["few"].tolist() == [[False, True, False, False, True]]


def text_of(*lengths: int) -> Tensor:
    return torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))


def test_some_tokens_of_each_packed_text_are_found_by_rank() -> None:
    flags = torch.tensor([5, 6, 5, 7, 5, 6, 8, 9, 8, 8]) == 8
    found = token_indices_per_text(flags, text_of(3, 1, 2, 4))
    assert found[:, [0, 6]].tolist() == [[-1, 6], [-1, 8], [-1, 9]]


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
