"""Stream over the tiles of an attention map and keep the sums that statistics are made of."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from multihead.call import AttentionRequest
from multihead.kernels.tile import scores, seen
from multihead.plan.bounds import KeyBounds
from multihead.probes.pooling import PooledMap
from multihead.scores.bias import values_of, with_values

ROWS = 128  # queries a tile
CELLS = 1 << 19  # weights a tile and sample, over all heads: small enough to stay in a cache
OFFSETS = {"self": 0, "previous": -1, "next": 1}


@dataclass(frozen=True, eq=False)
class Sums:
    """What was summed over the keys of each query; p_ij are the weights, d_ij = position_i - j the distance.

    Fields, (heads, queries) float64 unless said:
        mass: sum_j p_ij; 1, less where a sink takes part, 0 where no key is seen.
        surprisal: -sum_j p_ij ln p_ij, nats.
        distance: sum_j p_ij |d_ij|, tokens.
        squares: sum_j p_ij (|d_ij| - mean_i)^2, with mean_i = distance / mass.
        at: for each of self, previous and next, the weight on the key at that offset.
        first: the weight on the first key of the sample.
        special: the weight on the special keys.
        largest: the logarithm of the largest weight, which may be too small for a weight; -inf where no key is seen.
        largest_key: int64, its key, -1 where no key is seen.
        received: (heads, keys), sum_i p_ij.
        pooled: the map in blocks.
    """

    mass: Tensor
    surprisal: Tensor
    distance: Tensor
    squares: Tensor
    at: dict[str, Tensor]
    first: Tensor
    special: Tensor
    largest: Tensor
    largest_key: Tensor
    received: Tensor
    pooled: PooledMap

    @staticmethod
    def zero(heads: int, queries: int, keys: int, *, map_size: int, device: torch.device) -> Sums:
        """Make the sums of nothing."""

        def zeros() -> Tensor:
            return torch.zeros(heads, queries, dtype=torch.float64, device=device)

        return Sums(
            mass=zeros(),
            surprisal=zeros(),
            distance=zeros(),
            squares=zeros(),
            at={name: zeros() for name in OFFSETS},
            first=zeros(),
            special=zeros(),
            largest=zeros().fill_(-torch.inf),
            largest_key=torch.full((heads, queries), -1, device=device),
            received=torch.zeros(heads, keys, dtype=torch.float64, device=device),
            pooled=PooledMap.zero(heads, queries, keys, size=map_size, device=device),
        )


@dataclass(frozen=True, eq=False)
class _Tile:
    """Some weights of one sample.

    Fields:
        rows: the queries.
        columns: first key and the one behind the last.
        positions: (rows,), int64, where the queries stand among the keys.
        logs: (heads, rows, columns), ln p_ij; 0 where hidden.
        weights: (heads, rows, columns), p_ij; 0 where hidden.
        shown: (heads or 1, rows, columns) bool, or None where every cell may be seen.
    """

    rows: slice
    columns: tuple[int, int]
    positions: Tensor
    logs: Tensor
    weights: Tensor
    shown: Tensor | None


def of_sample(
    request: AttentionRequest,
    bounds: KeyBounds,
    logsumexp: Tensor,
    sample: int,
    *,
    streams: frozenset[str],
    special_keys: Tensor | None,
    map_size: int,
) -> Sums:
    """Sum one sample of a call, tile by tile.

    Args:
        request: the call, free of NaN.
        bounds: its plan.
        logsumexp: (heads, queries) of the sample; a huge number leaves a row out, since exp(s - huge) = 0.
        sample: which sample.
        streams: the names of the sums that are needed; the others stay 0.
        special_keys: (keys,) bool, or None.
        map_size: most rows and columns of the pooled map.
    """
    shape = request.shape
    sums = Sums.zero(shape.num_heads, shape.query_length, shape.key_length, map_size=map_size, device=shape.device)
    start = bounds.start[0 if bounds.shared else sample]
    stop = bounds.stop[0 if bounds.shared else sample]
    seeing = start < stop
    first_key = int(start[seeing].min()) if bool(seeing.any()) else -1
    for tile in _tiles(request, bounds, logsumexp, sample):
        if streams & {"distance", "special"}:
            _add_moments(sums, tile, special_keys)
        if "surprisal" in streams:
            sums.surprisal[:, tile.rows] -= (tile.weights * tile.logs).sum(-1)
        if "at" in streams:
            _add_neighbours(sums, tile)
        if "first" in streams and tile.columns[0] <= first_key < tile.columns[1]:
            sums.first[:, tile.rows] = tile.weights[..., first_key - tile.columns[0]].double()
        if "largest" in streams:
            _keep_largest(sums, tile)
        if streams & {"received", "pooled"}:
            by_row_block = sums.pooled.row_blocks(tile.weights, tile.rows)  # (heads, row blocks, columns)
            sums.received[:, slice(*tile.columns)] += by_row_block.sum(1)
            if "pooled" in streams:
                sums.pooled.add(by_row_block, tile.shown, tile.rows, tile.columns)
    return sums


def _tiles(request: AttentionRequest, bounds: KeyBounds, logsumexp: Tensor, sample: int) -> Iterator[_Tile]:
    """Yield the tiles of one sample that the bounds do not hide."""
    shape, plan_row = request.shape, 0 if bounds.shared else sample
    every_cell_read = bounds.remainder is not None or request.bias is not None
    alone = _sample(request, sample)
    origin = request.query_start
    origin = int(origin[sample]) if isinstance(origin, Tensor) else origin
    width = max(64, CELLS // (shape.num_heads * min(ROWS, max(shape.query_length, 1))))
    for first_row in range(0, shape.query_length, ROWS):
        rows = slice(first_row, min(first_row + ROWS, shape.query_length))
        start, stop = bounds.start[plan_row, rows], bounds.stop[plan_row, rows]
        if not bool((start < stop).any()):
            continue
        least, most = int(start[start < stop].min()), int(stop.max())
        for first in range(least, most, width):
            columns = (first, min(first + width, most))
            shown: Tensor | None = None
            if every_cell_read:
                cells = seen(request, rows, slice(*columns))
                shown = cells[sample if cells.shape[0] > 1 else 0]
            elif int(start.max()) > columns[0] or int(stop.min()) < columns[1]:
                key = torch.arange(*columns, device=start.device)
                shown = ((key >= start[:, None]) & (key < stop[:, None]))[None]
            logs = scores(alone, rows, slice(*columns))[0].to(logsumexp.dtype) - logsumexp[:, rows, None]
            if shown is not None:
                logs.masked_fill_(~shown, 0)
            weights = logs.exp()
            if shown is not None:
                weights.masked_fill_(~shown, 0)
            yield _Tile(
                rows, columns, torch.arange(rows.start, rows.stop, device=start.device) + origin, logs, weights, shown
            )


def _sample(request: AttentionRequest, sample: int) -> AttentionRequest:
    bias = request.bias
    return replace(
        request,
        q=request.q[sample : sample + 1],
        k=request.k[sample : sample + 1],
        bias=bias if bias is None or len(values_of(bias)) == 1 else with_values(bias, values_of(bias)[sample][None]),
    )


def _add_moments(sums: Sums, tile: _Tile, special_keys: Tensor | None) -> None:
    """Add sum p and sum p |d|, and join the squares about the mean of what is there and of this tile.

    A spread taken as the difference of sum p d^2 and (sum p |d|)^2 / sum p would lose its digits; squares about
    a mean are joined without a difference (Chan, Golub and LeVeque 1979, equation 1.5).
    """
    first, behind = tile.columns
    keys = torch.arange(first, behind, device=tile.weights.device)
    distance = (tile.positions[:, None] - keys).abs().to(tile.weights.dtype)  # (rows, columns)
    mass, once = tile.weights.sum(-1), (tile.weights * distance).sum(-1)  # (heads, rows)
    mean = once / mass.masked_fill(mass == 0, 1)
    squares = ((distance - mean[..., None]).square_() * tile.weights).sum(-1)
    mass, mean, squares = mass.double(), mean.double(), squares.double()
    before = sums.mass[:, tile.rows]
    both = (before + mass).masked_fill(before + mass == 0, 1)
    mean_before = sums.distance[:, tile.rows] / before.masked_fill(before == 0, 1)
    sums.squares[:, tile.rows] += squares + (mean - mean_before).square() * (before * mass / both)
    sums.mass[:, tile.rows] += mass
    sums.distance[:, tile.rows] += mean * mass
    if special_keys is not None:
        special = special_keys[first:behind].to(tile.weights.dtype)
        sums.special[:, tile.rows] += (tile.weights @ special).double()


def _add_neighbours(sums: Sums, tile: _Tile) -> None:
    """Pick the weight on each query's own key and on those beside it, where they lie in this tile."""
    first, behind = tile.columns
    for name, offset in OFFSETS.items():
        index = tile.positions + offset - first  # (rows,)
        inside = (index >= 0) & (index < behind - first)
        if bool(inside.any()):
            picked = index.clamp(0, behind - first - 1)[None, :, None].expand(tile.weights.shape[0], -1, 1)
            sums.at[name][:, tile.rows] += tile.weights.gather(-1, picked)[..., 0] * inside


def _keep_largest(sums: Sums, tile: _Tile) -> None:
    """Keep the largest weight so far and its key; of equal ones the first."""
    logs = tile.logs if tile.shown is None else tile.logs.masked_fill(~tile.shown, -torch.inf)
    value, key = logs.max(-1)
    larger = value > sums.largest[:, tile.rows]
    sums.largest[:, tile.rows] = torch.where(larger, value.double(), sums.largest[:, tile.rows])
    sums.largest_key[:, tile.rows] = torch.where(larger, key + tile.columns[0], sums.largest_key[:, tile.rows])
