"""Tell whether the values of tensors may be read here, to check or to branch on them."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


def constant_in_graphs(function: Callable[P, R]) -> Callable[P, R]:
    """Have a compiler call a function while it makes a graph, and not look into it.

    `torch.compiler.assume_constant_result` does the same, and imports the compiler, which takes a second.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]  # noqa: SLF001
    return function


def traced() -> bool:
    """Whether torch.compile, torch.export or a transform of torch.func runs this code with stand-ins for tensors.

    >>> torch.func.vmap(lambda x: x + traced())(torch.zeros(2))
    tensor([1., 1.])
    """
    return torch.compiler.is_compiling() or torch._C._functorch.peek_interpreter_stack() is not None  # noqa: SLF001


def transformed() -> bool:
    """Whether a transform of torch.func (vmap, grad, jacrev ...) runs this code: its tensors have no memory to read."""
    if torch.compiler.is_compiling():
        return False  # a compiler traces a transform's inside as it is
    return torch._C._functorch.peek_interpreter_stack() is not None  # noqa: SLF001 - torch has no public word for it


def runs_backward() -> bool:
    """Whether a backward pass runs this code: activation checkpointing computes forward passes anew in it.

    >>> runs_backward()
    False
    """
    return torch._C._current_graph_task_id() != -1  # noqa: SLF001 - torch has no public word for it


def readable(device: torch.device) -> bool:
    """Whether reading a value costs nothing: on the CPU, and neither in a graph nor in a transform.

    On an accelerator the host would wait for the device.
    """
    return device.type == "cpu" and not traced()
