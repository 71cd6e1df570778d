// A block of queries of the forward pass, with the queries as the columns of the tiles: each lane of a vector is one
// query, so that the softmax needs no operation across lanes and treats COLUMNS queries at a time.
//
// The scores of a panel of COLUMNS queries are computed as K Q^T, from keys that need no transpose. The arithmetic and
// its order are those of forward_rows.h, so the bits do not depend on whether a call has statistics.
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
  Floats largest[2], total[2];
  Floats factor[2];  // of the sums over earlier keys
  Span span;
  int64_t count;  // queries
  bool begun;     // whether `sums` has been written
  int64_t start[COLUMNS], stop[COLUMNS];
};

// The memory of one thread.
struct ColumnsBlocks {
  float *scores;  // (FORWARD_KEYS + ROWS, COLUMNS): scores of a panel, replaced by weights; the last tile may end later
  float *sums;    // (FORWARD_QUERIES, width): weighted sums of the values
  float *q;       // (PANELS, depth, COLUMNS)
  Panel *panels;  // (PANELS)
  int64_t bytes;

  template <class Plan>
  ColumnsBlocks(const Plan &plan, char *memory) {
    Workspace workspace{memory};
    scores = workspace.take<float>((FORWARD_KEYS + ROWS) * COLUMNS);
    sums = workspace.take<float>(FORWARD_QUERIES * plan.width);
    q = workspace.take<float>(FORWARD_QUERIES * plan.depth);
    panels = workspace.take<Panel>(PANELS);
    bytes = workspace.bytes;
  }
};

// Whether this file computes the call.
template <class Element>
bool columns_apply(const Call &call) {
  const bool terms = call.softcap > 0 || call.bias || call.visible || call.dropout > 0;
  return !ForwardPlan<Element>::NARROW && !terms && required_statistics(call) == Statistics::NONE;
}

// Copy keys [first, end) as rows (keys, depth), and their values as panels; those that are not finite as in
// forward_rows.h.
template <class Element>
void pack_key_rows(const Call &call, const ForwardPlan<Element> &plan, int64_t batch, int64_t head, int64_t first,
                   int64_t end, float *packed_k, float *packed_v) {
  const Element *k = row_of<Element>(call.k, call.k_strides, batch, head, first);
  const Element *v = row_of<Element>(call.v, call.v_strides, batch, head, first);
  const int64_t count = min(end, call.keys) - first, depth = plan.depth, panel = plan.keys * COLUMNS;
  packed_k += first * depth;
  packed_v += first * COLUMNS;
  bool good = copy_rows(k, call.k_strides.row, count, depth, depth, packed_k, depth);
  if (end >= call.keys) memset(packed_k + count * depth, 0, sizeof(float) * static_cast<size_t>(ROWS * depth));
  for (int64_t column = 0; column < call.value_dim; column += COLUMNS)
    good &= copy_rows(v + column, call.v_strides.row, count, min(COLUMNS, call.value_dim - column), COLUMNS,
                      packed_v + column / COLUMNS * panel, COLUMNS);
  if (good) return;
  for (int64_t key = 0; key < count; key++) {
    const Element *k_row = k + key * call.k_strides.row, *v_row = v + key * call.v_strides.row;
    if (row_finite(k_row, call.head_dim) && row_finite(v_row, call.value_dim)) continue;
    for (int64_t x = 0; x < depth; x++) packed_k[key * depth + x] = NOT_A_NUMBER;
    for (int64_t column = 0; column < plan.width; column++)
      packed_v[column / COLUMNS * panel + key * COLUMNS + column % COLUMNS] = 0;
  }
}

// Read the visible keys of a panel's queries, and clear its softmax. Columns after the last query repeat its interval.
INLINE void begin_panel(const Call &call, int64_t batch, int64_t first, Panel &panel) {
  panel.span = span_of_no_query(call);
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
    panel.total[half] = (Floats){};
  }
}

// Transpose the queries of a panel, times a factor. A query with an element that is not finite becomes NaN as a whole.
template <class Element>
void pack_columns(const Element *q, int64_t stride, int64_t count, int64_t depth, float factor, float *to) {
  pack_transposed(q, stride, count, COLUMNS, depth, to);
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

// The scores of keys [from, to) of the block of keys that begins with key `first`.
template <int HALVES>
INLINE void score_panel(const Panel &panel, const float *packed_k, const float *q, int64_t depth, int64_t first,
                        int64_t from, int64_t to, float *scores, Floats (&largest)[2]) {
  LaneBounds bounds[2];
  bool have_bounds = false;
  for (int64_t key = from; key < to; key += ROWS) {
    const float *k = packed_k + key * depth;
    float *at = scores + (key - first) * COLUMNS;
    const bool half = to - key <= ROWS / 2;
    const int64_t count = half ? ROWS / 2 : ROWS;
    if (key + count <= to && panel.span.covers(key, count)) {
      if (half) score_keys<ROWS / 2, HALVES>(k, q, depth, at, largest);
      else score_keys<ROWS, HALVES>(k, q, depth, at, largest);
      continue;
    }
    if (!have_bounds)
      for (int side = 0; side < HALVES; side++) bounds[side] = lane_bounds(panel, side, first, to);
    have_bounds = true;
    if (half) score_some_keys<ROWS / 2, HALVES>(k, q, depth, key - first, bounds, at, largest);
    else score_some_keys<ROWS, HALVES>(k, q, depth, key - first, bounds, at, largest);
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

// Turn the scores of rows [from, to) into weights, as update_row.
template <int HALVES>
INLINE void update_panel(Panel &panel, const Floats (&block_largest)[2], float *scores, int64_t from, int64_t to) {
  Floats base[2];
  for (int half = 0; half < HALVES; half++) {
    const Floats before = panel.largest[half];
    const Floats now = select(block_largest[half] > before, block_largest[half], before);
    base[half] = select(now == broadcast(-INF), (Floats){}, now);  // -inf - -inf would be NaN
    panel.factor[half] = exp2(before - base[half]);
    panel.largest[half] = now;
  }
  for (int64_t key = from; key < to; key++)
#pragma GCC unroll 2
    for (int half = 0; half < HALVES; half++) {
      float *at = scores + key * COLUMNS + half * LANES;
      store(at, exp2(load(at) - base[half]));
    }
  for (int half = 0; half < HALVES; half++) {
    const Floats total = sum_of_weights(scores + half * LANES, from, to);
    panel.total[half] = multiply_add(panel.total[half], panel.factor[half], total);
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
__attribute__((noinline)) void attend_panel(Panel &panel, const float *packed_k, const float *packed_v, const float *q,
                                            int64_t depth, int64_t width, int64_t keys, int64_t first, int64_t end,
                                            float *scores, float *sums) {
  const int64_t from = max(panel.span.any_start, first), to = min(panel.span.any_stop, end);
  if (from >= to) return;
  Floats largest[2] = {broadcast(-INF), broadcast(-INF)};
  score_panel<HALVES>(panel, packed_k, q, depth, first, from, to, scores, largest);
  update_panel<HALVES>(panel, largest, scores, from - first, to - first);
  using Tiles = PanelTiles<HALVES * LANES>;
  float factors[COLUMNS];
  for (int half = 0; half < HALVES; half++) store(factors + half * LANES, panel.factor[half]);
  for (int64_t column = 0; column < width; column += COLUMNS) {
    const float *values = packed_v + column * keys + from * COLUMNS;
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

// Write the output and the logsumexp of a panel whose first query is `first`.
template <class Element>
void write_panel(const Call &call, const Panel &panel, int64_t batch, int64_t head, int64_t first, const float *sums,
                 int64_t width) {
  float inverses[COLUMNS], logsumexps[COLUMNS];
  for (int half = 0; half < 2; half++) {
    const Normaliser normaliser = normaliser_of(call, head, panel.largest[half], panel.total[half]);
    store(inverses + half * LANES, normaliser.inverse);
    store(logsumexps + half * LANES, normaliser.logsumexp * broadcast(LN_2));
  }
  Element *output = row_of<Element>(call.output, call.output_strides, batch, head, first);
  for (int64_t i = 0; i < panel.count; i++, sums += width, output += call.output_strides.row) {
    write_row(panel.begun ? sums : nullptr, call.value_dim, inverses[i], output);
  }
  float *logsumexp = call.logsumexp + (batch * call.heads + head) * call.queries + first;
  memcpy(logsumexp, logsumexps, sizeof(float) * static_cast<size_t>(panel.count));
}

// Compute the queries [first, first + count) of one head.
template <class Element>
void attend_columns(const Call &call, const ForwardPlan<Element> &plan, const ColumnsBlocks &block, int64_t batch,
                    int64_t head, int64_t first, int64_t count, const float *packed_k, const float *packed_v) {
  const int64_t panels = ceil_div(count, COLUMNS);
  const float scale = static_cast<float>(call.scale) * LOG2_E;
  Span span = span_of_no_query(call);
  for (int64_t i = 0; i < panels; i++) {
    Panel &panel = block.panels[i];
    const int64_t query = first + i * COLUMNS;
    panel.count = min(COLUMNS, first + count - query);
    begin_panel(call, batch, query, panel);
    span.add(panel.span);
    const Element *q = row_of<Element>(call.q, call.q_strides, batch, head, query);
    pack_columns(q, call.q_strides.row, panel.count, plan.depth, scale, block.q + i * plan.depth * COLUMNS);
  }
  for (int64_t key = span.any_start / COLUMNS * COLUMNS; key < span.any_stop; key += FORWARD_KEYS)
    for (int64_t i = 0; i < panels; i++) {
      Panel &panel = block.panels[i];
      const auto attend = panel.count <= LANES ? attend_panel<1> : attend_panel<2>;
      attend(panel, packed_k, packed_v, block.q + i * plan.depth * COLUMNS, plan.depth, plan.width, plan.keys, key,
             key + FORWARD_KEYS, block.scores, block.sums + i * COLUMNS * plan.width);
    }
  for (int64_t i = 0; i < panels; i++)
    write_panel<Element>(call, block.panels[i], batch, head, first + i * COLUMNS,
                         block.sums + i * COLUMNS * plan.width, plan.width);
}

}  // namespace
