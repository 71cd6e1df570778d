"""All texts of a call are measured at once as each of them alone."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import multihead as mh
from multihead import probes
from multihead.observation.measuring import StatisticsMeasurer, token_indices_per_text
from multihead.tensors.shapes import AttentionShape

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
