"""flex_attention's kernel on the simulated GPU: NaN and inf in every place, and what the layers of a model share."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import multihead as mh
from multihead import masks
from multihead.functional import request_of
from multihead.kernels import flex
from multihead.kernels.plan import bounds as plan_bounds
from multihead.kernels.plan.bounds import MOST_MASKS_WITH_TENSORS, bounds_of
from multihead.scores.bias import RelativeBias
from tests import oracle
from tests.kernels.test_flex import taking_calls_on_the_cpu
from tests.simulated_gpu.device import Counts, Gpu, simulated_gpu, skip_where_not_simulated, to_cpu, to_gpu

skip_where_not_simulated(module=True)

KEYS, AXES = 12, "batch heads queries keys"


@pytest.fixture
def gpu() -> Iterator[Gpu]:
    with simulated_gpu() as found:
        yield found


@dataclass(frozen=True)
class _Steps(masks.Mask):
    """A mask that holds a tensor and a list, which cannot be hashed."""

    tensor: Tensor
    sizes: list[int]

    def visible(self, queries: Tensor, keys: Tensor) -> Tensor:
        return (queries >= keys) & (keys >= self.tensor.view(-1, 1, 1, 1))


MASKS: dict[str, masks.Mask] = {
    "lengths": masks.Lengths((KEYS, 5)),
    "lengths of which one is 0, causal": masks.Causal() & masks.Lengths((KEYS, 0)),
    "documents": masks.Documents((5, 4, 3)) & masks.Causal(),
    "no interval": masks.Window(3) | masks.Prefix(2),
    "cells": masks.Keep(torch.rand(2, 1, KEYS, KEYS, generator=torch.Generator().manual_seed(5)) > 0.6, AXES),
}


def planted(place: str) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return q, k, v and a bias in bfloat16 with values that are not finite in one place, or in all."""
    q, k, v = (torch.randn(2, heads, KEYS, 16).bfloat16() for heads in (4, 2, 2))
    bias = torch.randn(1, 4, KEYS, KEYS) if place in ("a bias", "everywhere") else None
    if place in ("a query", "everywhere"):
        q[0, 1, 3, 2], q[1, 2, 4], q[1, 0, 0, 5] = torch.nan, torch.inf, -torch.inf
    if place in ("a key", "everywhere"):
        k[0, 0, 7, 1], k[1, 1, 2, 0], k[1, 0, 9] = torch.nan, -torch.inf, torch.inf
    if place in ("a value", "everywhere"):
        v[0, 1, 5, 3], v[1, 0, 8, 0], v[0, 0, 11] = torch.inf, torch.nan, -torch.inf
    if bias is not None:
        bias[0, 1, 6, 2], bias[0, 2, 9, 8], bias[0, 0, 4, 3] = torch.nan, torch.inf, -torch.inf
        bias[0, 0, 9:, 7] = -torch.inf  # hides a key that may be NaN
    return q, k, v, bias


def expected(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, mask: masks.Mask, softcap: float | None
) -> tuple[Tensor, Tensor]:
    """Return output and logsumexp by the contract: a row is NaN if it sees, or is, what is not finite."""
    seen = oracle.shown(mask, (*q.shape[:3], k.shape[2]))
    bad_queries = ~q.isfinite().all(-1)
    bad_keys = ~(k.isfinite().all(-1) & v.isfinite().all(-1)).repeat_interleave(q.shape[1] // k.shape[1], 1)
    bad_cells = torch.zeros(1, dtype=torch.bool)
    if bias is not None:
        bad_cells = bias.isnan() | (bias == torch.inf)
        seen = seen & (bias != -torch.inf)
    found = dense_of(*(each.double().nan_to_num(0, 0, 0) for each in (q, k, v)), bias, mask, softcap)
    bad = (seen & (bad_keys[:, :, None] | bad_cells)).any(-1) | (bad_queries & seen.any(-1))
    return found.output.masked_fill(bad[..., None], torch.nan), found.logsumexp.masked_fill(bad, torch.nan)


def dense_of(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, mask: masks.Mask, softcap: float | None
) -> oracle.Dense:
    """Compute a call in float64 of finite q, k and v, with 0 for each number of a bias that is not finite."""
    seen = oracle.shown(mask, (*q.shape[:3], k.shape[2]))
    if bias is None:
        return oracle.attend(q, k, v, seen, softcap=softcap)
    numbers = bias.double().masked_fill(bias.isnan() | (bias == torch.inf), 0)
    return oracle.attend(q, k, v, seen & (bias != -torch.inf), bias=numbers, softcap=softcap)


def on_gpu(mask: masks.Mask) -> masks.Mask:
    """Return a mask whose tensors are on the simulated GPU."""
    return masks.Keep(to_gpu(mask.tensor), mask.axes) if isinstance(mask, masks.Keep) else mask


@pytest.mark.parametrize("place", ["a query", "a key", "a value", "a bias", "everywhere"])
@pytest.mark.parametrize("name", MASKS)
def test_what_is_not_finite_reaches_the_queries_that_see_it_and_no_other(name: str, place: str, gpu: Gpu) -> None:
    q, k, v, bias = planted(place)
    mask, softcap = MASKS[name], 5.0 if place == "everywhere" else None
    there, options = on_gpu(mask), {"bias": None if bias is None else to_gpu(bias), "softcap": softcap}
    output, logsumexp = mh.attention_with_logsumexp(*to_gpu([q, k, v]), mask=there, **options)
    right = expected(q, k, v, bias, mask, softcap)
    assert oracle.difference(to_cpu(output).double(), right[0]) < 2e-2
    assert oracle.difference(to_cpu(logsumexp).double(), right[1]) < 1e-5
    gpu.counts = Counts()
    mh.attention(*to_gpu([q, k, v]), mask=there, **options)
    assert gpu.counts.totals == {"launches": 4, "reads": 0, "copies": 0}


@pytest.mark.parametrize("place", ["a query", "a key", "a value", "a bias", "everywhere"])
@pytest.mark.parametrize("name", MASKS)
def test_gradients_are_those_of_the_rows_that_are_finite(name: str, place: str) -> None:
    """Autograd's engine needs a real device, so the call runs on the CPU, by the eager flex_attention."""
    q, k, v, bias = planted(place)
    mask, softcap = MASKS[name], 5.0 if place == "everywhere" else None
    leaves = [each.float().requires_grad_() for each in (q, k, v)]
    request = request_of(*leaves, mask=mask, bias=bias, softcap=softcap)
    with taking_calls_on_the_cpu():
        found = flex._attend(request, bounds_of(request), nonfinite="marked")
        right = expected(*(each.float() for each in (q, k, v)), bias, mask, softcap)
        assert oracle.difference(found.output.detach().double(), right[0]) < 1e-5
        assert oracle.difference(found.logsumexp.detach().double(), right[1]) < 1e-5
        given = torch.randn_like(found.output), torch.randn_like(found.logsumexp)
        grads = torch.autograd.grad((found.output, found.logsumexp), leaves, given)
    exact = [each.double().nan_to_num(0, 0, 0).requires_grad_() for each in (q, k, v)]
    dense = dense_of(*exact, bias, mask, softcap)
    of_rows = [
        each.double().masked_fill(~right[1].isfinite().view(*right[1].shape, *(1,) * (each.dim() - 3)), 0)
        for each in given
    ]
    bad_keys = ~(k.isfinite().all(-1) & v.isfinite().all(-1))
    bad = ~q.isfinite().all(-1), bad_keys, bad_keys
    of_leaves = torch.autograd.grad(
        (dense.output, dense.logsumexp.masked_fill(~dense.logsumexp.isfinite(), 0)), exact, of_rows
    )
    for mine, of_leaf, rows in zip(grads, of_leaves, bad, strict=True):
        assert oracle.difference(mine.double(), of_leaf.masked_fill(rows[..., None], 0)) < 1e-5


def test_with_gradients_a_call_takes_few_launches_too(gpu: Gpu) -> None:
    q, k, v, _ = planted("everywhere")
    given = [each.requires_grad_() for each in to_gpu([q, k, v])]
    for name, mask in MASKS.items():
        there = on_gpu(mask)
        output, logsumexp = mh.attention_with_logsumexp(*given, mask=there)
        assert output.requires_grad, name
        right = expected(q, k, v, None, mask, None)
        assert oracle.difference(to_cpu(output.detach()).double(), right[0]) < 2e-2
        assert oracle.difference(to_cpu(logsumexp.detach()).double(), right[1]) < 1e-5
        gpu.counts = Counts()
        mh.attention(*given, mask=there)
        assert gpu.counts.totals == {"launches": 5, "reads": 0, "copies": 0}


def test_sinks_that_are_not_finite_reach_the_rows_of_their_head_that_see_a_key(gpu: Gpu) -> None:
    q, k, v, _ = planted("a key")
    sinks = torch.tensor([0.5, torch.nan, torch.inf, -torch.inf])
    for name in ("lengths of which one is 0, causal", "no interval"):
        mask = MASKS[name]
        seen = oracle.shown(mask, (2, 4, KEYS, KEYS))
        finite = (each.double().nan_to_num(0, 0, 0) for each in (q, k, v))
        right = oracle.attend(*finite, seen, sinks=sinks.double().nan_to_num(0, 0, -torch.inf))
        _, of_keys = expected(q, k, v, None, mask, None)
        bad = of_keys.isnan() | (torch.tensor([False, True, True, False])[:, None] & seen.any(-1))
        there = to_gpu(sinks)
        output, logsumexp = mh.attention_with_logsumexp(*to_gpu([q, k, v]), mask=mask, sinks=there)
        for found, exact in ((output, right.output), (logsumexp, right.logsumexp)):
            shape = (*bad.shape, *(1,) * (exact.dim() - 3))
            assert oracle.difference(to_cpu(found).double(), exact.masked_fill(bad.view(shape), torch.nan)) < 2e-2
        gpu.counts = Counts()
        mh.attention(*to_gpu([q, k, v]), mask=mask, sinks=there)
        assert gpu.counts.totals["launches"] < 20


def test_a_bias_of_distances_that_is_not_finite_does_so_too(gpu: Gpu) -> None:
    q, k, v, _ = planted("a key")
    values = torch.randn(1, 4, 2 * KEYS - 1)
    values[0, 1, 4], values[0, 2, 9], values[0, 0, 15] = torch.nan, torch.inf, -torch.inf
    dense = values[:, :, torch.arange(KEYS) - torch.arange(KEYS)[:, None] + KEYS - 1]
    output = mh.attention(*to_gpu([q, k, v]), mask=masks.Causal(), bias=RelativeBias(to_gpu(values)))
    right, _ = expected(q, k, v, dense, masks.Causal(), None)
    assert oracle.difference(to_cpu(output).double(), right) < 2e-2


class TestWhatTheLayersOfAPassShare:
    @staticmethod
    def launches(gpu: Gpu, mask: masks.Mask, given: Any) -> int:
        gpu.counts = Counts()
        with torch.no_grad():
            mh.attention(*given, mask=mask)
        return gpu.counts.totals["launches"]

    @pytest.fixture
    def given(self, gpu: Gpu) -> Any:
        return to_gpu([torch.randn(2, 2, KEYS, 16).bfloat16() for _ in range(3)])

    def test_the_blocks_of_a_mask_with_tensors_are_found_once(self, gpu: Gpu, given: Any) -> None:
        lengths, cells = to_gpu(torch.tensor([KEYS, 5])), to_gpu(torch.rand(2, 1, KEYS, KEYS) > 0.5)
        for make in (lambda: masks.Causal() & masks.Lengths(lengths), lambda: masks.Keep(cells, AXES)):
            assert self.launches(gpu, make(), given) > 10
            assert self.launches(gpu, make(), given) == 4  # another mask object with the same tensors

    def test_they_are_found_again_after_the_tensor_changed(self, gpu: Gpu, given: Any) -> None:
        lengths = to_gpu(torch.tensor([KEYS, 5]))
        mask = masks.Lengths(lengths)
        mh.attention(*given, mask=mask)
        lengths[1] = 2
        q, k, v = (each.double() for each in to_cpu(given))
        right = oracle.attend(q, k, v, oracle.shown(masks.Lengths((KEYS, 2)), (2, 2, KEYS, KEYS)))
        assert oracle.difference(to_cpu(mh.attention(*given, mask=mask)).double(), right.output) < 2e-2

    def test_tensors_that_count_no_changes_are_read_each_time(self, gpu: Gpu, given: Any) -> None:
        with torch.inference_mode():
            lengths = to_gpu(torch.tensor([KEYS, 5]))
            assert lengths.is_inference()
        mask = masks.Lengths(lengths)
        assert min(self.launches(gpu, mask, given) for _ in range(2)) > 10

    def test_a_mask_that_cannot_be_hashed_is_planned_each_time(self, gpu: Gpu, given: Any) -> None:
        mask = _Steps(to_gpu(torch.tensor([0, 2])), [1])
        assert min(self.launches(gpu, mask, given) for _ in range(2)) > 10

    def test_few_masks_are_kept(self, gpu: Gpu, given: Any) -> None:
        for _ in range(MOST_MASKS_WITH_TENSORS + 3):
            mh.attention(*given, mask=masks.Keep(to_gpu(torch.rand(1, 1, KEYS, KEYS) > 0.5), AXES))
        caches = (plan_bounds._BOUNDS_OF_TENSORS, flex._DENSE_BLOCK_MASKS)
        assert [len(cache.entries) for cache in caches] == [MOST_MASKS_WITH_TENSORS] * 2
