"""Run the kernels of `kernels/triton/` in the interpreter of Triton, where the simulated GPU launches them."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
from triton import language
from triton.runtime import interpreter
from triton.runtime.interpreter import ReduceOps

from multihead.kernels.triton import launch, statistics
from multihead.kernels.triton.tiles import Tile
from tests.simulated_gpu import device

assert os.environ.get("TRITON_INTERPRET") == "1", "`make gpu-code` sets it, before Triton is imported."
_interpreted = launch._kernels  # before the simulated GPU replaces it
TILE = Tile(32, 32, 4, 2)  # small, so that calls of 96 rows have tiles of every kind


def run_kernel(name: str, programs: int, given: dict[str, Any]) -> None:
    """Run a kernel on tensors of the CPU, without the instructions that only a GPU has."""
    constants = {"fast": False, "precision": "ieee"}
    if "step" in given:
        constants["step"] = given["width"]
    with warnings.catch_warnings(), _language_replaced_once():
        # What is hidden may overflow before it is replaced.
        warnings.simplefilter("ignore", RuntimeWarning)
        _interpreted()[name][(programs,)](**given | constants)


@contextmanager
def _language_replaced_once() -> Iterator[None]:
    """Let the interpreter replace the functions of Triton's language once, and not at each call of a function.

    That took a third of the time.
    """
    replace, replaced = interpreter._patch_lang, set[tuple[bool, ...]]()

    def replace_once(function: Any) -> Any:
        names = function.__globals__.values()
        modules = tuple(any(each is module for each in names) for module in (language, language.core))
        if modules in replaced:
            return interpreter._LangPatchScope()
        replaced.add(modules)
        return replace(function)

    with mock.patch.object(interpreter, "_patch_lang", replace_once):
        yield


@contextmanager
def nan_in_searches(*, is_found: bool) -> Iterator[None]:
    """Let a search for the largest number of a row find NaN if there is one, or only if there is nothing else.

    A GPU does either, by the order in which it compares. The interpreter does the second, but raises an error for a row
    of NaN.
    """
    reduce = ReduceOps.min_max

    def search(self: ReduceOps, numbers: Any, val_reduce_op: Any, idx_reduce_op: Any = None) -> Any:
        if idx_reduce_op is np.nanargmax:
            val_reduce_op, idx_reduce_op = np.max if is_found else np.fmax.reduce, partial(_index_of_largest, is_found)
        return reduce(self, numbers, val_reduce_op, idx_reduce_op)

    with mock.patch.object(ReduceOps, "min_max", search):
        yield


class _NoFailures(list[str]):
    """No kernel may fail here: a call would fall back to operators of PyTorch, and so would those after it."""

    def append(self, reason: str) -> None:
        raise AssertionError(f"A kernel does not run: {reason}.")


def _index_of_largest(is_nan_found: bool, numbers: Any, **axis: Any) -> Any:
    return np.argmax(numbers if is_nan_found else np.where(np.isnan(numbers), -np.inf, numbers), **axis)


@contextmanager
def interpreted_gpu() -> Iterator[device.Gpu]:
    """Simulate a GPU whose Triton kernels are interpreted, with small tiles."""
    with (
        device.simulated_gpu() as gpu,
        mock.patch.object(device, "run_kernel", run_kernel),
        mock.patch.object(launch, "_failures", _NoFailures()),
        mock.patch.object(statistics, "tile_of_queries", return_value=TILE),
        mock.patch.object(statistics, "tile_of_keys", return_value=TILE),
    ):
        yield gpu
