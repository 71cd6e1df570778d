"""A page stores as much of the maps as fits, and states what it stores."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from multihead.errors import ProbeError
from multihead.viewer import page_budget
from tests.dense_record import DenseSample, random_weights, record_of


def a_record(length: int = 120, **given: Any) -> Any:
    return record_of(random_weights(3, length, length), random_weights(2, length, length), **given)


def size(kept: page_budget.StoredMaps) -> int:
    return sum(len(content) + 2 * len(name) + 120 for name, content in kept.arrays.contents.items())


def test_with_room_every_weight_is_held_in_sixteen_bits() -> None:
    kept = page_budget.encode_fitting_maps(a_record(), sample=0, room=10_000_000)
    assert (kept.mode, kept.bits_per_weight, kept.why_incomplete) == ("whole", 16, "")
    heads = {"0/0/0/0", "0/0/0/1", "0/0/0/2", "0/0/1/0", "0/0/1/1"}
    maps = {f"runs/0/samples/0/layers/{layer}/maps" for layer in (0, 1)}
    margins = {f"0/0/{layer} {name}" for layer in (0, 1) for name in ("received", "entropy")}
    assert set(kept.arrays.contents) == set(kept.arrays.descriptions) == heads | maps | margins
    assert 0 < kept.largest_rounding_error <= 1.6e-5


def test_a_short_text_needs_no_pooled_maps_beside_its_weights() -> None:
    kept = page_budget.encode_fitting_maps(a_record(40), sample=0, room=10_000_000)
    assert not any("maps" in name for name in kept.arrays.contents)


def test_with_less_room_twelve_bits_are_tried() -> None:
    full = page_budget.encode_fitting_maps(a_record(), sample=0, room=10_000_000)
    kept = page_budget.encode_fitting_maps(a_record(), sample=0, room=int(size(full) * 0.85))
    assert (kept.mode, kept.bits_per_weight) == ("whole", 12)
    assert 1.6e-5 < kept.largest_rounding_error <= 2.5e-4


def test_with_little_room_each_query_keeps_its_largest_weights() -> None:
    kept = page_budget.encode_fitting_maps(a_record(), sample=0, room=80_000)
    assert (kept.mode, kept.why_incomplete) == ("largest", "room")
    assert kept.weights_per_query >= 1
    assert size(kept) <= 80_000


def test_where_few_weights_of_a_query_fit_they_take_eight_bits() -> None:
    fine = page_budget.encode_fitting_maps(a_record(), sample=0, room=100_000)
    coarse = page_budget.encode_fitting_maps(a_record(), sample=0, room=60_000)
    assert (fine.mode, fine.bits_per_weight) == ("largest", 16)
    assert fine.weights_per_query >= page_budget.MIN_WEIGHTS_OF_16_BITS
    assert (coarse.mode, coarse.bits_per_weight) == ("largest", 8)
    assert 1 <= coarse.weights_per_query < fine.weights_per_query
    assert coarse.largest_rounding_error <= 4e-3


@pytest.mark.parametrize("room", [9_000, 20_000, 35_000, 60_000, 100_000, 200_000])
def test_no_room_is_ever_exceeded(room: int) -> None:
    assert size(page_budget.encode_fitting_maps(a_record(), sample=0, room=room)) <= room


def test_maps_become_coarser_before_they_are_left_out() -> None:
    kept = page_budget.encode_fitting_maps(a_record(), sample=0, room=9_000)
    assert kept.mode in ("largest", "pooled")
    assert kept.map_size[0] < 60


def test_without_room_the_page_stores_no_map_and_names_the_reason() -> None:
    kept = page_budget.encode_fitting_maps(a_record(), sample=0, room=100)
    assert (kept.mode, kept.why_incomplete, kept.arrays.contents) == ("none", "room", {})


def test_statistics_without_a_pooled_map_give_no_map() -> None:
    kept = page_budget.encode_fitting_maps(a_record(keep="statistics"), sample=0, room=10_000_000)
    assert (kept.mode, kept.why_incomplete) == ("none", "statistics")


def test_statistics_with_a_pooled_map_give_that_map() -> None:
    record = a_record(keep="statistics")
    for layer in record.layers:
        layer.sample().statistics["pooled_map"] = torch.rand(layer.num_heads, 60, 60)
    kept = page_budget.encode_fitting_maps(record, sample=0, room=10_000_000)
    assert (kept.mode, kept.why_incomplete) == ("pooled", "statistics")
    assert kept.weights_per_cell[0] == (2, 2)


def test_a_pooled_map_of_other_blocks_is_pooled_anew() -> None:
    record = a_record()
    record.layers[0].sample().statistics["pooled_map"] = torch.full((3, 7, 7), 0.5)
    kept = page_budget.encode_fitting_maps(record, sample=0, room=80_000)
    assert kept.map_size == (60, 60)


def test_of_a_long_text_the_largest_weight_of_each_query_is_kept_and_no_map_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(page_budget, "MAX_READ_WEIGHTS", 1000)
    record = a_record()
    for layer in record.layers:
        layer.sample().statistics["pooled_map"] = torch.rand(layer.num_heads, 60, 60)
    kept = page_budget.encode_fitting_maps(record, sample=0, room=80_000)
    assert (kept.mode, kept.weights_per_query, kept.why_incomplete) == ("largest", 1, "time")
    assert [layer.sample().tiles for layer in record.layers] == [[], []]


@pytest.mark.parametrize("lacking", ["room", "largest_key"])
def test_where_not_even_those_are_had_a_long_text_keeps_its_pooled_maps(
    lacking: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_budget, "MAX_READ_WEIGHTS", 1000)
    record = a_record()
    for layer in record.layers:
        layer.sample().statistics.pop(lacking, None)
    whole = size(page_budget.encode_fitting_maps(a_record(), sample=0, room=80_000))
    kept = page_budget.encode_fitting_maps(record, sample=0, room=whole - 100 if lacking == "room" else 80_000)
    assert (kept.mode, kept.weights_per_query, kept.why_incomplete) == ("pooled", 0, "time")


def test_maps_are_read_head_by_head_and_in_small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("multihead.record.blocks.MAX_TILE_CELLS", 1200)
    record = a_record()
    page_budget.encode_fitting_maps(record, sample=0, room=60_000)
    for layer in record.layers:
        assert max(layer.sample().tiles) <= 1200


def test_progress_counts_the_heads() -> None:
    heard: list[tuple[int, int]] = []
    page_budget.encode_fitting_maps(
        a_record(), sample=0, room=10_000_000, progress=lambda done, all_: heard.append((done, all_))
    )
    assert heard == [(n, 5) for n in range(1, 6)]


def test_a_record_without_weights_says_so() -> None:
    assert page_budget.encode_fitting_maps(a_record(), sample=0, room=10_000_000).why_incomplete == ""
    kept = page_budget.encode_fitting_maps(a_record(keep="statistics"), sample=0, room=10_000_000)
    assert kept.why_incomplete == "statistics"


def test_an_error_that_is_not_about_missing_weights_is_not_swallowed(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> torch.Tensor:
        raise RuntimeError("broken")

    monkeypatch.setattr(DenseSample, "weights", broken)
    with pytest.raises(RuntimeError, match=r"^broken$"):
        page_budget.encode_fitting_maps(a_record(), sample=0, room=1000)
    assert not issubclass(RuntimeError, ProbeError)
