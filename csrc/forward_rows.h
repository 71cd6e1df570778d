// A block of queries of the forward pass, with the queries as the rows of the tiles. It computes every call; calls
// without terms of the scores are faster by forward_panels.h, to the same bits.
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

  ForwardBlocks(const ForwardPlan &plan, char *memory) {
    Workspace workspace{memory};
    scores = workspace.take<float>(FORWARD_QUERIES * FORWARD_KEYS);
    sums = workspace.take<float>(FORWARD_QUERIES * plan.width);
    q = workspace.take<Packed>(FORWARD_QUERIES * plan.depth);
    weights = reinterpret_cast<Packed *>(scores);
    if (sizeof(Packed) == sizeof(Bfloat16)) weights = workspace.take<Packed>(FORWARD_QUERIES * FORWARD_KEYS);
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
#endif

// Pack keys [first, end) of a key/value head. The scores of a key that is not finite, in k or v, become NaN, and its
// value becomes 0. So a query that sees the key becomes NaN by its score, and no other query is affected.
template <class Element>
void pack_keys(const Call &call, const ForwardPlan &plan, int64_t batch, int64_t head, int64_t first,
               int64_t end, PackedKeys<PackedOf<Element>> to) {
  constexpr int64_t PAIR = sizeof(PackedOf<Element>) == 2 ? 2 : 1;  // adjacent keys in packed values
  const Element *k = row_of<Element>(call.k, call.k_strides, batch, head, first);
  const Element *v = row_of<Element>(call.v, call.v_strides, batch, head, first);
  const int64_t count = min(end, call.keys) - first;  // without the padding
  const int64_t panel = plan.held * COLUMNS;          // stride between panels of values
  pack_transposed(k, call.k_strides.row, count, end - first, call.head_dim, to.k);
  pack_panels(v, call.v_strides.row, count, end - first, call.value_dim, to.v, panel);
  bool good = all_finite(to.k, (end - first) * plan.depth);
  for (int64_t column = 0; column < plan.width; column += COLUMNS)
    good &= all_finite(to.v + column / COLUMNS * panel, (end - first) * COLUMNS);
  if (good) return;
  for (int64_t key = 0; key < count; key++) {
    const Element *k_row = k + key * call.k_strides.row, *v_row = v + key * call.v_strides.row;
    if (row_finite(k_row, call.head_dim) && row_finite(v_row, call.value_dim)) continue;
    const int64_t in_panel = key % COLUMNS;
    for (int64_t x = 0; x < plan.depth; x++)
      set_nan(to.k + (key - in_panel) * plan.depth + x / PAIR * PAIR * COLUMNS + in_panel * PAIR + x % PAIR);
    for (int64_t column = 0; column < plan.width; column++)
      set_zero(to.v + column / COLUMNS * panel + key / PAIR * PAIR * COLUMNS + column % COLUMNS * PAIR + key % PAIR);
  }
}

// The queries [first, first + count) of one head, on their way through blocks of keys.
template <class PackedElement>
class BlockOfRows {
 public:
  using Packed = PackedElement;
  using Memory = ForwardBlocks<Packed>;
  template <class Element>
  static constexpr auto pack = pack_keys<Element>;

  BlockOfRows(const Call &call, const ForwardPlan &plan, const Memory &memory, int64_t batch, int64_t head,
              int64_t first, int64_t count)
      : call_(call), plan_(plan), memory_(memory), batch_(batch), head_(head), first_(first), count_(count),
        tiles_(ceil_div(count, ROWS)) {}

  // keys_from(first, end) packs the keys of a block, if they are not yet, and returns them.
  template <class KeysFrom>
  void attend(KeysFrom keys_from) {
    begin_rows();
    pack_queries();
    for (int64_t key = span_.any_start / COLUMNS * COLUMNS; key < span_.any_stop; key += FORWARD_KEYS) {
      begin_keys(key, min(key + FORWARD_KEYS, round_up(span_.any_stop, COLUMNS)));
      const PackedKeys<Packed> keys = keys_from(block_, block_end_);
      compute_scores(keys.k);
      with_statistics(call_, [this](auto statistics) { compute_weights<decltype(statistics)::VALUE>(); });
      add_values(keys.v);
    }
    write();
  }

 private:
  static constexpr bool NARROW = sizeof(Packed) == sizeof(Bfloat16);
  static constexpr int PLAIN_ROWS = ROWS % 3 == 0 ? 3 : 4;  // at once, where they need neither terms nor statistics

  // Read the visible keys of each query, and clear its softmax and its sums.
  void begin_rows() {
    span_ = span_of_no_query(call_);
    for (int64_t tile = 0; tile < tiles_; tile++) {
      Span span = span_of_no_query(call_);
      for (int64_t i = tile * ROWS; i < min(tile * ROWS + ROWS, count_); i++) {
        memory_.queries[i] = read_query(call_, batch_, head_, first_ + i);
        clear_row(call_, memory_.rows[i], batch_, first_ + i);
        span.add(memory_.queries[i]);
      }
      spans_[tile] = span;
      span_.add(span);
    }
    memset(memory_.sums, 0, sizeof(float) * static_cast<size_t>(tiles_ * ROWS * plan_.width));
    // The products of the rows past the last query are not read; 0, because they may be slow otherwise.
    for (int64_t i = count_; i < tiles_ * ROWS; i++) {
      memory_.factors[i] = 0;
      if (NARROW) memset(static_cast<void *>(memory_.weights + i * FORWARD_KEYS), 0, sizeof(Packed) * FORWARD_KEYS);
    }
  }

  void pack_queries() const {
    const int64_t depth = plan_.depth;
    with_element_packed_as<Packed>(call_, [&](auto element) {
      const auto *q = row_of<decltype(element)>(call_.q, call_.q_strides, batch_, head_, first_);
      for (int64_t i = 0; i < count_; i++, q += call_.q_strides.row) {
        if constexpr (NARROW) pack_row(q, call_.head_dim, depth, memory_.q + i * depth);
        else pack_row(q, call_.head_dim, depth, scale(), memory_.q + i * depth);
      }
    });
    const int64_t rest = (tiles_ * ROWS - count_) * depth;
    memset(static_cast<void *>(memory_.q + count_ * depth), 0, sizeof(Packed) * static_cast<size_t>(rest));
  }

  // Begin with a block of keys, of which a tile computes only the panels that some query of it sees.
  void begin_keys(int64_t first, int64_t end) {
    block_ = first;
    block_end_ = end;
    for (int64_t tile = 0; tile < tiles_; tile++) {
      starts_[tile] = max(spans_[tile].any_start / COLUMNS * COLUMNS, first);
      stops_[tile] = min(round_up(spans_[tile].any_stop, COLUMNS), end);
    }
  }

  NOINLINE void compute_scores(const Packed *keys) const {
    const int64_t depth = plan_.depth, tiles = tiles_;
    const float factor = scale();
    for (int64_t key = block_; key < block_end_; key += COLUMNS)
      for (int64_t tile = 0; tile < tiles; tile++) {
        if (key < starts_[tile] || key >= stops_[tile]) continue;
        float *scores = memory_.scores + tile * ROWS * FORWARD_KEYS + (key - block_);
        const Packed *q = memory_.q + tile * ROWS * depth, *k = keys + (key - block_) * depth;
        if constexpr (NARROW)
          gemm_tile(q, depth, k, depth, [=](int64_t row, Floats left, Floats right) __attribute__((always_inline)) {
            store(scores + row * FORWARD_KEYS, left * broadcast(factor));
            store(scores + row * FORWARD_KEYS + LANES, right * broadcast(factor));
          });
        else
          gemm_tile<false>(q, depth, k, depth, [=](int64_t row, Floats left, Floats right)
                           __attribute__((always_inline)) {
            store(scores + row * FORWARD_KEYS, left);
            store(scores + row * FORWARD_KEYS + LANES, right);
          });
      }
  }

  // Turn the scores of the block of keys into weights.
  template <Statistics STATISTICS>
  void compute_weights() const {
    const bool terms = call_.softcap > 0 || call_.bias || call_.visible;
    const float *special = mark_special_keys(call_, batch_, block_, block_end_, memory_.special);
    for (int64_t tile = 0; tile < tiles_; tile++) {
      const int64_t start = starts_[tile], stop = stops_[tile], offset = start - block_;
      if (start >= stop) continue;
      const bool all_plain = !terms && spans_[tile].covers(start, stop - start);
      for (int64_t i = tile * ROWS; i < min(tile * ROWS + ROWS, count_); i++) {
        const int64_t cell = i * FORWARD_KEYS + offset;
        if constexpr (STATISTICS == Statistics::NONE && !NARROW)
          if (all_plain && i % PLAIN_ROWS == 0 && i + PLAIN_ROWS <= count_ && call_.dropout == 0 &&
              update_plain_rows<PLAIN_ROWS>(memory_.rows + i, memory_.scores + cell, FORWARD_KEYS, stop - start,
                                            memory_.factors + i)) {
            i += PLAIN_ROWS - 1;
            continue;
          }
        const Query &query = memory_.queries[i];
        const bool plain = all_plain || (!terms && query.start <= start && query.stop >= stop);
        memory_.factors[i] = update_row<STATISTICS>(call_, query, memory_.rows[i], memory_.scores + cell, start, stop,
                                                    plain, special ? special + offset : nullptr,
                                                    memory_.weights + cell);
      }
    }
  }

  // Add the values of the block of keys, times their weights, to the sums of each query.
  NOINLINE void add_values(const Packed *values_of_block) const {
    const int64_t width = plan_.width;
    for (int64_t column = 0; column < width; column += COLUMNS)
      for (int64_t tile = 0; tile < tiles_; tile++) {
        const int64_t start = starts_[tile], keys = stops_[tile] - start;
        if (keys <= 0) continue;
        float *sums = memory_.sums + tile * ROWS * width + column;
        const float *factors = memory_.factors + tile * ROWS;
        const auto add = [=](int64_t row, Floats left, Floats right) __attribute__((always_inline)) {
          float *to = sums + row * width;
          const Floats factor = broadcast(factors[row]);
          store(to, load(to) * factor + left);
          store(to + LANES, load(to + LANES) * factor + right);
        };
        const Packed *weights = memory_.weights + tile * ROWS * FORWARD_KEYS + (start - block_);
        const Packed *values = values_of_block + column * plan_.held + (start - block_) * COLUMNS;
        if constexpr (NARROW) gemm_tile(weights, FORWARD_KEYS, values, keys, add);
        else gemm_tile<false>(weights, FORWARD_KEYS, values, keys, add);
      }
  }

  void write() const {
    const int64_t index = (batch_ * call_.heads + head_) * call_.queries + first_;
    write_softmax_of_rows(call_, index, count_, memory_.rows, memory_.factors);
    write_outputs(call_, batch_, head_, first_, count_, memory_.sums, plan_.width, memory_.factors);
  }

  float scale() const { return static_cast<float>(call_.scale) * LOG2_E; }

  const Call &call_;
  const ForwardPlan &plan_;
  const Memory &memory_;
  const int64_t batch_, head_, first_, count_, tiles_;
  Span span_, spans_[FORWARD_TILES];                      // of all queries, and of those of each tile
  int64_t block_, block_end_;                             // the block of keys
  int64_t starts_[FORWARD_TILES], stops_[FORWARD_TILES];  // its keys that a tile computes, in whole panels
};

}  // namespace
