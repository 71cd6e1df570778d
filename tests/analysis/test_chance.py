"""Chance is what an even spread over the visible keys gives, and its error is that of independent observations."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import multihead as mh
from multihead import masks
from multihead.analysis.chance import NEAR, Evidence, chance, evidence, standard_error, stands_out
from multihead.masks.base import UnknownMask
from multihead.probes import first_keys_mass, offset_mass
from multihead.record.sample import SampleRecord
from tests.dense_record import record_of

LENGTH, HEADS = 23, 2


def some(*shape: int) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(0)) < 0.4


MASKS = {
    "full": masks.Full(),
    "causal": masks.Causal(),
    "window": masks.Causal() & masks.Window(5),
    "documents": masks.Documents((10, 13)),
    "cells": masks.Keep(some(LENGTH, LENGTH), "queries keys"),
    "cells of heads": masks.Keep(some(HEADS, LENGTH, LENGTH), "heads queries keys"),
}
NAMES = (
    *("self_mass", "previous_mass", "next_mass", "first_mass", "special_mass", "duplicate_mass", "induction_mass"),
    *("largest_weight", "effective_keys", "entropy", "mean_distance", NEAR, "offset_minus_5_mass", "first_4_mass"),
    "contribution",
)


class Even(torch.nn.Module):
    """Attention whose scores are all zero: an even spread."""

    def __init__(self, mask: masks.Mask) -> None:
        super().__init__()
        self.layer, self.mask = mh.MultiHeadAttention(embed_dim=8, num_heads=HEADS, bias=False), mask
        torch.nn.init.zeros_(self.layer.q_proj.weight)

    def forward(self, input_ids: Tensor) -> Tensor:
        output: Tensor = self.layer(torch.randn(1, input_ids.shape[1], 8), mask=self.mask)
        return output


def even(mask: masks.Mask, *, keep: Any = "cpu") -> SampleRecord:
    ids = torch.randint(0, 6, (1, LENGTH), generator=torch.Generator().manual_seed(2))
    names = (*NAMES[:7], "largest_weight", "effective_keys", "entropy", "mean_distance")
    probes = (*names, offset_mass(-5), first_keys_mass(4))
    with mh.observe(model := Even(mask), probes=probes, special_ids=[3], keep=keep) as seen:
        model(input_ids=ids)
    return seen.layers[0].sample()


@pytest.mark.parametrize("name", list(MASKS))
def test_chance_is_what_a_head_with_equal_scores_measures(name: str) -> None:
    sample = even(MASKS[name])
    found = chance(sample, NAMES, special=sample.text.special)
    assert set(found) == set(NAMES) - {"contribution"}
    for statistic, values in sample.per_query.items():
        if statistic in found:
            expected = values.double()
            level = found[statistic].expand_as(expected)
            torch.testing.assert_close(level, expected, rtol=1e-5, atol=1e-5, msg=lambda text: f"{statistic}: {text}")  # noqa: B023


@pytest.mark.parametrize("name", list(MASKS))
def test_chance_agrees_with_a_count_of_single_cells(name: str) -> None:
    sample = even(MASKS[name])
    seen = sample.visible()
    seen = (seen if seen.dim() == 3 else seen[None]).expand(HEADS, -1, -1)
    ids, special = sample.text.ids, sample.text.special
    assert ids is not None
    assert special is not None
    found = {each: values.expand(HEADS, -1) for each, values in chance(sample, NAMES, special=special).items()}
    for head in range(HEADS):
        for query in range(LENGTH):
            keys = [key for key in range(LENGTH) if seen[head, query, key]]
            if not keys:
                assert all(float(values[head, query]) == 0 for values in found.values())
                continue
            copies = [key for key in range(query) if ids[key] == ids[query]]
            share = {
                "previous_mass": sum(key == query - 1 for key in keys),
                "special_mass": sum(special[key] for key in keys),
                "duplicate_mass": sum(key in copies for key in keys),
                "induction_mass": sum(key - 1 in copies for key in keys),
                "mean_distance": sum(abs(key - query) for key in keys),
                NEAR: sum(abs(key - query) <= 3 for key in keys),
            }
            for each, count in share.items():
                assert float(found[each][head, query]) == pytest.approx(count / len(keys), abs=1e-12), each


def test_without_marks_ids_or_a_known_mask_there_is_no_such_chance() -> None:
    sample = even(masks.Causal())
    assert "special_mass" not in chance(sample, NAMES)
    bare = record_of(torch.full((1, 4, 4), 0.25)).layers[0].sample()
    assert set(chance(bare, ("duplicate_mass", "induction_mass", "self_mass"))) == {"self_mass"}  # type: ignore[arg-type]
    unknown: Any = even(masks.Keep(torch.ones(LENGTH, LENGTH, dtype=torch.bool), "queries keys"), keep="statistics")
    (segment,) = unknown.segments
    object.__setattr__(segment.request, "mask", UnknownMask("Mine", {}))
    assert chance(unknown, NAMES) == {}


def one_text(values: Tensor, level: float = 0.0) -> Evidence:
    return evidence([values], [torch.full((1, values.shape[1]), level)], [torch.ones_like(values, dtype=torch.bool)])


def test_the_error_of_one_text_is_that_of_the_mean_over_blocks_of_its_queries() -> None:
    values = torch.rand(3, 800, generator=torch.Generator().manual_seed(0)).double()
    found = one_text(values, 0.5)
    blocks = values.unflatten(1, (8, 100)).mean(-1)
    torch.testing.assert_close(found.mean, values.mean(-1))
    torch.testing.assert_close(found.chance, torch.full((3,), 0.5, dtype=torch.float64))
    torch.testing.assert_close(found.error, blocks.std(-1) / math.sqrt(8))


def test_queries_that_resemble_their_neighbours_do_not_make_a_mean_sure() -> None:
    values = torch.zeros(1, 800)
    values[:, :100] = 1  # one long passage of eight
    found = one_text(values)
    assert float(found.error) == pytest.approx(1 / 8)
    assert float(values.std() / math.sqrt(800)) < 0.012  # as if each query were independent


def test_what_differs_from_query_to_query_by_chance_alone_is_no_error() -> None:
    level = 1 / torch.arange(1, 101).double()[None]
    found = evidence([level + 0.3], [level], [torch.ones(1, 100, dtype=torch.bool)])
    assert float(found.error) == pytest.approx(0, abs=1e-12)
    assert float(found.mean - found.chance) == pytest.approx(0.3)


def test_queries_that_do_not_count_are_left_out_and_few_give_no_error() -> None:
    values = torch.tensor([[9.0, 1.0, 1.0, 2.0, 2.0, 9.0], [9.0, 9.0, 9.0, 1.0, 2.0, 3.0]]).double()
    counted = torch.tensor([[False, True, True, True, True, False], [False, False, False, True, True, True]])
    found = evidence([values], [torch.zeros(1, 6)], [counted])
    assert found.mean.tolist() == [1.5, 2.0]
    assert float(found.error[0]) == pytest.approx(1 / math.sqrt(12))
    assert float(found.error[1]) == math.inf


def test_the_error_of_four_texts_is_that_of_the_mean_over_texts() -> None:
    texts = [torch.full((1, 10 * (1 + index)), float(index)) for index in range(4)]
    levels = [torch.zeros(1, each.shape[1]) for each in texts]
    counted = [torch.ones_like(each, dtype=torch.bool) for each in texts]
    found = evidence(texts, levels, counted)
    assert float(found.mean) == pytest.approx((0 * 10 + 1 * 20 + 2 * 30 + 3 * 40) / 100)
    assert float(found.error) == pytest.approx(math.sqrt(5 / 12))
    assert float(standard_error(torch.tensor([[0.0], [1.0], [2.0], [3.0]]))) == pytest.approx(math.sqrt(5 / 12))


def test_numbers_that_are_none_stand_out_from_nothing() -> None:
    excess = torch.tensor([math.nan, 0.9, 0.9, 0.9])
    assert stands_out(excess, torch.tensor([0.0, math.nan, math.inf, 0.0]), 0.35).tolist() == [
        False,
        False,
        False,
        True,
    ]
