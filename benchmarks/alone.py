"""Run a function in a process of its own, with an instruction set forced before torch is imported."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from typing import TypeVar

from multihead.kernels.native import library

T = TypeVar("T")

# What holds torch to the instructions of a CPU that has no more than the set.
HELD = {
    "avx2": {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"},
    "avx512": {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE"},
}


def alone(function: Callable[..., T], *given: object, instruction_set: str | None = None) -> T:
    """Call a function in a new process: what one call leaves in the allocator must not slow the next one down.

    Args:
        function: one that can be imported by its name.
        given: its arguments.
        instruction_set: what the native kernel is forced to, and torch held to; None forces nothing.
    """
    forced: dict[str, str] = {}
    if instruction_set is not None:
        forced = {library.ENVIRONMENT: instruction_set, "HF_HUB_OFFLINE": "1", **HELD.get(instruction_set, {})}
    with _environment(forced), ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
        return process.submit(function, *given).result()


def runs_here(*, asked: tuple[str, ...] = ()) -> list[str]:
    """Name the instruction sets that are asked for and run here; AVX2 and the widest, where none is asked for."""
    running = [each.name for each in library.instruction_sets() if each.runs and not each.for_tests]
    chosen = asked or tuple(dict.fromkeys(["avx2", *running[-1:]]))
    return [name for name in chosen if name in running]


@contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    """Set environment variables for the processes that begin meanwhile."""
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
