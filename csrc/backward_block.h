// A block of queries meets a block of keys: the five products of the backward pass, tile by tile.
#pragma once
#include "backward_memory.h"
#include "call.h"
#include "lanes.h"
#include "product.h"
#include "terms.h"

namespace {

// ---------------------------------------------------------------- products

// Add A B, or A^T B, to ROWS rows of `width` floats. A is of scores, B (depth, width).
template <bool TRANSPOSED>
INLINE void add_product(const float *a, const float *b, int64_t b_stride, int64_t depth, float *to, int64_t width) {
  for (int64_t column = 0; column < width; column += COLUMNS) {
    float *corner = to + column;
    const auto add = [=](int64_t row, Floats left, Floats right) __attribute__((always_inline)) {
      float *at = corner + row * width;
      store(at, load(at) + left);
      store(at + LANES, load(at + LANES) + right);
    };
    product<TRANSPOSED>(a, SCORES_STRIDE, b + column, depth, add, b_stride);
  }
}

// ---------------------------------------------------------------- the block

class Meeting {
 public:
  Meeting(const Call &call, const BackwardSizes &sizes, const PackedHead &head, int64_t block, const KeyBlock &keys)
      : call_(call), sizes_(sizes), head_(head), keys_(keys), first_row_(block * BLOCK_ROWS) {
    rows_ = least(BLOCK_ROWS, sizes.rows - first_row_);
    plain_ = !call.bias && !call.dbias && !call.seen && !(call.softcap > 0) && !(call.dropout > 0);
    find_tiles();
  }

  // Add to the block's dK and dV, and to this chunk's part of dQ.
  void run(int64_t chunk) {
    if (!found_) return;
    const int64_t q_stride = sizes_.q_stride, v_stride = sizes_.v_stride, q_width = sizes_.q_width;
    for (int64_t column = 0; column < keys_.padded; column += COLUMNS)
      for (int64_t tile = 0; tile < rows_ / ROWS; tile++)
        if (start_[tile] <= column && column < stop_[tile]) weigh(tile, column);
    add_to_keys(head_.of_output + first_row_ * v_stride, v_stride, keys_.dv, sizes_.v_width);
    for (int64_t column = 0; column < keys_.padded; column += COLUMNS)
      for (int64_t tile = 0; tile < rows_ / ROWS; tile++)
        if (start_[tile] <= column && column < stop_[tile]) differentiate(tile, column);
    add_to_keys(head_.q + first_row_ * q_stride, q_stride, keys_.dk, q_width);

    float *dq = head_.dq + (chunk * sizes_.rows + first_row_) * q_width;
    uint8_t &begun = head_.begun[chunk * sizes_.blocks + first_row_ / BLOCK_ROWS];
    if (!begun) memset(dq, 0, static_cast<size_t>(rows_ * q_width) * sizeof(float));
    begun = 1;
    for (int64_t tile = 0; tile < rows_ / ROWS; tile++)
      if (start_[tile] < stop_[tile])
        add_product<false>(keys_.scores + tile * ROWS * SCORES_STRIDE + start_[tile], keys_.k + start_[tile] * q_stride,
                           q_stride, stop_[tile] - start_[tile], dq + tile * ROWS * q_width, q_width);
  }

 private:
  // Which columns of keys each tile of rows sees, and which rows see each tile of keys. Scores in between that no tile
  // computes become 0.
  void find_tiles() {
    found_ = false;
    key_tiles_ = whole(keys_.padded, ROWS);
    for (int64_t key = 0; key < key_tiles_; key++) {
      first_[key] = BLOCK_ROWS;
      behind_[key] = 0;
    }
    for (int64_t tile = 0; tile < rows_ / ROWS; tile++) {
      const Span &span = head_.tiles[first_row_ / ROWS + tile];
      int64_t start = most(span.some_start - keys_.first, 0) / COLUMNS * COLUMNS;
      int64_t stop = least(up(most(span.some_stop - keys_.first, 0), COLUMNS), keys_.padded);
      if (start >= stop) start = stop = 0;
      start_[tile] = start;
      stop_[tile] = stop;
      for (int64_t row = tile * ROWS; row < tile * ROWS + ROWS && stop - start < keys_.padded; row++) {
        float *scores = keys_.scores + row * SCORES_STRIDE;
        memset(scores, 0, static_cast<size_t>(start) * sizeof(float));
        memset(scores + stop, 0, static_cast<size_t>(keys_.padded - stop) * sizeof(float));
      }
      for (int64_t key = start / ROWS; key * ROWS < stop; key++) {
        first_[key] = least(first_[key], tile * ROWS);
        behind_[key] = tile * ROWS + ROWS;
        found_ = true;
      }
    }
  }

  // dV += (Z P)^T dO, or dK += dS^T Q.
  void add_to_keys(const float *rows, int64_t stride, float *to, int64_t width) const {
    for (int64_t key = 0; key < key_tiles_; key++)
      if (first_[key] < behind_[key])
        add_product<true>(keys_.scores + first_[key] * SCORES_STRIDE + key * ROWS, rows + first_[key] * stride, stride,
                          behind_[key] - first_[key], to + key * ROWS * width, width);
  }

  // ------------------------------------------------------------ a tile of scores

  // Z P.
  void weigh(int64_t tile, int64_t column) const {
    const int64_t row = first_row_ + tile * ROWS, corner = tile * ROWS * SCORES_STRIDE + column;
    const float *q = head_.q + row * sizes_.q_stride, *panel = keys_.k_columns + column * call_.head_dim;
    const float *logsumexp = head_.logsumexp + row;
    float *scores = keys_.scores + corner;
    const Floats factor = broadcast(static_cast<float>(call_.scale) * LOG2_E);
    if (plain_) {
      product<false>(q, sizes_.q_stride, panel, call_.head_dim,
                     [=](int64_t i, Floats left, Floats right) __attribute__((always_inline)) {
                       const Floats shift = broadcast(logsumexp[i]);
                       store(scores + i * SCORES_STRIDE, exp2(left * factor - shift));
                       store(scores + i * SCORES_STRIDE + LANES, exp2(right * factor - shift));
                     });
      return hide(tile, column);
    }
    product<false>(q, sizes_.q_stride, panel, call_.head_dim,
                   [=](int64_t i, Floats left, Floats right) __attribute__((always_inline)) {
                     store(scores + i * SCORES_STRIDE, left * factor);
                     store(scores + i * SCORES_STRIDE + LANES, right * factor);
                   });
    for (int64_t i = 0; i < ROWS; i++)
      for (int64_t half = 0; half < COLUMNS; half += LANES)
        weigh_lanes(row + i, keys_.first + column + half, corner + i * SCORES_STRIDE + half);
  }

  // LANES scores of one row, from key `key`, where a score is more than a product.
  void weigh_lanes(int64_t row, int64_t key, int64_t place) const {
    const Query &query = head_.queries[row];
    float *scores = keys_.scores + place;
    if (query.start >= key + LANES || query.stop <= key) return store(scores, (Floats){});
    const Ints may = shown(call_, query, key);
    Floats score = load(scores);
    if (call_.softcap > 0) {
      score = softcapped(call_, score);
      const Floats part = score * broadcast(1 / (static_cast<float>(call_.softcap) * LOG2_E));  // the tanh
      store(keys_.slopes + place, select(may, broadcast(1.f) - part * part, (Floats){}));
    }
    if (query.bias) score += bias_of(call_, query, key);
    Floats weight = select(may, exp2(score - broadcast(head_.logsumexp[row])), (Floats){});
    if (call_.dropout > 0) {
      store(keys_.weights + place, weight);
      weight *= kept(call_, query, key);
    }
    store(scores, weight);
  }

  // dS, in place of Z P.
  void differentiate(int64_t tile, int64_t column) const {
    const int64_t row = first_row_ + tile * ROWS, corner = tile * ROWS * SCORES_STRIDE + column;
    const float *of_output = head_.of_output + row * sizes_.v_stride;
    const float *panel = keys_.v_columns + column * call_.value_dim;
    const float *delta = head_.delta + row;
    float *scores = keys_.scores + corner;
    if (plain_) {
      product<false>(of_output, sizes_.v_stride, panel, call_.value_dim,
                     [=](int64_t i, Floats left, Floats right) __attribute__((always_inline)) {
                       const Floats shift = broadcast(delta[i]);
                       float *weights = scores + i * SCORES_STRIDE;
                       store(weights, load(weights) * (left - shift));
                       store(weights + LANES, load(weights + LANES) * (right - shift));
                     });
      return hide(tile, column);
    }
    float of_weights[ROWS * COLUMNS];
    product<false>(of_output, sizes_.v_stride, panel, call_.value_dim,
                   [&](int64_t i, Floats left, Floats right) __attribute__((always_inline)) {
                     store(of_weights + i * COLUMNS, left);
                     store(of_weights + i * COLUMNS + LANES, right);
                   });
    for (int64_t i = 0; i < ROWS; i++)
      for (int64_t half = 0; half < COLUMNS; half += LANES)
        differentiate_lanes(row + i, keys_.first + column + half, load(of_weights + i * COLUMNS + half),
                            corner + i * SCORES_STRIDE + half);
  }

  void differentiate_lanes(int64_t row, int64_t key, Floats of_weight, int64_t place) const {
    const Query &query = head_.queries[row];
    float *scores = keys_.scores + place;
    if (query.start >= key + LANES || query.stop <= key) return store(scores, (Floats){});
    const Floats weight = load((call_.dropout > 0 ? keys_.weights : keys_.scores) + place);
    if (call_.dropout > 0) of_weight *= kept(call_, query, key);
    const Floats product = weight * (of_weight - broadcast(head_.delta[row]));
    Floats of_score = select(shown(call_, query, key), product, (Floats){});  // 0 times what is not finite is not 0
    if (call_.dbias) add_to_bias(row, key, of_score);
    if (call_.softcap > 0) of_score *= load(keys_.slopes + place);
    store(scores, of_score);
  }

  // Put 0 for what lies outside the rows' intervals. Tiles at an edge are computed like all others, so that where the
  // edges of other rows lie changes no bit of a row.
  void hide(int64_t tile, int64_t column) const {
    const int64_t row = first_row_ + tile * ROWS, key = keys_.first + column;
    if (head_.tiles[row / ROWS].covers(key, COLUMNS)) return;
    for (int64_t i = 0; i < ROWS; i++)
      for (int64_t half = 0; half < COLUMNS; half += LANES) {
        float *scores = keys_.scores + (tile * ROWS + i) * SCORES_STRIDE + column + half;
        store(scores, select(shown(call_, head_.queries[row + i], key + half), load(scores), (Floats){}));
      }
  }

  void add_to_bias(int64_t row, int64_t key, Floats of_score) const {
    const int64_t offset = head_.batch * call_.dbias_batch + head_.head * call_.dbias_head + row * call_.dbias_row;
    float *dbias = static_cast<float *>(const_cast<void *>(call_.dbias)) + offset + key * call_.dbias_key;
    if (call_.dbias_key == 1 && key + LANES <= call_.keys) return store(dbias, load(dbias) + of_score);
    const int64_t lanes = least(LANES, call_.keys - key);
    for (int64_t lane = 0; lane < lanes; lane++) dbias[lane * call_.dbias_key] += of_score[lane];
  }

  const Call &call_;
  const BackwardSizes &sizes_;
  const PackedHead &head_;
  const KeyBlock &keys_;
  const int64_t first_row_;
  int64_t rows_, key_tiles_;
  bool plain_, found_;  // whether the scores are products and nothing else; whether any tile sees a key
  int64_t start_[BLOCK_TILES], stop_[BLOCK_TILES];          // columns of keys that a tile of rows sees
  int64_t first_[MOST_KEY_TILES], behind_[MOST_KEY_TILES];  // rows that see a tile of keys
};

}  // namespace
