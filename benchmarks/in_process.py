"""Run a function in a new process, optionally with an instruction set that is forced before torch is imported."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from typing import TypeVar

from multihead.kernels.native import library

T = TypeVar("T")

# Environment variables that limit torch to the instructions of a CPU with this set.
TORCH_LIMITS = {
    "avx2": {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"},
    "avx512": {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE"},
}


def in_new_process(function: Callable[..., T], *arguments: object, instruction_set: str | None = None) -> T:
    """Call a function in a new process, because the state of the allocator after one case changes the next one's times.

    Args:
        function: a function of a module, so that it can be imported by its name.
        arguments: its arguments.
        instruction_set: the set that the native kernel must use and torch is limited to; None forces nothing.
    """
    forced: dict[str, str] = {}
    if instruction_set is not None:
        forced = {library.ENVIRONMENT: instruction_set, "HF_HUB_OFFLINE": "1", **TORCH_LIMITS.get(instruction_set, {})}
    with _environment(forced), ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
        return process.submit(function, *arguments).result()


def failure(error: Exception) -> str:
    """Return the note of a row whose case raised an error: the type and the first line of the message."""
    message = str(error).strip().splitlines()
    return f"failed: {type(error).__name__}: {message[0] if message else ''}"


def runs_here(names: tuple[str, ...] = ()) -> list[str]:
    """Return those of the named instruction sets that run here; without names, AVX2 and the widest."""
    running = [each.name for each in library.instruction_sets() if each.runs and not each.for_tests]
    chosen = names or tuple(dict.fromkeys(["avx2", *running[-1:]]))
    return [name for name in chosen if name in running]


@contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    """Set environment variables for the processes that start in this context."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
