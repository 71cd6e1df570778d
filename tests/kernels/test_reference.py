"""The kernel that writes every weight down."""

from __future__ import annotations

import pytest
import torch

from multihead.functional import attention_with_logsumexp, request_of
from multihead.kernels import reference
from multihead.plan.bounds import key_bounds


def test_softmax_of_empty_rows_is_zero_with_no_nan_in_the_gradient() -> None:
    cells = torch.tensor([[[[1.0, 2.0], [-torch.inf, -torch.inf]]]], dtype=torch.float64, requires_grad=True)
    weights, logsumexp = reference.softmax(cells, None)
    assert weights[0, 0, 1].tolist() == [0, 0]
    assert logsumexp[0, 0, 1] == -torch.inf
    (weights.square().sum() + logsumexp[0, 0, 0]).backward()
    assert cells.grad is not None
    assert cells.grad[0, 0, 1].tolist() == [0, 0]
    assert bool(cells.grad.isfinite().all())


def test_softmax_does_not_overflow() -> None:
    weights, logsumexp = reference.softmax(torch.tensor([[[[3e38, 3e38]]]]), torch.tensor([3e38]))
    assert weights.flatten().tolist() == pytest.approx([1 / 3, 1 / 3])
    assert bool(logsumexp.isfinite().all())


def test_it_takes_every_request_and_holds_three_maps() -> None:
    q = torch.zeros(2, 4, 5, 8)
    request = request_of(q, q, q, dropout=0.5, softcap=3.0)
    bounds = key_bounds(request.mask, queries=5, keys=5)
    assert reference.refusal(request, bounds) is None
    work = reference.work(request, bounds)
    assert work.cells == 2 * 4 * 5 * 5
    assert work.memory == 3 * 4 * work.cells


def test_its_gradients_are_those_of_finite_differences() -> None:
    q, k, v = torch.randn(3, 1, 2, 3, 2, dtype=torch.float64, requires_grad=True).unbind()
    bias = torch.randn(1, 2, 3, 3, dtype=torch.float64, requires_grad=True)
    sinks = torch.randn(2, dtype=torch.float64, requires_grad=True)

    def run(*given: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        q, k, v, bias, sinks = given
        return attention_with_logsumexp(q, k, v, bias=bias, sinks=sinks, softcap=2.0, kernel="reference")

    assert torch.autograd.gradcheck(run, (q, k, v, bias, sinks))
    assert torch.autograd.gradgradcheck(run, (q, k, v, bias, sinks))
