// The expected results of all passes, computed cell by cell in double precision.
#pragma once
#include "random_call.h"

// A contiguous array of doubles with four axes.
struct Dense {
  int64_t sizes[4] = {0, 0, 0, 0};
  std::vector<double> values;

  Dense() = default;
  Dense(int64_t a, int64_t b, int64_t c, int64_t d, double fill = 0)
      : sizes{a, b, c, d}, values(static_cast<size_t>(a * b * c * d), fill) {}

  static Dense of(const Tensor &tensor) {
    Dense result(tensor.sizes[0], tensor.sizes[1], tensor.sizes[2], tensor.sizes[3]);
    tensor.each([&](int64_t a, int64_t b, int64_t c, int64_t d) { result(a, b, c, d) = tensor.at(a, b, c, d); });
    return result;
  }
  double &operator()(int64_t a, int64_t b, int64_t c, int64_t d = 0) {
    return values[static_cast<size_t>(((a * sizes[1] + b) * sizes[2] + c) * sizes[3] + d)];
  }
  double operator()(int64_t a, int64_t b, int64_t c, int64_t d = 0) const { return const_cast<Dense &>(*this)(a, b, c, d); }
};

// The expected results, and the weights and visible cells from which they are computed.
struct Naive {
  Dense p;        // (batch, heads, queries, keys): weights, 0 where hidden
  Dense slope;    // of the softcap at each score
  Dense visible;  // 1 where a query sees a key
  Dense output, logsumexp, entropy, largest_weight, mean_distance, distance_spread;
  Dense offset_weights, target_key_weight, special_keys_weight, near_weight;
  Dense delta, dq, dk, dv, dbias, key_sums, pooled_map;
};

inline bool finite_row(const Dense &tensor, int64_t a, int64_t b, int64_t c) {
  for (int64_t d = 0; d < tensor.sizes[3]; d++)
    if (!isfinite(tensor(a, b, c, d))) return false;
  return true;
}

// Compute p, visible, slope and logsumexp. In a row that is NaN, p is NaN at each visible cell.
inline void compute_weights(const RandomCall &input, Naive &naive) {
  const Call &call = input.call;
  const int64_t B = call.batch, H = call.heads, N = call.queries, M = call.keys, group = H / call.kv_heads;
  const Dense q = Dense::of(input.q), k = Dense::of(input.k), v = Dense::of(input.v);
  naive.p = naive.visible = Dense(B, H, N, M);
  naive.slope = Dense(B, H, N, M, 1);
  naive.logsumexp = Dense(B, H, N, 1);
  for (int64_t b = 0; b < B; b++)
    for (int64_t h = 0; h < H; h++) {
      std::vector<char> bad_key(static_cast<size_t>(M));
      for (int64_t j = 0; j < M; j++)
        bad_key[static_cast<size_t>(j)] = !finite_row(k, b, h / group, j) || !finite_row(v, b, h / group, j);
      for (int64_t i = 0; i < N; i++) {
        const int64_t b_bounds = call.bounds_batch_stride ? b : 0;
        const auto start = static_cast<int64_t>(input.start.at(b_bounds, 0, 0, i));
        const auto stop = static_cast<int64_t>(input.stop.at(b_bounds, 0, 0, i));
        std::vector<double> scores(static_cast<size_t>(M), -INF);
        double largest = -INF;
        bool bad = !finite_row(q, b, h, i);
        for (int64_t j = start; j < stop; j++) {
          const double bias = input.bias ? input.bias.at(b, h, i, j) : 0;
          if ((input.visible && input.visible.at(b, h, i, j) == 0) || bias == -INF) continue;
          double score = 0;
          for (int64_t x = 0; x < call.head_dim; x++) score += q(b, h, i, x) * k(b, h / group, j, x);
          score *= call.scale;
          if (call.softcap > 0) {
            const double share = tanh(score / call.softcap);
            score = call.softcap * share;
            naive.slope(b, h, i, j) = 1 - share * share;
          }
          score += bias;
          naive.visible(b, h, i, j) = 1;
          bad |= bad_key[static_cast<size_t>(j)] || !isfinite(score);
          scores[static_cast<size_t>(j)] = score;
          if (score > largest) largest = score;
        }
        bool any = false;
        for (int64_t j = start; j < stop; j++) any |= naive.visible(b, h, i, j) != 0;
        if (!any) {
          naive.logsumexp(b, h, i) = -INF;
          continue;
        }
        double total = 0;
        const double sink = input.sinks ? input.sinks.at(h, 0, 0) : -INF;
        if (sink > largest) largest = sink;
        for (double score : scores) total += exp(score - largest);
        total += exp(sink - largest);
        const double logsumexp = bad ? NOT_A_NUMBER : largest + log(total);
        naive.logsumexp(b, h, i) = logsumexp;
        for (int64_t j = start; j < stop; j++)
          if (naive.visible(b, h, i, j)) naive.p(b, h, i, j) = exp(scores[static_cast<size_t>(j)] - logsumexp);
      }
    }
}

inline bool row_is_nan(const Naive &naive, int64_t b, int64_t h, int64_t i) { return isnan(naive.logsumexp(b, h, i)); }

// Compute output and statistics. `kept` holds the dropout factors of the weights.
inline void attend(const RandomCall &input, const Dense &kept, Naive &naive) {
  const Call &call = input.call;
  const int64_t B = call.batch, H = call.heads, N = call.queries, M = call.keys, group = H / call.kv_heads;
  const Dense v = Dense::of(input.v);
  naive.output = Dense(B, H, N, call.value_dim);
  naive.entropy = naive.largest_weight = naive.mean_distance = naive.distance_spread = Dense(B, H, N, 1);
  naive.target_key_weight = naive.special_keys_weight = naive.near_weight = Dense(B, H, N, 1);
  naive.offset_weights = Dense(call.num_offsets * B, H, N, 1);
  for (int64_t b = 0; b < B; b++)
    for (int64_t h = 0; h < H; h++)
      for (int64_t i = 0; i < N; i++) {
        if (row_is_nan(naive, b, h, i)) {
          for (int64_t x = 0; x < call.value_dim; x++) naive.output(b, h, i, x) = NOT_A_NUMBER;
          for (Dense *each : {&naive.entropy, &naive.largest_weight, &naive.mean_distance, &naive.distance_spread,
                              &naive.target_key_weight, &naive.special_keys_weight, &naive.near_weight})
            (*each)(b, h, i) = NOT_A_NUMBER;
          for (int64_t o = 0; o < call.num_offsets; o++) naive.offset_weights(o * B + b, h, i) = NOT_A_NUMBER;
          continue;
        }
        int64_t position = i + call.first_row;
        if (input.query_start) position += static_cast<int64_t>(input.query_start.at(b, 0, 0));
        double total = 0;
        for (int64_t j = 0; j < M; j++) {
          const double p = naive.p(b, h, i, j), away = fabs(static_cast<double>(position - j));
          if (p == 0) continue;
          for (int64_t x = 0; x < call.value_dim; x++)
            naive.output(b, h, i, x) += p * kept(b, h, i, j) * v(b, h / group, j, x);
          total += p;
          naive.entropy(b, h, i) -= p * log(p);
          naive.largest_weight(b, h, i) = fmax(naive.largest_weight(b, h, i), p);
          naive.mean_distance(b, h, i) += p * away;
          if (input.special_keys && input.special_keys.at(b, 0, 0, j) != 0) naive.special_keys_weight(b, h, i) += p;
          if (away <= static_cast<double>(call.reach)) naive.near_weight(b, h, i) += p;
        }
        if (total == 0) continue;
        const double mean = naive.mean_distance(b, h, i) /= total;
        double spread = 0;
        for (int64_t j = 0; j < M; j++) {
          const double from_mean = fabs(static_cast<double>(position - j)) - mean;
          spread += naive.p(b, h, i, j) * from_mean * from_mean;
        }
        naive.distance_spread(b, h, i) = sqrt(spread / total);
        const auto on = [&](int64_t j) { return j >= 0 && j < M ? naive.p(b, h, i, j) : 0; };
        if (input.target_key) naive.target_key_weight(b, h, i) = on(static_cast<int64_t>(input.target_key.at(b, 0, 0)));
        for (int64_t o = 0; o < call.num_offsets; o++)
          naive.offset_weights(o * B + b, h, i) = on(position + static_cast<int64_t>(input.offsets.at(o, 0, 0)));
      }
}

// Compute the gradients. NaN rows are skipped, because the gradients of their outputs are 0.
inline void backward(const RandomCall &input, const Dense &kept, Naive &naive) {
  const Call &call = input.call;
  const int64_t B = call.batch, H = call.heads, N = call.queries, M = call.keys, G = call.kv_heads, group = H / G;
  const Dense q = Dense::of(input.q), k = Dense::of(input.k), v = Dense::of(input.v);
  naive.delta = Dense(B, H, N, 1);
  naive.dq = Dense(B, H, N, call.head_dim);
  naive.dk = Dense(B, G, M, call.head_dim);
  naive.dv = Dense(B, G, M, call.value_dim);
  const auto axis = [&](int64_t size, int64_t stride) { return input.bias && stride ? size : int64_t{1}; };
  const int64_t b_bias = axis(B, call.bias_strides.batch), h_bias = axis(H, call.bias_strides.head);
  const int64_t i_bias = axis(N, call.bias_strides.row), j_bias = axis(M, call.bias_strides.key);
  naive.dbias = Dense(b_bias, h_bias, i_bias, j_bias);
  for (int64_t b = 0; b < B; b++)
    for (int64_t h = 0; h < H; h++)
      for (int64_t i = 0; i < N; i++) {
        if (!isfinite(naive.logsumexp(b, h, i))) continue;
        double delta = input.grad_logsumexp ? -input.grad_logsumexp.at(b, h, i) : 0;
        for (int64_t x = 0; x < call.value_dim; x++)
          delta += input.grad_output.at(b, h, i, x) * naive.output(b, h, i, x);
        naive.delta(b, h, i) = delta;
        for (int64_t j = 0; j < M; j++) {
          const double p = naive.p(b, h, i, j), z = kept(b, h, i, j);
          if (p == 0) continue;
          double grad_p = 0;
          for (int64_t x = 0; x < call.value_dim; x++) {
            const double grad_output = input.grad_output.at(b, h, i, x);
            grad_p += grad_output * v(b, h / group, j, x);
            naive.dv(b, h / group, j, x) += p * z * grad_output;
          }
          const double grad_score = p * (grad_p * z - delta);
          const double grad_product = grad_score * naive.slope(b, h, i, j) * call.scale;
          naive.dbias(b % b_bias, h % h_bias, i % i_bias, j % j_bias) += grad_score;
          for (int64_t x = 0; x < call.head_dim; x++) {
            naive.dq(b, h, i, x) += grad_product * k(b, h / group, j, x);
            naive.dk(b, h / group, j, x) += grad_product * q(b, h, i, x);
          }
        }
      }
}

inline void sum_keys(const RandomCall &input, Naive &naive) {
  const Call &call = input.call;
  const int64_t B = call.batch, H = call.heads, N = call.queries, M = call.keys;
  naive.key_sums = Dense(B, H, M, 1);
  naive.pooled_map = Dense(B, H, (N + call.pool_rows - 1) / call.pool_rows, (M + call.pool_keys - 1) / call.pool_keys);
  for (int64_t b = 0; b < B; b++)
    for (int64_t h = 0; h < H; h++)
      for (int64_t i = 0; i < N; i++)
        for (int64_t j = 0; j < M && !row_is_nan(naive, b, h, i); j++) {
          naive.key_sums(b, h, j) += naive.p(b, h, i, j);
          naive.pooled_map(b, h, i / call.pool_rows, j / call.pool_keys) += naive.p(b, h, i, j);
        }
}
