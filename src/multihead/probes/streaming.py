"""Compute an attention map tile by tile, and accumulate the parts of statistics.

Where the native kernel cannot measure statistics, one loop over tiles computes all sums. It takes 0.84 to 0.96 of the
time of a fused forward pass. Computing the entropy by a second fused call, with the keys as values, would take a whole
forward pass for this statistic alone. Weights at offsets, on first keys and on equal tokens are computed one by one
(`probes/lookups.py`, `probes/repeats.py`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from multihead.kernels.call import AttentionRequest
from multihead.kernels.dense_tile import scores, visible_cells, working_dtype
from multihead.kernels.parts import PartName
from multihead.probes.measured_call import MeasuredCall
from multihead.probes.repeats import KEY_SHIFTS
from multihead.scores.bias import index_bias
from multihead.tensors.precision import widen, widest_float
from multihead.tensors.shapes import consecutive_slices, index_axes

TILE_QUERIES = 64  # queries per tile
TILE_KEYS = 512  # keys per tile
KEYS_PER_GROUP = 32  # keys per group; squared distances are summed about the middle of their group
TILE_WEIGHTS = 1 << 19  # weights per tile over the heads of a group, so that a tile fits into a CPU cache
# Factors of the three sizes on a GPU, where a tile of 2^25 weights takes longer to compute than to launch.
GPU_TILE_FACTORS = (8, 4, 64)
_LARGEST_PARTS: frozenset[PartName] = frozenset({"largest_weight", "largest_key"})
_DISTANCE_PARTS: frozenset[PartName] = frozenset({"mean_distance", "distance_spread"})
_PER_QUERY_PARTS: frozenset[PartName] = frozenset(("entropy", *KEY_SHIFTS)) | _LARGEST_PARTS | _DISTANCE_PARTS
STREAMED_PARTS: frozenset[PartName] = _PER_QUERY_PARTS | {"received", "pooled_map"}


@dataclass(eq=False)
class DistanceMoments:
    """Running sums of a distance over keys, where p_ij are the weights and d_ij = |position_i - j| the distances.

    The difference of sum p d^2 and (sum p d)^2 / sum p would cancel; squares about means are merged without a
    difference (Chan, Golub and LeVeque 1979, equation 1.5).

    Attributes, (heads, rows) float64:
        mass: sum_j p_ij.
        weighted_distance: sum_j p_ij d_ij.
        squared_deviations: sum_j p_ij (d_ij - weighted_distance / mass)^2.
    """

    mass: Tensor
    weighted_distance: Tensor
    squared_deviations: Tensor

    @staticmethod
    def zero(like: Tensor) -> DistanceMoments:
        """Create sums of 0 with the shape of `like`, (heads, rows)."""
        return DistanceMoments(torch.zeros_like(like), torch.zeros_like(like), torch.zeros_like(like))

    def add(self, weights: Tensor, positions: Tensor, columns: tuple[int, int], side: int) -> None:
        """Add the weights of a tile.

        Args:
            weights: (heads, rows, columns), 0 where hidden.
            positions: (rows,), positions of the queries among the keys.
            columns: range of the keys, [first, stop).
            side: 1 if all keys are at or before all positions, -1 if at or after, 0 if neither.
        """
        first, stop = columns
        middle = first + (stop - first) // KEYS_PER_GROUP * KEYS_PER_GROUP if side else first
        if middle > first:
            self._add_one_sided_keys(weights[..., : middle - first], positions, first, side)
        if stop > middle:
            self._add_any_keys(weights[..., middle - first :], positions, (middle, stop))

    def _add_one_sided_keys(self, weights: Tensor, positions: Tensor, first: int, side: int) -> None:
        """Add keys that are all before or all after the queries: distance is linear, so groups of GROUP keys suffice.

        About the middle of a group the squares are at most 240, so float32 rounds them by far less than a token.
        """
        half = (KEYS_PER_GROUP - 1) / 2
        about = torch.arange(KEYS_PER_GROUP, device=weights.device, dtype=weights.dtype) - half
        parts = weights.unflatten(-1, (-1, KEYS_PER_GROUP))  # (heads, rows, parts, GROUP)
        mass, once, twice = widen(parts.sum(-1)), widen(parts @ about), widen(parts @ about.square())
        number = torch.arange(parts.shape[2], device=weights.device, dtype=widest_float(weights.device))
        middles = number * KEYS_PER_GROUP + half
        whole = mass.sum(-1)
        mean = (mass * middles + once).sum(-1) / _zeros_to_ones(whole)  # counted from the first key
        # sum p (c + m - mean)^2 = sum p c^2 + 2 (m - mean) sum p c + (m - mean)^2 sum p, with c about the middle m.
        away = middles - mean[..., None]
        squares = (twice + away * (2 * once + away * mass)).sum(-1).clamp(min=0)
        sharp = squares < whole
        if bool(sharp.any()):
            # For a spread below one token this difference cancels, so its squares are summed about the mean itself.
            key = torch.arange(weights.shape[-1], device=weights.device, dtype=weights.dtype)
            apart = key - mean[sharp][:, None].to(weights.dtype)
            squares[sharp] = widen(torch.linalg.vecdot(weights[sharp], apart.square_()))
        self._join_sums(whole, side * (positions - first - mean), squares)

    def _add_any_keys(self, weights: Tensor, positions: Tensor, columns: tuple[int, int]) -> None:
        """Add keys on any side of the queries, with the distance of each."""
        distance = (positions[:, None] - torch.arange(*columns, device=weights.device)).abs().to(weights.dtype)
        mass, once = weights.sum(-1), torch.linalg.vecdot(weights, distance)  # (heads, rows)
        mean = once / _zeros_to_ones(mass)
        squares = torch.linalg.vecdot((distance - mean[..., None]).square_(), weights)
        self._join_sums(widen(mass), widen(mean), widen(squares))

    def _join_sums(self, mass: Tensor, mean: Tensor, squares: Tensor) -> None:
        """Merge a tile, given its mass, its mean distance and its squares about this mean; (heads, rows) each."""
        both = _zeros_to_ones(self.mass + mass)
        mean_before = self.weighted_distance / _zeros_to_ones(self.mass)
        self.squared_deviations += squares + (mean - mean_before).square() * (self.mass * mass / both)
        self.mass += mass
        self.weighted_distance += mean * mass

    def mean(self) -> Tensor:
        """Return the mean distance: (heads, rows), 0 for a mass of 0."""
        return self.weighted_distance / _zeros_to_ones(self.mass)

    def spread(self) -> Tensor:
        """Return the standard deviation of the distance: (heads, rows)."""
        return (self.squared_deviations / _zeros_to_ones(self.mass)).sqrt()


def _zeros_to_ones(mass: Tensor) -> Tensor:
    return mass.masked_fill(mass == 0, 1)


@dataclass(frozen=True, eq=False)
class HeadGroup:
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


@dataclass(frozen=True, eq=False)
class _Tile:
    """The weights of a group of heads of one sample in a tile of the attention map.

    Attributes:
        group: the heads.
        rows: the queries.
        positions: (rows,), positions of the queries among the keys.
        columns: range of the keys, [first, stop).
        log_weights: (heads, rows, columns), ln p_ij; any finite number where hidden.
        weights: (heads, rows, columns), p_ij; 0 where hidden.
        visible_cells: (heads or 1, rows, columns) bool, True = visible; None if all cells are visible.
        side_of_keys: 1 if all keys are at or before all positions, -1 if at or after, 0 if neither.
    """

    group: HeadGroup
    rows: slice
    positions: Tensor
    columns: tuple[int, int]
    log_weights: Tensor
    weights: Tensor
    visible_cells: Tensor | None
    side_of_keys: int


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

    def zeros(*size: int) -> Tensor:
        return torch.zeros(shape.batch, shape.num_heads, *size, dtype=widest_float(shape.device), device=shape.device)

    needed = set(parts)
    for measured_together in (_LARGEST_PARTS, _DISTANCE_PARTS):
        if needed & measured_together:
            needed |= measured_together
    found = {part: zeros(shape.query_length) for part in needed & _PER_QUERY_PARTS}
    if "largest_key" in found:
        # The logarithm of the largest weight is updated, because the weight itself may underflow.
        found["largest_weight"].fill_(-torch.inf)
        found["largest_key"] = torch.full_like(found["largest_key"], -1, dtype=torch.int64)
    if "received" in parts:
        found["received"] = zeros(shape.key_length)
    if "pooled_map" in parts:
        found["pooled_map"] = zeros(*call.empty_map(1).sums.shape[1:])
    weighted_sums = None if columns is None else zeros(shape.query_length, columns.shape[-1])
    for group in groups_of_call(call):
        _measure_group(call, group, found, columns, weighted_sums)
    if "entropy" in found:
        found["entropy"].clamp_(min=0)  # rounding can give -1e-7 for a single key
    if "largest_weight" in found:
        found["largest_weight"].exp_()
    return {part: found[part] for part in parts}, weighted_sums


def groups_of_call(call: MeasuredCall) -> Iterator[HeadGroup]:
    """Yield the groups of heads of each sample of a call; a group has at most TILE_WEIGHTS weights per tile."""
    shape = call.request.shape
    rows, width, cells = _tile_size(shape.device)
    most = max(1, cells // (rows * width * shape.heads_per_kv_head))  # key/value heads per group
    for index in range(shape.batch):
        sample = call.request_of_sample(index)
        for kv in consecutive_slices(shape.num_kv_heads, most):
            heads = slice(kv.start * shape.heads_per_kv_head, kv.stop * shape.heads_per_kv_head)
            part = replace(
                sample,
                q=sample.q[:, heads],
                k=sample.k[:, kv],
                bias=index_bias(sample.bias, {1: heads}),
                shape=shape._replace(num_heads=heads.stop - heads.start, num_kv_heads=kv.stop - kv.start),
            )
            yield HeadGroup(index, heads, part, *_append_logsumexp(call, part, index, heads))


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


def _measure_group(
    call: MeasuredCall,
    group: HeadGroup,
    found: dict[PartName, Tensor],
    columns: Tensor | None,
    weighted_sums: Tensor | None,
) -> None:
    """Add the weights of one group of heads, tile by tile, to the results of the call.

    Args:
        call: the call.
        group: the heads.
        found: the results as of `measure_in_tiles`, but "largest_weight" is its logarithm.
        columns: the numbers per key, or None.
        weighted_sums: the weighted sums of the numbers per key, or None.
    """
    shape = call.request.shape
    pooled = call.empty_map(group.heads.stop - group.heads.start) if "pooled_map" in found else None
    for rows in consecutive_slices(shape.query_length, _tile_size(shape.device)[0]):
        place = (group.sample, group.heads, rows)
        sums = {part: found[part][place] for part in found.keys() & _PER_QUERY_PARTS}  # views of `found`
        moments = DistanceMoments.zero(widen(call.logsumexp[place])) if "mean_distance" in sums else None
        for tile in _tiles_of_rows(call, group, rows):
            _add_to_sums(call, tile, sums, moments)
            if columns is not None and weighted_sums is not None:
                weighted_sums[place] += _weighted_sums_of_tile(columns, tile)
            if "received" in found:
                found["received"][group.sample, group.heads, slice(*tile.columns)] += tile.weights.sum(-2)
            if pooled is not None and call.context.map_pool == "mean":
                pooled.add(tile.weights, rows, tile.columns)
            elif pooled is not None:
                pooled.update_maxima(tile.weights, tile.visible_cells, rows, tile.columns)
        if moments is not None:
            sums["mean_distance"].copy_(moments.mean())
            sums["distance_spread"].copy_(moments.spread())
    if pooled is not None and call.context.map_pool == "mean":
        pooled.count_visible_cells(call.request, call.bounds, group.sample, heads=group.heads)
        found["pooled_map"][group.sample, group.heads] = pooled.means()
    elif pooled is not None:
        found["pooled_map"][group.sample, group.heads] = pooled.maxima()


def _spans_of_keys(call: MeasuredCall, group: HeadGroup, rows: slice) -> Iterator[tuple[tuple[int, int], bool, int]]:
    """Split the keys that any of the rows sees into spans; yield (first, stop), whether all cells are visible, side."""
    bounds = call.bounds
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
    before, after = (int(call.positions[group.sample, row]) for row in (rows.start, rows.stop - 1))
    # A span is a multiple of KEYS_PER_GROUP keys, is fully visible or not, and is on one side of all rows or not.
    edges = [least - (least - edge) // KEYS_PER_GROUP * KEYS_PER_GROUP for edge in (free, after)]
    edges += [least + (edge - least) // KEYS_PER_GROUP * KEYS_PER_GROUP for edge in (seen_stop, before + 1)]
    cuts = sorted({least, most, *(edge for edge in edges if least < edge < most)})
    width = _tile_size(start.device)[1]
    for begin, end in pairwise(cuts):
        side = 1 if end <= before + 1 else -1 if begin >= after else 0
        for first in range(begin, end, width):
            yield (first, min(first + width, end)), free <= begin and end <= seen_stop, side


def _tiles_of_rows(call: MeasuredCall, group: HeadGroup, rows: slice) -> Iterator[_Tile]:
    """Yield the tiles of some rows that have visible keys."""
    request, bounds, plan_row = group.request, call.bounds, 0 if call.bounds.is_shared_by_samples else group.sample
    every_cell_read = bounds.remainder is not None or request.bias is not None
    for columns, free, side in _spans_of_keys(call, group, rows):
        shown: Tensor | None = None
        if every_cell_read:
            cells = visible_cells(call.request, rows, slice(*columns))
            shown = index_axes(cells, {0: slice(group.sample, group.sample + 1), 1: group.heads})[0]
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
        yield _Tile(group, rows, call.positions[group.sample, rows], columns, logs, weights, shown, side)


def strips_of_weights(call: MeasuredCall, group: HeadGroup) -> Iterator[tuple[slice, Tensor]]:
    """Yield strips of queries, and the weights of a group of heads of them: (heads, rows, keys)."""
    shape, heads = call.request.shape, group.heads.stop - group.heads.start
    for rows in consecutive_slices(shape.query_length, _tile_size(shape.device)[0]):
        strip = call.finite_logsumexp.new_zeros(heads, rows.stop - rows.start, shape.key_length)
        for tile in _tiles_of_rows(call, group, rows):
            strip[:, :, slice(*tile.columns)] = tile.weights
        yield rows, strip


def _add_to_sums(
    call: MeasuredCall, tile: _Tile, sums: dict[PartName, Tensor], moments: DistanceMoments | None
) -> None:
    """Add the weights of a tile to `sums`, part -> (heads, rows), and to the moments of the distance."""
    if "entropy" in sums:
        sums["entropy"] -= torch.linalg.vecdot(tile.weights, tile.log_weights)
    if moments is not None:
        moments.add(tile.weights, tile.positions, tile.columns, tile.side_of_keys)
    if "largest_key" in sums:
        _update_largest(sums["largest_weight"], sums["largest_key"], tile)
    for part, shift in KEY_SHIFTS.items():
        if part in sums:
            sums[part] += (tile.weights * _keys_of_same_token(call, tile, shift)).sum(-1)


def _weighted_sums_of_tile(columns: Tensor, tile: _Tile) -> Tensor:
    """Sum the numbers of the keys of a tile, weighted: (batch, kv_heads, keys, n) -> (heads, rows, n)."""
    group, per = tile.group, tile.group.request.shape.heads_per_kv_head
    kv_heads = slice(group.heads.start // per, group.heads.stop // per)
    numbers = columns[group.sample, kv_heads, slice(*tile.columns)].to(tile.weights.dtype)
    by_kv = tile.weights.unflatten(0, (-1, per)).flatten(1, 2)
    sums: Tensor = (by_kv @ numbers).view(*tile.weights.shape[:2], -1)
    return sums


def _keys_of_same_token(call: MeasuredCall, tile: _Tile, shift: int) -> Tensor:
    """Return the keys `shift` after the earlier keys with the query's token: (rows, columns) bool."""
    assert call.context.ids is not None
    positions = tile.positions
    ids = call.context.ids[tile.group.sample].to(positions.device)
    known = (positions >= 0) & (positions < len(ids))
    own = ids[positions.clamp(0, len(ids) - 1)]
    key = torch.arange(*tile.columns, device=ids.device) - shift
    alike = (ids[key.clamp(min=0)] == own[:, None]) & (key >= 0)
    return alike & known[:, None] & (key < positions[:, None])


def _update_largest(largest: Tensor, largest_key: Tensor, tile: _Tile) -> None:
    """Update the logarithm of the largest weight, and its key, (heads, rows) each; ties go to the first key."""
    logs = tile.log_weights
    if tile.visible_cells is not None:
        logs = logs.masked_fill(~tile.visible_cells, -torch.inf)
    value, key = _largest_and_index(logs)
    larger = value > largest
    largest.copy_(torch.where(larger, widen(value), largest))
    largest_key.copy_(torch.where(larger, key + tile.columns[0], largest_key))


def _largest_and_index(cells: Tensor) -> tuple[Tensor, Tensor]:
    """Return the largest number of each row and its first index, like `max(-1)`, but twice as fast."""
    if cells.shape[-1] % KEYS_PER_GROUP:
        return cells.max(-1)
    parts = cells.unflatten(-1, (-1, KEYS_PER_GROUP))
    value, part = parts.amax(-1).max(-1)  # (heads, rows)
    one = parts.gather(-2, part[..., None, None].expand(*part.shape, 1, KEYS_PER_GROUP))[..., 0, :]
    return value, one.argmax(-1) + part * KEYS_PER_GROUP
