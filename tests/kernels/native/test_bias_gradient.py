"""The gradient of a bias that speaks of the distance alone, against the oracle, in one block and in many."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from multihead import masks
from multihead.functional import attention_with_logsumexp
from multihead.scores.bias import RelativeBias
from tests import oracle
from tests.agreeing import loss
from tests.kernel_names import needs_native

pytestmark = needs_native
MASKS = [
    masks.Full(),
    masks.Causal() & masks.Window(40),
    masks.Causal() | masks.Prefix(3),
    masks.Window(2) | masks.Prefix(1),
]


def found(q: Tensor, k: Tensor, v: Tensor, values: Tensor, mask: masks.Mask) -> list[Tensor]:
    tensors = [each.clone().requires_grad_() for each in (q, k, v, values)]
    output, logsumexp = attention_with_logsumexp(
        *tensors[:3], mask=mask, bias=RelativeBias(tensors[3]), query_start=0, kernel="native"
    )
    return [output.detach(), *torch.autograd.grad(loss(output, logsumexp), tensors)]


def expected(q: Tensor, k: Tensor, v: Tensor, values: Tensor, mask: masks.Mask) -> list[Tensor]:
    tensors = [each.double().requires_grad_() for each in (q, k, v, values)]
    sizes = (len(q), q.shape[1], q.shape[2], k.shape[2])
    diagonal = torch.arange(sizes[3]) - torch.arange(sizes[2])[:, None] + sizes[2] - 1
    dense = oracle.attend(*tensors[:3], oracle.shown(mask, sizes), bias=tensors[3][:, :, diagonal])
    return [dense.output.detach(), *torch.autograd.grad(loss(dense.output, dense.logsumexp), tensors)]


@pytest.mark.parametrize("mask", MASKS, ids=repr)
@pytest.mark.parametrize(("samples", "heads"), [(1, 4), (2, 1), (2, 4), (1, 1)])
def test_it_is_that_of_the_oracle(mask: masks.Mask, samples: int, heads: int) -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 4, 70, 8), torch.randn(2, 2, 67, 8), torch.randn(2, 2, 67, 5)
    values = torch.randn(samples, heads, 136)
    for one, two in zip(found(q, k, v, values, mask), expected(q, k, v, values, mask), strict=True):
        assert one.shape == two.shape
        assert oracle.difference(one, two) < 2e-4


def test_blocks_of_a_dense_mask_have_their_own_distances(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("multihead.kernels.native.call.DENSE_BLOCK_BYTES", 0)  # blocks of 96 queries
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 4, 130, 8), torch.randn(2, 2, 67, 8), torch.randn(2, 2, 67, 5)
    values, mask = torch.randn(1, 4, 196), masks.Window(20) | masks.Prefix(3)
    for one, two in zip(found(q, k, v, values, mask), expected(q, k, v, values, mask), strict=True):
        assert oracle.difference(one, two) < 2e-4


def test_many_keys_are_computed_in_blocks_of_queries() -> None:
    """A block of 64 queries has a map of 64 MB, so that 70 queries are two blocks."""
    torch.manual_seed(0)
    sizes = ((2, 4, 70, 4), (2, 4, 33_000, 4), (2, 4, 33_000, 4), (2, 4, 70 + 33_000 - 1))
    drawn = [torch.randn(size) for size in sizes]
    for one, two in zip(found(*drawn, masks.Full()), expected(*drawn, masks.Full()), strict=True):
        assert oracle.difference(one, two) < 2e-4


@pytest.mark.parametrize(("queries", "keys"), [(0, 3), (3, 0), (1, 1)])
def test_calls_of_almost_nothing_have_gradients(queries: int, keys: int) -> None:
    q, k, v = torch.randn(1, 2, queries, 4), torch.randn(1, 2, keys, 4), torch.randn(1, 2, keys, 4)
    values = torch.randn(1, 2, max(queries + keys - 1, 0))
    gradients = found(q, k, v, values, masks.Full())[1:]
    assert [tuple(each.shape) for each in gradients] == [tuple(each.shape) for each in (q, k, v, values)]
    assert all(bool(each.isfinite().all()) for each in gradients)


def test_half_precision_is_gathered_in_float32() -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 20, 8) for _ in range(3))
    values = torch.randn(1, 2, 39)
    exact = expected(q.bfloat16(), k.bfloat16(), v.bfloat16(), values.bfloat16(), masks.Full())[4]
    given = found(q.bfloat16(), k.bfloat16(), v.bfloat16(), values.bfloat16(), masks.Full())[4]
    assert given.dtype == torch.bfloat16
    assert oracle.difference(given, exact) < 0.05


@pytest.mark.parametrize(("queries", "keys"), [(0, 1), (1, 0), (0, 0), (0, 3)])
def test_a_relative_bias_without_queries_or_keys_is_read_nowhere(queries: int, keys: int) -> None:
    """Its first number would stand one before the memory of no numbers, at an address below 0."""
    bias = RelativeBias(torch.zeros(1, 1, max(queries + keys - 1, 0)))
    q, k = torch.randn(1, 2, queries, 4), torch.randn(1, 2, keys, 4)
    output, logsumexp = attention_with_logsumexp(q, k, k, bias=bias, kernel="native")
    assert output.shape == (1, 2, queries, 4)
    assert bool((logsumexp == -torch.inf).all())
