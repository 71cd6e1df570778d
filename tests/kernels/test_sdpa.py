"""PyTorch's fused attention on the rectangles of a plan."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from multihead import masks
from multihead.functional import attention, attention_with_logsumexp, request_of, statistics
from multihead.kernels import sdpa
from multihead.kernels.plan import rectangles
from multihead.kernels.plan.bounds import key_bounds
from tests import oracle


def refusal(**options: Any) -> str | None:
    q = torch.zeros(1, 2, 4, 8)
    request = request_of(q, q, q, **options)
    return sdpa.refusal(request, key_bounds(request.mask, queries=4, keys=4))


def test_its_refusals_are_one_sentence() -> None:
    bias = torch.zeros(1, 1, 4, 4, requires_grad=True)
    assert refusal() is None
    assert refusal(dropout=0.1) == "PyTorch's fused kernels are called without dropout"
    assert refusal(softcap=5.0) == "PyTorch's fused kernels have no softcap"
    assert refusal(bias=bias) == "PyTorch's fused kernels have no gradient for a bias"
    assert refusal(bias=bias.detach()) is None
    with torch.no_grad():
        assert refusal(bias=bias) is None


def test_it_refuses_tensors_of_another_device() -> None:
    q = torch.zeros(1, 2, 4, 8, device="meta")
    request = request_of(q, q, q)
    bounds = key_bounds(request.mask, queries=4, keys=4)
    assert (
        sdpa.refusal(request, bounds)
        == "it calls PyTorch's fused kernels for the CPU and CUDA, and the tensors are on meta"
    )


@pytest.mark.parametrize("which", [0, 1, 2])
def test_features_that_do_not_lie_side_by_side_are_read_right(which: int) -> None:
    """The fused kernel reads features as if their stride were 1: a q laid out as (features, queries) gave garbage."""
    tensors = [torch.randn(2, 2, 20, 8) for _ in range(3)]
    expected = attention(*tensors, kernel="sdpa")
    tensors[which] = tensors[which].mT.contiguous().mT
    assert torch.equal(attention(*tensors, kernel="sdpa"), expected)
    of_one_sample = torch.randn(64).as_strided((1, 2, 20, 8), (1, 8, 0, 1))  # a batch of 1 has any stride
    for repeated in (torch.randn(2, 2, 20, 1).expand(-1, -1, -1, 8), of_one_sample):
        tensors = [tensor[: len(repeated)] for tensor in tensors]
        tensors[which] = repeated
        given = attention(*tensors, kernel="sdpa")
        tensors[which] = repeated.contiguous()
        assert torch.equal(given, attention(*tensors, kernel="sdpa"))


@pytest.mark.parametrize("scale", [-0.5, 0.0])
def test_a_scale_that_is_not_positive_leaves_hidden_keys_hidden(scale: float) -> None:
    """The fused kernel hides keys by -inf before it scales: -inf * 0 is NaN, and -inf * -0.5 showed them alone."""
    q, k, v = torch.randn(3, 2, 2, 20, 8, dtype=torch.float64).unbind()
    seen = oracle.shown(masks.Causal(), (2, 2, 20, 20))
    exact = oracle.attend(q, k, v, seen, scale=scale)
    output, logsumexp = attention_with_logsumexp(q, k, v, mask=masks.Causal(), scale=scale, kernel="sdpa")
    assert oracle.difference(output, exact.output) < 1e-13
    assert oracle.difference(logsumexp, exact.logsumexp) < 1e-13


def test_merged_rectangles_lose_nothing_where_one_of_them_outweighs_the_other() -> None:
    q, k, v = torch.randn(3, 1, 1, 8, 4, dtype=torch.float64).unbind()
    k[..., :300, :] *= 200
    seen = oracle.shown(masks.Causal(), (1, 1, 4, 8), 4)
    exact = oracle.attend(q[:, :, :4], k, v, seen)
    given = attention_with_logsumexp(q[:, :, :4], k, v, mask=masks.Causal(), query_start=4, kernel="sdpa")
    assert oracle.difference(given[0], exact.output) < 1e-12
    assert oracle.difference(given[1], exact.logsumexp) < 1e-11


def test_only_tensors_that_require_a_gradient_get_one() -> None:
    q, k, v = torch.randn(3, 1, 2, 5, 4).unbind()
    sinks = torch.randn(2, requires_grad=True)
    attention(q, k, v, sinks=sinks, kernel="sdpa").sum().backward()
    assert sinks.grad is not None
    v = v.clone().requires_grad_()
    attention(q, k, v, kernel="sdpa").sum().backward()
    assert v.grad is not None
    assert torch.allclose(v.grad.sum(), torch.tensor(2.0 * 5 * 4))


def test_gradients_of_many_rectangles_are_summed_before_they_are_rounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each key gets a small gradient from each of 128 blocks: added up in bfloat16, most of it would be lost."""
    monkeypatch.setattr(rectangles, "BLOCK_ROWS", 4)
    q, k, v = torch.randn(3, 1, 1, 512, 8).bfloat16().unbind()
    v = v.clone().requires_grad_()
    gaps = masks.Keep(torch.arange(512) % 5 != 1, "keys")
    attention(q, k, v, mask=gaps, kernel="sdpa").sum().backward()
    received = statistics(q, k, mask=gaps, probes=("received",))["received"]  # the weight that each value receives
    assert v.grad is not None
    error = (v.grad[..., 0].float() - received).abs() / received.clamp(min=0.1)
    assert float(error.max()) < torch.finfo(torch.bfloat16).eps


class LargestTensor(TorchDispatchMode):
    """Records the number of elements of the largest tensor that any operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, Tensor):
                self.elements = max(self.elements, tensor.untyped_storage().nbytes() // tensor.element_size())
        return result


LONG = 4096
NARROW: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"mask": masks.Causal()},
    "window": {"mask": masks.Window(100)},
    "documents": {"mask": masks.Documents((1000, 3000, 96))},
    "dense remainder": {"mask": masks.Window(100) | masks.Prefix(5)},
    "keys dropped": {"mask": masks.Drop(torch.arange(LONG).remainder(7) == 3, "keys")},
    "a bias a key": {"bias": torch.zeros(1, 1, 1, LONG)},
}


@pytest.mark.parametrize("name", NARROW)
def test_it_never_holds_queries_by_keys(name: str) -> None:
    """A bias of one number a key was once spread over all queries: 64 MiB at 4,096 keys."""
    q, k, v = torch.randn(3, 1, 1, LONG, 16).unbind()
    q.requires_grad_()
    with LargestTensor() as largest:
        attention(q, k, v, kernel="sdpa", **NARROW[name])
    assert 0 < largest.elements <= LONG * LONG // 16


def test_its_work_counts_the_cells_of_its_rectangles() -> None:
    q = torch.zeros(2, 4, 100, 8)
    request = request_of(q, q, q, mask=masks.Lengths((50, 20)))
    work = sdpa.estimate_work(request, key_bounds(request.mask, queries=100, keys=100))
    assert work.computed_cells == 4 * 100 * (50 + 20)
    request = request_of(q, q, q)
    assert (
        sdpa.estimate_work(request, key_bounds(request.mask, queries=100, keys=100)).computed_cells == 2 * 4 * 100 * 100
    )


def test_its_work_leaves_out_the_blocks_that_pytorch_skips_under_a_causal_mask() -> None:
    request = request_of(*torch.zeros(3, 1, 1, 1024, 8).unbind(), masks.Causal())
    work = sdpa.estimate_work(request, key_bounds(request.mask, queries=1024, keys=1024))
    assert work.computed_cells == 512 * 512 + 512 * 1024
