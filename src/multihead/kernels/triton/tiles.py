"""What a Triton kernel is compiled for: its tile, the instructions of the device, and how products are computed.

A tile is the largest one whose numbers fit into the registers, which `make gpu-compile` shows for every GPU.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

FEW_QUERIES = 16  # queries of the smallest tile


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
    queries, keys, stages = 64, 128, 3
    if reads_cells or dtype == torch.float32 or head_dim > 128:
        queries, keys, stages = 32, 64, 2
    if cell is None:
        return Tile(queries, keys, 8 if queries * keys >= 4096 else 4, stages)
    if head_dim > 64:
        keys = 64  # the sums of a map need registers too
    queries, keys = (min(most, padded_width(size)) for most, size in zip((queries, keys), cell, strict=True))
    return Tile(queries, keys, 8, stages)


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
