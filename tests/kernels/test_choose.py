"""Choosing a kernel."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from multihead import masks
from multihead.errors import ArgumentError, SlowPathError
from multihead.functional import request_of
from multihead.kernels.call import AttentionRequest
from multihead.kernels.choose import KERNELS, choose, plan
from multihead.kernels.native import library
from multihead.kernels.plan.bounds import key_bounds
from multihead.kernels.slow_paths import strict
from tests.kernel_names import EACH, needs_native

Q = torch.zeros(1, 2, 4, 8)
DOUBLE = Q.double()
BOUNDS = key_bounds(request_of(Q, Q, Q).mask, queries=4, keys=4)


@needs_native
def test_the_fastest_that_does_not_refuse_is_chosen() -> None:
    choice = choose(request_of(Q, Q, Q, softcap=2.0), BOUNDS)
    assert (choice.name, choice.refusals) == ("native", {})
    not_double = {"native": "it computes float32, bfloat16 and float16, and the tensors are float64"}
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


def equal_requests(**options: Any) -> tuple[AttentionRequest, AttentionRequest]:
    first, second = (request_of(Q.clone(), Q.clone(), Q.clone(), masks.Causal(), **options) for _ in range(2))
    return first, second


def test_a_call_looks_up_what_was_planned_for_an_equal_one() -> None:
    first, second = equal_requests()
    assert plan(first) is plan(second)
    for other in (
        request_of(Q, Q, Q, masks.Causal() & masks.Window(2)),
        request_of(Q, Q, Q, masks.Causal(), softcap=2.0),
        request_of(Q, Q, Q, masks.Causal(), query_start=1),
        request_of(DOUBLE, DOUBLE, DOUBLE, masks.Causal()),
        request_of(Q.clone().requires_grad_(), Q, Q, masks.Causal()),
    ):
        assert plan(other) is not plan(first)


@pytest.mark.parametrize("options", [{"dropout": 0.5}, {"sinks": torch.zeros(2)}, {"query_start": torch.tensor([0])}])
def test_a_call_with_tensors_of_its_own_is_planned_each_time(options: dict[str, Any]) -> None:
    first, second = equal_requests(**options)
    assert plan(first) is not plan(second)


@needs_native
def test_the_instruction_set_takes_part_in_the_choice() -> None:
    request, _ = equal_requests()
    before = plan(request)
    with library.using("scalar"):
        assert plan(request).bounds is before.bounds
        assert plan(request) is not before
    assert plan(request) is before


def test_no_slow_path_is_looked_up_past_strict() -> None:
    request = request_of(DOUBLE, DOUBLE, DOUBLE, masks.Causal(), softcap=2.0)
    assert plan(request).kernel is KERNELS["reference"]
    with strict(), pytest.raises(SlowPathError):
        plan(request)
