// A block of queries of the forward pass, with the queries as the columns of the tiles: each lane of a vector is one
// query, so that the softmax needs no operation across lanes and treats COLUMNS queries at a time.
//
// The scores of a panel of COLUMNS queries are computed as K Q^T, from keys that need no transpose. The arithmetic and
// its order are those of forward_rows.h, so that both compute the same bits.
//
// A block of queries is computed in one of two ways, to the same bits (`forward_rows.h`, `forward_panels.h`). With 16
// to 128 queries that takes 0.4 to 0.8 of the time on AVX-512, and 0.6 to 0.95 on AVX2, where it is used for up to 512
// queries and for statistics; for more, rows are up to 3 % faster. Both need tiles that keep their sums in registers:
// while the loop over tiles was part of a larger function, the compiler stored them, and on AVX2 rows were 1.2 to 1.7
// times as fast. Statistics are sums per lane there, and cost 8 to 10 % of a forward pass instead of 13 to 20 %. Bias,
// softcap, cell masks and dropout read the keys of a query as lanes, so such calls have the queries as rows. A mask
// given as a tensor must not change what an interval gives, so both add in the same order; the fuzzer compares their
// bits.
//
// Special keys are found by `memchr`. A packed row marks the first key of each sample as special; a test of every key
// and vector took 3 % of an observed call.
#pragma once
#include "call.h"
#include "forward_plan.h"
#include "gemm_tile.h"
#include "pack.h"
#include "score_terms.h"
#include "simd.h"
#include "softmax.h"
#include "workspace.h"

namespace {

constexpr int64_t PANELS = FORWARD_QUERIES / COLUMNS;
// The rows of the output of some queries are divided into tiles of HEIGHT rows, and a last one with the rest.
template <int64_t QUERIES>
struct PanelTiles {
  static constexpr int64_t COUNT = (QUERIES + ROWS - 1) / ROWS, HEIGHT = (QUERIES + COUNT - 1) / COUNT;
  static constexpr int64_t LAST_HEIGHT = QUERIES - (COUNT - 1) * HEIGHT;
};

// COLUMNS queries, and their softmax after some blocks of keys; see SoftmaxRow.
struct Panel {
  Floats largest[2];
  Floats factor[2];  // of the sums over earlier keys
  WeightSums sums[2];
  Span span;
  int64_t count;     // queries
  int64_t position;  // of the first query among the keys
  bool begun;        // whether its sums of the values have been written
  int64_t start[COLUMNS], stop[COLUMNS];
  // Statistics: undefined in a call without them.
  Ints largest_key[2];
  Floats pivot[2];
  float few_scores[MAX_OFFSETS + 1][COLUMNS];
};

// The memory of one thread.
struct PanelBlocks {
  float *scores;  // (FORWARD_KEYS + ROWS, COLUMNS): scores of a panel, replaced by weights; the last tile may end later
  float *sums;    // (FORWARD_QUERIES, width): weighted sums of the values
  float *q;       // (PANELS, depth, COLUMNS)
  Panel *panels;  // (PANELS)
  int64_t bytes;

  PanelBlocks(const ForwardPlan &plan, char *memory) {
    Workspace workspace{memory};
    scores = workspace.take<float>((FORWARD_KEYS + ROWS) * COLUMNS);
    sums = workspace.take<float>(FORWARD_QUERIES * plan.width);
    q = workspace.take<float>(FORWARD_QUERIES * plan.depth);
    panels = workspace.take<Panel>(PANELS);
    bytes = workspace.bytes;
  }
};

// Whether this file computes the call. With 16 registers of 8 floats, the products of many queries are up to 3 % faster in
// forward_rows.h.
INLINE bool panels_apply(const Call &call) {
  if (packed_narrow(call) || call.softcap > 0 || call.bias || call.visible || call.dropout > 0) return false;
  return LANES != 8 || call.queries <= 512 || required_statistics(call) != Statistics::NONE;
}

// Copy keys [first, end) as rows (keys, depth), and their values as panels; those that are not finite as in
// forward_rows.h.
template <class Element>
void pack_key_rows(const Call &call, const ForwardPlan &plan, int64_t batch, int64_t head, int64_t first,
                   int64_t end, PackedKeys<float> to) {
  const Element *k = row_of<Element>(call.k, call.k_strides, batch, head, first);
  const Element *v = row_of<Element>(call.v, call.v_strides, batch, head, first);
  const int64_t count = min(end, call.keys) - first, depth = plan.depth, panel = plan.held * COLUMNS;
  bool good = copy_rows(k, call.k_strides.row, count, depth, depth, to.k, depth);
  if (end >= call.keys) memset(to.k + count * depth, 0, sizeof(float) * static_cast<size_t>(ROWS * depth));
  for (int64_t column = 0; column < call.value_dim; column += COLUMNS)
    good &= copy_rows(v + column, call.v_strides.row, count, min(COLUMNS, call.value_dim - column), COLUMNS,
                      to.v + column / COLUMNS * panel, COLUMNS);
  if (good) return;
  for (int64_t key = 0; key < count; key++) {
    const Element *k_row = k + key * call.k_strides.row, *v_row = v + key * call.v_strides.row;
    if (row_finite(k_row, call.head_dim) && row_finite(v_row, call.value_dim)) continue;
    for (int64_t x = 0; x < depth; x++) to.k[key * depth + x] = NOT_A_NUMBER;
    for (int64_t column = 0; column < plan.width; column++)
      to.v[column / COLUMNS * panel + key * COLUMNS + column % COLUMNS] = 0;
  }
}

// Read the visible keys of a panel's queries, and clear its softmax. Columns after the last query repeat its interval.
INLINE void begin_panel(const Call &call, int64_t batch, int64_t first, Panel &panel) {
  panel.span = span_of_no_query(call);
  panel.position = position_of(call, batch, first);
  panel.begun = false;
  for (int64_t i = 0; i < COLUMNS; i++) {
    const int64_t index = batch * call.bounds_batch_stride + first + min(i, panel.count - 1);
    Query query{call.start[index], call.stop[index], nullptr, nullptr, {0, 0}};
    if (query.start >= query.stop) query.start = query.stop = 0;
    panel.start[i] = query.start;
    panel.stop[i] = query.stop;
    panel.span.add(query);
  }
  for (int half = 0; half < 2; half++) {
    panel.largest[half] = broadcast(-INF);
    panel.sums[half] = WeightSums{};
    if (required_statistics(call) == Statistics::NONE) continue;
    panel.largest_key[half] = (Ints){} - 1;
    panel.pivot[half] = (Floats){};
    for (auto &scores : panel.few_scores) store(scores + half * LANES, broadcast(-INF));
  }
}

// Transpose the queries of a panel, times a factor. A query with an element that is not finite becomes NaN as a whole.
NOINLINE void pack_queries_of_panel(const Call &call, int64_t batch, int64_t head, int64_t first, int64_t count,
                                    float factor, float *to) {
  const int64_t depth = call.head_dim;
  with_element(call, [&](auto element) {
    const auto *q = row_of<decltype(element)>(call.q, call.q_strides, batch, head, first);
    pack_transposed(q, call.q_strides.row, count, COLUMNS, depth, to);
  });
  Ints bits[2] = {};  // as in copy_rows
  for (int64_t x = 0; x < depth; x++)
    for (int half = 0; half < 2; half++) {
      float *at = to + x * COLUMNS + half * LANES;
      const Floats value = load(at);
      bits[half] |= (Ints)(value * broadcast(0.f));
      store(at, value * broadcast(factor));
    }
  for (int half = 0; half < 2; half++) {
    const Ints bad = (bits[half] & 0x7fffffff) != 0;
    if (!any(bad)) continue;
    for (int64_t x = 0; x < depth; x++) {
      float *at = to + x * COLUMNS + half * LANES;
      store(at, select(bad, broadcast(NOT_A_NUMBER), load(at)));
    }
  }
}

// The intervals of LANES queries, relative to a block of keys.
struct LaneBounds {
  Ints start, stop;
};
INLINE LaneBounds lane_bounds(const Panel &panel, int half, int64_t first, int64_t end) {
  LaneBounds bounds;
  for (int lane = 0; lane < LANES; lane++) {
    const int64_t i = half * LANES + lane;
    bounds.start[lane] = static_cast<int32_t>(max(0, min(panel.start[i], end) - first));
    bounds.stop[lane] = static_cast<int32_t>(max(0, min(panel.stop[i], end) - first));
  }
  return bounds;
}

// In the functions below, HALVES vectors of a panel have queries: 1 where there are at most LANES.

// Compute the scores of COUNT keys with a panel, and the largest score of each query.
template <int64_t COUNT, int HALVES>
INLINE void score_keys(const float *k, const float *q, int64_t depth, float *scores, Floats (&largest)[2]) {
  Floats left_largest = largest[0], right_largest = largest[1];
  gemm_tile<false, COUNT, HALVES>(k, depth, q, depth, [&](int64_t row, Floats left, Floats right)
                                  __attribute__((always_inline)) {
    left_largest = maximum(left_largest, left);
    store(scores + row * COLUMNS, left);
    if (HALVES == 1) return;
    right_largest = maximum(right_largest, right);
    store(scores + row * COLUMNS + LANES, right);
  });
  largest[0] = left_largest;
  largest[1] = right_largest;
}
// The same where some query does not see some of the keys, `key` of the block and later.
template <int64_t COUNT, int HALVES>
INLINE void score_some_keys(const float *k, const float *q, int64_t depth, int64_t key, const LaneBounds (&bounds)[2],
                            float *scores, Floats (&largest)[2]) {
  gemm_tile<false, COUNT, HALVES>(k, depth, q, depth, [&](int64_t row, Floats left, Floats right)
                                  __attribute__((always_inline)) {
    store(scores + row * COLUMNS, left);
    if (HALVES == 2) store(scores + row * COLUMNS + LANES, right);
  });
  for (int64_t row = 0; row < COUNT; row++)
    for (int half = 0; half < HALVES; half++) {
      float *at = scores + row * COLUMNS + half * LANES;
      const Ints index = (Ints){} + static_cast<int32_t>(key + row);
      const Ints seen = (index >= bounds[half].start) & (index < bounds[half].stop);
      const Floats score = select(seen, load(at), broadcast(-INF));
      largest[half] = maximum(largest[half], score);
      store(at, score);
    }
}

// The largest score of each query in a block of keys.
struct BlockLargest {
  Floats score[2];
  Ints tile[2];  // the first key of the first tile with it, relative to the block; only for statistics
};

// The scores of keys [from, to) of the block of keys that begins with key `first`.
template <int HALVES>
INLINE void score_panel(const Panel &panel, const float *keys, const float *q, int64_t depth, int64_t first,
                        int64_t from, int64_t to, bool statistics, float *scores, BlockLargest &block) {
  LaneBounds bounds[2];
  bool have_bounds = false;
  for (int64_t key = from; key < to; key += ROWS) {
    const float *k = keys + (key - first) * depth;
    float *at = scores + (key - first) * COLUMNS;
    const bool half = to - key <= ROWS / 2;
    const int64_t count = half ? ROWS / 2 : ROWS;
    const Floats before[2] = {block.score[0], block.score[1]};
    if (key + count <= to && panel.span.covers(key, count)) {
      if (half) score_keys<ROWS / 2, HALVES>(k, q, depth, at, block.score);
      else score_keys<ROWS, HALVES>(k, q, depth, at, block.score);
    } else {
      if (!have_bounds)
        for (int side = 0; side < HALVES; side++) bounds[side] = lane_bounds(panel, side, first, to);
      have_bounds = true;
      if (half) score_some_keys<ROWS / 2, HALVES>(k, q, depth, key - first, bounds, at, block.score);
      else score_some_keys<ROWS, HALVES>(k, q, depth, key - first, bounds, at, block.score);
    }
    if (!statistics) continue;
    const Ints tile = (Ints){} + static_cast<int32_t>(key - first);
    for (int side = 0; side < HALVES; side++)
      block.tile[side] = block.score[side] > before[side] ? tile : block.tile[side];
  }
}

// The sum of the weights of rows [from, to), in the order in which `sum` and update_row add those of one query:
// the keys of each column of a tile first, then the columns in halves.
template <int64_t WIDTH>
INLINE Floats sum_in_halves(const float *weights, int64_t column, int64_t from, int64_t to) {
  if constexpr (WIDTH < COLUMNS) {
    const Floats low = sum_in_halves<2 * WIDTH>(weights, column, from, to);
    return low + sum_in_halves<2 * WIDTH>(weights, column + WIDTH, from, to);
  } else {
    Floats total = (Floats){};
    for (int64_t key = from / COLUMNS * COLUMNS + column; key < to; key += COLUMNS)
      if (key >= from) total += load(weights + key * COLUMNS);
    return total;
  }
}
INLINE Floats sum_of_weights(const float *weights, int64_t from, int64_t to) {
  Floats quad[4];
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) quad[i] = sum_in_halves<4>(weights, i, from, to);
  return (quad[0] + quad[1]) + (quad[2] + quad[3]);
}

// The functions below treat the scores or weights of keys [from, to) of the block of keys that begins with key `first`;
// `from` and `to` are relative to it.

// Keep the scores of the keys at the offsets from each query, and of the target key.
INLINE void keep_few_scores(const Call &call, int64_t batch, Panel &panel, const float *scores, int64_t first,
                            int64_t from, int64_t to) {
  for (int64_t i = 0; i < call.num_offsets; i++) {
    const int64_t key = panel.position + call.offsets[i] - first;  // at the offset from the first query
    float *kept = panel.few_scores[i];
    if (key >= from && key + COLUMNS <= to) {
      for (int64_t query = 0; query < COLUMNS; query += LANES)
        store(kept + query, gather(scores + key * COLUMNS, index_from(query) * static_cast<int32_t>(COLUMNS + 1)));
      continue;
    }
    for (int64_t query = max(0, from - key); query < min(panel.count, to - key); query++)
      kept[query] = scores[(key + query) * COLUMNS + query];
  }
  const int64_t target = call.target_key ? call.target_key[batch] - first : -1;
  if (target >= from && target < to)
    memcpy(panel.few_scores[TARGET], scores + target * COLUMNS, sizeof(float) * COLUMNS);
}

// The key with the largest score of each query, the first of equal ones, where `improved`; and the pivot at its distance.
// It is searched for in its tile, whose later rows may be those of another block: they cannot come first.
template <int HALVES>
INLINE void keep_largest_keys(Panel &panel, const Ints (&improved)[2], const Ints (&tile)[2], const float *scores,
                              int64_t first, bool distances) {
  for (int half = 0; half < HALVES; half++) {
    if (!any(improved[half])) continue;
    const Ints cell = tile[half] * static_cast<int32_t>(COLUMNS) + index_from(half * LANES);
    Ints found = tile[half];
    for (int32_t row = ROWS - 1; row >= 0; row--)
      found = gather(scores + row * COLUMNS, cell) == panel.largest[half] ? tile[half] + row : found;
    const Ints now = improved[half] ? found + static_cast<int32_t>(first) : panel.largest_key[half];
    panel.largest_key[half] = now;
    if (!distances) continue;
    const Ints distance = now - index_from(panel.position + half * LANES);
    const Floats pivot = select(improved[half], absolute(__builtin_convertvector(distance, Floats)), panel.pivot[half]);
    panel.sums[half].move_pivot(panel.pivot[half] - pivot);
    panel.pivot[half] = pivot;
  }
}

// Turn scores into weights, and add them to the sums. All keys are on one SIDE of all queries, or on either.
template <int HALVES, Statistics STATISTICS, Side SIDE>
INLINE void weigh_keys(const Panel &panel, const Floats (&base)[2], float *scores, int64_t first, int64_t from,
                       int64_t to, WeightSums (&sums)[2]) {
  constexpr bool DISTANCES = STATISTICS == Statistics::DISTANCES;
  constexpr float SIGN = SIDE == Side::BEFORE ? -1 : 1;
  const Floats step = broadcast(SIGN);
  Floats x[2];  // distance of a key from each query, less the pivot; its sign is the side, where both occur
  for (int half = 0; half < HALVES && DISTANCES; half++) {
    const Floats lane = __builtin_convertvector(index_from(half * LANES), Floats);
    x[half] = step * (broadcast(static_cast<float>(first + from - panel.position)) - lane);
    if (SIDE != Side::BOTH) x[half] -= panel.pivot[half];
  }
  for (int64_t key = from; key < to; key++)
#pragma GCC unroll 2
    for (int half = 0; half < HALVES; half++) {
      float *at = scores + key * COLUMNS + half * LANES;
      const Floats exponent = maximum(broadcast(-127.f), load(at) - base[half]);  // 0 * -inf would be NaN
      const Floats weight = exp2_clamped(exponent);
      store(at, weight);
      sums[half].add_weight<STATISTICS>(weight, exponent);
      if (!DISTANCES) continue;
      sums[half].add_distance(weight, SIDE == Side::BOTH ? absolute(x[half]) - panel.pivot[half] : x[half]);
      x[half] += step;
    }
}

// Add the weights of special keys.
template <int HALVES>
INLINE void add_special_keys(const Call &call, int64_t batch, const float *scores, int64_t first, int64_t from,
                             int64_t to, WeightSums (&sums)[2]) {
  const uint8_t *const flags = call.special_keys + batch * call.keys + first, *const end = flags + to;
  const uint8_t *flag = flags + from;
  while ((flag = static_cast<const uint8_t *>(memchr(flag, 1, static_cast<size_t>(end - flag))))) {
    for (int half = 0; half < HALVES; half++)
      sums[half].special += load(scores + (flag - flags) * COLUMNS + half * LANES);
    flag++;
  }
}

// Add the weights of the keys within `reach` of each query, which are few: one more sum in weigh_keys would cost more.
template <int HALVES>
INLINE void add_near_keys(const Call &call, const Panel &panel, const float *scores, int64_t first, int64_t from,
                          int64_t to, WeightSums (&sums)[2]) {
  const int64_t position = panel.position - first;
  const Ints reach = (Ints){} + static_cast<int32_t>(call.reach);
  for (int64_t key = max(from, position - call.reach); key < min(to, position + COLUMNS + call.reach); key++)
    for (int half = 0; half < HALVES; half++) {
      const Ints after = index_from(half * LANES + position - key);  // of each query after the key
      const Floats weight = load(scores + key * COLUMNS + half * LANES);
      sums[half].near += select((after <= reach) & (after >= -reach), weight, (Floats){});
    }
}

// Add the weights of a block of keys to the sums of a panel, whose earlier weights are multiplied by its factor.
template <int HALVES, Statistics STATISTICS>
NOINLINE void update_panel(const Call &call, int64_t batch, Panel &panel, const BlockLargest &block, float *scores,
                         int64_t first, int64_t from, int64_t to) {
  Floats base[2], change[2];
  Ints improved[2];
  for (int half = 0; half < HALVES; half++) {
    const Floats before = panel.largest[half];
    improved[half] = block.score[half] > before;
    const Floats now = select(improved[half], block.score[half], before);
    base[half] = select(now == broadcast(-INF), (Floats){}, now);  // -inf - -inf would be NaN
    change[half] = change_between(before, base[half]);
    panel.factor[half] = exp2(before - base[half]);
    panel.largest[half] = now;
  }
  WeightSums sums[2] = {};
  if constexpr (STATISTICS == Statistics::NONE) {
    weigh_keys<HALVES, STATISTICS, Side::BOTH>(panel, base, scores, first, from, to, sums);
  } else {
    keep_few_scores(call, batch, panel, scores, first, from, to);
    keep_largest_keys<HALVES>(panel, improved, block.tile, scores, first, STATISTICS == Statistics::DISTANCES);
    const int64_t before = max(from, min(to, panel.position + 1 - first));  // the keys before it are so for all queries
    const int64_t after = max(before, min(to, panel.position + COLUMNS - 1 - first));
    weigh_keys<HALVES, STATISTICS, Side::BEFORE>(panel, base, scores, first, from, before, sums);
    weigh_keys<HALVES, STATISTICS, Side::BOTH>(panel, base, scores, first, before, after, sums);
    weigh_keys<HALVES, STATISTICS, Side::AFTER>(panel, base, scores, first, after, to, sums);
    if (call.special_keys_weight) add_special_keys<HALVES>(call, batch, scores, first, from, to, sums);
    if (call.near_weight) add_near_keys<HALVES>(call, panel, scores, first, from, to, sums);
  }
  for (int half = 0; half < HALVES; half++) {
    sums[half].total = sum_of_weights(scores + half * LANES, from, to);  // in the order of update_row
    panel.sums[half].add<STATISTICS>(sums[half], panel.factor[half], change[half]);
  }
}

// Add the weighted values of `count` keys to the sums of COUNT queries.
template <int64_t COUNT>
INLINE void add_values_of(const float *weights, const float *values, int64_t count, bool begun, const float *factors,
                          float *sums, int64_t width) {
  if (begun)
    gemm_tile<true, COUNT>(weights, COLUMNS, values, count, [=](int64_t row, Floats left, Floats right)
                           __attribute__((always_inline)) {
      float *to = sums + row * width;
      const Floats factor = broadcast(factors[row]);
      store(to, load(to) * factor + left);
      store(to + LANES, load(to + LANES) * factor + right);
    });
  else
    gemm_tile<true, COUNT>(weights, COLUMNS, values, count, [=](int64_t row, Floats left, Floats right)
                           __attribute__((always_inline)) {
      store(sums + row * width, left);
      store(sums + row * width + LANES, right);
    });
}

// The visible keys of a block of keys, for one panel.
template <int HALVES>
NOINLINE void attend_panel(const Call &call, int64_t batch, Panel &panel, PackedKeys<float> keys, const float *q,
                           int64_t depth, int64_t width, int64_t held, int64_t first, int64_t end, float *scores,
                           float *sums) {
  const int64_t from = max(panel.span.any_start, first), to = min(panel.span.any_stop, end);
  if (from >= to) return;
  BlockLargest block = {{broadcast(-INF), broadcast(-INF)}, {}};
  const bool statistics = required_statistics(call) != Statistics::NONE;
  score_panel<HALVES>(panel, keys.k, q, depth, first, from, to, statistics, scores, block);
  with_statistics(call, [&](auto constant) __attribute__((always_inline)) {
    update_panel<HALVES, decltype(constant)::VALUE>(call, batch, panel, block, scores, first, from - first, to - first);
  });
  using Tiles = PanelTiles<HALVES * LANES>;
  float factors[COLUMNS];
  for (int half = 0; half < HALVES; half++) store(factors + half * LANES, panel.factor[half]);
  for (int64_t column = 0; column < width; column += COLUMNS) {
    const float *values = keys.v + column * held + (from - first) * COLUMNS;
    for (int64_t row = 0; row < panel.count; row += Tiles::HEIGHT) {
      const float *weights = scores + (from - first) * COLUMNS + row;
      float *to_sums = sums + row * width + column;
      if (row + Tiles::HEIGHT <= HALVES * LANES)
        add_values_of<Tiles::HEIGHT>(weights, values, to - from, panel.begun, factors + row, to_sums, width);
      else
        add_values_of<Tiles::LAST_HEIGHT>(weights, values, to - from, panel.begun, factors + row, to_sums, width);
    }
  }
  panel.begun = true;
}

// Write the output, the logsumexp and the statistics of a panel whose first query is `first`.
NOINLINE void write_panel(const Call &call, const Panel &panel, int64_t batch, int64_t head, int64_t first,
                          const float *values, int64_t width) {
  const int64_t index = (batch * call.heads + head) * call.queries + first;
  const bool statistics = required_statistics(call) != Statistics::NONE;
  float factors[COLUMNS];
  FinishedQueries queries;
  for (int half = 0; half * LANES < panel.count; half++) {
    queries.largest = panel.largest[half];
    queries.sums = panel.sums[half];
    queries.pivot = (Floats){};
    if (statistics) {
      queries.pivot = panel.pivot[half];
      queries.largest_key = __builtin_convertvector(panel.largest_key[half], Longs);
      for (int64_t i = 0; i < call.num_offsets; i++) queries.few_scores[i] = load(panel.few_scores[i] + half * LANES);
      queries.few_scores[TARGET] = load(panel.few_scores[TARGET] + half * LANES);
    }
    const int64_t count = min(LANES, panel.count - half * LANES);
    store(factors + half * LANES, write_softmax(call, index + half * LANES, count, queries, statistics));
  }
  write_outputs(call, batch, head, first, panel.count, panel.begun ? values : nullptr, width, factors);
}

// The queries [first, first + count) of one head, on their way through blocks of keys.
class BlockOfPanels {
 public:
  using Packed = float;
  using Memory = PanelBlocks;
  template <class Element>
  static constexpr auto pack = pack_key_rows<Element>;

  BlockOfPanels(const Call &call, const ForwardPlan &plan, const Memory &memory, int64_t batch, int64_t head,
                 int64_t first, int64_t count)
      : call_(call), plan_(plan), memory_(memory), batch_(batch), head_(head), first_(first), count_(count),
        panels_(ceil_div(count, COLUMNS)), span_(span_of_no_query(call)) {}

  template <class KeysFrom>
  void attend(KeysFrom keys_from) {
    begin_panels();
    const int64_t depth = plan_.depth, width = plan_.width;
    for (int64_t key = span_.any_start / COLUMNS * COLUMNS; key < span_.any_stop; key += FORWARD_KEYS) {
      const PackedKeys<float> keys = keys_from(key, min(key + FORWARD_KEYS, plan_.keys));
      for (int64_t i = 0; i < panels_; i++) {
        Panel &panel = memory_.panels[i];
        const auto attend = panel.count <= LANES ? attend_panel<1> : attend_panel<2>;
        attend(call_, batch_, panel, keys, memory_.q + i * depth * COLUMNS, depth, width, plan_.held, key,
               key + FORWARD_KEYS, memory_.scores, memory_.sums + i * COLUMNS * width);
      }
    }
    for (int64_t i = 0; i < panels_; i++)
      write_panel(call_, memory_.panels[i], batch_, head_, first_ + i * COLUMNS, memory_.sums + i * COLUMNS * width,
                  width);
  }

 private:
  void begin_panels() {
    const float scale = static_cast<float>(call_.scale) * LOG2_E;
    for (int64_t i = 0; i < panels_; i++) {
      Panel &panel = memory_.panels[i];
      const int64_t query = first_ + i * COLUMNS;
      panel.count = min(COLUMNS, first_ + count_ - query);
      begin_panel(call_, batch_, query, panel);
      span_.add(panel.span);
      pack_queries_of_panel(call_, batch_, head_, query, panel.count, scale, memory_.q + i * plan_.depth * COLUMNS);
    }
  }

  const Call &call_;
  const ForwardPlan &plan_;
  const Memory &memory_;
  const int64_t batch_, head_, first_, count_, panels_;
  Span span_;  // of all queries
};

}  // namespace
