"""What the native kernel measures, in the pass of the call and in one of its own, against the dense definitions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from multihead import masks
from multihead.functional import request_of
from multihead.kernels.call import AttentionRequest
from multihead.kernels.native import kernel, library
from multihead.kernels.native.statistics import (
    PARTS_OF_ONE_PASS,
    measure_in_one_pass,
    statistics_of_one_pass,
    sum_weights_per_key,
)
from multihead.kernels.parts import SPECIAL_MASS, PartName
from multihead.kernels.plan.bounds import bounds_of
from multihead.masks.positions import TilePositions
from multihead.probes import PROBES
from tests import oracle
from tests.drawing import Drawn, calls
from tests.kernel_names import NATIVE_DTYPES, needs_native

pytestmark = needs_native
SETS = [each.name for each in library.instruction_sets() if each.is_supported_by_cpu]
IN_THE_PASS = PARTS_OF_ONE_PASS - {SPECIAL_MASS.name}
# Part -> the statistic of the dense definitions that is this part alone.
STATISTIC = {
    part: name
    for name, probe in PROBES.items()
    for part in probe.parts
    if name != "effective_keys" and len(probe.parts) == 1
}


def dense(request: AttentionRequest, seen: Tensor) -> oracle.Dense:
    """The whole attention in float64."""
    q, k, v = (tensor.double() for tensor in (request.q, request.k, request.v))
    bias, sinks = (None if tensor is None else tensor.double() for tensor in (request.bias, request.sinks))
    return oracle.attend(q, k, v, seen, bias=bias, sinks=sinks, softcap=request.softcap, scale=request.scale)


def assert_close(found: dict[PartName, Tensor], exact: dict[str, Tensor], weights: Tensor, tolerance: float) -> None:
    """Compare within a tolerance, distances within that share of the keys, the largest key but for ties."""
    values = {STATISTIC[part]: value for part, value in found.items()}
    values["effective_keys"] = values["entropy"].exp().masked_fill(exact["largest_key"] < 0, 0)
    for name, value in values.items():
        if name == "largest_key":
            seeing = exact[name] >= 0
            assert torch.equal(value >= 0, seeing)
            at = weights.gather(-1, value.clamp(min=0)[..., None])[..., 0]
            assert bool((at - exact["largest_weight"])[seeing].abs().le(tolerance).all())
            continue
        allowed = tolerance
        if name in ("mean_distance", "distance_spread"):
            allowed *= max(4, weights.shape[-1])
        elif name == "effective_keys":
            allowed *= 4 * max(1.0, float(exact[name].max()))
        assert oracle.difference(value, exact[name]) <= allowed, name


@settings(max_examples=40)
@given(case=calls(dtypes=NATIVE_DTYPES))
def test_every_statistic_of_a_drawn_call_is_that_of_its_definition(case: Drawn) -> None:
    request = request_of(case.q, case.k, case.v, case.mask, query_start=case.query_start, **case.options)
    bounds = bounds_of(request)
    seen = oracle.shown(case.mask, case.size.cells, case.query_start)
    whole = dense(request, seen)
    if request.bias is not None:
        seen = seen & (request.bias != -torch.inf)
    start = oracle.positions_of_first(case.query_start, *case.size.cells[::2], case.size.keys)
    exact = oracle.statistics(whole.weights, seen, start=start, mask=case.mask)
    for name in SETS:
        with library.using_instruction_set(name):
            attended = kernel.attend(replace(request, requested_statistics=IN_THE_PASS), bounds)
        assert attended.statistics.keys() == set(IN_THE_PASS)
        # bfloat16 scores are products of bfloat16 inputs, summed in float32: as exact as float32's.
        assert_close(attended.statistics, exact, whole.weights, 2e-5)


def long(queries: int, mask: masks.Mask, **options: Any) -> AttentionRequest:
    q, k, v = torch.randn(2, 4, queries, 24), torch.randn(2, 2, 530, 24), torch.randn(2, 2, 530, 40)
    return request_of(2 * q, k, v, mask, query_start=torch.tensor([530 - queries, 17]), **options)


def seen_by(request: AttentionRequest) -> Tensor:
    shape = request.shape
    place = TilePositions.from_sizes(shape.query_length, shape.key_length, query_start=request.query_start)
    return request.mask.tile(place).expand(shape.batch, shape.num_heads, -1, -1)


MASKS = [
    masks.Full(),
    masks.Causal(),
    masks.Window(60, after=30) & masks.Lengths((530, 90)),
    masks.Window(9) | masks.Prefix((3, 0)),
    masks.Keep(torch.rand(2, 4, 1, 530, generator=torch.Generator().manual_seed(5)) < 0.3),
]


@pytest.mark.parametrize("rows_together", [8 << 20, 0], ids=["whole", "in blocks of rows"])
@pytest.mark.parametrize("queries", [1, 7, 210])
@pytest.mark.parametrize("mask", MASKS, ids=lambda mask: type(mask).__name__)
def test_long_calls_are_measured_right_in_both_passes(
    mask: masks.Mask, queries: int, rows_together: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Distances are of hundreds of keys, weights are of every size, and cells of a map divide neither side."""
    monkeypatch.setattr("multihead.kernels.native.call.DENSE_BLOCK_BYTES", rows_together)
    request = long(queries, mask, sinks=torch.randn(4), softcap=20.0, bias=torch.randn(1, 4, 1, 530))
    bounds, seen, special = bounds_of(request), seen_by(request), torch.rand(2, 530) < 0.2
    whole = dense(request, seen)
    exact = oracle.statistics(whole.weights, seen, start=[530 - queries, 17], special_keys=special)
    cells = torch.nn.functional.pad(whole.weights, (0, -530 % 37, 0, -queries % 23))
    sums = cells.unflatten(2, (-1, 23)).unflatten(4, (-1, 37)).sum((3, 5))
    for name in SETS:
        with library.using_instruction_set(name):
            _, found = measure_in_one_pass(request, bounds, PARTS_OF_ONE_PASS, special)
            received, pooled = sum_weights_per_key(request, bounds, whole.logsumexp.float(), cell=(23, 37))
            alone, nothing = sum_weights_per_key(request, bounds, whole.logsumexp.float(), cell=None)
        assert found.keys() == set(PARTS_OF_ONE_PASS)
        assert_close(found, exact, whole.weights, 2e-5)
        assert oracle.difference(received, exact["received"]) < 2e-5
        assert nothing is None
        assert oracle.difference(alone, exact["received"]) < 2e-5
        assert pooled is not None
        assert oracle.difference(pooled, sums) < 1e-4


def test_a_spread_stays_exact_far_away_from_the_query() -> None:
    """Weight on two neighbouring keys 8,000 tokens away: the square of the distance would have no bit left for it."""
    k = torch.full((1, 1, 8200, 1), -200.0)
    k[0, 0, 100:102] = 0
    request = request_of(torch.ones(1, 1, 120, 1), k, k, query_start=8100, scale=1.0)
    for name in SETS:
        with library.using_instruction_set(name):
            for some in (
                request,
                replace(request, q=request.q[:, :, :2], shape=request.shape._replace(query_length=2)),
            ):
                _, found = measure_in_one_pass(some, bounds_of(some), ("mean_distance", "distance_spread"), None)
                rows = torch.arange(some.shape.query_length)
                assert found["mean_distance"][0, 0].tolist() == (8100 + rows - 100.5).tolist()
                assert found["distance_spread"][0, 0].tolist() == pytest.approx([0.5] * len(rows), abs=1e-5)


@pytest.mark.parametrize("queries", [2, 20])
def test_a_spread_stays_exact_where_each_block_of_keys_has_a_larger_weight(queries: int) -> None:
    """Distances are relative to that of the largest key, which moves with each block and to the other side."""
    k = (torch.arange(2000.0) / 100)[None, None, :, None]
    request = request_of(torch.ones(1, 1, queries, 1), k, k, query_start=900, scale=1.0)
    weights = k[0, 0, :, 0].double().softmax(0)
    distance = (torch.arange(900, 900 + queries)[:, None] - torch.arange(2000)).abs().double()
    mean = distance @ weights
    spread = ((distance - mean[:, None]).square() @ weights).sqrt()
    for name in SETS:
        with library.using_instruction_set(name):
            _, found = measure_in_one_pass(request, bounds_of(request), ("mean_distance", "distance_spread"), None)
        assert oracle.difference(found["mean_distance"][0, 0] / mean, torch.ones(queries)) < 1e-6
        assert oracle.difference(found["distance_spread"][0, 0] / spread, torch.ones(queries)) < 1e-5


@pytest.mark.parametrize("rows_together", [8 << 20, 0], ids=["whole", "in blocks of rows"])
@pytest.mark.parametrize("mask", MASKS, ids=lambda mask: type(mask).__name__)
def test_one_pass_without_values_has_the_logsumexp_of_the_call(
    mask: masks.Mask, rows_together: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("multihead.kernels.native.call.DENSE_BLOCK_BYTES", rows_together)
    request = long(210, mask, sinks=torch.randn(4))
    bounds = bounds_of(request)
    for name in SETS:
        with library.using_instruction_set(name):
            logsumexp, found = measure_in_one_pass(request, bounds, (), None)
            expected = kernel.attend(request, bounds).logsumexp
        assert found == {}
        assert torch.equal(logsumexp, expected)


def test_of_equal_weights_the_first_key_is_named() -> None:
    k = torch.zeros(1, 1, 1200, 4)
    k[0, 0, [3, 260, 261, 1100]] = 1
    for queries in (1, 20):
        request = request_of(torch.ones(1, 1, queries, 4), k, k)
        for name in SETS:
            with library.using_instruction_set(name):
                _, found = measure_in_one_pass(request, bounds_of(request), ("largest_key",), None)
            assert found["largest_key"].flatten().tolist() == [3] * queries


def test_rows_without_a_logsumexp_count_as_nothing_in_what_keys_receive() -> None:
    request = long(100, masks.Full())
    bounds = bounds_of(request)
    logsumexp = dense(request, seen_by(request)).logsumexp.float()
    logsumexp[0, 1, 5], logsumexp[1, 2, 99] = torch.nan, -torch.inf
    kept = logsumexp.isfinite()
    exact = dense(request, seen_by(request)).weights * kept[..., None]
    for name in SETS:
        with library.using_instruction_set(name):
            received, _ = sum_weights_per_key(request, bounds, logsumexp, cell=None)
        assert oracle.difference(received, exact.sum(2)) < 2e-5


def test_only_what_is_wanted_is_measured() -> None:
    found = statistics_of_one_pass(frozenset(("received", "entropy", ("offset_mass", 0), SPECIAL_MASS.name)))
    assert found.requested_bits == 1 + 16
    assert found.parts == ("entropy", ("offset_mass", 0), None, None)


def test_the_results_of_an_operator_are_named_by_part() -> None:
    found = statistics_of_one_pass(PARTS_OF_ONE_PASS, special=True)
    rows = torch.arange(10.0)[:, None, None, None].expand(10, 2, 3, 4)
    parts = found.name_results(rows, torch.full((2, 3, 4), 7))
    assert found.requested_bits == 511
    offsets = [("offset_mass", offset) for offset in (0, -1, 1)]
    order = ("entropy", "largest_weight", "mean_distance", "distance_spread", *offsets, ("first_keys_mass", 1))
    assert [float(parts[part][0, 0, 0]) for part in (*order, SPECIAL_MASS.name, "near_mass")] == list(range(10))
    assert torch.equal(parts["largest_key"], torch.full((2, 3, 4), 7))
