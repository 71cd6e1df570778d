// A query's row of the softmax, taken block by block of keys (arXiv:1805.02867), and what is measured of it on the way.
#pragma once
#include <math.h>

#include "call.h"
#include "lanes.h"
#include "terms.h"

namespace {

// What of a row is measured beside its sum: nothing; entropy, largest weight and what is found at single keys;
// or also the sum of squares and the distances, which take a few more products a weight.
enum Watch { NOTHING, SOME, ALL };

INLINE Watch watched(const Call &call) {
  if (call.squares || call.mean_distance || call.distance_spread) return ALL;
  const bool some = call.entropy || call.largest_weight || call.largest_key || call.at_offsets || call.on_given_key;
  return some || call.on_special_keys ? SOME : NOTHING;
}

// A row so far; a weight is 2^(score - largest), with scores in units of log2.
struct Row {
  float largest;    // score, -inf before the first
  float total;      // sum of the weights
  float surprisal;  // sum of weight * (score - largest)
  float squares;    // sum of weight^2
  float mean;       // of |position - key| under the weights
  float spread;     // sum of weight * (|position - key| - mean)^2
  float special;    // sum of the weights of special keys
  float on_given;   // score of the given key, -inf if it was not seen
  float at[MOST_OFFSETS];  // score of the key at each offset
  int64_t key;       // with the largest score, the first of equal ones
  int64_t position;  // of the query among the keys
  int64_t given_key;
};

INLINE Row row_before(const Call &call, int64_t batch, int64_t row) {
  Row fresh;
  fresh.largest = fresh.on_given = -INFINITE;
  fresh.total = fresh.surprisal = fresh.squares = fresh.mean = fresh.spread = fresh.special = 0;
  for (int64_t i = 0; i < MOST_OFFSETS; i++) fresh.at[i] = -INFINITE;
  fresh.key = -1;
  fresh.position = row + call.first_row;
  if (call.query_start) fresh.position += static_cast<const int64_t *>(call.query_start)[batch];
  fresh.given_key = call.given_key ? static_cast<const int64_t *>(call.given_key)[batch] : -1;
  return fresh;
}

// Hide what the query may not see among the scores of keys [first, behind), after softcap and bias.
INLINE void apply_terms(const Call &call, const Query &query, float *scores, int64_t first, int64_t behind) {
  const bool changed = call.softcap > 0 || query.bias, by_cell = changed || query.seen;
  for (int64_t key = first; key < behind; key += LANES) {
    float *at = scores + (key - first);
    if (!by_cell && key >= query.start && key + LANES <= query.stop) {  // nothing to do up to the interval's end
      key = first + (least(behind, query.stop) - first) / LANES * LANES - LANES;
      continue;
    }
    Floats score = load(at);
    if (call.softcap > 0) score = softcapped(call, score);
    if (query.bias) score += bias_of(call, query, key);
    store(at, select(shown(call, query, key), score, broadcast(-INFINITE)));
  }
}

INLINE float sum_of_products(const float *a, const float *b, int64_t count) {
  Floats total = (Floats){};
  for (int64_t i = 0; i < count; i += LANES) total += load(a + i) * load(b + i);
  return sum(total);
}

// Merge the moments of some weights into a row's, whose weights were multiplied by `factor` (Chan, Golub and LeVeque 1983).
INLINE void merge_moments(Row &row, float factor, float total, float mean, float spread) {
  const float before = row.total * factor, apart = mean - row.mean;
  if (!(total > 0)) {
    row.spread *= factor;
  } else if (before > 0) {
    row.spread = row.spread * factor + spread + apart * apart * (before * total / (before + total));
    row.mean += apart * (total / (before + total));
  } else {
    row.spread = spread;
    row.mean = mean;
  }
}

// Take the scores of keys [first, behind) (a multiple of 2 * LANES) into a row, and turn them into weights in place, in
// `narrow` too if that is given. `plain` says that the query sees all of them as they are. `special` is 1 for each
// special key among them, or null.
// Returns what the row's earlier sums are to be multiplied by.
template <Watch WATCH, class Narrow>
INLINE float absorb(const Call &call, const Query &query, Row &row, float *scores, int64_t first, int64_t behind,
                    bool plain, const float *special, Narrow narrow) {
  const int64_t count = behind - first;
  if (!plain) apply_terms(call, query, scores, first, behind);
  Floats left = broadcast(-INFINITE), right = left;
  for (int64_t i = 0; i < count; i += 2 * LANES) {
    left = maximum(left, load(scores + i));
    right = maximum(right, load(scores + i + LANES));
  }
  const float before = row.largest;
  float block_largest = largest(maximum(left, right));
  if (!(block_largest > -INFINITE)) {
    // Either the query sees none of these keys, or one of their scores is NaN and the maximum lost or kept it.
    Ints bad = (Ints){};
    for (int64_t i = 0; i < count; i += LANES) bad |= load(scores + i) != load(scores + i);
    block_largest = any(bad) ? NOT_A_NUMBER : -INFINITE;
  }
  if (block_largest == -INFINITE) {
    for (int64_t i = 0; i < count; i += LANES) {
      store(scores + i, (Floats){});
      narrow(i, (Floats){});
    }
    return 1;
  }
  const float now = block_largest != block_largest ? NOT_A_NUMBER : block_largest > before ? block_largest : before;
  if (WATCH != NOTHING) {
    if (block_largest > before)
      for (int64_t i = 0; i < count; i += LANES) {
        const Ints equal = load(scores + i) == broadcast(block_largest);
        if (!any(equal)) continue;
        int64_t lane = 0;
        while (!equal[lane]) lane++;
        row.key = first + i + lane;
        break;
      }
    for (int64_t i = 0; i < call.num_offsets; i++) {
      const int64_t key = row.position + static_cast<const int64_t *>(call.offsets)[i];
      if (key >= first && key < behind) row.at[i] = scores[key - first];
    }
    if (row.given_key >= first && row.given_key < behind) row.on_given = scores[row.given_key - first];
  }
  const float factor = exp2f(before - now);
  // Distances are taken about that of the key nearest to the largest weight: else a small spread would drown in rounding.
  const int64_t anchor = least(most(row.position, first), behind);  // |position - key| = |position - anchor| + |anchor - key|
  const int64_t pivot = least(most(row.key, first), behind - 1);
  const int64_t pivot_distance = anchor > pivot ? anchor - pivot : pivot - anchor;
  Floats from_anchor = broadcast(static_cast<float>(first - anchor)), about = broadcast(static_cast<float>(pivot_distance));
  if (WATCH == ALL) from_anchor += __builtin_convertvector(index_from(0), Floats);
  Floats totals[2] = {}, surprisals[2] = {}, squares[2] = {}, distances[2] = {}, spreads[2] = {};
  const Floats base = broadcast(now);
  for (int64_t i = 0; i < count; i += 2 * LANES) {
#pragma GCC unroll 2
    for (int half = 0; half < 2; half++) {
      const int64_t at = i + half * LANES;
      const Floats exponent = load(scores + at) - base;
      const Floats weight = exp2(exponent);
      totals[half] += weight;
      if (WATCH != NOTHING) surprisals[half] += weight * maximum(broadcast(-127.f), exponent);  // 0 * -inf is NaN
      if (WATCH == ALL) {
        squares[half] += weight * weight;
        const Floats distance = absolute(from_anchor) - about, weighted = weight * distance;
        distances[half] += weighted;
        spreads[half] += weighted * distance;
        from_anchor += broadcast(static_cast<float>(LANES));
      }
      store(scores + at, weight);
      narrow(at, weight);
    }
  }
  const float total = sum(totals[0] + totals[1]);
  if (WATCH != NOTHING) {
    const float shift = before == -INFINITE ? 0.f : row.total * (before - now);
    row.surprisal = factor * (row.surprisal + shift) + sum(surprisals[0] + surprisals[1]);
    if (special) row.special = row.special * factor + sum_of_products(scores, special, count);
  }
  if (WATCH == ALL) {
    row.squares = row.squares * factor * factor + sum(squares[0] + squares[1]);
    const float mean = sum(distances[0] + distances[1]) / total;
    const float spread = sum(spreads[0] + spreads[1]) - mean * mean * total;
    const int64_t away = row.position > anchor ? row.position - anchor : anchor - row.position;
    merge_moments(row, factor, total, mean + static_cast<float>(away + pivot_distance), spread > 0 ? spread : 0);
  }
  // Rounded once in words, not at the compiler's choice: it depended on what is watched, and so did the output's last bit.
  row.total = fmaf(row.total, factor, total);
  row.largest = now;
  if (call.dropout > 0)
    for (int64_t i = 0; i < count; i += LANES) {
      const Floats weight = load(scores + i) * kept(call, query, first + i);
      store(scores + i, weight);
      narrow(i, weight);
    }
  return factor;
}

INLINE void leave_wide(int64_t, Floats) {}  // where no narrow copy of the weights is wanted

// What two rows' sums are to be multiplied by when they become one.
struct Factors {
  float mine, theirs;
};

// Take a row over later keys of the same query into this one.
INLINE Factors merge(const Call &call, Row &row, const Row &later) {
  if (later.largest == -INFINITE) return {1, 0};
  const bool newer = row.largest == -INFINITE || later.largest > row.largest;
  const float now = later.largest != later.largest || newer ? later.largest : row.largest;
  const Factors factors = {exp2f(row.largest - now), exp2f(later.largest - now)};
  const float shift = row.largest == -INFINITE ? 0.f : row.total * (row.largest - now);
  row.surprisal = factors.mine * (row.surprisal + shift) +
                  factors.theirs * (later.surprisal + later.total * (later.largest - now));
  row.squares = row.squares * factors.mine * factors.mine + later.squares * factors.theirs * factors.theirs;
  merge_moments(row, factors.mine, later.total * factors.theirs, later.mean, later.spread * factors.theirs);
  row.special = row.special * factors.mine + later.special * factors.theirs;
  row.total = row.total * factors.mine + later.total * factors.theirs;
  row.largest = now;
  if (newer) row.key = later.key;
  for (int64_t i = 0; i < call.num_offsets; i++)
    if (later.at[i] > -INFINITE) row.at[i] = later.at[i];
  if (later.on_given > -INFINITE) row.on_given = later.on_given;
  return factors;
}

INLINE void write(const void *to, int64_t index, float value) {
  if (to) static_cast<float *>(const_cast<void *>(to))[index] = value;
}

// Write a row's output, logsumexp and statistics; `sums` are the values summed by weight.
template <class Element>
INLINE void finish(const Call &call, const Row &row, int64_t batch, int64_t head, int64_t query, const float *sums) {
  const int64_t index = (batch * call.heads + head) * call.queries + query;
  const bool empty = row.total == 0;
  float inverse = 0, log_inverse = 0, logsumexp = -INFINITE;  // inverse: what makes a share of a weight
  if (!empty) {
    float top = row.largest, total = row.total;
    if (call.sinks) {
      const float sink = static_cast<const float *>(call.sinks)[head] * LOG2_E;
      if (sink > top) top = sink;
      total = total * exp2f(row.largest - top) + exp2f(sink - top);
    }
    inverse = exp2f(row.largest - top) / total;
    logsumexp = top + log2f(total);
    log_inverse = row.largest - logsumexp;  // finite where a huge sink makes the inverse itself 0
    logsumexp *= LN_2;
  }
  Element *output = static_cast<Element *>(const_cast<void *>(call.output));
  output += batch * call.output_batch + head * call.output_head + query * call.output_row;
  int64_t x = 0;
  for (; x + LANES <= call.value_dim; x += LANES) store(output + x, load(sums + x) * broadcast(inverse));
  for (; x < call.value_dim; x++) set(output + x, sums[x] * inverse);
  write(call.logsumexp, index, logsumexp);
  const bool bad = row.total != row.total;
  if (call.largest_key) static_cast<int64_t *>(const_cast<void *>(call.largest_key))[index] = empty || bad ? -1 : row.key;
  const float entropy = empty ? 0.f : -LN_2 * inverse * (row.surprisal + row.total * log_inverse);
  write(call.entropy, index, entropy < 0 ? 0.f : entropy);
  write(call.squares, index, row.squares * inverse * inverse);
  write(call.largest_weight, index, inverse);
  write(call.mean_distance, index, bad ? NOT_A_NUMBER : row.mean);
  write(call.distance_spread, index, empty ? 0.f : sqrtf(row.spread / row.total));
  const int64_t all_rows = call.batch * call.heads * call.queries;
  for (int64_t i = 0; i < call.num_offsets; i++)
    write(call.at_offsets, i * all_rows + index, empty ? 0.f : exp2f(row.at[i] - row.largest) * inverse);
  write(call.on_given_key, index, empty ? 0.f : exp2f(row.on_given - row.largest) * inverse);
  write(call.on_special_keys, index, row.special * inverse);
}

}  // namespace
