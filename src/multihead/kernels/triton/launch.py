"""Launch a Triton kernel, where there is a device for it; what happens if it cannot run.

This module imports Triton when it launches the first kernel. A kernel that does not compile or launch here is not tried
again: there is one warning, and torch operators measure instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from importlib.util import find_spec
from typing import Any, Literal

import torch
from torch import Tensor

from multihead.kernels.proven import GpuPath, reason_to_wait
from multihead.kernels.slow_paths import warn_of_slow_path
from multihead.kernels.triton.tiles import Tile
from multihead.tensors.tracing import constant_in_graphs

_FOLDER = "kernels/triton"
CODE_ON_DEVICE = tuple(
    f"{_FOLDER}/{name}.py" for name in ("device/scores", "device/per_query", "device/per_key", "tiles")
)
GPU_PATH = GpuPath("statistics", (*CODE_ON_DEVICE, f"{_FOLDER}/launch.py", f"{_FOLDER}/statistics.py"))
LARGEST_HEAD_DIM = 256
FIRST_CAPABILITY = (8, 0)  # of NVIDIA's GPUs; code for older ones has no matrix instructions
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
KernelName = Literal["measure_queries", "sum_keys"]

_failures: list[str] = []  # why kernels are not tried any more; at most one sentence


def reason_not_to_launch(device: torch.device) -> str | None:
    """Return why no kernel runs on a device, in one sentence, or None."""
    if device.type != "cuda":
        return f"it needs CUDA, and the tensors are on {device}"
    return (_failures[0] if _failures else None) or reason_to_wait(GPU_PATH) or reason_of_device(device)


@constant_in_graphs
def reason_of_device(device: torch.device) -> str | None:
    """Return what a GPU or its software lacks, in one sentence, or None."""
    if is_triton_missing():
        return "it is compiled by Triton, which is not installed"
    if torch.version.hip is None and torch.cuda.get_device_capability(device) < FIRST_CAPABILITY:
        return "it needs a GPU of compute capability 8.0, because older ones would compute without matrix instructions"
    return None


@cache
def is_triton_missing() -> bool:
    """Whether Triton cannot be imported."""
    return find_spec("triton") is None


def launch(
    kernel: KernelName, programs: int, tile: Tile, arguments: Mapping[str, Any], constants: Mapping[str, Any]
) -> bool:
    """Launch a kernel on the device of its tensors; return False, and warn, if it does not compile or launch.

    Args:
        kernel: name of the kernel.
        programs: number of programs.
        tile: the tile of a program.
        arguments: name of an argument -> tensor or number.
        constants: name of a constant for which the kernel is compiled -> its value.
    """
    q: Tensor = arguments["q"]
    try:
        with _on_device(q.device):
            _kernels()[kernel][(programs,)](**arguments, **constants, num_warps=tile.warps, num_stages=tile.stages)
    except Exception as error:  # noqa: BLE001 - compilers and drivers raise errors of many classes
        # Remembered after the warning, so that a warning that is an error is raised by the next call too.
        warn_of_slow_path(
            f"The kernel that measures statistics on the GPU does not run here: {type(error).__name__}: {error}.",
            "Statistics are measured by operators of PyTorch, which take longer; their numbers are the same.",
        )
        _failures.append(f"it failed on this device ({type(error).__name__})")
        return False
    return True


@cache
def _kernels() -> dict[str, Any]:
    """Import the kernels, and Triton with them: name -> function that is compiled at its first launch."""
    from multihead.kernels.triton.device.per_key import sum_keys
    from multihead.kernels.triton.device.per_query import measure_queries

    return {"measure_queries": measure_queries, "sum_keys": sum_keys}


def _on_device(device: torch.device) -> AbstractContextManager[object]:
    """Make a device the current one, on which Triton launches."""
    if device.type != "cuda" or device.index in (None, torch.cuda.current_device()):
        return nullcontext()
    return torch.cuda.device(device)
