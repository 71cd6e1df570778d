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
    assert places(record.find(previous=(0.9, None))) == [(0, 0)]
    assert places(record.find(next=(0.9, None))) == [(0, 1)]
    assert places(record.find(self_mass=(0.9, None), entropy=(None, 1))) == [(0, 2)]
    assert sorted(places(record.find(local=(0.9, None)))) == [(0, 0), (0, 1), (0, 2)]
    assert record.find(broad=(0.5, None)) == []


def test_the_first_bound_orders_them() -> None:
    record = read(ids(1, 12))
    entropy = {(each.layer, each.head): each.values["entropy"] for each in record.find(entropy=(0, None))}
    assert list(entropy.values()) == sorted(entropy.values(), reverse=True)
    assert places(record.find(entropy=(None, 99))) == list(reversed(entropy))
    row = record.table(sort="entropy", top=1).rows[0]
    assert next(iter(entropy)) == (row["layer"], row["head"])


def test_a_range_has_two_limits() -> None:
    record = read(ids(1, 12))
    found = record.find(entropy=(0.5, 1.5))
    assert found
    assert all(0.5 <= each.values["entropy"] <= 1.5 for each in found)


def test_a_percentile_may_be_asked_for() -> None:
    record = read(ids(1, 12))
    value = float(record.layers[0].summary("p95")["entropy"][0])
    assert (0, 0) in places(record.find(of="p95", entropy=(value - 1e-6, value + 1e-6)))


def test_induction_and_duplicate_heads_are_found_where_token_ids_are_known() -> None:
    record = read(torch.randperm(50)[None, :12].repeat(1, 2))
    found = record.find(induction=(-1, None), duplicate=(-1, None))
    assert len(found) == 8
    for each in found:
        second = record.layers[each.layer].weights(each.head).double()[12:]  # (queries of the second time, keys)
        assert each.values["duplicate"] == pytest.approx(float(second.diagonal().mean()), abs=1e-6)
        assert each.values["induction"] == pytest.approx(float(second.diagonal(1).mean()), abs=1e-6)


def test_separators_are_told_by_special_tokens_after_the_first() -> None:
    record = read(torch.tensor([[7, 3, 4, 7, 5, 6, 8]]), special_ids=[7])
    found = {(each.layer, each.head): each.values["separator"] for each in record.find(separator=(-1, None))}
    weights = record.layers[1].weights(2).double()[:, 3]
    assert found[1, 2] == pytest.approx(float(weights.mean()), abs=1e-6)


def test_layers_that_have_no_such_number_are_left_out() -> None:
    model, batch = family("t5"), batch_of("t5")
    with torch.no_grad(), mh.observe(model, probes=("entropy", "induction_mass")) as seen:
        model(**batch)
    crossing = {index for index, layer in enumerate(seen.layers) if layer.sample().cross_attention}
    found = {layer for layer, _ in places(seen.find(induction=(-1, None)))}
    assert found == set(range(len(seen.layers))) - crossing


def test_a_head_reads_as_one_line() -> None:
    found = pointing(-1).find(previous=(0.5, None), entropy=(None, 1))[0]
    assert str(found).startswith("L0 H0: previous 100 %, entropy 0.0")


class TestRefusals:
    def refusal(self, kind: type[Exception], record: Record | None = None, **bounds: Any) -> str:
        with pytest.raises(kind) as caught:
            (record or asked(mask=masks.Causal(), watch={"probes": ["self_mass"]})).find(**bounds)
        return str(caught.value)

    def test_no_condition(self) -> None:
        assert self.refusal(ArgumentError) == (
            "find has no condition. Give the range of a statistic, for example find(previous=(0.8, 1))."
        )

    @pytest.mark.parametrize("limits", [0.8, "0.8", (0.8,), (0, 1, 2), (True, 1), (float("nan"), 1), ("0", 1), None])
    def test_what_is_not_a_pair_of_numbers(self, limits: Any) -> None:
        assert self.refusal(ArgumentError, self_mass=limits) == (
            f"self_mass is {limits!r}. Give the lowest and the highest value, None for no limit: "
            "self_mass=(0.8, None) or self_mass=(None, 1)."
        )

    def test_a_statistic_that_was_not_measured(self) -> None:
        assert self.refusal(ProbeError, entropie=(1, None)) == (
            "There is no statistic 'entropie' in the record. Give one of self_mass, or a kind: previous, "
            "next, self, first, separator, duplicate, induction, local, one_way, neighbours, broad, "
            "repeated_induction, repeated_duplicate, repeated_previous, repeated_first."
        )

    @pytest.mark.parametrize("old", ["previous_token", "next_token", "self_token", "first_token", "duplicate_token"])
    def test_a_name_of_an_earlier_version_names_the_new_one(self, old: str) -> None:
        new = old.removesuffix("_token")
        assert self.refusal(ArgumentError, **{old: (0.8, None)}) == (
            f"{old} is called {new}, as in tables. Give a range of it: find({new}=(0.8, None))."
        )

    @pytest.mark.parametrize(
        ("kind", "needs"),
        [
            ("induction", 'the statistic "induction_mass": probes=[..., "induction_mass"] of observe or census'),
            ("previous", 'the statistic "previous_mass": probes=[..., "previous_mass"] of observe or census'),
            ("broad", 'the statistic "entropy": probes=[..., "entropy"] of observe or census'),
            (
                "separator",
                "special tokens: give `tokenizer` or `special_ids` to observe",
            ),
        ],
    )
    def test_a_kind_that_needs_more(self, kind: str, needs: str) -> None:
        sentence = f"The record has no numbers for {kind!r}. It needs {needs}."
        assert self.refusal(ProbeError, **{kind: (0, None)}) == sentence
        with pytest.raises(ProbeError) as caught:
            asked(mask=masks.Causal(), watch={"probes": ["self_mass"]}).kinds(kind)
        assert str(caught.value) == sentence


def test_the_limits_are_within_the_range() -> None:
    record = pointing(-1)
    value = record.find(previous=(None, None))[0].values["previous"]
    assert record.find(previous=(value, value))
    assert record.find(previous=(value + 1e-9, None)) == record.find(previous=(None, value - 1e-9)) == []
