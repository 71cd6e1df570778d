"""Run the kernels of `kernels/triton/` in the interpreter of Triton, where the simulated GPU launches them."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from multihead.kernels.triton import launch, statistics
from multihead.kernels.triton.launch import Tile
from tests.simulated_gpu import device

assert os.environ.get("TRITON_INTERPRET") == "1", "`make gpu-code` sets it, before Triton is imported."
_interpreted = launch._kernels  # before the simulated GPU replaces it
TILE = Tile(32, 32, 4, 2)  # small, so that calls of 96 rows have tiles of every kind


def run_kernel(name: str, programs: int, given: dict[str, Any]) -> None:
    """Run a kernel on tensors of the CPU, without the instructions that only a GPU has."""
    constants = {"fast": False, "precision": "ieee"}
    if "step" in given:
        constants["step"] = given["width"]
    with warnings.catch_warnings():
        # What is hidden may overflow before it is replaced.
        warnings.simplefilter("ignore", RuntimeWarning)
        _interpreted()[name][(programs,)](**given | constants)


@contextmanager
def interpreted_gpu() -> Iterator[device.Gpu]:
    """Simulate a GPU whose Triton kernels are interpreted, with small tiles."""
    with (
        device.simulated_gpu() as gpu,
        mock.patch.object(device, "run_kernel", run_kernel),
        mock.patch.object(statistics, "tile_of_queries", return_value=TILE),
        mock.patch.object(statistics, "tile_of_keys", return_value=TILE),
    ):
        yield gpu
