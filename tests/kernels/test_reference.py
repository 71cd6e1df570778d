"""The reference kernel, and second derivatives where a fused kernel has none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import multihead as mh
from multihead import masks
from multihead.errors import ArgumentError, SlowPathError, SlowPathWarning
from multihead.functional import attention_with_logsumexp, request_of
from multihead.kernels import reference
from multihead.kernels.plan.bounds import key_bounds
from multihead.kernels.slow_paths import strict
from multihead.scores.bias import RelativeBias
from tests import oracle
from tests.kernel_names import needs_native


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


def test_it_accepts_every_request_and_holds_three_maps() -> None:
    q = torch.zeros(2, 4, 5, 8)
    request = request_of(q, q, q, dropout=0.5, softcap=3.0)
    bounds = key_bounds(request.mask, queries=5, keys=5)
    assert reference.refusal(request, bounds) is None
    work = reference.estimate_work(request, bounds)
    assert work.computed_cells == 2 * 4 * 5 * 5
    assert work.extra_memory_bytes == 3 * 4 * work.computed_cells


def test_a_hidden_score_that_overflows_reaches_no_gradient_through_a_softcap() -> None:
    """With few queries a sum of products is inf - inf, and the slope of a softcap at NaN is NaN."""
    q, k, v = torch.randn(1, 2, 1, 8), torch.randn(1, 2, 5, 8), torch.randn(1, 2, 5, 8)
    leaves, exact = ([each.double().requires_grad_() for each in (q, k, v)] for _ in range(2))
    with torch.no_grad():
        leaves[1][:, :, 3:] = -torch.finfo(torch.float64).max
    mask, options = masks.Lengths((3,)), {"softcap": 3.0, "scale": 40.0}
    output, _ = attention_with_logsumexp(*leaves, mask=mask, **options)  # type: ignore[arg-type]
    dense = oracle.attend(*exact, oracle.shown(mask, (1, 2, 1, 5)), **options)  # type: ignore[arg-type]
    found = torch.autograd.grad(output.square().sum(), leaves)
    for one, two in zip(found, torch.autograd.grad(dense.output.square().sum(), exact), strict=True):
        assert oracle.difference(one, two) < 1e-12


def test_its_gradients_are_those_of_finite_differences() -> None:
    q, k, v = torch.randn(3, 1, 2, 3, 2, dtype=torch.float64, requires_grad=True).unbind()
    bias = torch.randn(1, 2, 3, 3, dtype=torch.float64, requires_grad=True)
    sinks = torch.randn(2, dtype=torch.float64, requires_grad=True)

    def run(*given: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        q, k, v, bias, sinks = given
        return attention_with_logsumexp(q, k, v, bias=bias, sinks=sinks, softcap=2.0, kernel="reference")

    assert torch.autograd.gradcheck(run, (q, k, v, bias, sinks))
    assert torch.autograd.gradgradcheck(run, (q, k, v, bias, sinks))


def test_blocks_of_queries_equal_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = torch.randn(3, 2, 4, 11, 8, dtype=torch.float64).unbind()
    mask = (masks.Causal() & masks.Window(3)) | masks.Lengths((2, 0))
    options = {"mask": mask, "softcap": 5.0, "sinks": torch.randn(4, dtype=torch.float64), "kernel": "reference"}
    whole = attention_with_logsumexp(q, k, v, **options)  # type: ignore[arg-type]
    monkeypatch.setattr(reference, "QUERIES_PER_BLOCK", 2)
    for block, expected in zip(attention_with_logsumexp(q, k, v, **options), whole, strict=True):  # type: ignore[arg-type]
        torch.testing.assert_close(block, expected, rtol=0, atol=1e-13)


def test_a_query_that_overflows_by_its_scale_reaches_no_gradient_of_a_hidden_key() -> None:
    q, v = torch.randn(1, 1, 2, 2).double(), torch.randn(1, 1, 2, 2).double()
    k = torch.randn(1, 1, 2, 2).double().requires_grad_()
    q[:, :, 0] = -torch.finfo(torch.float64).max
    both = mh.attention(q, k, v, mask=masks.Causal(), scale=40.0, kernel="reference")
    alone = mh.attention(q[:, :, 1:], k, v, mask=masks.Causal(), scale=40.0, query_start=1, kernel="reference")
    (found,), (expected,) = (torch.autograd.grad(each[:, :, -1].sum(), k) for each in (both, alone))
    assert torch.equal(found[:, :, 1], expected[:, :, 1])


def test_a_query_that_overflows_reaches_no_gradient_of_the_value_of_a_hidden_key() -> None:
    """Its weights are NaN, and only those of keys that it sees count."""
    q, k = (torch.full((1, 1, 2, 2), size, dtype=torch.float64) for size in (1e300, 1e10))
    q[:, :, 1] = 0
    v = torch.randn(1, 1, 2, 2).double().requires_grad_()
    output = mh.attention(q, k, v, mask=masks.Causal(), kernel="reference")
    (gradient,) = torch.autograd.grad(output.sum(), v)
    assert gradient[0, 0, 1].tolist() == [0.5, 0.5]


def test_without_gradients_hidden_blocks_are_neither_computed_nor_held() -> None:
    q = torch.zeros(1, 1, 1024, 8)
    windowed = request_of(q, q, q, masks.Window(64), softcap=5.0)
    bounds = key_bounds(windowed.mask, queries=1024, keys=1024)
    found = reference.estimate_work(windowed, bounds)
    assert found.computed_cells == 256 * 256 + 3 * 256 * (256 + 63)
    assert found.extra_memory_bytes < 3 * 1024 * 1024 * 4
    followed = request_of(q.requires_grad_(), q, q, masks.Window(64), softcap=5.0)
    assert reference.estimate_work(followed, bounds).computed_cells == 1024 * 1024


@pytest.mark.parametrize(
    "mask", [masks.Full(), masks.Causal(), masks.Lengths((0, 7)), masks.Window(2) | masks.Prefix(3)], ids=repr
)
def test_blocks_of_queries_are_the_whole(mask: masks.Mask, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without gradients it goes by blocks of queries, each with the keys that some of them see."""
    q, k, v = torch.randn(3, 2, 2, 11, 4, dtype=torch.float64).unbind()
    sinks, bias = torch.randn(2, dtype=torch.float64), torch.randn(1, 2, 1, 11, dtype=torch.float64)
    monkeypatch.setattr(reference, "QUERIES_PER_BLOCK", 4)
    output, logsumexp = attention_with_logsumexp(q, k, v, mask=mask, sinks=sinks, bias=bias, kernel="reference")
    exact = oracle.attend(q, k, v, oracle.shown(mask, (2, 2, 11, 11)), sinks=sinks, bias=bias)
    assert oracle.difference(output, exact.output) < 1e-14
    assert oracle.difference(logsumexp, exact.logsumexp) < 1e-14


FUSED = [pytest.param("native", marks=needs_native), "sdpa"]
MASK = masks.Causal() & masks.Lengths((3, 0))


def sentence(kernel: str) -> str:
    return (
        f"Kernel '{kernel}' has no second derivative, and create_graph=True requires one: the reference kernel "
        "computes the call again, and holds queries x keys. Give kernel='reference' to compute the call only once."
    )


def leaves(dtype: torch.dtype, *, sink: float | None = None, hidden: float | None = None) -> list[Tensor]:
    """q, k, v and sinks; `sink` replaces the first sink, and `hidden` the keys and values that nobody sees."""
    torch.manual_seed(0)
    sizes = ((2, 4, 5, 8), (2, 2, 5, 8), (2, 2, 5, 6), (4,))
    q, k, v, sinks = (torch.randn(size, dtype=torch.float64).to(dtype) for size in sizes)
    if sink is not None:
        sinks[0] = sink
    if hidden is not None:
        for tensor in (k, v):
            tensor[0, :, 3:] = tensor[1] = hidden
    return [tensor.requires_grad_() for tensor in (q, k, v, sinks)]


def second(
    kernel: str, dtype: torch.dtype, *, sink: float | None = None, hidden: float | None = None, **options: Any
) -> list[Tensor]:
    """The gradients of the squared first gradients, output and logsumexp taking part in both."""
    *qkv, sinks = leaves(dtype, sink=sink, hidden=hidden)
    output, logsumexp = attention_with_logsumexp(*qkv, mask=MASK, sinks=sinks, kernel=kernel, **options)
    loss = output.square().sum() + logsumexp.masked_fill(logsumexp == -torch.inf, 0).sin().sum()
    first = torch.autograd.grad(loss, [*qkv, sinks], create_graph=True)
    return list(torch.autograd.grad(sum(each.square().sum() for each in first), [*qkv, sinks]))


@pytest.mark.parametrize("kernel", FUSED)
def test_a_second_derivative_is_that_of_the_reference_kernel_with_a_warning(kernel: str) -> None:
    expected = second("reference", torch.float64)
    with pytest.warns(SlowPathWarning) as warned:
        found = second(kernel, torch.float32)
    assert [str(each.message) for each in warned] == [sentence(kernel)]
    for one, two in zip(found, expected, strict=True):
        assert torch.allclose(one.double(), two, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("sink", [-torch.inf, -300.0, 300.0])
@pytest.mark.parametrize("kernel", FUSED)
@pytest.mark.filterwarnings("ignore:Kernel .* has no second derivative")
def test_a_sink_far_from_the_scores_has_a_second_derivative(kernel: str, sink: float) -> None:
    expected = second("reference", torch.float64, sink=sink)
    for one, two in zip(second(kernel, torch.float32, sink=sink), expected, strict=True):
        assert torch.allclose(one.double(), two, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("kernel", [*FUSED, "reference"])
@pytest.mark.filterwarnings("ignore:Kernel .* has no second derivative", "ignore:Entries of q, k or v are so large")
def test_a_hidden_number_near_the_largest_changes_no_second_derivative(kernel: str, softcap: float | None) -> None:
    """Its score overflows, where the slope of a softcap is NaN."""
    if softcap is not None and kernel == "sdpa":
        pytest.skip("PyTorch's fused kernel has no softcap")
    expected = second("reference", torch.float64, softcap=softcap, hidden=0.0)
    for sign in (1, -1):
        hidden = sign * 0.9 * torch.finfo(torch.float32).max
        for one, two in zip(second(kernel, torch.float32, softcap=softcap, hidden=hidden), expected, strict=True):
            assert torch.allclose(one.double(), two, atol=1e-4, rtol=1e-4)


@needs_native
def test_a_relative_bias_has_a_second_derivative() -> None:
    found = []
    for kernel, dtype in (("reference", torch.float64), ("native", torch.float32)):
        *qkv, _ = leaves(dtype)
        values = torch.linspace(-1, 1, 36).view(1, 4, 9).to(dtype).requires_grad_()
        output, _ = attention_with_logsumexp(*qkv, bias=RelativeBias(values), kernel=kernel)
        if kernel == "native":
            with pytest.warns(SlowPathWarning, match="native"):
                (first,) = torch.autograd.grad(output.square().sum(), values, create_graph=True)
        else:
            (first,) = torch.autograd.grad(output.square().sum(), values, create_graph=True)
        found.append(torch.autograd.grad(first.square().sum(), values)[0].double())
    assert torch.allclose(found[0], found[1], atol=1e-4)


@needs_native
def test_dropout_cannot_be_repeated_and_is_rejected() -> None:
    q = torch.randn(1, 1, 3, 4, requires_grad=True)
    output, _ = attention_with_logsumexp(q, q, q, dropout=0.5, kernel="native")
    with pytest.raises(ArgumentError) as refusal:
        torch.autograd.grad(output.sum(), q, create_graph=True)
    assert str(refusal.value) == (
        "Kernel 'native' has no second derivative with dropout, and create_graph=True requires one. "
        "Set dropout to 0, or give kernel='reference'."
    )


@pytest.mark.parametrize("kernel", FUSED)
def test_a_strict_context_refuses_it(kernel: str) -> None:
    q = torch.randn(1, 1, 3, 4, requires_grad=True)
    output, _ = attention_with_logsumexp(q, q, q, kernel=kernel)
    with strict(), pytest.raises(SlowPathError) as refusal:
        torch.autograd.grad(output.sum(), q, create_graph=True)
    assert str(refusal.value) == sentence(kernel)
