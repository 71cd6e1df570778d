"""The nearest heads are those whose weights differ least, query by query."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import multihead as mh
from multihead import masks
from multihead.errors import ArgumentError, ProbeError
from multihead.record.analysis import similar
from tests.families import batch_of, family
from tests.observation.recorded import asked, ids, read


def by_hand(p: Tensor, q: Tensor) -> float:
    """Mean Jensen-Shannon divergence of (queries, keys) and (queries, keys)."""
    p, q = p.double(), q.double()
    middle = (p + q) / 2
    parts = [torch.xlogy(each, each / middle).nan_to_num(0).sum(-1) for each in (p, q)]
    return float((sum(parts) / 2).mean())


@pytest.mark.parametrize("tile", [1, 1 << 21])
def test_divergence_is_that_of_the_definition(tile: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(similar, "MAX_WEIGHTS_PER_TILE", tile)
    record = read(ids(1, 20))
    found = record.nearest(0, 1, top=99)
    assert len(found) == 7
    assert [each.divergence for each in found] == sorted(each.divergence for each in found)
    for each in found:
        expected = by_hand(record.layers[0].weights(1), record.layers[each.layer].weights(each.head))
        assert each.divergence == pytest.approx(expected, abs=1e-6)
        assert each.queries == 20


def test_a_head_like_another_is_its_nearest_at_divergence_0() -> None:
    record = asked(heads=4, kv_heads=1, mask=masks.Causal())
    sample = record.layers[0].sample()
    assert sample.q is not None
    sample.q.all_rows()[:, 3] = sample.q.all_rows()[:, 0]
    sample.logsumexp.all_rows()[:, 3] = sample.logsumexp.all_rows()[:, 0]
    assert [(each.head, each.divergence) for each in record.nearest(0, 0, top=1)] == [(3, 0.0)]


def test_heads_that_share_no_key_are_ln_2_apart() -> None:
    hides = torch.zeros(1, 2, 6, 6).masked_fill(torch.arange(6) < 3, -torch.inf)
    hides[:, 1] = torch.zeros(6, 6).masked_fill(torch.arange(6) >= 3, -torch.inf)
    record = asked(heads=2, queries=6, keys=6, bias=hides)
    assert record.nearest(0, 0)[0].divergence == pytest.approx(math.log(2))


def test_a_learned_sink_counts_as_one_key_more() -> None:
    record = asked(sinks=torch.tensor([3.0, -3.0, 0.0, 1.0]))
    weights = record.layers[0].weights()
    whole = torch.cat([weights, 1 - weights.sum(-1, keepdim=True)], -1)
    for each in record.nearest(0, 0):
        assert each.divergence == pytest.approx(by_hand(whole[0], whole[each.head]), abs=1e-5)


def test_queries_that_see_nothing_are_no_difference() -> None:
    record = asked(mask=masks.Lengths((tuple([0, 0] + [9] * 7),)))
    weights = record.layers[0].weights()[:, 2:]
    for each in record.nearest(0, 0):
        assert each.divergence == pytest.approx(by_hand(weights[0], weights[each.head]), abs=1e-5)


def test_of_a_long_text_few_queries_are_looked_at_and_the_last_among_them(monkeypatch: pytest.MonkeyPatch) -> None:
    record = read(ids(1, 50))
    assert record.nearest(0, 0, queries=5)[0].queries == 5
    monkeypatch.setattr(similar, "DEFAULT_COMPARED_WEIGHTS", 1)
    found = record.nearest(0, 0, top=1)[0]
    rows = similar.evenly_spaced_queries(50, similar.affordable_queries(10**9))
    assert found.queries == len(range(*rows.indices(50))) <= 16
    assert range(*rows.indices(50))[-1] == 49
    expected = by_hand(
        record.layers[0].weights(0, queries=rows), record.layers[found.layer].weights(found.head, queries=rows)
    )
    assert found.divergence == pytest.approx(expected, abs=1e-6)


def test_layers_of_other_texts_are_left_out() -> None:
    model, batch = family("t5"), batch_of("t5")
    with torch.no_grad(), mh.observe(model) as seen:
        model(**batch)
    inside = {index for index, layer in enumerate(seen.layers) if layer.name.startswith("encoder")}
    assert {each.layer for each in seen.nearest(0, 0, top=99)} == inside


def test_a_head_reads_as_one_line() -> None:
    assert str(similar.NearHead(3, 5, "layers.3", 0.04123, 64)) == "L3 H5: 0.041 nats"


@pytest.mark.parametrize(
    ("layer", "head", "options", "said"),
    [
        (2, 0, {}, "There is no layer 2. Give one from 0 to 1."),
        (True, 0, {}, "There is no layer True. Give one from 0 to 1."),
        (0, 4, {}, "There is no head 4. Give one from 0 to 3."),
        (0, 0, {"top": 0}, "top is 0. Give an integer of at least 1."),
        (0, 0, {"queries": 0}, "queries is 0. Give an integer of at least 1."),
        (0, 0, {"sample": 1}, "There is no sample 1; layers.0 has 1. Give 0."),
    ],
)
def test_what_is_not_there_is_refused(layer: int, head: int, options: dict[str, Any], said: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        read(ids(1, 6)).nearest(layer, head, **options)
    assert str(caught.value) == said


def test_statistics_alone_cannot_be_compared() -> None:
    with pytest.raises(ProbeError):
        read(ids(1, 6), keep="statistics").nearest(0, 0)


def test_a_head_without_finite_weights_is_like_no_other_and_comes_last() -> None:
    record = asked(heads=4, kv_heads=1, mask=masks.Causal())
    sample = record.layers[0].sample()
    assert sample.q is not None
    sample.q.all_rows()[:, 1] = math.nan  # its weights are NaN
    sample.logsumexp.all_rows()[:, 2] = math.nan  # and these
    found = record.nearest(0, 0)
    assert [each.head for each in found] == [3, 1, 2]
    assert found[0].divergence == pytest.approx(by_hand(*(record.layers[0].weights(head) for head in (0, 3))), abs=1e-5)
    assert all(math.isnan(each.divergence) for each in found[1:])
    assert all(math.isnan(each.divergence) for each in record.nearest(0, 1))


def test_queries_whose_weights_are_not_finite_are_left_out_of_the_mean() -> None:
    record = asked(heads=2, kv_heads=1, mask=masks.Causal())
    sample = record.layers[0].sample()
    assert sample.q is not None
    sample.q.all_rows()[:, 1, 4] = math.nan
    weights = record.layers[0].weights()[:, [0, 1, 2, 3, 5, 6, 7, 8]]
    assert record.nearest(0, 0)[0].divergence == pytest.approx(by_hand(*weights), abs=1e-5)


def test_without_a_query_no_head_is_like_another() -> None:
    found = asked(heads=2, queries=0, query_start=0).nearest(0, 0)
    assert [(each.head, math.isnan(each.divergence), each.queries) for each in found] == [(1, True, 0)]
