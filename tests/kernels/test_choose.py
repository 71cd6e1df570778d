"""Choosing a kernel."""

from __future__ import annotations

import pytest
import torch

from multihead.errors import ArgumentError
from multihead.functional import request_of
from multihead.kernels.choose import choose
from multihead.plan.bounds import key_bounds
from tests.kernel_names import EACH, needs_native

Q = torch.zeros(1, 2, 4, 8)
DOUBLE = Q.double()
BOUNDS = key_bounds(request_of(Q, Q, Q).mask, queries=4, keys=4)


@needs_native
def test_the_fastest_that_does_not_refuse_is_chosen() -> None:
    choice = choose(request_of(Q, Q, Q, softcap=2.0), BOUNDS)
    assert (choice.name, choice.refusals) == ("native", {})
    not_double = {"native": "it computes float32 and bfloat16, and the tensors are float64"}
    choice = choose(request_of(DOUBLE, DOUBLE, DOUBLE), BOUNDS)
    assert (choice.name, choice.refusals) == ("sdpa", not_double)
    choice = choose(request_of(DOUBLE, DOUBLE, DOUBLE, softcap=2.0), BOUNDS)
    assert (choice.name, choice.refusals) == (
        "reference",
        not_double
        | {
            "sdpa": "PyTorch's fused kernels have no softcap",
            "flex": "it needs CUDA, and the tensors are on cpu",
        },
    )


@pytest.mark.parametrize("name", EACH)
def test_a_kernel_can_be_insisted_on(name: str) -> None:
    choice = choose(request_of(Q, Q, Q), BOUNDS, kernel=name)
    assert (choice.name, choice.refusals) == (name, {})


def test_a_kernel_that_refuses_is_not_replaced_in_silence() -> None:
    with pytest.raises(ArgumentError) as refusal:
        choose(request_of(Q, Q, Q, dropout=0.5), BOUNDS, kernel="sdpa")
    assert str(refusal.value) == (
        "Kernel 'sdpa' refuses: PyTorch's fused CPU kernel has no dropout. Leave kernel out to have one chosen."
    )


def test_an_unknown_kernel_is_refused_with_those_there_are() -> None:
    with pytest.raises(ArgumentError) as refusal:
        choose(request_of(Q, Q, Q), BOUNDS, kernel="fast")
    assert str(refusal.value) == "There is no kernel 'fast'. Give one of native, sdpa, flex, reference, or None."
