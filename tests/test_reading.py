"""Where values may be read."""

from __future__ import annotations

import torch

from multihead.reading import constant_in_graphs, readable, runs_backward, traced, transformed

CPU, META = torch.device("cpu"), torch.device("meta")


def test_values_are_read_on_the_cpu_alone() -> None:
    assert readable(CPU)
    assert not readable(META)
    assert not traced()


def test_no_value_is_read_within_a_transform() -> None:
    told: list[bool] = []

    def noted(x: torch.Tensor) -> torch.Tensor:
        told.extend((transformed(), traced(), readable(CPU)))
        return x.sum()

    for transform in (torch.func.vmap, torch.func.grad):
        told.clear()
        transform(noted)(torch.ones(2))
        assert told == [True, True, False]
    assert not transformed()


def test_no_value_is_read_within_a_graph() -> None:
    def noted(x: torch.Tensor) -> torch.Tensor:
        return x + traced() + 2 * readable(CPU) + 4 * transformed()

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
    x.register_hook(lambda _: told.append(runs_backward()))
    told.append(runs_backward())
    x.sum().backward()
    assert told == [False, True]
