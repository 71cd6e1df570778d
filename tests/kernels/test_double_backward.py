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


def leaves(dtype: torch.dtype) -> list[Tensor]:
    torch.manual_seed(0)
    sizes = ((2, 4, 5, 8), (2, 2, 5, 8), (2, 2, 5, 6), (4,))
    return [torch.randn(size, dtype=torch.float64).to(dtype).requires_grad_() for size in sizes]


def second(kernel: str, dtype: torch.dtype, **options: Any) -> list[Tensor]:
    """The gradients of the squared first gradients, output and logsumexp taking part in both."""
    *qkv, sinks = leaves(dtype)
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
