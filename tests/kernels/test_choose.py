"""Choosing a kernel."""

from __future__ import annotations

import timeit
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import multihead as mh
from multihead import masks
from multihead.errors import ArgumentError, SlowPathError
from multihead.functional import request_of
from multihead.kernels import choose as module
from multihead.kernels import reference
from multihead.kernels.call import AttentionRequest, AttentionResult
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
from multihead.kernels.explanation import explain_request
from multihead.kernels.native import library, short_call
from multihead.kernels.native.operator import DTYPES
from multihead.kernels.plan.bounds import bounds_of, key_bounds
from multihead.kernels.proven import GpuPath
from multihead.kernels.slow_paths import strict
from multihead.masks.base import KeyBounds
from tests.kernel_names import EACH, needs_native

Q = torch.zeros(1, 2, 4, 8)
DOUBLE = Q.double()
BOUNDS = key_bounds(request_of(Q, Q, Q).mask, queries=4, keys=4)


@needs_native
def test_the_fastest_that_does_not_refuse_is_chosen() -> None:
    choice = choose_kernel(request_of(Q, Q, Q, softcap=2.0), BOUNDS)
    assert (choice.name, choice.refusals) == ("native", {})
    not_double = {
        "native": "it computes float32, bfloat16 and float16, and the tensors are float64",
        "ragged": "it needs CUDA, and the tensors are on cpu",
    }
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
    assert (
        str(refusal.value) == "There is no kernel 'fast'. Give one of native, ragged, sdpa, flex, reference, or None."
    )


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


# ---- a kernel of one's own


class Counting:
    """A kernel that counts its calls, and computes what the reference kernel does."""

    HANDLES_NONFINITE = False
    GPU_PATH = None
    reads_int8 = staticmethod(reference.reads_int8)
    estimate_work = staticmethod(reference.estimate_work)

    def __init__(self, reason: str | None = None) -> None:
        self.calls, self.reason = 0, reason

    def refusal(self, request: AttentionRequest, bounds: KeyBounds) -> str | None:
        return self.reason

    def attend(self, request: AttentionRequest, bounds: KeyBounds) -> AttentionResult:
        self.calls += 1
        return reference.attend(request, bounds)


@pytest.fixture(name="own")
def _own() -> Iterator[Counting]:
    own = Counting()
    with mh.kernels.add("own", own):
        yield own


X = torch.randn(1, 2, 5, 8)
LAYER = mh.MultiHeadAttention(16, 2).eval()
TOKENS = torch.randn(2, 6, 16)
ROTARY = mh.MultiHeadAttention(16, 2, rotary=mh.Rotary()).eval()


def decoded(layer: mh.MultiHeadAttention, **options: Any) -> Tensor:
    cache = mh.KeyValueCache(**options)
    parts = (TOKENS[:, :4], TOKENS[:, 4:5], TOKENS[:, 5:])
    with torch.no_grad():
        return torch.cat([layer(part, mask=masks.Causal(), cache=cache) for part in parts], 1)


def drop_in(dtype: torch.dtype, *, need_weights: bool) -> Tensor:
    torch.manual_seed(0)
    layer = mh.compat.torch_nn.MultiheadAttention(16, 2, batch_first=True, dtype=dtype).eval()
    x = TOKENS.to(dtype)
    return layer(x, x, x, need_weights=need_weights)[0]


CALLS: dict[str, tuple[int, Callable[[], Tensor]]] = {
    "attention": (1, lambda: mh.attention(X, X, X, mask=masks.Causal())),
    "attention with gradients": (1, lambda: mh.attention(X.clone().requires_grad_(), X, X)),
    "attention with a logsumexp": (1, lambda: mh.attention_with_logsumexp(X, X, X)[1]),
    "documents": (1, lambda: mh.attention(X, X, X, mask=masks.Documents((2, 3)))),
    "a layer": (1, lambda: LAYER(TOKENS, mask=masks.Causal())),
    "a padded layer": (1, lambda: LAYER(TOKENS, mask=masks.Causal(), lengths=(6, 3))),
    "a cross-attention": (1, lambda: LAYER(TOKENS, TOKENS[:, :3], memory_lengths=(3, 1))),
    "a cache": (3, lambda: decoded(ROTARY)),
    "a cache of int8": (3, lambda: decoded(LAYER, dtype="int8")),
    "a drop-in": (1, lambda: drop_in(torch.float32, need_weights=False)),
    "a drop-in in float64": (1, lambda: drop_in(torch.float64, need_weights=False)),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_kernel_of_ones_own_computes_every_call_until_it_is_removed(name: str) -> None:
    count, call = CALLS[name]
    expected = call()  # and its plan is cached
    own = Counting()
    with mh.kernels.add("own", own):
        torch.testing.assert_close(call(), expected, rtol=1e-4, atol=1e-4)
        assert own.calls == count
    assert torch.equal(call(), expected)
    assert own.calls == count


def test_explain_names_a_kernel_of_ones_own_where_it_runs(own: Counting) -> None:
    given = {"mask": masks.Causal()}
    assert (mh.explain(X, X, X, **given).kernel, mh.explain(X, X, X, **given).refusals) == ("own", {})
    assert LAYER.explain(TOKENS).kernel == LAYER.explain(TOKENS, lengths=(6, 3)).kernel == "own"
    assert mh.explain(X, X, X, kernel="native").kernel == "native"
    assert own.calls == 0
    found = mh.attention(X, X, X, kernel="own")
    torch.testing.assert_close(found, mh.attention(X, X, X, kernel="native"))
    assert own.calls == 1


def test_a_call_that_it_refuses_goes_to_the_next_kernel() -> None:
    plain = mh.attention(X, X, X), mh.explain(X, X, X).kernel
    own = Counting("it is Sunday")
    with mh.kernels.add("own", own):
        told = mh.explain(X, X, X)
        assert (told.kernel, told.refusals) == (plain[1], {"own": "it is Sunday"})
        assert torch.equal(mh.attention(X, X, X), plain[0])
        with pytest.raises(ArgumentError) as refused:
            mh.attention(X, X, X, kernel="own")
    assert str(refused.value) == (
        "Kernel 'own' refuses: it is Sunday. Leave kernel out to use the fastest kernel that supports the call."
    )
    assert own.calls == 0


def test_two_kernels_are_asked_in_the_order_of_the_list_and_removed_in_any() -> None:
    before, first, second = list(KERNELS), Counting(), Counting()
    one = mh.kernels.add("one", first)
    two = mh.kernels.add("two", second, before="one")
    last = mh.kernels.add("last", Counting(), before="reference")
    assert list(KERNELS) == ["two", "one", *before[:-1], "last", "reference"]
    one.undo()
    mh.attention(X, X, X)
    assert (first.calls, second.calls) == (0, 1)
    two.undo()
    one.undo()
    last.undo()
    assert list(KERNELS) == before


def test_another_kernel_of_the_same_name_does_not_run_by_a_cached_plan_of_the_first() -> None:
    kernels = Counting(), Counting()
    for each in kernels:
        with mh.kernels.add("own", each):
            mh.attention(X, X, X, mask=masks.Documents((4, 1)))
    assert [each.calls for each in kernels] == [1, 1]


def test_a_listener_receives_the_calls_of_a_kernel_of_ones_own_and_measures_the_same(own: Counting) -> None:
    with mh.observe(LAYER) as seen:
        LAYER(TOKENS, mask=masks.Causal())
    assert own.calls == 1
    mine = seen.layers[0].samples[0].statistics["entropy"]
    KERNELS.pop("own")
    with mh.observe(LAYER) as again:
        LAYER(TOKENS, mask=masks.Causal())
    torch.testing.assert_close(mine, again.layers[0].samples[0].statistics["entropy"])


def test_the_statistics_do_not_depend_on_a_kernel_of_ones_own() -> None:
    expected = mh.statistics(X, X, mask=masks.Causal())
    with mh.kernels.add("own", Counting()):
        found = mh.statistics(X, X, mask=masks.Causal())
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


class Unfinished:
    HANDLES_NONFINITE = True
    GPU_PATH = None
    refusal = staticmethod(reference.refusal)
    estimate_work = staticmethod(reference.estimate_work)


class OnGpu(Counting):
    GPU_PATH = GpuPath("own", ("own.py",))  # type: ignore[assignment]


NAMES = ", ".join(KERNELS)
OF_OWN_PATH = (
    "The kernel 'own' has the GPU_PATH GpuPath(name='own', sources=('own.py',), in_use_before_rows=False), which only "
    "kernels of this library have. Set GPU_PATH = None: a kernel that is added also runs on a GPU unless it refuses."
)
WRONG_KERNELS: dict[str, tuple[Callable[[], object], str]] = {
    "a name that is used": (
        lambda: mh.kernels.add("native", Counting()),
        f"There is a kernel 'native' already. Give a text other than {NAMES}.",
    ),
    "a name that is no text": (
        lambda: mh.kernels.add(3, Counting()),  # type: ignore[arg-type]
        f"The name of a kernel is 3. Give a text other than {NAMES}.",
    ),
    "no such place": (
        lambda: mh.kernels.add("own", Counting(), before="fast"),
        f"There is no kernel 'fast'. Give one of {NAMES}, or None.",
    ),
    "an unfinished kernel": (
        lambda: mh.kernels.add("own", Unfinished()),  # type: ignore[arg-type]
        "The kernel 'own' lacks reads_int8, attend. Define them, as multihead.kernels.Kernel declares them.",
    ),
    "a row of proven.json": (
        lambda: mh.kernels.add("own", OnGpu()),
        OF_OWN_PATH,
    ),
}


@pytest.mark.parametrize("name", WRONG_KERNELS)
def test_what_is_no_kernel_is_rejected(name: str) -> None:
    call, sentence = WRONG_KERNELS[name]
    before = list(KERNELS)
    with pytest.raises(ArgumentError) as refusal:
        call()
    assert str(refusal.value) == sentence
    assert list(KERNELS) == before


@needs_native
def test_explain_names_the_native_kernel_wherever_the_short_operator_takes_a_call() -> None:
    for mask in (masks.Full(), masks.Causal(), masks.Lengths((3,))):
        request = request_of(X, X, X, mask)
        assert short_call.takes_request(request)
        assert explain_request(request).kernel == choose_kernel(request, bounds_of(request)).name == "native"
    assert not short_call.takes_request(request_of(X, X, X, dropout=0.5))
    assert short_call.reason_against_all() is None
    with mh.kernels.add("own", Counting()):
        assert short_call.reason_against_all() == "the kernel own comes before the native one"
        assert not short_call.takes_request(request_of(X, X, X))
    with library.using_instruction_set("scalar"):
        assert short_call.reason_against_all() == (
            "with the instruction set scalar, PyTorch's fused kernel is faster for some calls"
        )
