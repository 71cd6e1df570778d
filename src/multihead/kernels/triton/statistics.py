"""Statistics that Triton kernels measure on a GPU: all those of a query by one launch, sums per key by another.

Nothing here reads a value, so no call waits for the device. What is read of a mask are its key bounds, which are
computed once per mask; a mask that is no interval is made dense in blocks of queries.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from functools import lru_cache
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, TypeAlias
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from multihead.kernels import dense_tile
from multihead.kernels.call import AttentionRequest, AttentionResult
from multihead.kernels.native.call import QueryBlock, iterate_query_blocks
from multihead.kernels.parts import (
    DISTANCE_SPREAD,
    ENTROPY,
    FIRST_KEYS_MASS,
    FIRST_SPECIAL_MASS,
    LARGEST_KEY,
    LARGEST_WEIGHT,
    LOGSUMEXP,
    MEAN_DISTANCE,
    NEAR_MASS,
    NEAR_REACH,
    OFFSET_MASS,
    SINK_MASS,
    SPECIAL_MASS,
    PartName,
)
from multihead.kernels.triton.launch import DTYPES, LARGEST_HEAD_DIM, launch, reason_not_to_launch
from multihead.kernels.triton.tiles import is_fast, padded_width, precision_of, tile_of_keys, tile_of_queries
from multihead.masks.base import KeyBounds
from multihead.scores.bias import RelativeBias, slice_bias, values_of
from multihead.tensors.tracing import is_captured

# Key bounds of a mask that is no interval -> number of keys, which bounds leave open, and all of its queries.
_DENSE_BLOCKS: WeakKeyDictionary[KeyBounds, tuple[int, QueryBlock]] = WeakKeyDictionary()
PoolOperation: TypeAlias = Literal["mean", "max"]
LOG2_E = 1.4426950408889634
_NO_STRIDES: tuple[int, ...] = (0, 0, 0, 0)
QUERIES_PER_SCAN = 1024  # queries whose intervals a program reads at once
MOST_SETS = 4  # sets of keys in one launch
MOST_FIRST_KEYS = 64  # with more first keys, looking up their weights takes longer than a pass over all keys
LARGEST_POSITION = 1 << 30  # kernels count in int32
EXP_ENTROPY, LARGEST_SCORE, _KEY_LOW, _KEY_HIGH = range(4)  # rows before the parts; the key is an int64
AFTER_FIRST_SPECIAL = "special keys after the first"  # a row that is no part
_PARTS_OF_ALL_QUERIES: tuple[PartName, ...] = (
    LOGSUMEXP.name,
    ENTROPY.name,
    MEAN_DISTANCE.name,
    DISTANCE_SPREAD.name,
    LARGEST_WEIGHT.name,
)
_NEAR = tuple(range(-NEAR_REACH, NEAR_REACH + 1))


def refusal(request: AttentionRequest) -> str | None:
    """Return why no kernel measures a call, in one sentence, or None."""
    return reason_not_to_launch(request.shape.device) or reason_against_call(request)


def reason_against_call(request: AttentionRequest) -> str | None:
    """Return why the kernels do not measure a call, in one sentence, or None, wherever they run."""
    shape = request.shape
    if request.surroundings.intercepted:
        return "it is called without graphs, tracers and transforms of torch.func"
    if not type(request.q) is type(request.k) is Tensor or request.scales is not None:
        return "it reads plain tensors of q and k"
    if request.q.dtype not in DTYPES or request.k.dtype != request.q.dtype:
        return "it measures float32, bfloat16 and float16"
    if not 0 < shape.head_dim <= LARGEST_HEAD_DIM or 0 in (shape.batch, shape.num_heads, shape.query_length):
        return f"it needs at least one query, and heads of at most {LARGEST_HEAD_DIM} columns"
    start = request.query_start
    if (
        shape.key_length == 0
        or max(shape.query_length, shape.key_length) > LARGEST_POSITION
        or (isinstance(start, int) and start > LARGEST_POSITION)
    ):
        return f"it needs at least one key, and positions of at most {LARGEST_POSITION}"
    return None


def add_statistics(request: AttentionRequest, bounds: KeyBounds, attended: AttentionResult) -> AttentionResult:
    """Return a result with the requested statistics that its kernel has not measured, of a call on a GPU.

    The output and the logsumexp are those of the result, whichever kernel computed them.
    """
    wanted = request.requested_statistics - attended.statistics.keys()
    if not wanted or refusal(request) is not None:
        return attended
    with torch.no_grad():
        measured = measure_in_one_pass(request, bounds, wanted, logsumexp=attended.kernel_logsumexp.detach())
    if measured is None:
        return attended
    parts = {**attended.statistics, **measured.parts(wanted)}
    if attended.finish is None:
        return replace(attended, statistics=parts)
    return replace(attended, kernel_logsumexp=measured.logsumexp, finish=None, statistics=parts)


class QueryRows(NamedTuple):
    """The rows of what `measure_queries` writes.

    Attributes:
        parts: the part of each row after the first four; None for one that was not wanted.
        offsets: the offsets whose weights are looked up; the first `kept` are stored.
        kept: number of offsets that are stored.
        counts: the numbers of first keys, ascending.
        sets: the parts that are sets of keys.
        after_first_special: the row of the mass of the special keys after the first key of the text, and the row
            before it is that of a first key that is special; None if neither is measured.
    """

    parts: tuple[PartName | None, ...]
    offsets: tuple[int, ...]
    kept: int
    counts: tuple[int, ...]
    sets: tuple[PartName, ...]
    after_first_special: int | None

    @property
    def first_special(self) -> bool:
        """Whether the weight on a first key that is special is measured."""
        return self.after_first_special is not None


@lru_cache(maxsize=256)
def rows_of_parts(wanted: frozenset[PartName], sets: tuple[PartName, ...], *, sinks: bool) -> QueryRows:
    """Return the rows that measure wanted parts; parts that one launch does not measure are left out.

    Args:
        wanted: names of parts.
        sets: those of them that are sets of keys which the caller has.
        sinks: whether the call has learned sinks.
    """
    offsets = sorted(int(name[1]) for name in wanted if name[0] == OFFSET_MASS.name)
    counts = sorted(int(name[1]) for name in wanted if name[0] == FIRST_KEYS_MASS.name)
    counts = [count for count in counts if count <= MOST_FIRST_KEYS]
    first_special = FIRST_SPECIAL_MASS.name in wanted and SPECIAL_MASS.name in sets
    if first_special:
        sets = (SPECIAL_MASS.name, *(name for name in sets if name != SPECIAL_MASS.name))
    sets = tuple(name for name in sets if name in wanted or (first_special and name == SPECIAL_MASS.name))[:MOST_SETS]
    looked_up = [*offsets, *(each for each in _NEAR if NEAR_MASS.name in wanted and each not in offsets)]
    rows: list[PartName] = [*_PARTS_OF_ALL_QUERIES]
    rows += [SINK_MASS.name] if sinks else []
    rows += [*sets, *(OFFSET_MASS(each).name for each in offsets), *(FIRST_KEYS_MASS(each).name for each in counts)]
    rows += [FIRST_SPECIAL_MASS.name, AFTER_FIRST_SPECIAL] if first_special else []
    parts = tuple(name if name in wanted else None for name in (*rows, NEAR_MASS.name))
    after_first = _KEY_HIGH + 1 + rows.index(AFTER_FIRST_SPECIAL) if first_special else None
    return QueryRows(parts, tuple(looked_up), len(offsets), tuple(counts), sets, after_first)


class MeasuredQueries(NamedTuple):
    """What one launch measured of every query.

    Attributes:
        numbers: (rows, batch, heads, queries) float32, as `rows` names them; the largest key takes two rows.
        rows: the parts of the rows.
        largest_key: (batch, heads, queries) int64.
    """

    numbers: Tensor
    rows: QueryRows
    largest_key: Tensor

    @property
    def logsumexp(self) -> Tensor:
        """(batch, heads, queries), nats; NaN for a query that sees a NaN, -inf for one that sees no key."""
        return self.numbers[_KEY_HIGH + 1]

    def parts(self, wanted: Collection[PartName]) -> dict[PartName, Tensor]:
        """Return the measured ones of wanted parts: name -> (batch, heads, queries)."""
        found = {
            name: self.numbers[_KEY_HIGH + 1 + row]
            for row, name in enumerate(self.rows.parts)
            if name is not None and name in wanted
        }
        if LARGEST_KEY.name in wanted:
            found[LARGEST_KEY.name] = self.largest_key
        return found


def measure_in_one_pass(
    request: AttentionRequest,
    bounds: KeyBounds,
    wanted: Collection[PartName],
    *,
    logsumexp: Tensor | None = None,
    key_sets: Mapping[PartName, Tensor] = MappingProxyType({}),
    first_keys: Tensor | None = None,
) -> MeasuredQueries | None:
    """Measure parts with a number per query, and the logsumexp; None if the kernel does not run on this device.

    Args:
        request: the call.
        bounds: its key bounds.
        wanted: names of parts; those that the kernel does not measure are left out.
        logsumexp: (batch, heads, queries), nats, as any kernel wrote it (`AttentionResult.kernel_logsumexp`); None
            computes it, which takes a fifth longer.
        key_sets: part -> (batch, keys) bool, the keys of its set.
        first_keys: (batch or 1,) int64, the first key of each sample; None finds those that some query sees.
    """
    shape = request.shape
    rows = rows_of_parts(frozenset(wanted), tuple(key_sets), sinks=request.sinks is not None)
    size = (shape.batch, shape.num_heads, shape.query_length)
    numbers = torch.empty(_KEY_HIGH + 1 + len(rows.parts), *size, dtype=torch.float32, device=shape.device)
    largest_key = numbers[_KEY_LOW : _KEY_HIGH + 1].view(-1).view(torch.int64).view(size)
    if (rows.counts or rows.first_special) and first_keys is None:
        first_keys = dense_tile.first_keys(request, bounds)
    flags = _flags_of_sets([key_sets[name] for name in rows.sets])
    inputs = _with_readable_rows(request)
    for block in _blocks_of_queries(inputs, bounds):
        arguments, constants = _arguments_of_block(inputs, block, logsumexp)
        queries = int(arguments["num_queries"])
        reads_cells = bool(constants["has_bias"] or constants["has_shown"])
        tile = tile_of_queries(request.q.dtype, shape.head_dim, queries, reads_cells=reads_cells)
        start, has_starts = request.query_start, isinstance(request.query_start, Tensor)
        of_text = None
        if first_keys is not None:
            of_text = first_keys[:, None] if first_keys.dim() == 1 else first_keys[:, block.queries]
            of_text = of_text.expand(-1, queries)
        begin = block.queries.start or 0
        arguments |= {
            "query_starts": start.to(shape.device) if isinstance(start, Tensor) else arguments["starts"],
            "query_starts_batch": 1,
            "query_start": begin if isinstance(start, Tensor) else start + begin,
            "first_keys": arguments["starts"] if of_text is None else of_text,
            **_named_strides("first_keys", of_text, ("batch", "row")),
            "flags": arguments["starts"] if flags is None else flags,
            **_named_strides("flags", flags, ("batch", "key")),
            "places": _small_tensor((*rows.offsets, *rows.counts), shape.device),
            "num_places": len(rows.offsets),
            "num_kept": rows.kept,
            "num_counts": len(rows.counts),
            "sinks": arguments["starts"] if request.sinks is None else request.sinks.detach(),
            "found": block.slice_queries(numbers.flatten(0, 1)),
            "found_key": block.slice_queries(largest_key),
            "found_part": numbers.stride(0),
            "found_head": shape.query_length,
        }
        constants |= {
            "tile_queries": tile.queries,
            "tile_keys": tile.keys,
            "step": 16 if is_fast(shape.device) else constants["width"],
            "known": logsumexp is not None,
            "late": request.softcap is None and request.bias is None and request.scale > 0,
            "has_starts": has_starts,
            "sets": len(rows.sets),
            "first_special": rows.first_special,
            "has_sinks": request.sinks is not None,
            "near_reach": NEAR_REACH,
        }
        programs = -(-queries // tile.queries) * shape.batch * shape.num_heads
        if not launch("measure_queries", programs, tile, arguments, constants):
            return None
    return MeasuredQueries(numbers, rows, largest_key)


def sum_weights_per_key(
    request: AttentionRequest,
    bounds: KeyBounds,
    logsumexp: Tensor,
    *,
    cell: tuple[int, int] | None = None,
    pool: PoolOperation = "mean",
) -> tuple[Tensor, Tensor | None] | None:
    """Sum the attention weights over queries, per key, and pool them per cell of a coarse map.

    Args:
        request: the call.
        bounds: its key bounds.
        logsumexp: (batch, heads, queries), nats; queries for which it is -inf or NaN add 0.
        cell: queries and keys of a cell of the map; None: no map.
        pool: whether a cell is the "mean" or the "max" of the weights of its visible cells.

    Returns:
        The sums (batch, heads, keys), and the map (batch, heads, rows, columns), NaN where no cell is visible, or None;
        None instead of both if the kernel does not run on this device.
    """
    shape = request.shape
    inputs = _with_readable_rows(request)
    sums: Tensor | None = None
    maps: list[Tensor] = []
    for block in _blocks_of_queries(inputs, bounds, step=1 if cell is None else cell[0]):
        arguments, constants = _arguments_of_block(inputs, block, logsumexp)
        queries = int(arguments["num_queries"])
        reads_cells = bool(constants["has_bias"] or constants["has_shown"])
        tile = tile_of_keys(request.q.dtype, shape.head_dim, cell, reads_cells=reads_cells)
        cell_queries, cell_keys = (queries, tile.keys) if cell is None else cell
        rows, columns = -(-queries // cell_queries), -(-shape.key_length // cell_keys)
        tiles = -(-cell_keys // tile.keys)
        received = torch.empty(shape.batch, shape.num_heads, shape.key_length, device=shape.device)
        size = (shape.batch, shape.num_heads, rows, columns, tiles)
        pooled = seen = received  # unread without a map
        if cell is not None:
            pooled = torch.empty(size, dtype=torch.float32, device=shape.device)
        if cell is not None and pool == "mean":
            seen = torch.empty(size, dtype=torch.int32, device=shape.device)
        arguments |= {
            "received_by_keys": received,
            "cells_of_map": pooled,
            "cells_seen": seen,
            "cell_queries": cell_queries,
            "cell_keys": cell_keys,
            "map_rows": rows,
            "map_columns": columns,
            "tiles_per_column": tiles,
        }
        constants |= {
            "tile_queries": tile.queries,
            "tile_keys": tile.keys,
            "scanned": QUERIES_PER_SCAN,
            "pool": 0 if cell is None else 1 if pool == "mean" else 2,
        }
        if not launch("sum_keys", columns * tiles * shape.batch * shape.num_heads, tile, arguments, constants):
            return None
        sums = received if sums is None else sums.add_(received)
        if cell is not None:
            maps.append(_pool_tiles(pooled, seen, pool))
    assert sums is not None
    return sums, None if cell is None else maps[0] if len(maps) == 1 else torch.cat(maps, 2)


def _pool_tiles(pooled: Tensor, seen: Tensor, pool: PoolOperation) -> Tensor:
    """Pool the tiles of each column of cells, (batch, heads, rows, columns, tiles); NaN where no cell is visible."""
    one = pooled.shape[-1] == 1
    if pool == "max":
        largest = pooled[..., 0] if one else pooled.amax(-1)
        return largest.masked_fill(largest < 0, torch.nan)
    return pooled[..., 0] / seen[..., 0] if one else pooled.sum(-1) / seen.sum(-1)


def _blocks_of_queries(request: AttentionRequest, bounds: KeyBounds, *, step: int = 1) -> Iterator[QueryBlock]:
    """Yield blocks of queries, see `iterate_query_blocks`; one that has all queries is made once per bounds."""
    shape = request.shape
    known = _DENSE_BLOCKS.get(bounds)
    if known is not None and known[0] == shape.key_length:
        yield known[1]
        return
    for block in iterate_query_blocks(request, bounds, step=step):
        is_whole = block.visible is not None and block.bounds.start.shape[1] == shape.query_length
        if is_whole and not is_captured(shape.device):
            _DENSE_BLOCKS[bounds] = shape.key_length, block
        yield block


def _with_readable_rows(request: AttentionRequest) -> AttentionRequest:
    """Return the request with rows of q and k that are contiguous, as kernels read them."""
    q, k = _with_unit_columns(request.q), _with_unit_columns(request.k)
    return request if q is request.q and k is request.k else replace(request, q=q, k=k)


def _arguments_of_block(
    request: AttentionRequest, block: QueryBlock, logsumexp: Tensor | None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the arguments and constants of a block of queries that both kernels take."""
    shape, q, k = request.shape, block.slice_queries(request.q), request.k
    queries = q.shape[2]
    starts, stops = (_with_unit_columns(each) for each in (block.bounds.start, block.bounds.stop))
    bias, bias_first, bias_strides = _bias_of_block(request, block, queries, starts)
    shown, shown_strides = starts, _NO_STRIDES  # a tensor that is not read
    if block.visible is not None:
        visible = block.visible.expand(-1, -1, queries, shape.key_length)
        shown, shown_strides = visible.view(torch.uint8), _strides(visible)
    known = None if logsumexp is None else block.slice_queries(logsumexp)
    arguments = {
        "q": q,
        "k": k,
        "known_logsumexp": starts if known is None else known,
        "starts": starts,
        "stops": stops,
        "bias": bias,
        "shown": shown,
        **_named_strides("q", q, ("batch", "head", "row")),
        **_named_strides("k", k, ("batch", "head", "row")),
        **_named_strides("known", known, ("batch", "head", "row")),
        "bounds_batch": _strides(starts)[0],
        "bias_first": bias_first,
        **dict(zip(("bias_batch", "bias_head", "bias_row", "bias_key"), bias_strides, strict=True)),
        **dict(zip(("shown_batch", "shown_head", "shown_row", "shown_key"), shown_strides, strict=True)),
        "num_heads": shape.num_heads,
        "heads_per_kv_head": shape.heads_per_kv_head,
        "num_queries": queries,
        "num_keys": shape.key_length,
        "scale": request.scale * LOG2_E,
        "softcap": 1.0 if request.softcap is None else request.softcap,
    }
    constants = {
        "head_dim": shape.head_dim,
        "width": padded_width(shape.head_dim),
        "capped": request.softcap is not None,
        "has_bias": request.bias is not None,
        "has_shown": block.visible is not None,
        "wide": max(queries * q.stride(2), shape.key_length * k.stride(2)) >= 1 << 31,
        "fast": is_fast(shape.device),
        "precision": precision_of(request.q.dtype, shape.device),
    }
    return arguments, constants


def _bias_of_block(
    request: AttentionRequest, block: QueryBlock, queries: int, unused: Tensor
) -> tuple[Tensor, int, tuple[int, ...]]:
    """Return the numbers of a bias, the index of its first cell, and its strides by batch, head, query and key."""
    if request.bias is None:
        return unused, 0, _NO_STRIDES
    shape, bias = request.shape, request.bias
    if block.queries.stop is not None:
        bias = slice_bias(bias, shape.query_length, (block.queries.start, block.queries.stop), (0, shape.key_length))
    values = values_of(bias).detach()
    if isinstance(bias, RelativeBias):
        values = _with_unit_columns(values)
        return values, queries - 1, (*_strides(values)[:2], -1, 1)
    return values, 0, _strides(values)


def _strides(tensor: Tensor) -> tuple[int, ...]:
    """Return the strides of a tensor, 0 for axes of size 1, which so broadcast."""
    return tuple(0 if size == 1 else stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _named_strides(name: str, tensor: Tensor | None, axes: tuple[str, ...]) -> dict[str, int]:
    """Return the strides of the first axes of a tensor by name, 0 for all without a tensor."""
    strides = (0,) * len(axes) if tensor is None else _strides(tensor)
    return {f"{name}_{axis}": stride for axis, stride in zip(axes, strides, strict=False)}


def _with_unit_columns(tensor: Tensor) -> Tensor:
    """Return a tensor whose last axis is contiguous, as kernels read it."""
    tensor = tensor.detach().resolve_neg()
    return tensor if tensor.stride(-1) == 1 or tensor.shape[-1] == 1 else tensor.contiguous()


def _flags_of_sets(sets: list[Tensor]) -> Tensor | None:
    """Return one number per key, (batch, keys), whose bits say in which sets the key is; None without sets."""
    if not sets:
        return None
    flags = sets[0].view(torch.uint8)
    for bit, keys in enumerate(sets[1:], 1):
        flags = flags + keys.view(torch.uint8) * (1 << bit)
    return flags


@lru_cache(maxsize=64)
def _small_tensor(numbers: tuple[int, ...], device: torch.device) -> Tensor:
    """Return a few numbers on a device, int32, copied there once."""
    return torch.tensor(numbers or (0,), dtype=torch.int32, device=device)
