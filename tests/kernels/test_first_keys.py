"""The first keys that queries see, against dense masks."""

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
from multihead.kernels import first_keys as module
from multihead.kernels.call import AttentionRequest
from multihead.kernels.first_keys import first_keys, first_seen
from multihead.kernels.plan.bounds import bounds_of
from tests import oracle
from tests.drawing import Drawn, Every, calls


@settings(max_examples=60)
@given(case=calls())
def test_the_first_keys_of_any_call_are_those_of_its_dense_mask(case: Drawn) -> None:
    """In tiles of three queries and two keys, so that the search goes on from tile to tile."""
    request = request_of(case.q, case.k, case.v, case.mask, query_start=case.query_start, **case.options)
    seen = oracle.shown(case.mask, case.size.cells, case.query_start)
    if request.bias is not None:
        seen = seen & (request.bias != -torch.inf)
    keys = seen.any(1)  # (batch, queries, keys)
    with patch.multiple(module, ROWS=3, COLUMNS=2):
        found = first_seen(request, bounds_of(request)).expand(case.size.batch, -1)
        of_samples = first_keys(request, bounds_of(request)).expand(case.size.batch)
    assert torch.equal(found, torch.where(keys.any(-1), keys.int().argmax(-1), case.size.keys))
    ever = keys.any(1)
    assert torch.equal(of_samples, torch.where(ever.any(-1), ever.int().argmax(-1), -1))


def call(mask: masks.Mask, queries: int = 6, bias: Tensor | None = None) -> AttentionRequest:
    q, k = torch.zeros(2, 1, queries, 4), torch.zeros(2, 1, 6, 4)
    return request_of(q, k, k, mask, bias=bias, query_start=0)


def test_a_call_without_queries_has_no_first_key() -> None:
    request = call(masks.Causal(), 0)
    assert first_keys(request, bounds_of(request)).tolist() == [-1]


def test_the_first_keys_of_a_plan_are_found_once_but_not_under_a_dispatch_mode() -> None:
    request = call(masks.Full())
    bounds = bounds_of(request)
    with patch.object(module, "_OF_PLANS", WeakKeyDictionary()):  # other tests share the plan of so common a call
        with FlopCounterMode(display=False):
            under_a_mode = first_keys(request, bounds)
        assert first_keys(request, bounds) is not under_a_mode
        assert first_keys(request, bounds) is first_keys(request, bounds)


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
    found = {index: first_keys(requests[index], bounds_of(requests[index])).tolist() for index in order}
    assert found == {0: [0], 1: [2]}
