// A block of queries of the forward pass, with the queries as the rows of the tiles. It computes every call; calls
// without terms of the scores are faster by forward_columns.h, to the same bits.
#pragma once
#include "call.h"
#include "forward_plan.h"
#include "gemm_tile.h"
#include "pack.h"
#include "simd.h"
#include "softmax.h"
#include "workspace.h"

namespace {

constexpr int64_t FORWARD_TILES = FORWARD_QUERIES / ROWS;  // register tiles per block
static_assert(FORWARD_KEYS <= MAX_BLOCK_KEYS, "a row can add a block");

// The memory of one thread.
template <class Packed>
struct ForwardBlocks {
  float *scores;     // (FORWARD_QUERIES, FORWARD_KEYS): scores, replaced by weights
  float *sums;       // (FORWARD_QUERIES, width): weighted sums of the values
  Packed *q;         // (FORWARD_QUERIES, depth)
  Packed *weights;   // (FORWARD_QUERIES, FORWARD_KEYS): the same memory as scores, or a copy in bfloat16
  float *factors;    // (FORWARD_QUERIES): factors of the sums over earlier keys
  float *special;    // (FORWARD_KEYS): 1 for special keys, else 0
  SoftmaxRow *rows;  // (FORWARD_QUERIES)
  Query *queries;    // (FORWARD_QUERIES)
  int64_t bytes;

  template <class Plan>
  ForwardBlocks(const Plan &plan, char *memory) {
    Workspace workspace{memory};
    scores = workspace.take<float>(FORWARD_QUERIES * FORWARD_KEYS);
    sums = workspace.take<float>(FORWARD_QUERIES * plan.width);
    q = workspace.take<Packed>(FORWARD_QUERIES * plan.depth);
    weights = reinterpret_cast<Packed *>(scores);
    if (Plan::NARROW) weights = workspace.take<Packed>(FORWARD_QUERIES * FORWARD_KEYS);
    factors = workspace.take<float>(FORWARD_QUERIES);
    special = workspace.take<float>(FORWARD_KEYS);
    rows = workspace.take<SoftmaxRow>(FORWARD_QUERIES);
    queries = workspace.take<Query>(FORWARD_QUERIES);
    bytes = workspace.bytes;
  }
};

INLINE void set_nan(float *to) { *to = NOT_A_NUMBER; }
INLINE void set_zero(float *to) { *to = 0; }
#if BF16_DOT
INLINE void set_nan(Bfloat16 *to) { to->bits = 0x7fc0; }
INLINE void set_zero(Bfloat16 *to) { to->bits = 0; }
INLINE void store_narrow(Bfloat16 *to, Floats value) {  // faster than `store`; numbers below 2^-126 become 0
#ifdef __AVX512BF16__
  const __m256bh halves = _mm512_cvtneps_pbh((__m512)value);
  __builtin_memcpy(to, &halves, sizeof halves);
#else
  store(to, value);
#endif
}
#endif

// Pack keys [first, end) of a key/value head. The scores of a key that is not finite, in k or v, become NaN, and its
// value becomes 0. So a query that sees the key becomes NaN by its score, and no other query is affected.
template <class Element>
void pack_keys(const Call &call, const ForwardPlan<Element> &plan, int64_t batch, int64_t head, int64_t first,
               int64_t end, PackedOf<Element> *packed_k, PackedOf<Element> *packed_v) {
  constexpr int64_t PAIR = ForwardPlan<Element>::NARROW ? 2 : 1;  // adjacent keys in packed values
  const Element *k = row_of<Element>(call.k, call.k_strides, batch, head, first);
  const Element *v = row_of<Element>(call.v, call.v_strides, batch, head, first);
  const int64_t count = min(end, call.keys) - first;  // without the padding
  const int64_t panel = plan.keys * COLUMNS;          // stride between panels of values
  packed_k += first * plan.depth;
  packed_v += first * COLUMNS;
  pack_transposed(k, call.k_strides.row, count, end - first, call.head_dim, packed_k);
  pack_panels(v, call.v_strides.row, count, end - first, call.value_dim, packed_v, panel);
  bool good = all_finite(packed_k, (end - first) * plan.depth);
  for (int64_t column = 0; column < plan.width; column += COLUMNS)
    good &= all_finite(packed_v + column / COLUMNS * panel, (end - first) * COLUMNS);
  if (good) return;
  for (int64_t key = 0; key < count; key++) {
    const Element *k_row = k + key * call.k_strides.row, *v_row = v + key * call.v_strides.row;
    if (row_finite(k_row, call.head_dim) && row_finite(v_row, call.value_dim)) continue;
    const int64_t in_panel = key % COLUMNS;
    for (int64_t x = 0; x < plan.depth; x++)
      set_nan(packed_k + (key - in_panel) * plan.depth + x / PAIR * PAIR * COLUMNS + in_panel * PAIR + x % PAIR);
    for (int64_t column = 0; column < plan.width; column++)
      set_zero(packed_v + column / COLUMNS * panel + key / PAIR * PAIR * COLUMNS + column % COLUMNS * PAIR + key % PAIR);
  }
}

// Compute the queries [first, first + count) of one head.
template <class Element, Statistics STATISTICS>
void attend_block(const Call &call, const ForwardPlan<Element> &plan, const ForwardBlocks<PackedOf<Element>> &block,
                  int64_t batch, int64_t head, int64_t first, int64_t count,
                  const PackedOf<Element> *packed_k, const PackedOf<Element> *packed_v) {
  using Packed = PackedOf<Element>;
  constexpr bool NARROW = ForwardPlan<Element>::NARROW;
  const int64_t padded = round_up(count, ROWS), tiles = padded / ROWS, width = plan.width, depth = plan.depth;
  const float scale = static_cast<float>(call.scale) * LOG2_E;
  const Element *q = row_of<Element>(call.q, call.q_strides, batch, head, first);
  int64_t lowest = call.keys, highest = 0;                      // keys that some query sees
  int64_t tile_start[FORWARD_TILES], tile_stop[FORWARD_TILES];  // keys that some query of a tile sees, in whole panels
  for (int64_t tile = 0; tile < tiles; tile++) {
    int64_t start = call.keys, stop = 0;
    for (int64_t i = tile * ROWS; i < tile * ROWS + ROWS; i++) {
      Query &query = block.queries[i];
      if (i < count) query = read_query(call, batch, head, first + i);
      else query = Query{0, 0, nullptr, nullptr, {0, 0}};
      clear_row(call, block.rows[i], batch, first + i);
      if (query.start == query.stop) continue;
      start = min(start, query.start);
      stop = max(stop, query.stop);
    }
    tile_start[tile] = start / COLUMNS * COLUMNS;
    tile_stop[tile] = round_up(stop, COLUMNS);
    lowest = min(lowest, start);
    highest = max(highest, stop);
  }
  for (int64_t i = 0; i < padded; i++) {
    Packed *row = block.q + i * depth;
    if (i >= count) {
      memset(static_cast<void *>(row), 0, sizeof(Packed) * static_cast<size_t>(depth));
      continue;
    }
    if constexpr (NARROW) pack_row(q + i * call.q_strides.row, call.head_dim, depth, row);
    else pack_row(q + i * call.q_strides.row, call.head_dim, depth, scale, row);
  }
  memset(block.sums, 0, sizeof(float) * static_cast<size_t>(padded * width));
  const bool terms = call.softcap > 0 || call.bias || call.visible;

  for (int64_t block_first = lowest / COLUMNS * COLUMNS; block_first < highest; block_first += FORWARD_KEYS) {
    const int64_t block_end = min(block_first + FORWARD_KEYS, round_up(highest, COLUMNS));
    const float *special = mark_special_keys<STATISTICS>(call, batch, block_first, block_end, block.special);
    // A tile computes only the panels of keys that some query of it sees.
    int64_t starts[FORWARD_TILES], stops[FORWARD_TILES];
    for (int64_t tile = 0; tile < tiles; tile++) {
      starts[tile] = max(tile_start[tile], block_first);
      stops[tile] = min(tile_stop[tile], block_end);
    }
    for (int64_t key = block_first; key < block_end; key += COLUMNS)
      for (int64_t tile = 0; tile < tiles; tile++) {
        if (key < starts[tile] || key >= stops[tile]) continue;
        float *scores = block.scores + tile * ROWS * FORWARD_KEYS + (key - block_first);
        if constexpr (NARROW)
          gemm_tile(block.q + tile * ROWS * depth, depth, packed_k + key * depth, depth,
                    [=](int64_t row, Floats left, Floats right) __attribute__((always_inline)) {
                      store(scores + row * FORWARD_KEYS, left * broadcast(scale));
                      store(scores + row * FORWARD_KEYS + LANES, right * broadcast(scale));
                    });
        else
          gemm_tile<false>(block.q + tile * ROWS * depth, depth, packed_k + key * depth, depth,
                           [=](int64_t row, Floats left, Floats right) __attribute__((always_inline)) {
                             store(scores + row * FORWARD_KEYS, left);
                             store(scores + row * FORWARD_KEYS + LANES, right);
                           });
      }
    for (int64_t tile = 0; tile < tiles; tile++) {
      if (starts[tile] >= stops[tile]) continue;
      for (int64_t i = tile * ROWS; i < tile * ROWS + ROWS; i++) {
        const Query &query = block.queries[i];
        const int64_t start = starts[tile], stop = stops[tile], offset = start - block_first;
        const bool plain = !terms && query.start <= start && query.stop >= stop;
        float *scores = block.scores + i * FORWARD_KEYS + offset;
        const float *flags = special ? special + offset : nullptr;
        const auto update = [&](auto narrow) __attribute__((always_inline)) {
          return update_row<STATISTICS>(call, query, block.rows[i], scores, start, stop, plain, flags, narrow);
        };
        if constexpr (NARROW) {
          Packed *weights = block.weights + i * FORWARD_KEYS + offset;
          block.factors[i] = update([weights](int64_t at, Floats value) __attribute__((always_inline)) {
            store_narrow(weights + at, value);
          });
        } else {
          block.factors[i] = update(no_narrow_copy);
        }
      }
    }
    for (int64_t column = 0; column < width; column += COLUMNS)
      for (int64_t tile = 0; tile < tiles; tile++) {
        if (starts[tile] >= stops[tile]) continue;
        float *sums = block.sums + tile * ROWS * width + column;
        const float *factors = block.factors + tile * ROWS;
        const auto add = [=](int64_t row, Floats left, Floats right) __attribute__((always_inline)) {
          float *to = sums + row * width;
          const Floats factor = broadcast(factors[row]);
          store(to, load(to) * factor + left);
          store(to + LANES, load(to + LANES) * factor + right);
        };
        const Packed *weights = block.weights + tile * ROWS * FORWARD_KEYS + (starts[tile] - block_first);
        const Packed *values = packed_v + column * plan.keys + starts[tile] * COLUMNS;
        if constexpr (NARROW) gemm_tile(weights, FORWARD_KEYS, values, stops[tile] - starts[tile], add);
        else gemm_tile<false>(weights, FORWARD_KEYS, values, stops[tile] - starts[tile], add);
      }
  }
  for (int64_t i = 0; i < count; i++)
    write_row_results<Element>(call, block.rows[i], batch, head, first + i, block.sums + i * width);
}

}  // namespace
