"""Every statistic against brute force on dense weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from multihead import masks
from multihead.call import Attended, AttentionCall
from multihead.errors import ProbeError
from multihead.functional import request_of, statistics
from multihead.probes import Beside, sums
from multihead.probes.statistics import DEFAULT, PROBES, of_call
from tests import oracle
from tests.drawing import Drawn, calls
from tests.kernels.test_sdpa import LargestTensor

OTHERS = ("sink_mass", "duplicate_mass", "induction_mass", "contribution", "output_norm", "coverage")
EVERY = tuple(n for n in PROBES if n not in OTHERS)


@pytest.fixture(params=["one tile", "many tiles"])
def _tiles(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once as it is, and once with tiles of 7 queries and 64 keys, so that sums cross many of them."""
    if request.param == "many tiles":
        monkeypatch.setattr(sums, "ROWS", 7)
        monkeypatch.setattr(sums, "WIDTH", 64)
        monkeypatch.setattr(sums, "CELLS", 1)


def compare(
    q: Tensor, k: Tensor, *, mask: masks.Mask, start: int | str | Tensor = 0, map_size: int = 5, **options: Any
) -> None:
    """Assert that all statistics are those of the dense weights, to 1e-10 in float64."""
    batch, queries, keys = q.shape[0], q.shape[2], k.shape[2]
    special = torch.rand(batch, keys) < 0.3
    beside = Beside(special_keys=special, map_size=map_size)
    given_ = statistics(q, k, mask=mask, query_start=start, probes=EVERY, beside=beside, **options)
    bias = options.get("bias")
    seen = oracle.shown(mask, (batch, 1, queries, keys), start)
    seen = seen if bias is None else seen & (bias != -torch.inf)
    dense = oracle.attend(q, k, k, seen, **options)
    places = oracle.positions_of_first(start, batch, queries, keys)
    expected = oracle.statistics(dense.weights, seen, start=places, special_keys=special, map_size=map_size)
    assert set(given_) == set(expected) == set(EVERY)
    for name, value in given_.items():
        assert value.dtype == (torch.int64 if name == "largest_key" else torch.float64), name
        assert value.shape == expected[name].shape, name
        assert oracle.difference(value, expected[name]) <= 1e-10, name


EVERY_BUT = tuple(n for n in EVERY if n != "special_mass")
LONG = 150  # three widths of 64 keys
CASES: dict[str, dict[str, Any]] = {
    "full": {"mask": masks.Full()},
    "causal": {"mask": masks.Causal()},
    "window": {"mask": masks.Window(70)},
    "window both ways": {"mask": masks.Window(3, after=66)},
    "padded": {"mask": masks.Lengths((150, 20))},
    "padded and causal": {"mask": masks.Causal() & masks.Lengths((0, 101))},
    "lengths a query": {"mask": masks.Lengths(torch.arange(32).view(2, 16) * 4)},
    "documents": {"mask": masks.Documents(((30, 20, 100), (150,)))},
    "prefix": {"mask": masks.Causal() | masks.Prefix((20, 70))},
    "dense remainder": {"mask": masks.Window(20) | masks.Prefix(3)},
    "given": {"mask": masks.Keep(torch.rand(2, 1, 16, 150, generator=torch.Generator().manual_seed(3)) < 0.2)},
    "sinks": {"mask": masks.Causal(), "sinks": torch.tensor([2.0, -1.0, 0.0, 9.0], dtype=torch.float64)},
    "bias": {"mask": masks.Causal(), "bias": torch.randn(1, 4, 16, 150, dtype=torch.float64)},
    "softcap": {"mask": masks.Full(), "softcap": 0.8},
    "scale": {"mask": masks.Full(), "scale": 3.0},
}


@pytest.mark.usefixtures("_tiles")
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("start", ["end", torch.tensor([0, 90])], ids=str)
def test_statistics_are_those_of_the_dense_weights(case: str, start: int | str | Tensor) -> None:
    """16 queries over 150 keys, four heads over two: batch, groups, tiles, and queries that are not keys."""
    q, k = torch.randn(2, 4, 16, 8, dtype=torch.float64), torch.randn(2, 2, LONG, 8, dtype=torch.float64)
    compare(q, k, start=start, **CASES[case])


@pytest.mark.parametrize("map_size", [1, 7, 64, 1000])
def test_a_map_of_any_size_is_the_block_means(map_size: int) -> None:
    q, k = torch.randn(1, 2, 50, 8, dtype=torch.float64), torch.randn(1, 2, 130, 8, dtype=torch.float64)
    compare(q, k, mask=masks.Window(9), start="end", map_size=map_size)


@settings(max_examples=40)
@given(case=calls())
def test_statistics_of_any_call_are_those_of_its_dense_weights(case: Drawn) -> None:
    """All but the mass on the first key, which is that of the bounds where the mask has a remainder."""
    q, k = case.q.double(), case.k.double()
    options = {name: value.double() if isinstance(value, Tensor) else value for name, value in case.options.items()}
    probes = tuple(name for name in DEFAULT if name not in ("first_mass", "special_mass", "sink_mass"))
    given_ = statistics(
        q, k, mask=case.mask, query_start=case.query_start, probes=(*probes, "received", "pooled_map"), **options
    )
    seen = oracle.shown(case.mask, case.size.cells, case.query_start)
    if "bias" in options:
        seen = seen & (options["bias"] != -torch.inf)
    dense = oracle.attend(q, k, k, seen, **options)
    start = oracle.positions_of_first(case.query_start, case.size.batch, case.size.queries, case.size.keys)
    expected = oracle.statistics(dense.weights, seen, start=start)
    for name, value in given_.items():
        if name == "largest_key":  # of keys that are equal but for rounding, either may be the largest
            picked = dense.weights.gather(-1, value.clamp(min=0)[..., None])[..., 0]
            assert torch.equal(value == -1, expected[name] == -1)
            assert oracle.difference(picked, expected["largest_weight"]) <= 1e-10
        else:
            assert oracle.difference(value, expected[name]) <= 1e-10, name


@pytest.mark.parametrize("heads", [1, 6])
def test_float32_keeps_the_spread_of_a_sharp_head_that_looks_far_away(heads: int) -> None:
    """Summed in float32 about a tile's middle, the spread was off by 3 tokens at 3,000 keys: squares cancel."""
    q, k = torch.randn(1, heads, 150, 32), torch.randn(1, heads, 3000, 32)
    k[:, :, 5] = 3 * q[:, :, 140]
    k[:, :, 2900] = 3 * q[:, :, 10]
    k[:, :, 40:45] = q[:, :, 130:131]
    single = statistics(4 * q, k, mask=masks.Causal(), query_start="end", probes=EVERY_BUT)
    double = statistics((4 * q).double(), k.double(), mask=masks.Causal(), query_start="end", probes=EVERY_BUT)
    allowed = {"mean_distance": 1e-2, "distance_spread": 1e-2, "effective_keys": 2e-3, "received": 1e-3}
    for name, value in single.items():
        assert value.dtype == (torch.int64 if name == "largest_key" else torch.float32)
        assert oracle.difference(value, double[name]) <= allowed.get(name, 1e-4), name


def test_a_sink_that_takes_nearly_all_leaves_the_largest_key_its_name() -> None:
    """The weights underflow to 0, and the key is seen all the same: -1 is for queries that see none."""
    q, k = torch.zeros(1, 1, 2, 4), torch.zeros(1, 1, 3, 4)
    k[0, 0, 1] = 1
    q[:] = 1
    found = statistics(q, k, sinks=torch.tensor([500.0]), probes=("largest_key", "largest_weight", "entropy"))
    assert found["largest_key"].tolist() == [[[1, 1]]]
    assert found["largest_weight"].tolist() == [[[0, 0]]]
    assert found["entropy"].tolist() == [[[0, 0]]]


def test_of_equal_weights_the_first_key_is_named_across_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sums, "CELLS", 1)
    q = torch.zeros(1, 1, 2, 4)
    found = statistics(q, torch.zeros(1, 1, 200, 4), probes=("largest_key",))
    assert found["largest_key"].tolist() == [[[0, 0]]]


def test_blocks_in_which_no_cell_may_be_seen_are_nan_and_others_are_not() -> None:
    q = torch.zeros(1, 1, 4, 4)
    found = statistics(q, q, mask=masks.Causal(), probes=("pooled_map",), beside=Beside(map_size=2))["pooled_map"]
    assert bool(found[0, 0, 0, 1].isnan())
    assert found[0, 0, 0, 0] == pytest.approx((1 + 0.5 + 0.5) / 3)
    assert found[0, 0, 1, 0] == pytest.approx((2 / 3 + 2 / 4) / 4)


def test_the_first_key_is_the_first_that_any_query_of_the_sample_sees() -> None:
    """Left padding: the first token of the sample is not key 0."""
    q = torch.zeros(1, 1, 4, 4)
    hidden = torch.tensor([[True, True, False, False]])
    found = statistics(q, q, mask=masks.Causal() & masks.Drop(hidden, "batch keys"), probes=("first_mass",))
    assert found["first_mass"].tolist() == [[[0, 0, 1, 0.5]]]


@pytest.mark.parametrize("mask", [masks.Full(), masks.Causal(), masks.Window(40) | masks.Prefix(4)], ids=repr)
def test_no_tensor_of_queries_by_keys_is_made(mask: masks.Mask) -> None:
    length = 8192
    q, k = torch.randn(2, 1, 1, length, 8).unbind()
    with LargestTensor() as largest:
        statistics(
            q[:, :, :4096],
            k,
            mask=mask,
            query_start=0,
            probes=EVERY,
            beside=Beside(special_keys=torch.ones(1, length) > 0),
        )
    assert 0 < largest.elements <= 4096 * length // 4


def test_an_empty_batch_has_empty_statistics() -> None:
    """torch.stack of no samples raised."""
    q = torch.zeros(0, 2, 3, 4)
    found = statistics(q, q, probes=("entropy", "received", "pooled_map"))
    assert found["entropy"].shape == (0, 2, 3)
    assert found["received"].shape == (0, 2, 3)
    assert found["pooled_map"].shape == (0, 2, 3, 3)


def test_what_a_kernel_had_at_hand_is_not_computed_again() -> None:
    q = torch.zeros(1, 1, 2, 4)
    marked = torch.full((1, 1, 2), 42.0)
    call = AttentionCall(request_of(q, q, q), Attended(q, torch.full((1, 1, 2), 2.0).log(), {"entropy": marked}))
    found = of_call(call, ("entropy", "effective_keys"))
    assert found["entropy"] is marked
    assert found["effective_keys"].flatten().tolist() == pytest.approx([2, 2])


def test_unknown_names_are_refused_with_those_there_are() -> None:
    q = torch.zeros(1, 1, 2, 4)
    with pytest.raises(ProbeError) as refusal:
        statistics(q, q, probes=("entropie",))
    assert str(refusal.value) == (
        "There is no statistic 'entropie'. Give some of entropy, effective_keys, mean_distance, distance_spread, "
        "self_mass, previous_mass, next_mass, first_mass, special_mass, largest_weight, largest_key, sink_mass, "
        "duplicate_mass, induction_mass, contribution, output_norm, received, coverage, pooled_map."
    )


def test_special_mass_is_refused_where_nobody_says_what_is_special() -> None:
    q = torch.zeros(1, 1, 2, 4)
    with pytest.raises(ProbeError) as refusal:
        statistics(q, q, probes=("special_mass",))
    assert str(refusal.value) == (
        "special_mass was asked for, and nothing says which keys are special. Give special_keys."
    )
