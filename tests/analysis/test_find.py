"""Heads are found by bounds on their numbers, the best first, and what no layer has is named."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import multihead as mh
from multihead import masks
from multihead.errors import ArgumentError, ProbeError
from multihead.observation.record import Record
from tests.families import batch_of, family
from tests.observation.recorded import Asking, asked, ids, read

LENGTH = 40


def pointing(*offsets: int) -> Record:
    """A record of heads that look at the key at an offset each, sharply."""
    places = nn.functional.one_hot(torch.arange(LENGTH)).float()[None, None]  # (1, 1, queries, places)
    q = torch.cat([places.roll(offset, -1) for offset in offsets], 1) * 60
    with mh.observe(
        model := Asking(), probes=("entropy", "previous_mass", "next_mass", "self_mass", "first_mass")
    ) as seen:
        model(q, places, places, scale=1.0)
    return seen


def places(found: list[Any]) -> list[tuple[int, int]]:
    return [(each.layer, each.head) for each in found]


def test_heads_are_found_by_textbook_kinds_and_by_statistics() -> None:
    record = pointing(-1, 1, 0, 7)
    assert places(record.find(previous_token=mh.above(0.9))) == [(0, 0)]
    assert places(record.find(next_token=mh.above(0.9))) == [(0, 1)]
    assert places(record.find(self_mass=mh.above(0.9), entropy=mh.below(1))) == [(0, 2)]
    assert sorted(places(record.find(local=mh.above(0.9)))) == [(0, 0), (0, 1), (0, 2)]
    assert record.find(broad=mh.above(0.5)) == []


def test_the_first_bound_orders_them() -> None:
    record = read(ids(1, 12))
    entropy = {(each.layer, each.head): each.values["entropy"] for each in record.find(entropy=mh.above(0))}
    assert list(entropy.values()) == sorted(entropy.values(), reverse=True)
    assert places(record.find(entropy=mh.below(99))) == list(reversed(entropy))
    row = record.table(sort="entropy", top=1).rows[0]
    assert next(iter(entropy)) == (row["layer"], row["head"])


def test_two_bounds_on_one_number_are_joined() -> None:
    record = read(ids(1, 12))
    found = record.find(entropy=mh.above(0.5) & mh.below(1.5))
    assert found
    assert all(0.5 < each.values["entropy"] < 1.5 for each in found)
    assert str(mh.above(0.5) & mh.below(1.5) & mh.above(0.7)) == "above(0.7) & below(1.5)"


def test_a_percentile_may_be_asked_for() -> None:
    record = read(ids(1, 12))
    value = float(record.layers[0].summary("p95")["entropy"][0])
    assert (0, 0) in places(record.find(of="p95", entropy=mh.above(value - 1e-6) & mh.below(value + 1e-6)))


def test_induction_and_duplicate_heads_are_found_where_token_ids_are_known() -> None:
    record = read(torch.randperm(50)[None, :12].repeat(1, 2))
    found = record.find(induction=mh.above(-1), duplicate_token=mh.above(-1))
    assert len(found) == 8
    for each in found:
        second = record.layers[each.layer].weights(each.head).double()[12:]  # (queries of the second time, keys)
        assert each.values["duplicate_token"] == pytest.approx(float(second.diagonal().mean()), abs=1e-6)
        assert each.values["induction"] == pytest.approx(float(second.diagonal(1).mean()), abs=1e-6)


def test_separators_are_told_by_special_tokens_after_the_first() -> None:
    record = read(torch.tensor([[7, 3, 4, 7, 5, 6, 8]]), special_ids=[7])
    found = {(each.layer, each.head): each.values["separator"] for each in record.find(separator=mh.above(-1))}
    weights = record.layers[1].weights(2).double()[:, 3]
    assert found[1, 2] == pytest.approx(float(weights.mean()), abs=1e-6)


def test_layers_that_have_no_such_number_are_left_out() -> None:
    model, batch = family("t5"), batch_of("t5")
    with torch.no_grad(), mh.observe(model) as seen:
        model(**batch)
    crossing = {index for index, layer in enumerate(seen.layers) if layer.sample().crosses}
    found = {layer for layer, _ in places(seen.find(local=mh.above(-1)))}
    assert found == set(range(len(seen.layers))) - crossing


def test_a_head_reads_as_one_line() -> None:
    found = pointing(-1).find(previous_token=mh.above(0.5), entropy=mh.below(1))[0]
    assert str(found).startswith("L0 H0: previous token 100 %, entropy 0.0")


class TestRefusals:
    def refusal(self, kind: type[Exception], record: Record | None = None, **bounds: Any) -> str:
        with pytest.raises(kind) as caught:
            (record or asked(mask=masks.Causal(), watch={"probes": ["self_mass"]})).find(**bounds)
        return str(caught.value)

    def test_no_bounds(self) -> None:
        assert self.refusal(ArgumentError) == (
            "find was asked for nothing. Give bounds, for example find(previous_token=above(0.8))."
        )

    def test_a_bare_number(self) -> None:
        assert self.refusal(ArgumentError, self_mass=0.8) == (
            "self_mass is 0.8. Give bounds: self_mass=above(0.8) or self_mass=below(1)."
        )

    def test_a_statistic_that_was_not_measured(self) -> None:
        assert self.refusal(ProbeError, entropie=mh.above(1)) == (
            "There is no statistic 'entropie' in the record. Give one of self_mass, or a kind: previous_token, "
            "next_token, self_token, first_token, separator, duplicate_token, induction, broad, local."
        )

    @pytest.mark.parametrize(
        ("kind", "needs"),
        [
            ("induction", 'the statistic "induction_mass": observe(probes=[..., "induction_mass"])'),
            ("previous_token", 'the statistic "previous_mass": observe(probes=[..., "previous_mass"])'),
            ("broad", 'the statistic "entropy": observe(probes=[..., "entropy"])'),
            ("separator", "special tokens after the first: give `tokenizer` or `special_ids` to observe"),
        ],
    )
    def test_a_kind_that_needs_more(self, kind: str, needs: str) -> None:
        said = self.refusal(ProbeError, **{kind: mh.above(0)})
        assert said == f"The record has no numbers for {kind!r}. It needs {needs}."

    @pytest.mark.parametrize("value", ["0.8", True, float("nan"), None])
    def test_a_bound_that_is_no_number(self, value: Any) -> None:
        with pytest.raises(ArgumentError) as caught:
            mh.above(value)
        assert str(caught.value) == f"above was given {value!r}. Give a number, for example above(0.8)."


def test_the_bounds_themselves_do_not_hold() -> None:
    assert [0.5 in mh.above(0.5), 0.5 in mh.below(0.5), 0.5 in mh.above(0.4)] == [False, False, True]
