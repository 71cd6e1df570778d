"""Measure the statistics of every query from q and k in one pass over the keys, without the values.

One program has some queries of a head, and walks over the tiles of the keys that one of them sees. Tiles of which every
query sees every key, before or after all of the queries, take neither the mask nor the sign of a distance.

The sums of a query are: its largest score m and the key of it, sum e, sum e r and sum e over sets of keys, with
e = 2^r = 2^(s - m), and the mean and the spread of its distances. Distances of a tile are counted from that of its
largest key, and merged pairwise (Chan, Golub and LeVeque, 1979), so they are exact at positions of a million too. If
the logsumexp is known, m in e is the logsumexp, and sums need not be scaled.
"""

import triton
import triton.language as tl

from multihead.kernels.triton.device.scores import (
    FARTHEST,
    LOG2_E,
    NOTHING,
    biased,
    load_columns,
    load_rows,
    power_of_2,
    scaled,
    weight_at,
)


@triton.jit
def _add_tile(
    begin, q, k, bias, shown, flags, rows, columns, within, position, first, stop, logsumexp, latest, keys_in_memory,
    k_row, bias_row, bias_key, shown_row, shown_key, flags_key, scale, softcap, unit,
    most, key, total, surprisal, mean, squares, in_set_0, in_set_1, in_set_2, in_set_3,
    masked: tl.constexpr, known: tl.constexpr, late: tl.constexpr, head_dim: tl.constexpr, capped: tl.constexpr,
    has_bias: tl.constexpr, has_shown: tl.constexpr, sets: tl.constexpr, fast: tl.constexpr, precision: tl.constexpr,
):  # fmt: skip
    """Add the keys [begin, begin + tile) to the sums of the queries; without `masked`, all of them are seen by all."""
    keys = begin + within
    scores = tl.dot(
        q,
        load_columns(k, keys, k_row, columns, keys < keys_in_memory, head_dim, masked),
        input_precision=precision,
    )
    if not late:
        scores = scaled(scores, scale, softcap, capped)
    seen = scores
    if masked:
        seen = (keys[None, :] >= first[:, None]) & (keys[None, :] < stop[:, None])
        if has_shown:
            places = shown + rows[:, None] * shown_row + keys[None, :] * shown_key
            seen = seen & (tl.load(places, mask=seen, other=0) != 0)
        if has_bias:
            places = bias + rows[:, None] * bias_row + keys[None, :] * bias_key
            of_cell = tl.load(places, mask=seen, other=0.0)
            scores = biased(scores, of_cell)
            seen = seen & (of_cell != float("-inf"))
        scores = tl.where(seen, scores, NOTHING)
    tile_most, index = tl.max(scores, 1, return_indices=True)
    near = tl.abs(begin + index - position)  # distance of the tile's largest key, from which its distances are counted
    if masked:
        distances = (tl.abs(keys[None, :] - position[:, None]) - near[:, None]).to(tl.float32)
        tile_most = tl.where(tile_most > NOTHING, tile_most * unit, NOTHING)
    else:
        distances = within[None, :].to(tl.float32) - index[:, None].to(tl.float32)
        tile_most = tile_most * unit
    is_larger = tile_most > most
    largest = tl.where(is_larger, tile_most, most)
    if known:
        powers = scores * unit - logsumexp[:, None]
    else:
        powers = scores * unit - largest[:, None]
    weights = power_of_2(powers, fast)
    if masked:
        weights = tl.where(seen, weights, 0.0)
        powers = tl.where(seen, powers, 0.0)
    mass = tl.sum(weights, 1)
    moment = weights * distances
    tile_mean = tl.sum(moment, 1)
    tile_squares = tl.sum(moment * distances, 1)
    tile_surprisal = tl.sum(weights * powers, 1)
    before = total
    if not known:
        lower = tl.maximum(most - largest, -1.0e4)
        shrink = power_of_2(lower, fast)
        surprisal = shrink * (surprisal + lower * total)
        before = total * shrink
        squares = squares * shrink
        in_set_0 = in_set_0 * shrink
        in_set_1 = in_set_1 * shrink
        in_set_2 = in_set_2 * shrink
        in_set_3 = in_set_3 * shrink
    if sets > 0:
        of_key = tl.load(flags + keys * flags_key, mask=keys < keys_in_memory, other=0)[None, :]
        in_set_0 += tl.sum(tl.where((of_key & 1) != 0, weights, 0.0), 1)
        if sets > 1:
            in_set_1 += tl.sum(tl.where((of_key & 2) != 0, weights, 0.0), 1)
        if sets > 2:
            in_set_2 += tl.sum(tl.where((of_key & 4) != 0, weights, 0.0), 1)
        if sets > 3:
            in_set_3 += tl.sum(tl.where((of_key & 8) != 0, weights, 0.0), 1)
    if not masked:
        tile_mean = tl.where(begin >= latest, tile_mean, -tile_mean)
    tile_squares = tl.maximum(tile_squares - tile_mean * (tile_mean / tl.where(mass > 0.0, mass, 1.0)), 0.0)
    tile_mean = tile_mean / tl.where(mass > 0.0, mass, 1.0)
    # Both means are counted from the distance of the key with the larger weight.
    apart = (near - tl.abs(key - position)).to(tl.float32)
    tile_mean = tl.where(is_larger, tile_mean, tile_mean + apart)
    mean = tl.where(before > 0.0, tl.where(is_larger, mean - apart, mean), tile_mean)
    step = tile_mean - mean
    total = before + mass
    share = mass / tl.where(total > 0.0, total, 1.0)
    squares += tile_squares + step * step * before * share
    mean += step * share
    key = tl.where(is_larger, begin + index, key)
    return (
        largest, key, total, surprisal + tile_surprisal, mean, squares, in_set_0, in_set_1, in_set_2, in_set_3
    )  # fmt: skip


@triton.jit
def measure_queries(
    q, k, known_logsumexp, starts, stops, query_starts, first_keys, flags, places, sinks, bias, shown, found, found_key,
    q_batch, q_head, q_row, k_batch, k_head, k_row, known_batch, known_head, known_row, bounds_batch,
    query_starts_batch, first_keys_batch, first_keys_row, flags_batch, flags_key, bias_first, bias_batch, bias_head,
    bias_row, bias_key, shown_batch, shown_head, shown_row, shown_key, found_part, found_head,
    num_heads, heads_per_kv_head, num_queries, num_keys, query_start, num_places, num_kept, num_counts, scale, softcap,
    head_dim: tl.constexpr, width: tl.constexpr, step: tl.constexpr, tile_queries: tl.constexpr,
    tile_keys: tl.constexpr, known: tl.constexpr, capped: tl.constexpr, late: tl.constexpr, has_bias: tl.constexpr,
    has_shown: tl.constexpr, has_starts: tl.constexpr, sets: tl.constexpr, has_sinks: tl.constexpr,
    first_special: tl.constexpr, near_reach: tl.constexpr, wide: tl.constexpr, fast: tl.constexpr,
    precision: tl.constexpr,
):  # fmt: skip
    """Measure statistics of tile_queries queries of a head; `kernels/triton/statistics.py` names the rows of `found`.

    `places` are num_places offsets, whose weights are looked up, the first num_kept of which are stored, and after them
    num_counts ascending numbers of first keys. `scale` is in units of log2; `late` multiplies with it after the search
    for the largest score. `wide`: a row of q or k may begin 2^31 numbers after the first.
    """
    blocks = tl.cdiv(num_queries, tile_queries)
    program = tl.program_id(0)
    sample_head = program // blocks
    block = blocks - 1 - program % blocks  # the last queries of a causal mask take longest, so they begin first
    sample = (sample_head // num_heads).to(tl.int64)
    head = sample_head % num_heads
    rows = block * tile_queries + tl.arange(0, tile_queries)
    is_row = rows < num_queries
    columns = tl.arange(0, width)
    within = tl.arange(0, tile_keys)
    row_of_bounds = sample * bounds_batch + rows
    first = tl.load(starts + row_of_bounds, mask=is_row, other=FARTHEST).to(tl.int32)
    stop = tl.load(stops + row_of_bounds, mask=is_row, other=0).to(tl.int32)
    position = rows + query_start
    if has_starts:
        position += tl.load(query_starts + sample * query_starts_batch).to(tl.int32)
    if wide:
        q_row = q_row.to(tl.int64)
        k_row = k_row.to(tl.int64)
    q += sample * q_batch + head.to(tl.int64) * q_head
    k += sample * k_batch + (head // heads_per_kv_head).to(tl.int64) * k_head
    bias += bias_first + sample * bias_batch + head.to(tl.int64) * bias_head
    shown += sample * shown_batch + head.to(tl.int64) * shown_head
    flags += sample * flags_batch
    query_rows = load_rows(q, rows, q_row, columns, is_row, head_dim)
    logsumexp = tl.zeros([tile_queries], tl.float32)
    if known:
        given = known_logsumexp + sample * known_batch + head.to(tl.int64) * known_head
        logsumexp = tl.load(given + rows * known_row, mask=is_row, other=0.0).to(tl.float32) * LOG2_E
        logsumexp = tl.where(logsumexp == float("-inf"), 1.0e30, logsumexp)
    sees_some = first < stop
    begin = tl.min(tl.where(sees_some, first, FARTHEST), 0)
    end = tl.max(tl.where(sees_some, stop, 0), 0)
    begin = tl.minimum(begin // tile_keys * tile_keys, end)
    # Every query sees [seen_by_all, seen_by_all_stop).
    seen_by_all = tl.max(tl.where(is_row, tl.where(sees_some, first, FARTHEST), 0), 0)
    seen_by_all_stop = tl.min(tl.where(is_row, tl.where(sees_some, stop, 0), FARTHEST), 0)
    earliest = tl.min(tl.where(is_row, position, FARTHEST), 0)
    latest = tl.max(tl.where(is_row, position, -FARTHEST), 0)
    # Whole tiles of [free, free_stop) and [later, later_stop) need no mask.
    free = tl.minimum(seen_by_all, num_keys)
    free = tl.minimum(tl.maximum((free + tile_keys - 1) // tile_keys * tile_keys, begin), end)
    free_stop = tl.minimum(seen_by_all_stop, tl.maximum(earliest + 1, 0)) // tile_keys * tile_keys
    free_stop = tl.maximum(free_stop, free)
    later = tl.minimum(tl.maximum(seen_by_all, latest), num_keys)
    later = tl.minimum(tl.maximum((later + tile_keys - 1) // tile_keys * tile_keys, free_stop), end)
    later_stop = tl.maximum(seen_by_all_stop // tile_keys * tile_keys, later)
    if has_bias or has_shown:
        free, free_stop, later, later_stop = begin, begin, begin, begin
    unit = 1.0
    if late:
        unit = scale
    most = tl.full([tile_queries], NOTHING, tl.float32)
    key = tl.full([tile_queries], -1, tl.int32)
    total = tl.zeros([tile_queries], tl.float32)
    surprisal = tl.zeros([tile_queries], tl.float32)
    mean = tl.zeros([tile_queries], tl.float32)
    squares = tl.zeros([tile_queries], tl.float32)
    in_set_0 = tl.zeros([tile_queries], tl.float32)
    in_set_1 = tl.zeros([tile_queries], tl.float32)
    in_set_2 = tl.zeros([tile_queries], tl.float32)
    in_set_3 = tl.zeros([tile_queries], tl.float32)
    for span in range(3):  # so the code has each of the two loops once
        low = tl.where(span == 0, begin, tl.where(span == 1, free_stop, later_stop))
        middle = tl.where(span == 0, free, tl.where(span == 1, later, end))
        high = tl.where(span == 0, free_stop, tl.where(span == 1, later_stop, end))
        for at in range(low, middle, tile_keys):
            most, key, total, surprisal, mean, squares, in_set_0, in_set_1, in_set_2, in_set_3 = _add_tile(
                at, query_rows, k, bias, shown, flags, rows, columns, within, position, first, stop, logsumexp, latest,
                num_keys, k_row, bias_row, bias_key, shown_row, shown_key, flags_key, scale, softcap, unit,
                most, key, total, surprisal, mean, squares, in_set_0, in_set_1, in_set_2, in_set_3,
                masked=True, known=known, late=late, head_dim=head_dim, capped=capped, has_bias=has_bias,
                has_shown=has_shown, sets=sets, fast=fast, precision=precision,
            )  # fmt: skip
        for at in range(middle, high, tile_keys):
            most, key, total, surprisal, mean, squares, in_set_0, in_set_1, in_set_2, in_set_3 = _add_tile(
                at, query_rows, k, bias, shown, flags, rows, columns, within, position, first, stop, logsumexp, latest,
                num_keys, k_row, bias_row, bias_key, shown_row, shown_key, flags_key, scale, softcap, unit,
                most, key, total, surprisal, mean, squares, in_set_0, in_set_1, in_set_2, in_set_3,
                masked=False, known=known, late=late, head_dim=head_dim, capped=capped, has_bias=False,
                has_shown=False, sets=sets, fast=fast, precision=precision,
            )  # fmt: skip
    has_seen = key >= 0
    sink = tl.full([tile_queries], float("-inf"), tl.float32)
    if has_sinks:
        sink = tl.zeros([tile_queries], tl.float32) + tl.load(sinks + head).to(tl.float32) * LOG2_E
    factor = tl.full([tile_queries], 1.0, tl.float32)
    if not known:
        top = tl.maximum(most, sink)
        whole = total * tl.exp2(most - top)
        if has_sinks:
            whole += tl.exp2(sink - top)
        logsumexp = tl.where(has_seen, top + tl.log2(tl.where(has_seen, whole, 1.0)), 1.0e30)
        factor = tl.exp2(most - logsumexp)
        surprisal = surprisal + (most - logsumexp) * total
    # A kernel may write inf as the logsumexp of a query that sees a NaN, and anything for one that sees no key.
    is_bad = (total != total) | (most != most) | (has_seen & ~(logsumexp < float("inf")))
    if has_sinks:
        is_bad = is_bad | (has_seen & (sink != sink))
    if not has_bias and not has_shown:
        is_bad = is_bad | (sees_some & (key < 0))  # all of its scores are NaN or -inf
    number = tl.where(is_bad, float("nan"), 0.0)  # added to what is stored
    entropy = tl.where(has_seen, tl.maximum(-surprisal * factor / LOG2_E, 0.0), 0.0)
    spread = tl.sqrt(squares / tl.where(total > 0.0, total, 1.0))
    distance = tl.where(total > 0.0, tl.abs(key - position).to(tl.float32) + mean, 0.0)
    found += sample_head.to(tl.int64) * found_head
    found_key += sample_head.to(tl.int64) * found_head
    part = (program * 0).to(tl.int64) + found_part
    tl.store(found + rows, tl.where(has_seen, tl.exp2(entropy * LOG2_E), 0.0) + number, mask=is_row)
    tl.store(found + part + rows, tl.where(has_seen, most / LOG2_E, float("-inf")) + number, mask=is_row)
    tl.store(found_key + rows, tl.where(is_bad, -1, key).to(tl.int64), mask=is_row)
    found += 4 * part
    tl.store(found + rows, tl.where(has_seen, logsumexp / LOG2_E, float("-inf")) + number, mask=is_row)
    tl.store(found + part + rows, entropy + number, mask=is_row)
    tl.store(found + 2 * part + rows, distance + number, mask=is_row)
    tl.store(found + 3 * part + rows, spread + number, mask=is_row)
    largest = most - logsumexp
    largest = tl.where(has_seen, tl.exp2(tl.where(largest > 0.0, 0.0, largest)), 0.0)
    tl.store(found + 4 * part + rows, largest + number, mask=is_row)
    found += 5 * part
    if has_sinks:
        tl.store(found + rows, tl.where(has_seen, tl.exp2(sink - logsumexp), 0.0) + number, mask=is_row)
        found += part
    if sets > 0:
        tl.store(found + rows, in_set_0 * factor + number, mask=is_row)
        found += part
    if sets > 1:
        tl.store(found + rows, in_set_1 * factor + number, mask=is_row)
        found += part
    if sets > 2:
        tl.store(found + rows, in_set_2 * factor + number, mask=is_row)
        found += part
    if sets > 3:
        tl.store(found + rows, in_set_3 * factor + number, mask=is_row)
        found += part
    # The weights on single keys.
    near_mass = tl.zeros([tile_queries], tl.float32)
    for index in range(num_places):
        offset = tl.load(places + index)
        weight = weight_at(
            q, k, bias, shown, position + offset, rows, first, stop, logsumexp, q_row, k_row, bias_row, bias_key,
            shown_row, shown_key, scale, softcap, head_dim, width, step, capped, has_bias, has_shown,
        )  # fmt: skip
        near_mass += tl.where(tl.abs(offset) <= near_reach, weight, 0.0)
        if index < num_kept:
            tl.store(found + index * part + rows, weight + number, mask=is_row)
    found += num_kept * part
    of_text = tl.load(first_keys + sample * first_keys_batch + rows * first_keys_row, mask=is_row, other=-1)
    of_text = of_text.to(tl.int32)
    first_mass = tl.zeros([tile_queries], tl.float32)
    added = 0
    for index in range(num_counts):
        count = tl.load(places + num_places + index)
        for place in range(added, count):
            first_mass += weight_at(
                q, k, bias, shown, of_text + place, rows, first, stop, logsumexp, q_row, k_row, bias_row, bias_key,
                shown_row, shown_key, scale, softcap, head_dim, width, step, capped, has_bias, has_shown,
            )  # fmt: skip
        added = count
        tl.store(found + index * part + rows, first_mass + number, mask=is_row)
    found += num_counts * part
    if first_special:
        weight = weight_at(
            q, k, bias, shown, of_text, rows, first, stop, logsumexp, q_row, k_row, bias_row, bias_key,
            shown_row, shown_key, scale, softcap, head_dim, width, step, capped, has_bias, has_shown,
        )  # fmt: skip
        inside = is_row & (of_text >= 0) & (of_text < num_keys)
        is_special = (tl.load(flags + of_text * flags_key, mask=inside, other=0) & 1) != 0
        weight = tl.where(is_special, weight, 0.0)
        tl.store(found + rows, weight + number, mask=is_row)
        tl.store(found + part + rows, tl.maximum(in_set_0 * factor - weight, 0.0) + number, mask=is_row)
        found += 2 * part
    tl.store(found + rows, near_mass + number, mask=is_row)
