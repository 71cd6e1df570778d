// A block of queries with a block of keys: the five matrix products of the backward pass, tile by tile.
#pragma once
#include "backward_memory.h"
#include "call.h"
#include "gemm_tile.h"
#include "score_terms.h"
#include "simd.h"

namespace {

// Add A B, or A^T B, to ROWS rows of `width` floats. A is a part of the scores, B is (depth, width).
template <bool TRANSPOSED>
INLINE void add_gemm(const float *a, const float *b, int64_t b_stride, int64_t depth, float *to, int64_t width) {
  for (int64_t column = 0; column < width; column += COLUMNS) {
    float *corner = to + column;
    const auto add = [=](int64_t row, Floats left, Floats right) __attribute__((always_inline)) {
      float *at = corner + row * width;
      store(at, load(at) + left);
      store(at + LANES, load(at + LANES) + right);
    };
    gemm_tile<TRANSPOSED>(a, SCORES_STRIDE, b + column, depth, add, b_stride);
  }
}

class BlockPair {
 public:
  BlockPair(const Call &call, const BackwardPlan &plan, const PackedHead &head, int64_t block, const KeyBlock &keys)
      : call_(call), plan_(plan), head_(head), keys_(keys), first_row_(block * BACKWARD_QUERIES) {
    rows_ = min(BACKWARD_QUERIES, plan.rows - first_row_);
    plain_ = !call.bias && !call.dbias && !call.visible && !(call.softcap > 0) && !(call.dropout > 0);
    find_tiles();
  }

  // Add to dK and dV of the block of keys, and to the partial dQ of the chunk.
  NOINLINE void run(int64_t chunk) {
    if (!any_visible_) return;
    const int64_t q_stride = plan_.q_stride, v_stride = plan_.v_stride, q_width = plan_.q_width;
    for (int64_t column = 0; column < keys_.padded; column += COLUMNS)
      for (int64_t tile = 0; tile < rows_ / ROWS; tile++)
        if (start_[tile] <= column && column < stop_[tile]) compute_weights(tile, column);
    add_to_keys(head_.grad_output + first_row_ * v_stride, v_stride, keys_.dv, plan_.v_width);
    for (int64_t column = 0; column < keys_.padded; column += COLUMNS)
      for (int64_t tile = 0; tile < rows_ / ROWS; tile++)
        if (start_[tile] <= column && column < stop_[tile]) compute_grad_scores(tile, column);
    add_to_keys(head_.q + first_row_ * q_stride, q_stride, keys_.dk, q_width);

    float *dq = head_.dq + (chunk * plan_.rows + first_row_) * q_width;
    uint8_t &started = head_.started[chunk * plan_.blocks + first_row_ / BACKWARD_QUERIES];
    if (!started) memset(dq, 0, static_cast<size_t>(rows_ * q_width) * sizeof(float));
    started = 1;
    for (int64_t tile = 0; tile < rows_ / ROWS; tile++)
      if (start_[tile] < stop_[tile])
        add_gemm<false>(keys_.scores + tile * ROWS * SCORES_STRIDE + start_[tile], keys_.k + start_[tile] * q_stride,
                        q_stride, stop_[tile] - start_[tile], dq + tile * ROWS * q_width, q_width);
  }

 private:
  // Find the keys that each tile of rows sees, and the rows that see each tile of keys. Scores that no tile computes
  // become 0.
  void find_tiles() {
    any_visible_ = false;
    key_tiles_ = ceil_div(keys_.padded, ROWS);
    for (int64_t key = 0; key < key_tiles_; key++) {
      first_[key] = BACKWARD_QUERIES;
      end_[key] = 0;
    }
    for (int64_t tile = 0; tile < rows_ / ROWS; tile++) {
      const Span &span = head_.tiles[first_row_ / ROWS + tile];
      int64_t start = max(span.any_start - keys_.first, 0) / COLUMNS * COLUMNS;
      int64_t stop = min(round_up(max(span.any_stop - keys_.first, 0), COLUMNS), keys_.padded);
      if (start >= stop) start = stop = 0;
      start_[tile] = start;
      stop_[tile] = stop;
      for (int64_t row = tile * ROWS; row < tile * ROWS + ROWS && stop - start < keys_.padded; row++) {
        float *scores = keys_.scores + row * SCORES_STRIDE;
        memset(scores, 0, static_cast<size_t>(start) * sizeof(float));
        memset(scores + stop, 0, static_cast<size_t>(keys_.padded - stop) * sizeof(float));
      }
      for (int64_t key = start / ROWS; key * ROWS < stop; key++) {
        first_[key] = min(first_[key], tile * ROWS);
        end_[key] = tile * ROWS + ROWS;
        any_visible_ = true;
      }
    }
  }

  // dV += (Z P)^T dO, or dK += dS^T Q.
  void add_to_keys(const float *rows, int64_t stride, float *to, int64_t width) const {
    for (int64_t key = 0; key < key_tiles_; key++)
      if (first_[key] < end_[key])
        add_gemm<true>(keys_.scores + first_[key] * SCORES_STRIDE + key * ROWS, rows + first_[key] * stride, stride,
                       end_[key] - first_[key], to + key * ROWS * width, width);
  }

  // ------------------------------------------------------------ a tile of scores

  // Compute Z P of a tile of scores.
  void compute_weights(int64_t tile, int64_t column) const {
    const int64_t row = first_row_ + tile * ROWS, corner = tile * ROWS * SCORES_STRIDE + column;
    const float *q = head_.q + row * plan_.q_stride, *panel = keys_.k_panels + column * call_.head_dim;
    const float *logsumexp = head_.logsumexp + row;
    float *scores = keys_.scores + corner;
    const Floats factor = broadcast(static_cast<float>(call_.scale) * LOG2_E);
    if (plain_) {
      gemm_tile<false>(q, plan_.q_stride, panel, call_.head_dim,
                     [=](int64_t i, Floats left, Floats right) __attribute__((always_inline)) {
                       const Floats shift = broadcast(logsumexp[i]);
                       store(scores + i * SCORES_STRIDE, exp2(left * factor - shift));
                       store(scores + i * SCORES_STRIDE + LANES, exp2(right * factor - shift));
                     });
      return zero_hidden(tile, column);
    }
    gemm_tile<false>(q, plan_.q_stride, panel, call_.head_dim,
                   [=](int64_t i, Floats left, Floats right) __attribute__((always_inline)) {
                     store(scores + i * SCORES_STRIDE, left * factor);
                     store(scores + i * SCORES_STRIDE + LANES, right * factor);
                   });
    for (int64_t i = 0; i < ROWS; i++)
      for (int64_t half = 0; half < COLUMNS; half += LANES)
        compute_weight_lanes(row + i, keys_.first + column + half, corner + i * SCORES_STRIDE + half);
  }

  // Turn LANES products of one row, from key `key` on, into weights, with softcap, bias, mask and dropout.
  void compute_weight_lanes(int64_t row, int64_t key, int64_t index) const {
    const Query &query = head_.queries[row];
    float *scores = keys_.scores + index;
    if (query.start >= key + LANES || query.stop <= key) return store(scores, (Floats){});
    const Ints visible = visible_lanes(call_, query, key);
    Floats score = load(scores);
    if (call_.softcap > 0) {
      score = apply_softcap(call_, score);
      const Floats tanh = score * broadcast(1 / softcap_of(call_));
      store(keys_.softcap_slopes + index, select(visible, broadcast(1.f) - tanh * tanh, (Floats){}));
    }
    if (query.bias) score += scaled_bias(call_, query, key);
    Floats weight = select(visible, exp2(score - broadcast(head_.logsumexp[row])), (Floats){});
    if (call_.dropout > 0) {
      store(keys_.weights + index, weight);
      weight *= dropout_factors(call_, query, key);
    }
    store(scores, weight);
  }

  // Compute dS in index of Z P.
  void compute_grad_scores(int64_t tile, int64_t column) const {
    const int64_t row = first_row_ + tile * ROWS, corner = tile * ROWS * SCORES_STRIDE + column;
    const float *grad_output = head_.grad_output + row * plan_.v_stride;
    const float *panel = keys_.v_panels + column * call_.value_dim;
    const float *delta = head_.delta + row;
    float *scores = keys_.scores + corner;
    if (plain_) {
      gemm_tile<false>(grad_output, plan_.v_stride, panel, call_.value_dim,
                     [=](int64_t i, Floats left, Floats right) __attribute__((always_inline)) {
                       const Floats shift = broadcast(delta[i]);
                       float *weights = scores + i * SCORES_STRIDE;
                       store(weights, load(weights) * (left - shift));
                       store(weights + LANES, load(weights + LANES) * (right - shift));
                     });
      return zero_hidden(tile, column);
    }
    float grad_weights[ROWS * COLUMNS];
    gemm_tile<false>(grad_output, plan_.v_stride, panel, call_.value_dim,
                   [&](int64_t i, Floats left, Floats right) __attribute__((always_inline)) {
                     store(grad_weights + i * COLUMNS, left);
                     store(grad_weights + i * COLUMNS + LANES, right);
                   });
    for (int64_t i = 0; i < ROWS; i++)
      for (int64_t half = 0; half < COLUMNS; half += LANES)
        compute_grad_score_lanes(row + i, keys_.first + column + half, load(grad_weights + i * COLUMNS + half),
                            corner + i * SCORES_STRIDE + half);
  }

  void compute_grad_score_lanes(int64_t row, int64_t key, Floats grad_weight, int64_t index) const {
    const Query &query = head_.queries[row];
    float *scores = keys_.scores + index;
    if (query.start >= key + LANES || query.stop <= key) return store(scores, (Floats){});
    const Floats weight = load((call_.dropout > 0 ? keys_.weights : keys_.scores) + index);
    if (call_.dropout > 0) grad_weight *= dropout_factors(call_, query, key);
    // Selected, because a weight of 0 times a gradient that is not finite would be NaN.
    const Floats product = weight * (grad_weight - broadcast(head_.delta[row]));
    Floats grad_score = select(visible_lanes(call_, query, key), product, (Floats){});
    if (call_.dbias) add_to_bias(row, key, grad_score);
    if (call_.softcap > 0) grad_score *= load(keys_.softcap_slopes + index);
    store(scores, grad_score);
  }

  // Set the scores outside of the intervals of the rows to 0. Tiles at an edge are computed like all others, so that
  // the bits of a row do not depend on the intervals of other rows.
  void zero_hidden(int64_t tile, int64_t column) const {
    const int64_t row = first_row_ + tile * ROWS, key = keys_.first + column;
    if (head_.tiles[row / ROWS].covers(key, COLUMNS)) return;
    for (int64_t i = 0; i < ROWS; i++)
      for (int64_t half = 0; half < COLUMNS; half += LANES) {
        float *scores = keys_.scores + (tile * ROWS + i) * SCORES_STRIDE + column + half;
        store(scores, select(visible_lanes(call_, head_.queries[row + i], key + half), load(scores), (Floats){}));
      }
  }

  void add_to_bias(int64_t row, int64_t key, Floats grad_score) const {
    const int64_t stride = call_.dbias_strides.key, lanes = min(LANES, call_.keys - key);
    float *dbias = row_of(call_.dbias, call_.dbias_strides, head_.batch, head_.head, row) + key * stride;
    if (stride == 1 && lanes == LANES) return store(dbias, load(dbias) + grad_score);
    for (int64_t lane = 0; lane < lanes; lane++) dbias[lane * stride] += grad_score[lane];
  }

  const Call &call_;
  const BackwardPlan &plan_;
  const PackedHead &head_;
  const KeyBlock &keys_;
  const int64_t first_row_;
  int64_t rows_, key_tiles_;
  bool plain_;        // whether there is neither softcap nor bias, cell mask or dropout
  bool any_visible_;  // whether any query of the block sees a key of the block
  int64_t start_[BACKWARD_TILES], stop_[BACKWARD_TILES];                  // the keys that a tile of rows sees
  int64_t first_[BACKWARD_MAX_KEY_TILES], end_[BACKWARD_MAX_KEY_TILES];  // the rows that see a tile of keys
};

}  // namespace
