"""Detect tracing, transforms and compilation, under which values of tensors cannot be read.

Under `torch.jit.trace`, `make_fx` and every dispatch mode (`has_tracer_or_mode()`), attention is computed by a
registered operator with registered gradients, so that it can be recorded. Plans and rotary tables of such calls are not
cached, because a kernel would later read a cached fake tensor by its address.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial, wraps
from threading import RLock
from typing import Any, ParamSpec, TypeVar

import torch
from torch import nn
from torch.fx.experimental import proxy_tensor

from multihead.tensors.undo import Undo

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

# Functions of PyTorch, most of them private, looked up once because every attention call uses them.
_is_compiled_by_dynamo = torch.compiler.is_dynamo_compiling
_innermost_transform = torch._C._functorch.peek_interpreter_stack  # noqa: SLF001
_count_dispatch_modes = torch._C._len_torch_dispatch_stack  # noqa: SLF001
_is_jit_tracing = torch._C._is_tracing  # noqa: SLF001
_get_jit_state, _set_jit_state = torch._C._get_tracing_state, torch._C._set_tracing_state  # type: ignore[attr-defined]  # noqa: SLF001
_get_dispatch_mode = torch._C._get_dispatch_mode  # noqa: SLF001
# Modes of PyTorch under which tensors have no values, or code must not branch on values.
_MODES_WITHOUT_VALUES = (
    torch._C._TorchDispatchModeKey.FAKE,  # noqa: SLF001
    torch._C._TorchDispatchModeKey.PROXY,  # noqa: SLF001
    torch._C._TorchDispatchModeKey.FUNCTIONAL,  # noqa: SLF001
)


def constant_in_graphs(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Mark a function as constant for torch.compile: evaluated at trace time, not traced.

    `torch.compiler.assume_constant_result` does the same, but imports the compiler, which takes a second.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]  # noqa: SLF001
    return function


def outside_of_graphs(reason: str) -> Callable[[Callable[Parameters, Result]], Callable[Parameters, Result]]:
    """Mark a function for torch.compile: its calls, and all functions that it calls, stay outside of graphs.

    `torch.compiler.disable` does the same, but imports the compiler, which takes a second. The reason is a clause in
    PyTorch's error for `fullgraph=True`.
    """

    def decorate(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
        @cache
        def disabled_function() -> Callable[Parameters, Result]:
            return torch.compiler.disable(function, reason=reason)  # type: ignore[no-any-return]

        @wraps(function)
        def run_outside_of_graph(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
            return (disabled_function() if "torch._dynamo" in sys.modules else function)(*args, **kwargs)

        run_outside_of_graph._torchdynamo_disable, run_outside_of_graph._torchdynamo_disable_msg = True, reason  # type: ignore[attr-defined]  # noqa: SLF001
        return run_outside_of_graph

    return decorate


def is_traced() -> bool:
    """Whether tensor values must not be read here, because they are missing or would become constants of a graph.

    True in torch.compile, torch.export, torch.jit.trace, make_fx, FakeTensorMode and the transforms of torch.func.

    >>> torch.func.vmap(lambda x: x + is_traced())(torch.zeros(2))
    tensor([1., 1.])
    """
    return is_intercepted() and (
        torch.compiler.is_compiling() or _innermost_transform() is not None or _tensors_lack_values()
    )


def has_tracer_or_mode() -> bool:
    """Whether a compiler, torch.jit.trace, make_fx or a dispatch mode records operations.

    Tracers and modes cannot record a kernel that is called with addresses, so a registered operator is called instead.
    Tensors that are created while one is active must not be cached, because they may be fake tensors.

    >>> from torch.utils.flop_counter import FlopCounterMode
    >>> with FlopCounterMode(display=False):
    ...     has_tracer_or_mode(), is_traced()
    (True, False)
    """
    return (
        torch.compiler.is_compiling()
        or _count_dispatch_modes() > 0
        or _is_jit_tracing()
        or proxy_tensor._CURRENT_MAKE_FX_TRACER is not None  # noqa: SLF001 - see `_is_make_fx_tracing`
    )


def is_intercepted() -> bool:
    """Whether `has_tracer_or_mode()` or `is_transformed()` is True, in one fast check for every attention call."""
    # Outside of Dynamo, torch.export runs code under its modes, so that the slower `is_compiling()` adds nothing.
    return (
        _is_compiled_by_dynamo()
        or _count_dispatch_modes() > 0
        or _innermost_transform() is not None
        or _is_jit_tracing()
        or proxy_tensor._CURRENT_MAKE_FX_TRACER is not None  # noqa: SLF001 - see `_is_make_fx_tracing`
    )


def is_transformed() -> bool:
    """Whether a transform of torch.func (vmap, grad, jacrev ...) runs this code; its tensors have no storage."""
    if torch.compiler.is_compiling():
        return False  # a compiler traces through transforms, so no transform is active for its graph
    return _innermost_transform() is not None


@constant_in_graphs  # torch 2.11 evaluates is_exporting() to True in every graph
def is_exporting() -> bool:
    """Whether torch.export records this code."""
    return torch.compiler.is_exporting()


def is_jit_traced() -> bool:
    """Whether torch.jit.trace runs this code."""
    return not torch.compiler.is_compiling() and bool(_is_jit_tracing())


def _tensors_lack_values() -> bool:
    """Whether torch.jit.trace, make_fx or a mode of PyTorch's own compiler runs this code."""
    if _is_jit_tracing() or _is_make_fx_tracing():
        return True
    return _count_dispatch_modes() > 0 and any(_get_dispatch_mode(kind) is not None for kind in _MODES_WITHOUT_VALUES)


def _is_make_fx_tracing() -> bool:
    """Whether make_fx is tracing; with `pre_dispatch=True` its mode is not on the stack of dispatch modes."""
    return proxy_tensor._CURRENT_MAKE_FX_TRACER is not None  # noqa: SLF001 - torch has no public name for it


@contextmanager
def hide_from_jit_trace() -> Iterator[None]:
    """Disable torch.jit.trace in this context: it converts sizes to tensors, and warns of their comparisons."""
    state = _get_jit_state()
    if state is None:
        yield
        return
    with Undo() as undo:
        undo.add_step(partial(_set_jit_state, state))
        _set_jit_state(None)
        yield


def original_module(model: nn.Module) -> nn.Module:
    """Return the module that `torch.compile(module)` wraps; any other module is returned as it is."""
    return getattr(model, "_orig_mod", model)


@contextmanager
def run_uncompiled() -> Iterator[None]:
    """Run compiled models eagerly in this context, so that listeners receive their calls; contexts may overlap."""
    if "torch._dynamo" not in sys.modules:
        yield
        return
    with Undo() as undo:
        user = object()
        undo.add_step(partial(_end_uncompiled_use, user))
        with _stance_lock:
            _users_of_uncompiled.append(user)
            if not _replaced_compiler_stances:
                _replaced_compiler_stances.append(torch.compiler.set_stance("force_eager"))
        yield


def _end_uncompiled_use(user: object) -> None:
    with _stance_lock:
        _users_of_uncompiled[:] = [each for each in _users_of_uncompiled if each is not user]
        if _replaced_compiler_stances and not _users_of_uncompiled:
            _replaced_compiler_stances[0].__exit__(None, None, None)
            del _replaced_compiler_stances[:1]


_stance_lock = RLock()
_users_of_uncompiled: list[object] = []  # one object per active `run_uncompiled`
_replaced_compiler_stances: list[Any] = []  # the active force_eager stance, if any


def is_in_backward_pass() -> bool:
    """Whether a backward pass runs this code, as when activation checkpointing recomputes a forward pass.

    >>> is_in_backward_pass()
    False
    """
    return torch._C._current_graph_task_id() != -1  # noqa: SLF001 - torch has no public name for it


def is_captured(device: torch.device) -> bool:
    """Whether a CUDA graph captures the work on a device: tensors made now have no values until the graph runs."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def can_read_values(device: torch.device) -> bool:
    """Whether tensor values on a device can be read without synchronisation: on the CPU, unless a graph is traced."""
    return device.type == "cpu" and not is_traced()
