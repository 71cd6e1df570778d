// The online softmax of one query, block by block of keys (arXiv:1805.02867), and the statistics of its weights.
#pragma once
#include <math.h>

#include "call.h"
#include "pack.h"
#include "score_terms.h"
#include "simd.h"

namespace {

// The statistics that a call needs: none; those of the weights; or those of the distances too, which take a few more
// multiplications per weight.
enum class Statistics { NONE, WEIGHTS, DISTANCES };

INLINE Statistics required_statistics(const Call &call) {
  if (call.mean_distance || call.distance_spread) return Statistics::DISTANCES;
  const bool of_keys = call.offset_weights || call.target_key_weight || call.special_keys_weight;
  const bool weights = call.entropy || call.largest_weight || call.largest_key || of_keys;
  return weights ? Statistics::WEIGHTS : Statistics::NONE;
}

// The state of a row after some blocks of keys. Its weights are 2^(score - largest), with scores in units of log2.
struct SoftmaxRow {
  float largest;                     // score; -inf before the first key
  float total;                       // sum of the weights
  float surprisal;                   // sum of weight * (score - largest)
  float mean;                        // of |position - key| under the weights
  float spread;                      // sum of weight * (|position - key| - mean)^2
  float special;                     // sum of the weights of special keys
  float target_score;                // of target_key; -inf if it is not visible
  float offset_scores[MAX_OFFSETS];  // of the keys at the offsets; -inf if not visible
  int64_t largest_key;               // with the largest score, the first of equal ones
  int64_t position;                  // of the query among the keys
  int64_t target_key;
};

INLINE SoftmaxRow empty_row(const Call &call, int64_t batch, int64_t row) {
  SoftmaxRow empty;
  empty.largest = empty.target_score = -INF;
  empty.total = empty.surprisal = empty.mean = empty.spread = empty.special = 0;
  for (int64_t i = 0; i < MAX_OFFSETS; i++) empty.offset_scores[i] = -INF;
  empty.largest_key = -1;
  empty.position = row + call.first_row + (call.query_start ? call.query_start[batch] : 0);
  empty.target_key = call.target_key ? call.target_key[batch] : -1;
  return empty;
}

// Apply softcap and bias to the scores of keys [first, end), and set those of invisible keys to -inf.
INLINE void apply_terms(const Call &call, const Query &query, float *scores, int64_t first, int64_t end) {
  const bool changed = call.softcap > 0 || query.bias, by_cell = changed || query.visible;
  for (int64_t key = first; key < end; key += LANES) {
    float *at = scores + (key - first);
    if (!by_cell && key >= query.start && key + LANES <= query.stop) {  // skip to the end of the interval
      key = first + (min(end, query.stop) - first) / LANES * LANES - LANES;
      continue;
    }
    Floats score = load(at);
    if (call.softcap > 0) score = apply_softcap(call, score);
    if (query.bias) score += scaled_bias(call, query, key);
    store(at, select(visible_lanes(call, query, key), score, broadcast(-INF)));
  }
}

INLINE float sum_of_products(const float *a, const float *b, int64_t count) {
  Floats total = (Floats){};
  for (int64_t i = 0; i < count; i += LANES) total += load(a + i) * load(b + i);
  return sum(total);
}

// Multiply the weights of a row by `factor`, and merge the moments of more weights into its own (Chan, Golub and
// LeVeque 1983).
INLINE void merge_moments(SoftmaxRow &row, float factor, float total, float mean, float spread) {
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

// Add a block of keys [first, end), a multiple of 2 * LANES, to a row. Scores become weights in place; narrow(i,
// weights) receives them too. `plain` means that all these keys are visible and that their scores need neither softcap
// nor bias. `special` is 1 for each special key of the block, or null. Returns the factor by which sums over earlier
// keys must be multiplied.
template <Statistics STATISTICS, class Narrow>
INLINE float update_row(const Call &call, const Query &query, SoftmaxRow &row, float *scores, int64_t first,
                        int64_t end, bool plain, const float *special, Narrow narrow) {
  const int64_t count = end - first;
  if (!plain) apply_terms(call, query, scores, first, end);
  Floats left = broadcast(-INF), right = left;
  for (int64_t i = 0; i < count; i += 2 * LANES) {
    left = maximum(left, load(scores + i));
    right = maximum(right, load(scores + i + LANES));
  }
  const float before = row.largest;
  float block_largest = reduce_max(maximum(left, right));
  if (!(block_largest > -INF)) {
    // Either no key of the block is visible, or a score is NaN, which `maximum` may have dropped.
    Ints bad = (Ints){};
    for (int64_t i = 0; i < count; i += LANES) bad |= load(scores + i) != load(scores + i);
    block_largest = any(bad) ? NOT_A_NUMBER : -INF;
  }
  if (block_largest == -INF) {
    for (int64_t i = 0; i < count; i += LANES) {
      store(scores + i, (Floats){});
      narrow(i, (Floats){});
    }
    return 1;
  }
  const float now = block_largest != block_largest ? NOT_A_NUMBER : block_largest > before ? block_largest : before;
  if (STATISTICS != Statistics::NONE) {
    if (block_largest > before)
      for (int64_t i = 0; i < count; i += LANES) {
        const Ints equal = load(scores + i) == broadcast(block_largest);
        if (!any(equal)) continue;
        int64_t lane = 0;
        while (!equal[lane]) lane++;
        row.largest_key = first + i + lane;
        break;
      }
    for (int64_t i = 0; i < call.num_offsets; i++) {
      const int64_t key = row.position + call.offsets[i];
      if (key >= first && key < end) row.offset_scores[i] = scores[key - first];
    }
    if (row.target_key >= first && row.target_key < end) row.target_score = scores[row.target_key - first];
  }
  const float factor = exp2(broadcast(before - now))[0];
  // Distances are taken relative to that of the key with the largest weight: otherwise rounding would hide a small
  // spread.
  const int64_t anchor = min(max(row.position, first), end);  // |position - key| = |position - anchor| + |anchor - key|
  const int64_t pivot = min(max(row.largest_key, first), end - 1);
  const int64_t pivot_distance = anchor > pivot ? anchor - pivot : pivot - anchor;
  Floats from_anchor = broadcast(static_cast<float>(first - anchor));
  const Floats about = broadcast(static_cast<float>(pivot_distance));
  if (STATISTICS == Statistics::DISTANCES) from_anchor += __builtin_convertvector(index_from(0), Floats);
  Floats totals[2] = {}, surprisals[2] = {}, distances[2] = {}, spreads[2] = {};
  const Floats base = broadcast(now);
  for (int64_t i = 0; i < count; i += 2 * LANES) {
#pragma GCC unroll 2
    for (int half = 0; half < 2; half++) {
      const int64_t at = i + half * LANES;
      const Floats exponent = load(scores + at) - base;
      const Floats weight = exp2(exponent);
      totals[half] += weight;
      if (STATISTICS != Statistics::NONE)
        surprisals[half] += weight * maximum(broadcast(-127.f), exponent);  // 0 * -inf would be NaN
      if (STATISTICS == Statistics::DISTANCES) {
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
  if (STATISTICS != Statistics::NONE) {
    const float shift = before == -INF ? 0.f : row.total * (before - now);
    row.surprisal = factor * (row.surprisal + shift) + sum(surprisals[0] + surprisals[1]);
    if (special) row.special = row.special * factor + sum_of_products(scores, special, count);
  }
  if (STATISTICS == Statistics::DISTANCES) {
    const float mean = sum(distances[0] + distances[1]) / total;
    const float spread = sum(spreads[0] + spreads[1]) - mean * mean * total;
    const int64_t away = row.position > anchor ? row.position - anchor : anchor - row.position;
    merge_moments(row, factor, total, mean + static_cast<float>(away + pivot_distance), spread > 0 ? spread : 0);
  }
  // An explicit fma: left to the compiler, the rounding would depend on STATISTICS, and with it the bits of the output.
  row.total = fmaf(row.total, factor, total);
  row.largest = now;
  if (call.dropout > 0)
    for (int64_t i = 0; i < count; i += LANES) {
      const Floats weight = load(scores + i) * dropout_factors(call, query, first + i);
      store(scores + i, weight);
      narrow(i, weight);
    }
  return factor;
}

INLINE void no_narrow_copy(int64_t, Floats) {}

// The factors by which the sums of two rows must be multiplied when the rows are merged.
struct MergeFactors {
  float earlier, later;
};

// Merge the row over later keys of the same query into `row`.
INLINE MergeFactors merge_rows(const Call &call, SoftmaxRow &row, const SoftmaxRow &later) {
  if (later.largest == -INF) return {1, 0};
  const bool newer = row.largest == -INF || later.largest > row.largest;
  const float now = later.largest != later.largest || newer ? later.largest : row.largest;
  const MergeFactors factors = {exp2f(row.largest - now), exp2f(later.largest - now)};
  const float shift = row.largest == -INF ? 0.f : row.total * (row.largest - now);
  row.surprisal = factors.earlier * (row.surprisal + shift) +
                  factors.later * (later.surprisal + later.total * (later.largest - now));
  merge_moments(row, factors.earlier, later.total * factors.later, later.mean, later.spread * factors.later);
  row.special = row.special * factors.earlier + later.special * factors.later;
  row.total = row.total * factors.earlier + later.total * factors.later;
  row.largest = now;
  if (newer) row.largest_key = later.largest_key;
  for (int64_t i = 0; i < call.num_offsets; i++)
    if (later.offset_scores[i] > -INF) row.offset_scores[i] = later.offset_scores[i];
  if (later.target_score > -INF) row.target_score = later.target_score;
  return factors;
}

// What turns the weights of LANES queries into shares of their sums.
struct Normaliser {
  Floats inverse;    // of the sum of the weights, with that of the sink; 0 for a query without keys
  Floats logsumexp;  // in units of log2
};
INLINE Normaliser normaliser_of(const Call &call, int64_t head, Floats largest, Floats total) {
  Floats top = largest;
  const Ints empty = total == (Floats){};
  if (call.sinks) {
    const Floats sink = broadcast(call.sinks[head] * LOG2_E);
    top = select(sink > top, sink, top);
    total = total * exp2(largest - top) + exp2(sink - top);
  }
  const Floats inverse = exp2(largest - top) / total;
  return {select(empty, (Floats){}, inverse), select(empty, broadcast(-INF), top + log2(total))};
}

INLINE void write_statistic(float *to, int64_t index, float value) {
  if (to) to[index] = value;
}

// Write the output, the logsumexp and the statistics of a query; `sums` are the weighted sums of the values.
template <class Element>
INLINE void write_row_results(const Call &call, const SoftmaxRow &row, int64_t batch, int64_t head, int64_t query,
                              const float *sums) {
  const int64_t index = (batch * call.heads + head) * call.queries + query;
  const bool empty = row.total == 0;
  const Normaliser normaliser = normaliser_of(call, head, broadcast(row.largest), broadcast(row.total));
  const float inverse = normaliser.inverse[0], logsumexp = normaliser.logsumexp[0];
  const float log_inverse = empty ? 0.f : row.largest - logsumexp;  // finite even where a huge sink makes the inverse 0
  write_row(sums, call.value_dim, inverse, row_of<Element>(call.output, call.output_strides, batch, head, query));
  call.logsumexp[index] = logsumexp * LN_2;
  const bool bad = row.total != row.total;
  if (call.largest_key) call.largest_key[index] = empty || bad ? -1 : row.largest_key;
  const float entropy = empty ? 0.f : -LN_2 * inverse * (row.surprisal + row.total * log_inverse);
  write_statistic(call.entropy, index, entropy < 0 ? 0.f : entropy);
  write_statistic(call.largest_weight, index, inverse);
  write_statistic(call.mean_distance, index, bad ? NOT_A_NUMBER : row.mean);
  write_statistic(call.distance_spread, index, empty ? 0.f : sqrtf(row.spread / row.total));
  const int64_t all_rows = call.batch * call.heads * call.queries;
  for (int64_t i = 0; i < call.num_offsets; i++) {
    const float weight = empty ? 0.f : exp2f(row.offset_scores[i] - row.largest) * inverse;
    write_statistic(call.offset_weights, i * all_rows + index, weight);
  }
  write_statistic(call.target_key_weight, index, empty ? 0.f : exp2f(row.target_score - row.largest) * inverse);
  write_statistic(call.special_keys_weight, index, row.special * inverse);
}

}  // namespace
