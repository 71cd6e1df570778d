"""Streaming over the tiles of a map."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

import multihead as mh
from multihead import masks
from multihead.functional import request_of
from multihead.probes import streaming
from multihead.probes.context import ProbeContext
from multihead.probes.measured_call import MeasuredCall
from multihead.probes.streaming import DistanceMoments, measure_in_tiles


def subject(mask: masks.Mask) -> MeasuredCall:
    q = torch.randn(1, 2, 20, 4, dtype=torch.float64)
    return MeasuredCall.from_request(
        request_of(q, q, q, mask=mask), torch.zeros(1, 2, 20, dtype=torch.float64), ProbeContext(map_size=4)
    )


def test_only_the_parts_that_are_needed_are_made() -> None:
    found, weighed = measure_in_tiles(subject(masks.Full()), ("largest_weight",))
    assert list(found) == ["largest_weight"]
    assert bool((found["largest_weight"] > 1).all())
    assert weighed is None


def test_tiles_that_the_bounds_hide_are_not_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Documents of 5 tokens in tiles of 5 queries: each tile takes the keys of one document."""
    monkeypatch.setattr(streaming, "TILE_QUERIES", 5)
    looked_at = []
    tiles = streaming._tiles_of_rows

    def noted(call: MeasuredCall, group: streaming.HeadGroup, rows: slice) -> object:
        for tile in tiles(call, group, rows):
            looked_at.extend((rows.start, key) for key in range(*tile.columns))
            yield tile

    monkeypatch.setattr(streaming, "_tiles_of_rows", noted)
    measure_in_tiles(subject(masks.Documents((5, 5, 5))), ("received",))
    # And the last five queries, which see nothing, cost nothing.
    assert looked_at == [(first, key) for first in (0, 5, 10) for key in range(first, first + 5)]


def test_heads_are_taken_in_groups_that_fit_a_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k = torch.randn(2, 8, 9, 4, dtype=torch.float64), torch.randn(2, 4, 9, 4, dtype=torch.float64)
    request = request_of(q, k, k, mask=masks.Causal())
    logsumexp = torch.randn(2, 8, 9, dtype=torch.float64)
    together = MeasuredCall.from_request(request, logsumexp, ProbeContext(map_size=4))
    parts = ("entropy", "largest_key", "received", "pooled_map")
    whole, _ = measure_in_tiles(together, parts)
    monkeypatch.setattr(streaming, "TILE_WEIGHTS", streaming.TILE_QUERIES * streaming.TILE_KEYS * 6)
    assert [group.heads for group in streaming.groups_of_call(together)] == [slice(0, 6), slice(6, 8)] * 2
    grouped, _ = measure_in_tiles(together, parts)
    for part in parts:
        torch.testing.assert_close(grouped[part], whole[part], equal_nan=True, atol=1e-12, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_key_whose_weight_is_0_next_to_a_huge_sink_adds_no_entropy(dtype: torch.dtype) -> None:
    """The logarithm of that weight, bias - sink, overflows to -inf, and 0 * -inf is NaN."""
    q = torch.zeros(1, 1, 2, 4, dtype=dtype)
    huge = 0.9 * torch.finfo(dtype).max
    bias, sinks = torch.tensor([[[[0.0, -huge]]]], dtype=dtype), torch.tensor([huge], dtype=dtype)
    found = mh.statistics(q, q, bias=bias, sinks=sinks, probes=("entropy", "mean_distance", "sink_mass"))
    assert {name: value.flatten().tolist() for name, value in found.items()} == {
        "entropy": [0, 0],
        "mean_distance": [0, 0],
        "sink_mass": [1, 1],
    }


@pytest.mark.parametrize("cuts", [(0, 200), (0, 1, 77, 130, 200), (0, 100, 110, 200)])
def test_tiles_joined_are_the_whole(cuts: tuple[int, ...]) -> None:
    weights, positions = torch.rand(2, 5, 200, dtype=torch.float64), torch.arange(100, 105)
    moments = DistanceMoments.zero(torch.zeros(2, 5, dtype=torch.float64))
    for first, behind in pairwise(cuts):
        side = 1 if behind <= 101 else -1 if first >= 104 else 0
        moments.add(weights[..., first:behind], positions, (first, behind), side)
    distance = (positions[:, None] - torch.arange(200)).abs().double()
    share = weights / weights.sum(-1, keepdim=True)
    mean = (share * distance).sum(-1)
    torch.testing.assert_close(moments.mean(), mean, atol=1e-11, rtol=0)
    spread = (share * (distance - mean[..., None]).square()).sum(-1).sqrt()
    torch.testing.assert_close(moments.spread(), spread, atol=1e-11, rtol=0)


def test_of_nothing_seen_both_are_zero() -> None:
    moments = DistanceMoments.zero(torch.zeros(1, 2, dtype=torch.float64))
    moments.add(torch.zeros(1, 2, 40), torch.tensor([50, 51]), (0, 40), 1)
    assert moments.mean().tolist() == moments.spread().tolist() == [[0, 0]]
