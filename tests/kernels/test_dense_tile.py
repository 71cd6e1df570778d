"""The scores of one tile, which of its cells may be seen, and the first keys that queries see."""

from __future__ import annotations

from unittest.mock import patch
from weakref import WeakKeyDictionary

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import multihead as mh
from multihead import masks
from multihead.functional import request_of
from multihead.kernels import dense_tile as module
from multihead.kernels.call import AttentionRequest
from multihead.kernels.dense_tile import (
    first_key_of_queries,
    first_key_of_samples,
    scores,
    select_request_heads,
    visible_cells,
    without_autocast,
    working_dtype,
)
from multihead.kernels.plan.bounds import bounds_of
from tests import oracle
from tests.drawing import Drawn, Every, calls


def test_the_working_dtype_is_float32_and_float64_for_float64() -> None:
    assert working_dtype(torch.float64) == torch.float64
    assert {working_dtype(dtype) for dtype in (torch.float32, torch.float16, torch.bfloat16)} == {torch.float32}


def test_scores_are_capped_and_then_biased() -> None:
    q, k = torch.randn(2, 6, 5, 4, dtype=torch.float64), torch.randn(2, 2, 7, 4, dtype=torch.float64)
    bias = torch.randn(1, 6, 1, 7, dtype=torch.float64)
    request = request_of(q, k, k, bias=bias, softcap=0.7, scale=0.3)
    expected = 0.7 * torch.tanh(0.3 * q @ k.repeat_interleave(3, 1).mT / 0.7) + bias
    assert torch.allclose(scores(request), expected, atol=1e-14)
    tile = scores(request, slice(1, 3), slice(2, 7))
    assert torch.allclose(tile, expected[:, :, 1:3, 2:7], atol=1e-14)


def test_a_tile_sees_what_the_whole_sees() -> None:
    q = torch.zeros(2, 3, 6, 4)
    bias = torch.where(torch.rand(2, 1, 6, 6) < 0.3, -torch.inf, 1.0)
    mask = masks.Causal() | masks.Lengths((2, 4)) & masks.Keep(torch.rand(1, 3, 6, 1) < 0.5)
    request = request_of(q, q, q, mask=mask, bias=bias)
    expected = oracle.shown(mask, (2, 3, 6, 6)) & (bias != -torch.inf)
    tile = visible_cells(request, slice(2, 5), slice(1, 6)).expand(2, 3, 3, 5)
    assert torch.equal(tile, expected[:, :, 2:5, 1:6])


def test_chosen_heads_keep_their_own_keys_bias_and_sinks() -> None:
    q, k = torch.randn(2, 6, 5, 4), torch.randn(2, 2, 5, 4)
    bias, sinks = torch.randn(2, 6, 5, 5), torch.randn(6)
    narrow = select_request_heads(request_of(q, k, k, bias=bias, sinks=sinks), torch.tensor([4, 1]))
    assert torch.equal(narrow.q, q[:, [4, 1]])
    assert torch.equal(narrow.k, k[:, [1, 0]])
    assert narrow.bias is not None
    assert torch.equal(narrow.bias, bias[:, [4, 1]])
    assert narrow.sinks is not None
    assert torch.equal(narrow.sinks, sinks[[4, 1]])
    assert (narrow.shape.num_heads, narrow.shape.num_kv_heads) == (2, 2)


def test_autocast_is_kept_out_of_a_block() -> None:
    x = torch.randn(3, 3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert (x @ x).dtype == torch.bfloat16
        with without_autocast(x.device):
            assert (x @ x).dtype == torch.float32
    with without_autocast(x.device):
        assert (x @ x).dtype == torch.float32


@settings(max_examples=60)
@given(case=calls())
def test_the_first_keys_of_any_call_are_those_of_its_dense_mask(case: Drawn) -> None:
    """In tiles of three queries and two keys, so that the search goes on from tile to tile."""
    request = request_of(case.q, case.k, case.v, case.mask, query_start=case.query_start, **case.options)
    seen = oracle.shown(case.mask, case.size.cells, case.query_start)
    if request.bias is not None:
        seen = seen & (request.bias != -torch.inf)
    keys = seen.any(1)  # (batch, queries, keys)
    with patch.multiple(module, FIRST_TILE_QUERIES=3, FIRST_TILE_KEYS=2):
        found = first_key_of_queries(request, bounds_of(request)).expand(case.size.batch, -1)
        of_samples = first_key_of_samples(request, bounds_of(request)).expand(case.size.batch)
    assert torch.equal(found, torch.where(keys.any(-1), keys.int().argmax(-1), case.size.keys))
    ever = keys.any(1)
    assert torch.equal(of_samples, torch.where(ever.any(-1), ever.int().argmax(-1), -1))


def call(mask: masks.Mask, queries: int = 6, bias: Tensor | None = None) -> AttentionRequest:
    q, k = torch.zeros(2, 1, queries, 4), torch.zeros(2, 1, 6, 4)
    return request_of(q, k, k, mask, bias=bias, query_start=0)


def test_a_call_without_queries_has_no_first_key() -> None:
    request = call(masks.Causal(), 0)
    assert first_key_of_samples(request, bounds_of(request)).tolist() == [-1]


def test_the_first_keys_of_a_plan_are_found_once_but_not_under_a_dispatch_mode() -> None:
    request = call(masks.Full())
    bounds = bounds_of(request)
    with patch.object(
        module, "_FIRST_KEYS_OF_BOUNDS", WeakKeyDictionary()
    ):  # other tests share the plan of so common a call
        with FlopCounterMode(display=False):
            under_a_mode = first_key_of_samples(request, bounds)
        assert first_key_of_samples(request, bounds) is not under_a_mode
        assert first_key_of_samples(request, bounds) is first_key_of_samples(request, bounds)


@pytest.mark.parametrize("batches", [(2, 1), (1, 2)])
def test_calls_with_one_plan_may_differ_in_their_batch(batches: tuple[int, int]) -> None:
    found = [mh.statistics(q, q, mask=Every(2))["first_mass"] for q in (torch.ones(n, 1, 3, 4) for n in batches)]
    assert [each.shape[0] for each in found] == list(batches)
    for each in found:
        torch.testing.assert_close(each, torch.tensor([0.5, 0, 0.5]).expand_as(each))


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_calls_with_one_plan_and_different_biases_have_their_own_first_keys(order: tuple[int, int]) -> None:
    hides = torch.zeros(1, 1, 1, 6)
    hides[..., :2] = -torch.inf
    requests = [call(masks.Causal()), call(masks.Causal(), bias=hides)]
    found = {index: first_key_of_samples(requests[index], bounds_of(requests[index])).tolist() for index in order}
    assert found == {0: [0], 1: [2]}
