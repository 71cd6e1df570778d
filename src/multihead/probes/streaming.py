"""Compute an attention map tile by tile, and accumulate the parts of statistics.

Where the native kernel cannot measure statistics, one loop over tiles computes all sums. It takes 0.84 to 0.96 of the
time of a fused forward pass. Computing the entropy by a second fused call, with the keys as values, would take a whole
forward pass for this statistic alone. Weights at offsets, on first keys and on equal tokens are computed one by one
(`probes/lookups.py`, `probes/repeats.py`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise

import torch
from torch import Tensor

from multihead.kernels.call import AttentionRequest
from multihead.kernels.dense_tile import scores, visible_cells, working_dtype
from multihead.kernels.parts import PartName
from multihead.probes.measured_call import MeasuredCall
from multihead.probes.moments import KEYS_PER_GROUP, DistanceMoments
from multihead.probes.pooling import PooledMap
from multihead.scores.bias import values_of, with_values

TILE_QUERIES = 64  # queries per tile
TILE_KEYS = 512  # keys per tile
TILE_WEIGHTS = 1 << 19  # weights per tile over the heads of a group, so that a tile fits into a CPU cache
# Factors of the three sizes on a GPU, where a tile of 2^25 weights takes longer to compute than to launch.
GPU_TILE_FACTORS = (8, 4, 64)
_PER_QUERY_PARTS: tuple[PartName, ...] = (
    "entropy",
    "largest_weight",
    "largest_key",
    "mean_distance",
    "distance_spread",
)
_TOKEN_MATCH_PARTS: tuple[PartName, ...] = ("duplicate_mass", "induction_mass")
STREAMED_PARTS: frozenset[PartName] = frozenset((*_PER_QUERY_PARTS, *_TOKEN_MATCH_PARTS, "received", "pooled_map"))


@dataclass(frozen=True, eq=False)
class _Tile:
    """The weights of a group of heads of one sample in a tile of the attention map.

    Attributes:
        rows: the queries.
        columns: range of the keys, [first, stop).
        log_weights: (heads, rows, columns), ln p_ij; any finite number where hidden.
        weights: (heads, rows, columns), p_ij; 0 where hidden.
        visible_cells: (heads or 1, rows, columns) bool, True = visible; None if all cells are visible.
        side_of_keys: 1 if all keys are at or before all positions, -1 if at or after, 0 if neither.
    """

    rows: slice
    columns: tuple[int, int]
    log_weights: Tensor
    weights: Tensor
    visible_cells: Tensor | None
    side_of_keys: int


@dataclass(frozen=True, eq=False)
class _HeadGroup:
    """A group of query heads of one sample, with their key/value heads.

    Attributes:
        sample: index of the sample.
        heads: slice of the query heads.
        request: the call with q, k and bias sliced to the sample and heads; its mask is not sliced.
        q, k: (kv_heads, group, queries, head_dim + 1) and (kv_heads, keys, head_dim + 1), whose product is ln p_ij =
            s_ij - L_i; None if the scores have a softcap or a bias.
    """

    sample: int
    heads: slice
    request: AttentionRequest
    q: Tensor | None
    k: Tensor | None


@dataclass(eq=False)
class _TiledMeasurement:
    """Inputs and accumulated results of a computation over all tiles of a call.

    Attributes:
        call: the call.
        parts: the parts to measure, a subset of STREAMED_PARTS.
        value_columns: (batch, kv_heads, keys, n), n numbers c_j per key, or None.
        measured_parts: part -> (batch, heads, queries), for parts with a number per query.
        weighted_sums: (batch, heads, queries, n), the sums sum_j p_ij c_j, or None.
        received: (batch, heads, keys), the sum of the weights on each key.
        maps: pooled map of each group of heads, ordered by sample.
    """

    call: MeasuredCall
    parts: frozenset[PartName]
    value_columns: Tensor | None
    measured_parts: dict[PartName, Tensor]
    weighted_sums: Tensor | None
    received: Tensor
    maps: list[PooledMap] = field(default_factory=list)


def measure_in_tiles(
    call: MeasuredCall, parts: Collection[PartName], columns: Tensor | None = None
) -> tuple[dict[PartName, Tensor], Tensor | None]:
    """Measure parts of a call tile by tile.

    Args:
        call: the call.
        parts: a subset of STREAMED_PARTS.
        columns: (batch, kv_heads, keys, n), n numbers c_j per key whose weighted sums are computed, or None.

    Returns:
        the parts, and sum_j p_ij c_j as (batch, heads, queries, n) or None; in float64.
    """
    shape = call.request.shape
    size = (shape.batch, shape.num_heads, shape.query_length)

    def zeros_per_query(*more: int) -> Tensor:
        return torch.zeros(*size, *more, dtype=torch.float64, device=shape.device)

    stream = _TiledMeasurement(
        call,
        frozenset(parts),
        columns,
        {part: zeros_per_query() for part in (*_PER_QUERY_PARTS, *_TOKEN_MATCH_PARTS) if part in parts},
        None if columns is None else zeros_per_query(columns.shape[-1]),
        torch.zeros(*size[:2], shape.key_length, dtype=torch.float64, device=shape.device),
    )
    if "largest_key" in stream.measured_parts:
        stream.measured_parts["largest_key"] = torch.full(size, -1, device=shape.device)
    for group in _groups_of_call(call):
        _measure_group(stream, group)
    found = dict(stream.measured_parts)
    if "received" in parts:
        found["received"] = stream.received
    if "pooled_map" in parts:
        found["pooled_map"] = _join_maps(stream)
    return found, stream.weighted_sums


def _join_maps(stream: _TiledMeasurement) -> Tensor:
    """Concatenate the pooled maps of all groups of heads: (batch, heads, row blocks, column blocks)."""
    shape = stream.call.request.shape
    pooled = [each.maxima() if stream.call.context.map_pool == "max" else each.means() for each in stream.maps]
    if not pooled:  # an empty batch needs the shape of a map
        empty = _empty_map(stream.call, shape.num_heads).sums
        return empty.new_empty(shape.batch, *empty.shape)
    return torch.cat(pooled).view(shape.batch, shape.num_heads, *pooled[0].shape[1:])


def _empty_map(call: MeasuredCall, heads: int) -> PooledMap:
    shape = call.request.shape
    size = call.context.map_size
    return PooledMap.zero(heads, shape.query_length, shape.key_length, size=size, device=shape.device)


def _groups_of_call(call: MeasuredCall) -> Iterator[_HeadGroup]:
    """Yield the groups of heads of each sample of a call; a group has at most TILE_WEIGHTS weights per tile."""
    shape = call.request.shape
    rows, width, cells = _tile_size(shape.device)
    most = max(1, cells // (rows * width * shape.heads_per_kv_head))  # key/value heads per group
    for index in range(shape.batch):
        sample = call.request_of_sample(index)
        for first in range(0, shape.num_kv_heads, most):
            kv = slice(first, min(first + most, shape.num_kv_heads))
            heads = slice(kv.start * shape.heads_per_kv_head, kv.stop * shape.heads_per_kv_head)
            bias = sample.bias
            if bias is not None and values_of(bias).shape[1] > 1:
                bias = with_values(bias, values_of(bias)[:, heads])
            part = replace(
                sample,
                q=sample.q[:, heads],
                k=sample.k[:, kv],
                bias=bias,
                shape=shape._replace(num_heads=heads.stop - heads.start, num_kv_heads=kv.stop - kv.start),
            )
            yield _HeadGroup(index, heads, part, *_append_logsumexp(call, part, index, heads))


def _tile_size(device: torch.device) -> tuple[int, int, int]:
    """Return the queries, the keys, and the weights over the heads of a group per tile."""
    rows, width, cells = (1, 1, 1) if device.type == "cpu" else GPU_TILE_FACTORS
    return TILE_QUERIES * rows, TILE_KEYS * width, TILE_WEIGHTS * cells


def _append_logsumexp(
    call: MeasuredCall, part: AttentionRequest, sample: int, heads: slice
) -> tuple[Tensor | None, Tensor | None]:
    """Append -L to q and 1 to k, so that their product is ln p = s - L."""
    if part.bias is not None or part.softcap is not None:
        return None, None
    dtype = working_dtype(part.shape.dtype)
    minus = -call.finite_logsumexp[sample, heads, :, None].to(dtype)  # (heads, queries, 1)
    q = torch.cat([part.q[0].to(dtype) * part.scale, minus], -1).unflatten(0, (part.shape.num_kv_heads, -1))
    k = part.k[0].to(dtype)
    return q, torch.cat([k, k.new_ones(*k.shape[:2], 1)], -1)


def _measure_group(stream: _TiledMeasurement, group: _HeadGroup) -> None:
    """Measure one group of heads, and add the results to `stream`."""
    call, shape = stream.call, stream.call.request.shape
    pooled = _empty_map(call, group.heads.stop - group.heads.start) if "pooled_map" in stream.parts else None
    height = _tile_size(shape.device)[0]
    for first in range(0, shape.query_length, height):
        rows = slice(first, min(first + height, shape.query_length))
        block = _RowSums.zero(stream, group, rows)
        for tile in _tiles_of_rows(stream, group, rows):
            block.add(tile, stream, group)
            place = (group.sample, group.heads, slice(*tile.columns))
            if "received" in stream.parts:
                stream.received[place] += tile.weights.sum(-2)
            if pooled is not None and call.context.map_pool == "mean":
                pooled.add(tile.weights, rows, tile.columns)
            elif pooled is not None:
                pooled.update_maxima(tile.weights, tile.visible_cells, rows, tile.columns)
        block.write(stream, group)
    if pooled is not None:
        if call.context.map_pool == "mean":
            pooled.count_visible_cells(call.request, call.bounds, group.sample, heads=group.heads)
        stream.maps.append(pooled)


def _spans_of_keys(
    stream: _TiledMeasurement, group: _HeadGroup, rows: slice
) -> Iterator[tuple[tuple[int, int], bool, int]]:
    """Split the keys that any of the rows sees into spans; yield (first, stop), whether all cells are visible, side."""
    bounds = stream.call.bounds
    plan_row = 0 if bounds.is_shared_by_samples else group.sample
    start, stop = bounds.start[plan_row, rows], bounds.stop[plan_row, rows]
    seeing = start < stop
    if not bool(seeing.any()):
        return
    start, stop = start[seeing], stop[seeing]
    least, free, most = int(start.min()), int(start.max()), int(stop.max())
    seen_stop = max(int(stop.min()), free)  # all rows that see anything see [free, seen_stop)
    if bounds.remainder is not None or group.request.bias is not None or not bool(seeing.all()):
        free = seen_stop = most
    before, after = (int(stream.call.positions[group.sample, row]) for row in (rows.start, rows.stop - 1))
    # A span is a multiple of KEYS_PER_GROUP keys, is fully visible or not, and is on one side of all rows or not.
    wanted = (
        least - (least - free) // KEYS_PER_GROUP * KEYS_PER_GROUP,
        least + (seen_stop - least) // KEYS_PER_GROUP * KEYS_PER_GROUP,
    )
    sides = (
        least + (before + 1 - least) // KEYS_PER_GROUP * KEYS_PER_GROUP,
        least - (least - after) // KEYS_PER_GROUP * KEYS_PER_GROUP,
    )
    cuts = sorted({least, most, *(edge for edge in (*wanted, *sides) if least < edge < most)})
    width = _tile_size(start.device)[1]
    for begin, end in pairwise(cuts):
        side = 1 if end <= before + 1 else -1 if begin >= after else 0
        for first in range(begin, end, width):
            yield (first, min(first + width, end)), free <= begin and end <= seen_stop, side


def _tiles_of_rows(stream: _TiledMeasurement, group: _HeadGroup, rows: slice) -> Iterator[_Tile]:
    """Yield the tiles of some rows that have visible keys."""
    call, request = stream.call, group.request
    bounds, plan_row = call.bounds, 0 if call.bounds.is_shared_by_samples else group.sample
    every_cell_read = bounds.remainder is not None or request.bias is not None
    for columns, free, side in _spans_of_keys(stream, group, rows):
        shown: Tensor | None = None
        if every_cell_read:
            cells = visible_cells(call.request, rows, slice(*columns))
            cells = cells[group.sample if cells.shape[0] > 1 else 0]
            shown = cells[group.heads] if cells.shape[0] > 1 else cells
        elif not free:
            key = torch.arange(*columns, device=request.shape.device)
            shown = (key >= bounds.start[plan_row, rows, None]) & (key < bounds.stop[plan_row, rows, None])
            shown = shown[None]
        if group.q is not None and group.k is not None:
            product = group.q[:, :, rows].flatten(1, 2) @ group.k[:, slice(*columns)].mT
            logs = call.clamp_log_weights(product.view(-1, rows.stop - rows.start, columns[1] - columns[0]))
        else:
            cells = scores(request, rows, slice(*columns))
            logs = call.log_weights(cells[0], (group.sample, group.heads, rows))
        if shown is not None:
            logs.masked_fill_(~shown, 0)
        weights = logs.exp()
        if shown is not None:
            weights.masked_fill_(~shown, 0)
        yield _Tile(rows, columns, logs, weights, shown, side)


@dataclass(eq=False)
class _RowSums:
    """Running sums over the keys, for some queries of a group of heads: (heads, rows) float64 each.

    Attributes:
        rows: the queries.
        positions: (rows,), positions of the queries among the keys.
        sums: part -> sum, for "entropy", "duplicate_mass" and "induction_mass".
        moments: sums for the mean and the spread of the distance, or None.
        largest: logarithm of the largest weight, which may underflow as a weight; -inf before any visible key.
        largest_key: key of the largest weight; -1 before any visible key.
        weighted_sums: (heads, rows, n), weighted sums of numbers of the keys, or None.
    """

    rows: slice
    positions: Tensor
    sums: dict[PartName, Tensor]
    moments: DistanceMoments | None
    largest: Tensor
    largest_key: Tensor
    weighted_sums: Tensor | None

    @staticmethod
    def zero(stream: _TiledMeasurement, group: _HeadGroup, rows: slice) -> _RowSums:
        """Create the sums of some rows before any key is added."""
        size = (group.heads.stop - group.heads.start, rows.stop - rows.start)
        nothing = torch.zeros(size, dtype=torch.float64, device=stream.received.device)
        summed: tuple[PartName, ...] = ("entropy", *_TOKEN_MATCH_PARTS)
        return _RowSums(
            rows,
            stream.call.positions[group.sample, rows],
            {part: nothing.clone() for part in summed if part in stream.parts},
            DistanceMoments.zero(nothing) if {"mean_distance", "distance_spread"} & stream.parts else None,
            torch.full_like(nothing, -torch.inf),
            torch.full_like(nothing, -1, dtype=torch.int64),
            None if stream.value_columns is None else nothing.new_zeros(*size, stream.value_columns.shape[-1]),
        )

    def add(self, tile: _Tile, stream: _TiledMeasurement, group: _HeadGroup) -> None:
        """Add the weights of a tile to all sums."""
        if "entropy" in self.sums:
            self.sums["entropy"] -= torch.linalg.vecdot(tile.weights, tile.log_weights)
        if self.moments is not None:
            self.moments.add(tile.weights, self.positions, tile.columns, tile.side_of_keys)
        if {"largest_weight", "largest_key"} & stream.parts:
            self._update_largest(tile)
        for part in _TOKEN_MATCH_PARTS:
            if part in self.sums:
                self.sums[part] += (tile.weights * self._keys_of_same_token(part, tile, stream, group)).sum(-1)
        if self.weighted_sums is not None and stream.value_columns is not None:
            columns = stream.value_columns[group.sample, :, slice(*tile.columns)].to(tile.weights.dtype)
            per = stream.call.request.shape.heads_per_kv_head
            columns = columns[group.heads.start // per : group.heads.stop // per]  # (kv_heads, columns, n)
            by_kv = tile.weights.unflatten(0, (-1, per)).flatten(1, 2)
            self.weighted_sums += (by_kv @ columns).view(self.weighted_sums.shape)

    def _keys_of_same_token(self, part: PartName, tile: _Tile, stream: _TiledMeasurement, group: _HeadGroup) -> Tensor:
        """Return the earlier keys with the query's token, or the keys after these: (rows, columns) bool."""
        assert stream.call.context.ids is not None
        ids = stream.call.context.ids[group.sample].to(self.positions.device)
        known = (self.positions >= 0) & (self.positions < len(ids))
        own = ids[self.positions.clamp(0, len(ids) - 1)]
        key = torch.arange(*tile.columns, device=ids.device) - int(part == "induction_mass")
        alike = (ids[key.clamp(min=0)] == own[:, None]) & (key >= 0)
        return alike & known[:, None] & (key < self.positions[:, None])

    def _update_largest(self, tile: _Tile) -> None:
        """Update the largest weight and its key; ties go to the first key."""
        logs = (
            tile.log_weights
            if tile.visible_cells is None
            else tile.log_weights.masked_fill(~tile.visible_cells, -torch.inf)
        )
        value, key = _largest_and_index(logs)
        larger = value > self.largest
        self.largest = torch.where(larger, value.double(), self.largest)
        self.largest_key = torch.where(larger, key + tile.columns[0], self.largest_key)

    def write(self, stream: _TiledMeasurement, group: _HeadGroup) -> None:
        """Write the results of these rows into `stream.found` and `stream.weighted_sums`."""
        place = (group.sample, group.heads, self.rows)
        found: dict[PartName, Tensor] = {
            "largest_weight": self.largest.exp(),
            "largest_key": self.largest_key,
            **self.sums,
        }
        if "entropy" in found:
            found["entropy"].clamp_(min=0)  # rounding can give -1e-7 for a single key
        if self.moments is not None:
            found |= {"mean_distance": self.moments.mean(), "distance_spread": self.moments.spread()}
        for part, tensor in stream.measured_parts.items():
            tensor[place] = found[part]
        if self.weighted_sums is not None and stream.weighted_sums is not None:
            stream.weighted_sums[place] = self.weighted_sums


def _largest_and_index(cells: Tensor) -> tuple[Tensor, Tensor]:
    """Return the largest number of each row and its first index, like `max(-1)`, but twice as fast."""
    if cells.shape[-1] % KEYS_PER_GROUP:
        return cells.max(-1)
    parts = cells.unflatten(-1, (-1, KEYS_PER_GROUP))
    value, part = parts.amax(-1).max(-1)  # (heads, rows)
    one = parts.gather(-2, part[..., None, None].expand(*part.shape, 1, KEYS_PER_GROUP))[..., 0, :]
    return value, one.argmax(-1) + part * KEYS_PER_GROUP
