"""Where PyTorch's fused kernel was measured to be faster, a sentence says so."""

from __future__ import annotations

import timeit

import pytest
import torch
from torch import Tensor

from multihead import masks
from multihead.functional import request_of
from multihead.kernels import native_vs_sdpa
from multihead.kernels.call import AttentionRequest
from multihead.kernels.native import library
from multihead.kernels.native.operator import DTYPES
from multihead.kernels.native_vs_sdpa import CLASSES, TRAINING, Measured, class_of, losses, slower
from multihead.kernels.plan.bounds import bounds_of

LENGTH = 200


def tensors(queries: int = LENGTH, keys: int = LENGTH, value_dim: int = 8) -> tuple[Tensor, Tensor, Tensor]:
    return torch.zeros(1, 2, queries, 8), torch.zeros(1, 2, keys, 8), torch.zeros(1, 2, keys, value_dim)


def said(request: AttentionRequest, set_name: str = "scalar") -> str | None:
    return slower(request, bounds_of(request), set_name)


def lost(monkeypatch: pytest.MonkeyPatch, **ratios: float) -> None:
    named = {name.replace("_training", TRAINING): ratio for name, ratio in ratios.items()}
    monkeypatch.setattr(native_vs_sdpa, "LOST", losses([Measured("scalar", "float32", "a machine", named)]))


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


@pytest.mark.parametrize("name", CLASSES)
def test_every_class_has_a_request_that_is_in_it(name: str) -> None:
    request = REQUESTS[name]
    assert class_of(request, bounds_of(request)) == name


def test_a_request_is_training_where_a_gradient_is_followed() -> None:
    q, k, v = tensors()
    request = request_of(q, k, v.requires_grad_())
    assert class_of(request, bounds_of(request)) == "full" + TRAINING
    with torch.no_grad():
        assert class_of(request, bounds_of(request)) == "full"


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
    known = {name + training for name in CLASSES for training in ("", TRAINING)}
    for each in native_vs_sdpa.MEASURED:
        assert set(each.ratios) <= known
        assert getattr(torch, each.dtype) in DTYPES
        assert min(each.ratios.values()) > 0
    assert len({(each.instruction_set, each.dtype) for each in native_vs_sdpa.MEASURED}) == len(native_vs_sdpa.MEASURED)
    sets = [each.name for each in library.instruction_sets()]
    assert not sets or {each.instruction_set for each in native_vs_sdpa.MEASURED} <= set(sets)


def test_a_set_that_lost_nothing_costs_next_to_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    lost(monkeypatch, causal=0.5)
    request = REQUESTS["full"]
    bounds = bounds_of(request)
    for name, limit in (("avx2", 5e-6), ("scalar", 20e-6)):  # generous: the machine may be busy
        seconds = min(timeit.repeat(lambda name=name: slower(request, bounds, name), number=200, repeat=5)) / 200
        assert seconds < limit
