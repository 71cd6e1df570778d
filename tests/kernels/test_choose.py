"""Choosing a kernel."""

from __future__ import annotations

import timeit
from typing import Any

import pytest
import torch
from torch import Tensor

from multihead import masks
from multihead.errors import ArgumentError, SlowPathError
from multihead.functional import request_of
from multihead.kernels import choose as module
from multihead.kernels.call import AttentionRequest
from multihead.kernels.choose import (
    KERNELS,
    REQUEST_CLASSES,
    TRAINING_SUFFIX,
    MeasuredSpeed,
    benchmark_class_of,
    choose_kernel,
    plan_call,
    pytorch_speedups,
    reason_native_is_slower,
)
from multihead.kernels.native import library
from multihead.kernels.native.operator import DTYPES
from multihead.kernels.plan.bounds import bounds_of, key_bounds
from multihead.kernels.slow_paths import strict
from tests.kernel_names import EACH, needs_native

Q = torch.zeros(1, 2, 4, 8)
DOUBLE = Q.double()
BOUNDS = key_bounds(request_of(Q, Q, Q).mask, queries=4, keys=4)


@needs_native
def test_the_fastest_that_does_not_refuse_is_chosen() -> None:
    choice = choose_kernel(request_of(Q, Q, Q, softcap=2.0), BOUNDS)
    assert (choice.name, choice.refusals) == ("native", {})
    not_double = {"native": "it computes float32, bfloat16 and float16, and the tensors are float64"}
    choice = choose_kernel(request_of(DOUBLE, DOUBLE, DOUBLE), BOUNDS)
    assert (choice.name, choice.refusals) == ("sdpa", not_double)
    choice = choose_kernel(request_of(DOUBLE, DOUBLE, DOUBLE, softcap=2.0), BOUNDS)
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
    choice = choose_kernel(request_of(Q, Q, Q), BOUNDS, kernel=name)
    assert (choice.name, choice.refusals) == (name, {})


def test_a_kernel_that_refuses_is_not_replaced_in_silence() -> None:
    with pytest.raises(ArgumentError) as refusal:
        choose_kernel(request_of(Q, Q, Q, dropout=0.5), BOUNDS, kernel="sdpa")
    assert str(refusal.value) == (
        "Kernel 'sdpa' refuses: PyTorch's fused kernels are called without dropout. Leave kernel out to use "
        "the fastest kernel that supports the call."
    )


def test_an_unknown_kernel_is_refused_with_those_there_are() -> None:
    with pytest.raises(ArgumentError) as refusal:
        choose_kernel(request_of(Q, Q, Q), BOUNDS, kernel="fast")
    assert str(refusal.value) == "There is no kernel 'fast'. Give one of native, sdpa, flex, reference, or None."


def equal_requests(**options: Any) -> tuple[AttentionRequest, AttentionRequest]:
    first, second = (request_of(Q.clone(), Q.clone(), Q.clone(), masks.Causal(), **options) for _ in range(2))
    return first, second


def test_a_call_looks_up_what_was_planned_for_an_equal_one() -> None:
    first, second = equal_requests()
    assert plan_call(first) is plan_call(second)
    for other in (
        request_of(Q, Q, Q, masks.Causal() & masks.Window(2)),
        request_of(Q, Q, Q, masks.Causal(), softcap=2.0),
        request_of(Q, Q, Q, masks.Causal(), query_start=1),
        request_of(DOUBLE, DOUBLE, DOUBLE, masks.Causal()),
        request_of(Q.clone().requires_grad_(), Q, Q, masks.Causal()),
    ):
        assert plan_call(other) is not plan_call(first)


@pytest.mark.parametrize("options", [{"dropout": 0.5}, {"sinks": torch.zeros(2)}, {"query_start": torch.tensor([0])}])
def test_a_call_with_tensors_of_its_own_is_planned_each_time(options: dict[str, Any]) -> None:
    first, second = equal_requests(**options)
    assert plan_call(first) is not plan_call(second)


@needs_native
def test_the_instruction_set_takes_part_in_the_choice() -> None:
    request, _ = equal_requests()
    before = plan_call(request)
    with library.using_instruction_set("scalar"):
        assert plan_call(request).bounds is before.bounds
        assert plan_call(request) is not before
    assert plan_call(request) is before


def test_no_slow_path_is_looked_up_past_strict() -> None:
    request = request_of(DOUBLE, DOUBLE, DOUBLE, masks.Causal(), softcap=2.0)
    assert plan_call(request).kernel is KERNELS["reference"]
    with strict(), pytest.raises(SlowPathError):
        plan_call(request)


LENGTH = 200


def tensors(queries: int = LENGTH, keys: int = LENGTH, value_dim: int = 8) -> tuple[Tensor, Tensor, Tensor]:
    return torch.zeros(1, 2, queries, 8), torch.zeros(1, 2, keys, 8), torch.zeros(1, 2, keys, value_dim)


def said(request: AttentionRequest, set_name: str = "scalar") -> str | None:
    return reason_native_is_slower(request, bounds_of(request), set_name)


def lost(monkeypatch: pytest.MonkeyPatch, **ratios: float) -> None:
    named = {name.replace("_training", TRAINING_SUFFIX): ratio for name, ratio in ratios.items()}
    monkeypatch.setattr(
        module, "PYTORCH_SPEEDUPS", pytorch_speedups([MeasuredSpeed("scalar", "float32", "a machine", named)])
    )


REQUESTS = {
    "full": request_of(*tensors()),
    "causal": request_of(*tensors(), masks.Causal()),
    "intervals": request_of(*tensors(), masks.Causal() & masks.Window(20)),
    "cells": request_of(*tensors(), masks.Keep(torch.arange(LENGTH) % 2 == 0, axes="keys")),
    "bias": request_of(*tensors(), bias=torch.zeros(1, 1, LENGTH, LENGTH)),
    "few": request_of(*tensors(queries=1), masks.Causal(), query_start="end"),
    "short": request_of(*tensors(queries=50, keys=50), masks.Causal()),
    "unequal": request_of(*tensors(value_dim=4)),
}


@pytest.mark.parametrize("name", REQUEST_CLASSES)
def test_every_class_has_a_request_that_is_in_it(name: str) -> None:
    request = REQUESTS[name]
    assert benchmark_class_of(request, bounds_of(request)) == name


def test_a_request_is_training_where_a_gradient_is_followed() -> None:
    q, k, v = tensors()
    request = request_of(q, k, v.requires_grad_())
    assert benchmark_class_of(request, bounds_of(request)) == "full" + TRAINING_SUFFIX
    with torch.no_grad():
        assert benchmark_class_of(request, bounds_of(request)) == "full"


def test_what_was_lost_is_said_with_how_much(monkeypatch: pytest.MonkeyPatch) -> None:
    lost(monkeypatch, full=0.5, full_training=0.8)
    assert said(REQUESTS["full"]) == (
        "PyTorch's fused kernel was measured 2.00 times faster for full attention in float32 "
        "with the instruction set scalar"
    )
    q, k, v = tensors()
    assert said(request_of(q.requires_grad_(), k, v)) == (
        "PyTorch's fused kernel was measured 1.25 times faster for training with full attention in float32 "
        "with the instruction set scalar"
    )


def test_what_was_won_or_lost_by_a_hair_is_no_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    lost(monkeypatch, full=0.5, causal=1.2, intervals=0.98)
    assert [said(REQUESTS[name]) for name in ("causal", "intervals", "short")] == [None] * 3


def test_another_set_or_dtype_has_its_own_measurements(monkeypatch: pytest.MonkeyPatch) -> None:
    lost(monkeypatch, full=0.5)
    assert said(REQUESTS["full"], "avx2") is None
    assert said(request_of(*(tensor.bfloat16() for tensor in tensors()))) is None


def test_what_pytorchs_kernel_refuses_never_loses(monkeypatch: pytest.MonkeyPatch) -> None:
    lost(monkeypatch, full=0.5, bias_training=0.5, bias=0.5)
    q, k, v = tensors()
    bias = torch.zeros(1, 1, LENGTH, LENGTH, requires_grad=True)
    assert said(request_of(q, k, v, softcap=2.0)) is None
    assert said(request_of(q, k, v, dropout=0.1)) is None
    assert said(request_of(q.requires_grad_(), k, v, bias=bias)) is None
    assert said(REQUESTS["bias"]) is not None


def test_what_is_written_down_can_be_spoken_of() -> None:
    known = {name + training for name in REQUEST_CLASSES for training in ("", TRAINING_SUFFIX)}
    for each in module.MEASURED_SPEEDS:
        assert set(each.ratios) <= known
        assert getattr(torch, each.dtype) in DTYPES
        assert min(each.ratios.values()) > 0
    assert len({(each.instruction_set, each.dtype) for each in module.MEASURED_SPEEDS}) == len(module.MEASURED_SPEEDS)
    sets = [each.name for each in library.instruction_sets()]
    assert not sets or {each.instruction_set for each in module.MEASURED_SPEEDS} <= set(sets)


def test_a_set_that_lost_nothing_costs_next_to_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    lost(monkeypatch, causal=0.5)
    request = REQUESTS["full"]
    bounds = bounds_of(request)
    for name, limit in (("avx2", 5e-6), ("scalar", 20e-6)):  # generous: the machine may be busy
        seconds = (
            min(timeit.repeat(lambda name=name: reason_native_is_slower(request, bounds, name), number=200, repeat=5))
            / 200
        )
        assert seconds < limit
