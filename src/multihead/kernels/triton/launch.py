"""Launch a Triton kernel: the sizes of its tiles, what its code is compiled for, and what happens if it cannot run.

This module imports Triton when it launches the first kernel. A kernel that does not compile or launch here is not tried
again: there is one warning, and torch operators measure instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from importlib.util import find_spec
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from multihead.kernels.proven import GpuPath, reason_to_wait
from multihead.kernels.slow_paths import warn_of_slow_path
from multihead.tensors.tracing import constant_in_graphs

_FOLDER = "kernels/triton"
CODE_ON_DEVICE = tuple(
    f"{_FOLDER}/{name}.py" for name in ("device/scores", "device/per_query", "device/per_key", "launch")
)
GPU_PATH = GpuPath("statistics", (*CODE_ON_DEVICE, f"{_FOLDER}/statistics.py"))
LARGEST_HEAD_DIM = 256
FEW_QUERIES = 16  # queries of the smallest tile
FIRST_CAPABILITY = (8, 0)  # of NVIDIA's GPUs; code for older ones has no matrix instructions
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
KernelName = Literal["measure_queries", "sum_keys"]

_failures: list[str] = []  # why kernels are not tried any more; at most one sentence


class Tile(NamedTuple):
    """The tile of a program: its queries and keys, its warps, and the tiles that are loaded ahead."""

    queries: int
    keys: int
    warps: int
    stages: int


def tile_of_queries(dtype: torch.dtype, head_dim: int, queries: int, *, reads_cells: bool) -> Tile:
    """Return the tile of `measure_queries`: the largest one whose numbers fit into the registers.

    Args:
        dtype: dtype of q and k.
        head_dim: columns of q and k.
        queries: number of queries.
        reads_cells: whether a mask or a bias is read cell by cell.
    """
    if queries <= FEW_QUERIES:
        return Tile(FEW_QUERIES, 64, 4, 2)
    if reads_cells:
        return Tile(64, 32, 8, 2)
    if dtype == torch.float32:
        return Tile(64, 32, 8, 2) if head_dim > 64 else Tile(64, 64, 8, 2)
    return Tile(64, 64, 8, 2) if head_dim > 128 else Tile(128, 64, 8, 3)


def tile_of_keys(dtype: torch.dtype, head_dim: int, cell: tuple[int, int] | None, *, reads_cells: bool) -> Tile:
    """Return the tile of `sum_keys`, which is no larger than a cell of the map.

    Args:
        dtype: dtype of q and k.
        head_dim: columns of q and k.
        cell: queries and keys of a cell of the map; None: no map.
        reads_cells: whether a mask or a bias is read cell by cell.
    """
    queries, keys, warps, stages = 64, 128, 8, 3
    if reads_cells or dtype == torch.float32 or head_dim > 128:
        queries, keys, stages = 32, 64, 2
    if cell is not None:
        queries, keys = (min(most, padded_width(size)) for most, size in zip((queries, keys), cell, strict=True))
    return Tile(queries, keys, warps if queries * keys >= 4096 else 4, stages)


def padded_width(head_dim: int) -> int:
    """Return the width of a tile of q or k: the power of 2 that holds the columns, at least 16.

    >>> padded_width(8), padded_width(64), padded_width(80)
    (16, 64, 128)
    """
    return max(16, 1 << (head_dim - 1).bit_length())


def is_fast(device: torch.device) -> bool:
    """Whether a device has the instructions of NVIDIA's GPUs; the interpreter of Triton has not."""
    return device.type == "cuda" and torch.version.hip is None


def precision_of(dtype: torch.dtype, device: torch.device) -> str:
    """Return how products are computed: of float32 from three products of tf32, which keeps its digits."""
    return "tf32x3" if dtype == torch.float32 and is_fast(device) else "ieee"


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
        _failures.append(f"it failed on this device ({type(error).__name__})")
        warn_of_slow_path(
            f"The kernel that measures statistics on the GPU does not run here: {type(error).__name__}: {error}.",
            "Statistics are measured by operators of PyTorch, which take longer; their numbers are the same.",
        )
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
