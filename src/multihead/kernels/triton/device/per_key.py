"""Sum the attention weights that every key receives, and those of every cell of a coarse map, without atomics.

One program has some keys of a column of cells, and walks over the queries that see one of them, row of cells by row of
cells. Queries that see all of its keys, which are found by a scan over the mask's intervals, need no mask. Every sum is
written once, by one program, so two runs give the same bits.
"""

import triton
import triton.language as tl

from multihead.kernels.triton.device.scores import (
    FARTHEST,
    LOG2_E,
    biased,
    load_columns,
    load_rows,
    power_of_2,
    scaled,
)


@triton.jit
def _add_queries(
    begin, end, key_rows, q, logsumexp, starts, stops, bias, shown, keys, end_of_keys, columns, q_row, known_row,
    bias_row, bias_key, shown_row, shown_key, scale, softcap, received, cells, count,
    tile_queries: tl.constexpr, masked: tl.constexpr, head_dim: tl.constexpr, capped: tl.constexpr,
    has_bias: tl.constexpr, has_shown: tl.constexpr, pool: tl.constexpr, fast: tl.constexpr, precision: tl.constexpr,
):  # fmt: skip
    """Add the queries [begin, begin + tile) to the sums of the keys; without `masked`, each of them sees every key."""
    rows = begin + tl.arange(0, tile_queries)
    inside = rows < end
    of_query = tl.load(logsumexp + rows * known_row, mask=inside, other=float("-inf")).to(tl.float32) * LOG2_E
    adds = of_query > float("-inf")  # not a query without keys, and not one that sees a NaN
    of_query = tl.where(adds, of_query, 1.0e30)
    scores = tl.dot(
        key_rows, load_columns(q, rows, q_row, columns, inside, head_dim, masked), input_precision=precision
    )
    scores = scaled(scores, scale, softcap, capped)
    seen = adds[None, :]
    if masked:
        first = tl.load(starts + rows, mask=inside, other=FARTHEST).to(tl.int32)
        stop = tl.load(stops + rows, mask=inside, other=0).to(tl.int32)
        seen = (keys[:, None] >= first[None, :]) & (keys[:, None] < tl.minimum(stop, end_of_keys)[None, :])
        if has_shown:
            places = shown + rows[None, :] * shown_row + keys[:, None] * shown_key
            seen = seen & (tl.load(places, mask=seen, other=0) != 0)
        if has_bias:
            places = bias + rows[None, :] * bias_row + keys[:, None] * bias_key
            of_cell = tl.load(places, mask=seen, other=0.0)
            scores = biased(scores, of_cell)
            seen = seen & (of_cell != float("-inf"))
    powers = scores - of_query[None, :]
    weights = power_of_2(tl.where(powers > 0.0, 0.0, powers), fast) if capped or has_bias else power_of_2(powers, fast)
    weights = tl.where(seen & adds[None, :], weights, 0.0)
    of_tile = tl.sum(weights, 1)
    received += of_tile
    if pool == 1:
        cells += of_tile
        if masked:
            count += tl.sum(seen.to(tl.int32), 1)
        else:
            count += tile_queries
    if pool == 2:
        if masked:
            weights = tl.where(seen, weights, -1.0)
        cells = tl.maximum(cells, tl.max(weights, 1))
    return received, cells, count


@triton.jit
def sum_keys(
    q, k, known_logsumexp, starts, stops, bias, shown, received_by_keys, cells_of_map, cells_seen,
    q_batch, q_head, q_row, k_batch, k_head, k_row, known_batch, known_head, known_row, bounds_batch,
    bias_first, bias_batch, bias_head, bias_row, bias_key, shown_batch, shown_head, shown_row, shown_key,
    num_heads, heads_per_kv_head, num_queries, num_keys, cell_queries, cell_keys, map_rows, map_columns,
    tiles_per_column, scale, softcap,
    head_dim: tl.constexpr, width: tl.constexpr, tile_queries: tl.constexpr, tile_keys: tl.constexpr,
    scanned: tl.constexpr, capped: tl.constexpr, has_bias: tl.constexpr, has_shown: tl.constexpr, pool: tl.constexpr,
    wide: tl.constexpr, fast: tl.constexpr, precision: tl.constexpr,
):  # fmt: skip
    """Sum the weights on tile_keys keys of a head; `scale` is in units of log2.

    The sums of a cell, or its largest weight if `pool` is 2, are (batch, heads, map_rows, map_columns,
    tiles_per_column), and so is the number of its visible cells if `pool` is 1. If `pool` is 0 there is no map.
    `scanned` is the number of queries whose intervals are read at once.
    """
    tiles = map_columns * tiles_per_column
    program = tl.program_id(0)
    sample_head = program // tiles
    tile = program % tiles
    sample = (sample_head // num_heads).to(tl.int64)
    head = sample_head % num_heads
    column = tile // tiles_per_column
    begin_of_keys = column * cell_keys + tile % tiles_per_column * tile_keys
    end_of_keys = tl.minimum(tl.minimum(begin_of_keys + tile_keys, (column + 1) * cell_keys), num_keys)
    keys = begin_of_keys + tl.arange(0, tile_keys)
    columns = tl.arange(0, width)
    if wide:
        q_row = q_row.to(tl.int64)
        k_row = k_row.to(tl.int64)
    q += sample * q_batch + head.to(tl.int64) * q_head
    k += sample * k_batch + (head // heads_per_kv_head).to(tl.int64) * k_head
    bias += bias_first + sample * bias_batch + head.to(tl.int64) * bias_head
    shown += sample * shown_batch + head.to(tl.int64) * shown_head
    logsumexp = known_logsumexp + sample * known_batch + head.to(tl.int64) * known_head
    starts += sample * bounds_batch
    stops += sample * bounds_batch
    key_rows = load_rows(k, keys, k_row, columns, keys < end_of_keys, head_dim)
    # Queries [first, last) see some of the keys, and each of [whole, whole_stop) sees all.
    first = num_queries
    last = 0
    whole = num_queries
    for at in range(0, num_queries, scanned):
        rows = at + tl.arange(0, scanned)
        start = tl.load(starts + rows, mask=rows < num_queries, other=FARTHEST).to(tl.int32)
        stop = tl.load(stops + rows, mask=rows < num_queries, other=0).to(tl.int32)
        sees_some = (start < end_of_keys) & (stop > begin_of_keys) & (start < stop)
        sees_all = (start <= begin_of_keys) & (stop >= end_of_keys)
        first = tl.minimum(first, tl.min(tl.where(sees_some, rows, num_queries), 0))
        last = tl.maximum(last, tl.max(tl.where(sees_some, rows + 1, 0), 0))
        whole = tl.minimum(whole, tl.min(tl.where(sees_all, rows, num_queries), 0))
    if has_bias or has_shown:
        whole = num_queries
    whole = tl.where(begin_of_keys + tile_keys > end_of_keys, num_queries, whole)
    whole_stop = num_queries
    for at in range(whole // scanned * scanned, num_queries, scanned):
        rows = at + tl.arange(0, scanned)
        start = tl.load(starts + rows, mask=rows < num_queries, other=0).to(tl.int32)
        stop = tl.load(stops + rows, mask=rows < num_queries, other=FARTHEST).to(tl.int32)
        sees_less = (rows >= whole) & ((start > begin_of_keys) | (stop < end_of_keys))
        whole_stop = tl.minimum(whole_stop, tl.min(tl.where(sees_less, rows, num_queries), 0))
    received = tl.zeros([tile_keys], tl.float32)
    for row in range(map_rows):
        cells = tl.zeros([tile_keys], tl.float32)
        count = tl.zeros([tile_keys], tl.int32)
        if pool == 2:
            cells = tl.full([tile_keys], -1.0, tl.float32)
        begin = tl.maximum(row * cell_queries, first)
        end = tl.maximum(tl.minimum(tl.minimum((row + 1) * cell_queries, num_queries), last), begin)
        blocks_before = (tl.maximum(whole - begin, 0) + tile_queries - 1) // tile_queries
        free = tl.minimum(begin + blocks_before * tile_queries, end)
        free_stop = free + tl.maximum(tl.minimum(whole_stop, end) - free, 0) // tile_queries * tile_queries
        for span in range(2):  # so the code has each of the two loops once
            low = tl.where(span == 0, begin, free_stop)
            middle = tl.where(span == 0, free, end)
            high = tl.where(span == 0, free_stop, end)
            for at in range(low, middle, tile_queries):
                received, cells, count = _add_queries(
                    at, middle, key_rows, q, logsumexp, starts, stops, bias, shown, keys, end_of_keys, columns, q_row,
                    known_row, bias_row, bias_key, shown_row, shown_key, scale, softcap, received, cells, count,
                    tile_queries, masked=True, head_dim=head_dim, capped=capped, has_bias=has_bias,
                    has_shown=has_shown, pool=pool, fast=fast, precision=precision,
                )  # fmt: skip
            for at in range(middle, high, tile_queries):
                received, cells, count = _add_queries(
                    at, high, key_rows, q, logsumexp, starts, stops, bias, shown, keys, end_of_keys, columns, q_row,
                    known_row, bias_row, bias_key, shown_row, shown_key, scale, softcap, received, cells, count,
                    tile_queries, masked=False, head_dim=head_dim, capped=capped, has_bias=False, has_shown=False,
                    pool=pool, fast=fast, precision=precision,
                )  # fmt: skip
        place = ((sample_head.to(tl.int64) * map_rows + row) * map_columns + column) * tiles_per_column
        place += tile % tiles_per_column
        if pool == 1:
            tl.store(cells_of_map + place, tl.sum(cells, 0))
            tl.store(cells_seen + place, tl.sum(count, 0))
        if pool == 2:
            tl.store(cells_of_map + place, tl.max(cells, 0))
    tl.store(received_by_keys + sample_head.to(tl.int64) * num_keys + keys, received, mask=keys < end_of_keys)
