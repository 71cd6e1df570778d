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


def _limits(aten: str, mkl: str, onednn: str) -> dict[str, str]:
    return {"ATEN_CPU_CAPABILITY": aten, "MKL_ENABLE_INSTRUCTIONS": mkl, "ONEDNN_MAX_CPU_ISA": onednn}


# Environment variables that limit torch to the instructions of a CPU with this set. MKL computes the matrix products
# of SDPA, reads its variable on CPUs of Intel only, and calls VNNI, bfloat16 and AMX E1, E3 and E4.
TORCH_LIMITS = {
    "scalar": _limits("default", "SSE4_2", "SSE41"),
    "avx2": _limits("avx2", "AVX2", "AVX2"),
    "avx512": _limits("avx512", "AVX512", "AVX512_CORE"),
    "avx512_vnni": _limits("avx512", "AVX512_E1", "AVX512_CORE_VNNI"),
    "avx512_bf16": _limits("avx512", "AVX512_E3", "AVX512_CORE_BF16"),
    "amx": _limits("avx512", "AVX512_E4", "AVX512_CORE_AMX"),
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
        forced = {
            library.INSTRUCTION_SET_VARIABLE: instruction_set,
            "HF_HUB_OFFLINE": "1",
            **TORCH_LIMITS.get(instruction_set, {}),
        }
    with _environment(forced), ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
        return process.submit(function, *arguments).result()


def failure(error: Exception) -> str:
    """Return the note of a row whose case raised an error: the type and the first line of the message."""
    message = str(error).strip().splitlines()
    return f"failed: {type(error).__name__}: {message[0] if message else ''}"


def runs_here(names: tuple[str, ...] = ()) -> list[str]:
    """Return those of the named instruction sets that run here; without names, AVX2 and the widest."""
    running = [each.name for each in library.instruction_sets() if each.is_supported_by_cpu and not each.for_tests]
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
