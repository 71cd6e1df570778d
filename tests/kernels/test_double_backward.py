"""Second derivatives where a fused kernel has none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from multihead import masks
from multihead.errors import ArgumentError, SlowPathError, SlowPathWarning
from multihead.functional import attention_with_logsumexp
from multihead.kernels.slow_paths import strict
from multihead.scores.relative import RelativeBias
from tests.kernel_names import needs_native

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
