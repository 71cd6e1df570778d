"""Where values may be read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from multihead.tensors.tracing import (
    can_read_values,
    constant_in_graphs,
    has_tracer_or_mode,
    hide_from_jit_trace,
    is_in_backward_pass,
    is_jit_traced,
    is_traced,
    is_transformed,
)

CPU, META = torch.device("cpu"), torch.device("meta")


def test_values_are_read_on_the_cpu_alone() -> None:
    assert can_read_values(CPU)
    assert not can_read_values(META)
    assert not is_traced()


def test_no_value_is_read_within_a_transform() -> None:
    told: list[bool] = []

    def noted(x: torch.Tensor) -> torch.Tensor:
        told.extend((is_transformed(), is_traced(), can_read_values(CPU)))
        return x.sum()

    for transform in (torch.func.vmap, torch.func.grad):
        told.clear()
        transform(noted)(torch.ones(2))
        assert told == [True, True, False]
    assert not is_transformed()


def test_no_value_is_read_within_a_graph() -> None:
    def noted(x: torch.Tensor) -> torch.Tensor:
        return x + is_traced() + 2 * can_read_values(CPU) + 4 * is_transformed()

    torch.compiler.reset()
    assert torch.compile(noted, backend="eager", fullgraph=True)(torch.zeros(())) == 1


def test_a_constant_of_a_graph_is_asked_for_while_it_is_made() -> None:
    calls = []

    @constant_in_graphs
    def answer() -> int:
        calls.append(len(calls))
        return 7

    torch.compiler.reset()
    compiled = torch.compile(lambda x: x + answer(), backend="eager", fullgraph=True)
    assert [int(compiled(torch.zeros(()))) for _ in range(3)] == [7, 7, 7]
    assert len(calls) == 1


def test_a_backward_pass_is_told_from_a_forward_one() -> None:
    told: list[bool] = []
    x = torch.ones(2, requires_grad=True)
    x.register_hook(lambda _: told.append(is_in_backward_pass()))
    told.append(is_in_backward_pass())
    x.sum().backward()
    assert told == [False, True]


class Passing(TorchDispatchMode):
    """A user's mode, whose tensors have values."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("mode", "without_values"), [(FakeTensorMode, True), (FunctionalTensorMode, True), (Passing, False)]
)
def test_a_mode_records_and_some_have_no_values(mode: Callable[[], Any], *, without_values: bool) -> None:
    with mode():
        assert (has_tracer_or_mode(), is_traced(), can_read_values(CPU)) == (True, without_values, not without_values)
    assert (has_tracer_or_mode(), is_traced(), can_read_values(CPU)) == (False, False, True)


@pytest.mark.parametrize("options", [{}, {"tracing_mode": "symbolic"}, {"pre_dispatch": True}])
def test_make_fx_records_what_must_not_be_read(options: dict[str, Any]) -> None:
    told: list[bool] = []

    def noted(x: torch.Tensor) -> torch.Tensor:
        told.extend((has_tracer_or_mode(), is_traced(), is_transformed(), can_read_values(CPU)))
        return x + 1

    make_fx(noted, **options)(torch.ones(2))
    assert told == [True, True, False, False]
    assert not has_tracer_or_mode()


def test_a_mode_that_replaces_functions_records_nothing() -> None:
    with torch.device("cpu"):
        assert not has_tracer_or_mode()


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_torch_jit_trace_makes_no_tensors_of_sizes_where_it_is_kept_out() -> None:
    told: list[object] = []

    def noted(x: torch.Tensor) -> torch.Tensor:
        told.extend((has_tracer_or_mode(), is_traced(), is_jit_traced(), type(x.shape[0])))
        with hide_from_jit_trace():
            told.extend((is_jit_traced(), type(x.shape[0])))
        told.append(is_jit_traced())
        return x + 1

    torch.jit.trace(noted, (torch.ones(2),), check_trace=False)
    assert told == [True, True, True, torch.Tensor, False, int, True]
    assert not is_jit_traced()
