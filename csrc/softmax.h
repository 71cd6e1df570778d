// The online softmax of one query, block by block of keys (arXiv:1805.02867), and the statistics of its weights.
//
// The spread of the distance is merged from squares about a mean (Chan, Golub and LeVeque), not computed as a
// difference of two large sums, which lost three tokens in float32 at 3,000 keys. The native kernel sums distances
// relative to that of the key with the largest weight so far, and shifts the sums when another key becomes the largest:
// that weight is a share of the variance, so what cancels is small.
//
// The kernel reduces nothing per block of keys. Where the queries are rows, the sums of a row are vectors, whose lanes
// are added once when the results are written. On one side of the query a distance is a reference plus a step, so its
// two moments cost two multiplications per vector of weights; only the block around the query needs the absolute value.
// The largest key is searched without branches, and only in a block whose maximum exceeds those before. Reductions,
// divisions and a scan per block cost twice as much.
//
// The key with the largest weight is searched for in one tile. The product leaves a mark per tile of 12 keys where a
// query's largest score rises; comparing every score again was a quarter to a third of what statistics added to a pass.
// Measuring now adds 5 to 7 % from 512 queries on, causal 7 to 9 %.
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
  const bool of_keys = call.offset_weights || call.target_key_weight || call.special_keys_weight || call.near_weight;
  const bool weights = call.entropy || call.largest_weight || call.largest_key || of_keys;
  return weights ? Statistics::WEIGHTS : Statistics::NONE;
}

// Call body(constant) with the statistics that a call needs, as constant.VALUE.
template <Statistics STATISTICS>
struct StatisticsConstant {
  static constexpr Statistics VALUE = STATISTICS;
};
template <class Body>
INLINE void with_statistics(const Call &call, Body body) {
  switch (required_statistics(call)) {
    case Statistics::NONE: return body(StatisticsConstant<Statistics::NONE>{});
    case Statistics::WEIGHTS: return body(StatisticsConstant<Statistics::WEIGHTS>{});
    case Statistics::DISTANCES: return body(StatisticsConstant<Statistics::DISTANCES>{});
  }
}

// Sums over the weights of some keys, 2^(score - largest) with scores in units of log2. Where queries are rows of the
// tiles, each lane has a share of the keys of one query; where they are columns, each lane has a query.
struct WeightSums {
  Floats total;      // of the weights
  Floats surprisal;  // of weight * (score - largest)
  Floats distance;   // of weight * x, with x = |position - key| - pivot
  Floats square;     // of weight * x^2
  Floats special;    // of the weights of special keys
  Floats near;       // of the weights of keys within `reach` of the position

  // Add a weight per lane, and its distance.
  template <Statistics STATISTICS>
  inline __attribute__((always_inline)) void add_weight(Floats weight, Floats score_less_largest) {
    total += weight;
    if (STATISTICS != Statistics::NONE) surprisal += weight * score_less_largest;
  }
  inline __attribute__((always_inline)) void add_distance(Floats weight, Floats x) {
    const Floats weighted = weight * x;
    distance += weighted;
    square += weighted * x;
  }

  // Add the sums over other keys.
  inline __attribute__((always_inline)) void add(const WeightSums &other) {
    total += other.total;
    surprisal += other.surprisal;
    distance += other.distance;
    square += other.square;
    special += other.special;
    near += other.near;
  }

  // Multiply all weights by 2^change = `factor`, because the largest score rose.
  inline __attribute__((always_inline)) void scale(Floats factor, Floats change) {
    surprisal = factor * (surprisal + total * change);
    total *= factor, distance *= factor, square *= factor, special *= factor, near *= factor;
  }

  // Multiply all weights as `scale` does, and add the sums over a block of keys.
  template <Statistics STATISTICS>
  inline __attribute__((always_inline)) void add(const WeightSums &block, Floats factor, Floats change) {
    if (STATISTICS != Statistics::NONE) {
      surprisal = multiply_add(factor, surprisal + total * change, block.surprisal);
      special = multiply_add(factor, special, block.special);
      near = multiply_add(factor, near, block.near);
    }
    if (STATISTICS == Statistics::DISTANCES) {
      distance = multiply_add(factor, distance, block.distance);
      square = multiply_add(factor, square, block.square);
    }
    total = multiply_add(factor, total, block.total);
  }

  // Change the pivot, which increases every x by `change`.
  inline __attribute__((always_inline)) void move_pivot(Floats change) {
    square += change * (distance + distance + change * total);
    distance += change * total;
  }
};

// The state of a row after some blocks of keys. Its weights are 2^(score - largest), with scores in units of log2.
struct SoftmaxRow {
  float largest;        // score; -inf before the first visible key
  float total;          // sum of the weights; its bits do not depend on whether there are statistics
  int64_t position;     // of the query among the keys
  int64_t target_key;   // -1 for none
  // Statistics: undefined in a call without them, and before the first visible key.
  int64_t largest_key;  // with the largest score, the first of equal ones
  int64_t pivot;        // the distance of largest_key: relative to it, rounding does not hide a small spread far away
  WeightSums sums;
  float few_scores[2 * MAX_OFFSETS];  // of the keys at the offsets, then of target_key; -inf if not visible
};
constexpr int64_t TARGET = MAX_OFFSETS;  // index of target_key in few_scores
static_assert(2 * MAX_OFFSETS % LANES == 0, "few_scores are whole vectors");

// The position of a query among the keys.
INLINE int64_t position_of(const Call &call, int64_t batch, int64_t index) {
  return index + call.first_row + (call.query_start ? call.query_start[batch] : 0);
}

INLINE void clear_row(const Call &call, SoftmaxRow &row, int64_t batch, int64_t index) {
  row.largest = -INF;
  row.total = 0;
  row.position = position_of(call, batch, index);
  row.target_key = call.target_key ? call.target_key[batch] : -1;
}

INLINE void clear_statistics(SoftmaxRow &row) {
  row.largest_key = -1;
  row.pivot = 0;
  row.sums = WeightSums{};
  for (int64_t i = 0; i < 2 * MAX_OFFSETS; i += LANES) store(row.few_scores + i, broadcast(-INF));
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

INLINE int64_t distance_between(int64_t a, int64_t b) { return a > b ? a - b : b - a; }

// 2^x of one number, exactly 1 for 0; without the call of a library function, which would empty the vector registers.
INLINE float exp2_of(float x) { return x == 0 ? 1.f : exp2(broadcast(x))[0]; }

// How much scores relative to the largest one change where that rises. Limited, so that a product with a sum of weights
// is finite: that far, all earlier weights become 0.
INLINE Floats change_between(Floats before, Floats now) { return maximum(broadcast(-1e30f), before - now); }

constexpr int64_t MAX_BLOCK_KEYS = 512;

// -N .. N and their squares, for sums over a block whose vectors are counted from any of them.
struct Steps {
  static constexpr int64_t N = MAX_BLOCK_KEYS / LANES;
  float step[2 * N + 1], square[2 * N + 1];
  constexpr Steps() : step(), square() {
    for (int64_t i = -N; i <= N; i++) {
      step[i + N] = static_cast<float>(i);
      square[i + N] = static_cast<float>(i * i);
    }
  }
};
constexpr Steps STEPS;

// The first of `count` scores that equals `largest`, which is one of them. Without a branch per vector: the place is
// random, and a mispredicted branch takes longer than all comparisons.
INLINE int64_t first_of(const float *scores, int64_t count, float largest) {
  Floats first = broadcast(static_cast<float>(-count));  // minus the index of the first vector with such a score
  for (int64_t i = count - LANES; i >= 0; i -= LANES)
    first = select(load(scores + i) == broadcast(largest), broadcast(static_cast<float>(-i)), first);
  return -static_cast<int64_t>(reduce_max(first - __builtin_convertvector(index_from(0), Floats)));
}

INLINE void move_pivot(SoftmaxRow &row, int64_t pivot) {
  row.sums.move_pivot(broadcast(static_cast<float>(row.pivot - pivot)));
  row.pivot = pivot;
}

// Copy weights to a place in a row of bfloat16. Rows of floats need no copy.
INLINE void store_narrow(float *, int64_t, Floats) {}
#if BF16_DOT
INLINE void store_narrow(Bfloat16 *row, int64_t at, Floats weight) {
#ifdef __AVX512BF16__  // faster than `store`; numbers below 2^-126 become 0
  const __m256bh halves = _mm512_cvtneps_pbh((__m512)weight);
  __builtin_memcpy(row + at, &halves, sizeof halves);
#else
  store(row + at, weight);
#endif
}
#endif

// On which side of the query's position the keys of a block lie that it sees; a key at the position is on either.
enum class Side { BEFORE, BOTH, AFTER };

// Sum the weights of the keys within `reach` of a query's position, in a block of `count` keys from `first` on.
INLINE Floats near_weights(const Call &call, int64_t position, const float *weights, int64_t first, int64_t count) {
  const int64_t from = max(0, position - call.reach - first), to = min(count, position + call.reach + 1 - first);
  Floats near = (Floats){};
  for (int64_t i = from / LANES * LANES; i < to; i += LANES) {
    const Ints key = index_from(i), inside = (key >= static_cast<int32_t>(from)) & (key < static_cast<int32_t>(to));
    near += select(inside, load(weights + i), (Floats){});
  }
  return near;
}

// Replace scores by weights, and add them to the sums of a row whose earlier weights are multiplied by `factor`.
template <Statistics STATISTICS, Side SIDE, class Packed>
INLINE void add_weights(const Call &call, SoftmaxRow &row, float factor, float change, float *scores, int64_t first,
                        int64_t count, const float *special, Packed *narrow) {
  constexpr bool DISTANCES = STATISTICS == Statistics::DISTANCES;
  // On one side of the position, x = x of a reference key + side * (key - reference). The reference is the key of the
  // block that is nearest to the pivot; key - reference = (lane - its lane) + LANES * (vector - its vector).
  constexpr int64_t SIGN = SIDE == Side::BEFORE ? -1 : 1;
  const int64_t reference = min(max(row.position + SIGN * row.pivot, first), first + count - 1);
  const int64_t vector = (reference - first) / LANES, lane = (reference - first) % LANES;
  const float *steps = STEPS.step + Steps::N - vector, *squares = STEPS.square + Steps::N - vector;
  Floats signed_distance = broadcast(static_cast<float>(first - row.position));
  const Floats pivot = broadcast(static_cast<float>(row.pivot));
  if (DISTANCES && SIDE == Side::BOTH) signed_distance += __builtin_convertvector(index_from(0), Floats);
  WeightSums sums[2] = {};
  const Floats base = broadcast(row.largest);
  for (int64_t i = 0; i < count; i += 2 * LANES) {
#pragma GCC unroll 2
    for (int half = 0; half < 2; half++) {
      const int64_t at = i + half * LANES;
      const Floats exponent = maximum(broadcast(-127.f), load(scores + at) - base);  // 0 * -inf would be NaN
      const Floats weight = exp2_clamped(exponent);
      sums[half].add_weight<STATISTICS>(weight, exponent);
      if (DISTANCES && SIDE == Side::BOTH) {
        sums[half].add_distance(weight, absolute(signed_distance) - pivot);
        signed_distance += broadcast(static_cast<float>(LANES));
      } else if (DISTANCES) {
        sums[half].distance += weight * broadcast(steps[at / LANES]);
        sums[half].square += weight * broadcast(squares[at / LANES]);
      }
      store(scores + at, weight);
      store_narrow(narrow, at, weight);
    }
  }
  WeightSums block = sums[0];
  block.add(sums[1]);
  if (DISTANCES && SIDE != Side::BOTH) {
    const Floats in_lane = __builtin_convertvector(index_from(-lane), Floats) * broadcast(SIGN);
    const Floats x = broadcast(static_cast<float>(SIGN * (reference - row.position) - row.pivot)) + in_lane;
    const Floats step = broadcast(static_cast<float>(SIGN * LANES)) * block.distance;
    block.square = x * (x * block.total + step + step) + broadcast(static_cast<float>(LANES * LANES)) * block.square;
    block.distance = x * block.total + step;
  }
  if (STATISTICS != Statistics::NONE) {
    for (int64_t i = 0; special && i < count; i += LANES) block.special += load(scores + i) * load(special + i);
    if (call.near_weight) block.near = near_weights(call, row.position, scores, first, count);
    row.sums.add<STATISTICS>(block, broadcast(factor), broadcast(change));
  }
  // An explicit fma: left to the compiler, the rounding would depend on STATISTICS, and with it the bits of the output.
  row.total = fmaf(row.total, factor, sum(block.total));
}

// Write 1 for each special key of a block [first, end), which may end after the last key, and 0 for the others. Returns
// `to`, or null where the weight on special keys is not required.
INLINE const float *mark_special_keys(const Call &call, int64_t batch, int64_t first, int64_t end, float *to) {
  if (!call.special_keys_weight) return nullptr;
  const uint8_t *flags = call.special_keys + batch * call.keys;
  for (int64_t key = first; key < end; key++) to[key - first] = key < call.keys && flags[key] ? 1.f : 0.f;
  return to;
}

// Add a block of keys [first, end), a multiple of 2 * LANES and at most MAX_BLOCK_KEYS, to a row. Scores become weights
// in place, and are copied to `narrow` if that is bfloat16. `plain` means that all these keys are visible and that their
// scores need neither softcap nor bias. `special` is 1 for each special key of the block, or null. Returns the factor by
// which sums over earlier keys must be multiplied.
template <Statistics STATISTICS, class Packed>
NOINLINE float update_row(const Call &call, const Query &query, SoftmaxRow &row, float *scores, int64_t first,
                          int64_t end, bool plain, const float *special, Packed *narrow) {
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
      store_narrow(narrow, i, (Floats){});
    }
    return 1;
  }
  row.largest = block_largest != block_largest ? NOT_A_NUMBER : block_largest > before ? block_largest : before;
  const float factor = exp2_of(before - row.largest);
  const float change = change_between(broadcast(before), broadcast(row.largest))[0];
  if (STATISTICS != Statistics::NONE) {
    if (before == -INF) clear_statistics(row);
    if (block_largest > before) {
      row.largest_key = first + first_of(scores, count, block_largest);
      if (STATISTICS == Statistics::DISTANCES) move_pivot(row, distance_between(row.position, row.largest_key));
    }
    for (int64_t i = 0; i < call.num_offsets; i++) {
      const int64_t key = row.position + call.offsets[i];
      if (key >= first && key < end) row.few_scores[i] = scores[key - first];
    }
    if (row.target_key >= first && row.target_key < end) row.few_scores[TARGET] = scores[row.target_key - first];
  }
  if (STATISTICS != Statistics::DISTANCES || min(query.stop, end) <= row.position + 1)
    add_weights<STATISTICS, Side::BEFORE>(call, row, factor, change, scores, first, count, special, narrow);
  else if (max(query.start, first) >= row.position)
    add_weights<STATISTICS, Side::AFTER>(call, row, factor, change, scores, first, count, special, narrow);
  else
    add_weights<STATISTICS, Side::BOTH>(call, row, factor, change, scores, first, count, special, narrow);
  if (call.dropout > 0)
    for (int64_t i = 0; i < count; i += LANES) {
      const Floats weight = load(scores + i) * dropout_factors(call, query, first + i);
      store(scores + i, weight);
      store_narrow(narrow, i, weight);
    }
  return factor;
}

// update_row for COUNT rows at once, where all keys are plain and there are neither statistics nor dropout: to the same
// bits, and faster, because the rows share what is computed once per block. Scores are `stride` apart. Returns false,
// and changes nothing, where a row sees no key, or where the largest score is NaN.
template <int COUNT>
INLINE bool update_plain_rows(SoftmaxRow *rows, float *scores, int64_t stride, int64_t count, float *factors) {
  static_assert(COUNT <= LANES, "the factors fit into a vector");
  Floats left[COUNT], right[COUNT];
#pragma GCC unroll 4
  for (int row = 0; row < COUNT; row++) left[row] = right[row] = broadcast(-INF);
  for (int64_t i = 0; i < count; i += 2 * LANES)
#pragma GCC unroll 4
    for (int row = 0; row < COUNT; row++) {
      left[row] = maximum(left[row], load(scores + row * stride + i));
      right[row] = maximum(right[row], load(scores + row * stride + i + LANES));
    }
  float largest[COUNT], changes[LANES] = {};
  bool plain = true;
#pragma GCC unroll 4
  for (int row = 0; row < COUNT; row++) {
    largest[row] = reduce_max(maximum(left[row], right[row]));
    plain &= largest[row] > -INF;
  }
  if (!plain) return false;
  Floats totals[COUNT][2] = {};
#pragma GCC unroll 4
  for (int row = 0; row < COUNT; row++) {
    if (!(largest[row] > rows[row].largest)) largest[row] = rows[row].largest;
    changes[row] = rows[row].largest - largest[row];
    rows[row].largest = largest[row];
  }
  for (int64_t i = 0; i < count; i += 2 * LANES)
#pragma GCC unroll 2
    for (int half = 0; half < 2; half++)
#pragma GCC unroll 4
      for (int row = 0; row < COUNT; row++) {
        float *at = scores + row * stride + i + half * LANES;
        const Floats weight = exp2(load(at) - broadcast(largest[row]));
        totals[row][half] += weight;
        store(at, weight);
      }
  float shares[LANES];
  store(shares, exp2(load(changes)));
#pragma GCC unroll 4
  for (int row = 0; row < COUNT; row++) {
    factors[row] = shares[row];
    rows[row].total = fmaf(rows[row].total, shares[row], sum(totals[row][0] + totals[row][1]));
  }
  return true;
}

// The factors by which the sums of two rows must be multiplied when the rows are merged.
struct MergeFactors {
  float earlier, later;
};

// Merge the row over later keys of the same query into `row`.
INLINE MergeFactors merge_rows(const Call &call, SoftmaxRow &row, SoftmaxRow &later) {
  if (later.largest == -INF) return {1, 0};
  if (row.largest == -INF) {
    row = later;
    return {0, 1};
  }
  const bool newer = later.largest > row.largest;
  const float now = later.largest != later.largest || newer ? later.largest : row.largest;
  const MergeFactors factors = {exp2f(row.largest - now), exp2f(later.largest - now)};
  if (required_statistics(call) != Statistics::NONE) {
    if (newer) {
      move_pivot(row, later.pivot);
      row.largest_key = later.largest_key;
    } else {
      move_pivot(later, row.pivot);
    }
    const auto change = [now](const SoftmaxRow &from) { return change_between(broadcast(from.largest), broadcast(now)); };
    later.sums.scale(broadcast(factors.later), change(later));
    row.sums.add<Statistics::DISTANCES>(later.sums, broadcast(factors.earlier), change(row));
    for (int64_t i = 0; i < 2 * MAX_OFFSETS; i++)
      if (later.few_scores[i] > -INF) row.few_scores[i] = later.few_scores[i];
  }
  row.total = row.total * factors.earlier + later.total * factors.later;
  row.largest = now;
  return factors;
}

// What turns the weights of LANES queries into shares of their sums.
struct Normaliser {
  Floats inverse;      // of the sum of the weights, with that of the sink; 0 for a query without keys
  Floats log_inverse;  // its log2, finite even where a huge sink makes the inverse 0
  Floats logsumexp;    // in nats
};
INLINE Normaliser normaliser_of(Floats largest, Floats total, bool sinks, Floats sink) {
  Floats top = largest;
  const Ints empty = total == (Floats){};
  if (sinks) {
    sink = to_log2(sink);
    top = select(sink > top, sink, top);
    total = total * exp2(largest - top) + exp2(sink - top);
  }
  const Floats inverse = exp2(largest - top) / total, log_total = log2(total);
  return {
      select(empty, (Floats){}, inverse),
      change_between(largest, top) - log_total,
      select(empty, broadcast(-INF), from_log2(top + log_total)),
  };
}

// The softmax of LANES queries after all their keys, one per lane. In a call without statistics only `largest` and
// `sums.total` are defined.
typedef int64_t Longs __attribute__((vector_size(LANES * 8)));
struct FinishedQueries {
  Floats largest;  // score
  WeightSums sums;
  Longs largest_key;
  Floats pivot;
  Floats few_scores[MAX_OFFSETS + 1];
};

// Write the logsumexp, and with `statistics` these too, of `count` queries, from `index` of (batch, heads, queries) on.
// Returns the factors of their outputs: 1 / the sum of the weights.
INLINE Floats write_softmax(const Call &call, int64_t index, int64_t count, const FinishedQueries &queries,
                            bool statistics) {
  const auto write = [&](float *to, Floats values) {
    if (!to) return;
    if (count == 1) to[index] = values[0];  // as in decoding
    else if (count == LANES) store(to + index, values);
    else memcpy(to + index, &values, sizeof(float) * static_cast<size_t>(count));
  };
  Floats sinks = (Floats){};
  for (int64_t lane = 0; call.sinks && lane < count; lane++)
    sinks[lane] = call.sinks[(index + lane) / call.queries % call.heads];
  const WeightSums &sums = queries.sums;
  const Normaliser normaliser = normaliser_of(queries.largest, sums.total, call.sinks, sinks);
  const Floats inverse = normaliser.inverse;
  write(call.logsumexp, normaliser.logsumexp);
  if (!statistics) return inverse;

  const Floats zero = (Floats){}, total = sums.total;
  const Ints empty = total == zero;
  const Floats entropy = broadcast(-LN_2) * inverse * (sums.surprisal + total * normaliser.log_inverse);
  const Floats mean = sums.distance / total, variance = sums.square / total - mean * mean;
  write(call.entropy, select(empty | (entropy < zero), zero, entropy));
  write(call.largest_weight, inverse);
  write(call.mean_distance, select(empty, zero, mean + queries.pivot));
  write(call.distance_spread, select(empty, zero, square_root(select(variance < zero, zero, variance))));
  write(call.special_keys_weight, select(empty, zero, sums.special * inverse));
  write(call.near_weight, select(empty, zero, sums.near * inverse));
  const auto write_weight = [&](float *to, Floats score) {
    if (to) write(to, select(empty, zero, exp2(score - queries.largest) * inverse));
  };
  const int64_t all_rows = call.batch * call.heads * call.queries;
  for (int64_t i = 0; call.offset_weights && i < call.num_offsets; i++)
    write_weight(call.offset_weights + i * all_rows, queries.few_scores[i]);
  write_weight(call.target_key_weight, queries.few_scores[TARGET]);
  if (call.largest_key) {
    const Longs keys = queries.largest_key | ~__builtin_convertvector(total > zero, Longs);  // -1 for none
    memcpy(call.largest_key + index, &keys, sizeof(int64_t) * static_cast<size_t>(count));
  }
  return inverse;
}

// The same for `count` rows. Writes the factors of their outputs, and up to LANES - 1 more.
NOINLINE void write_softmax_of_rows(const Call &call, int64_t index, int64_t count, const SoftmaxRow *rows,
                                    float *factors) {
  const bool statistics = required_statistics(call) != Statistics::NONE;
  FinishedQueries queries;
  for (int64_t first = 0; first < count; first += LANES, rows += LANES) {
    const int64_t lanes = min(LANES, count - first);
    const auto each = [&](auto value_of) __attribute__((always_inline)) {
      if (lanes == 1) return broadcast(value_of(rows[0]));  // as in decoding
      Floats values = (Floats){};
      for (int64_t lane = 0; lane < lanes; lane++) values[lane] = value_of(rows[lane]);
      return values;
    };
    queries.largest = each([](const SoftmaxRow &row) { return row.largest; });
    queries.sums.total = each([](const SoftmaxRow &row) { return row.total; });
    queries.pivot = (Floats){};
    if (statistics) {
      queries.sums.surprisal = each([](const SoftmaxRow &row) { return sum(row.sums.surprisal); });
      queries.sums.distance = each([](const SoftmaxRow &row) { return sum(row.sums.distance); });
      queries.sums.square = each([](const SoftmaxRow &row) { return sum(row.sums.square); });
      queries.sums.special = each([](const SoftmaxRow &row) { return sum(row.sums.special); });
      queries.sums.near = each([](const SoftmaxRow &row) { return sum(row.sums.near); });
      queries.pivot = each([](const SoftmaxRow &row) { return static_cast<float>(row.pivot); });
      for (int64_t i = 0; i <= MAX_OFFSETS; i++)
        if (i < call.num_offsets || i == TARGET)
          queries.few_scores[i] = each([i](const SoftmaxRow &row) { return row.few_scores[i]; });
      for (int64_t lane = 0; lane < lanes; lane++) queries.largest_key[lane] = rows[lane].largest_key;
    }
    store(factors + first, write_softmax(call, index + first, lanes, queries, statistics));
  }
}

// Write the output of queries [first, first + count) of a head: each row of `sums`, (count, width), times its factor.
// Zeros for null.
NOINLINE void write_outputs(const Call &call, int64_t batch, int64_t head, int64_t first, int64_t count,
                            const float *sums, int64_t width, const float *factors) {
  with_element(call, [&](auto element) {
    auto *output = row_of<decltype(element)>(call.output, call.output_strides, batch, head, first);
    for (int64_t i = 0; i < count; i++)
      write_row(sums ? sums + i * width : nullptr, call.value_dim, factors[i], output + i * call.output_strides.row);
  });
}

}  // namespace
