// What the passes must answer, worked out cell by cell in double.
#pragma once
#include <math.h>

#include "drawn.h"

// A contiguous array of doubles with four axes.
struct Dense {
  int64_t sizes[4] = {0, 0, 0, 0};
  std::vector<double> values;

  Dense() = default;
  Dense(int64_t a, int64_t b, int64_t c, int64_t d, double fill = 0)
      : sizes{a, b, c, d}, values(static_cast<size_t>(a * b * c * d), fill) {}

  static Dense of(const Tensor &tensor) {
    Dense made(tensor.sizes[0], tensor.sizes[1], tensor.sizes[2], tensor.sizes[3]);
    tensor.each([&](int64_t a, int64_t b, int64_t c, int64_t d) { made(a, b, c, d) = tensor.at(a, b, c, d); });
    return made;
  }
  double &operator()(int64_t a, int64_t b, int64_t c, int64_t d = 0) {
    return values[static_cast<size_t>(((a * sizes[1] + b) * sizes[2] + c) * sizes[3] + d)];
  }
  double operator()(int64_t a, int64_t b, int64_t c, int64_t d = 0) const { return const_cast<Dense &>(*this)(a, b, c, d); }
};

// The answers, and on the way to them p (batch, heads, queries, keys), 0 where hidden, and which rows are of no use.
struct Naive {
  Dense p, capped;  // weights; what the softcap's slope is at each score
  Dense seen;       // 1 where a query sees a key
  Dense output, logsumexp, entropy, squares, largest_weight, mean_distance, distance_spread, at_offsets, on_given_key, on_special_keys;
  Dense delta, dq, dk, dv, dbias, received, pooled;
};

inline bool finite_row(const Dense &tensor, int64_t a, int64_t b, int64_t c) {
  for (int64_t d = 0; d < tensor.sizes[3]; d++)
    if (!isfinite(tensor(a, b, c, d))) return false;
  return true;
}

// p, seen, capped and logsumexp. Every cell of a row that is NaN is NaN where it is seen.
inline void weigh(const Drawn &drawn_call, Naive &naive) {
  const Call &call = drawn_call.call;
  const int64_t B = call.batch, H = call.heads, N = call.queries, M = call.keys, group = H / call.kv_heads;
  const Dense q = Dense::of(drawn_call.q), k = Dense::of(drawn_call.k), v = Dense::of(drawn_call.v);
  naive.p = naive.seen = Dense(B, H, N, M);
  naive.capped = Dense(B, H, N, M, 1);
  naive.logsumexp = Dense(B, H, N, 1);
  for (int64_t b = 0; b < B; b++)
    for (int64_t h = 0; h < H; h++) {
      std::vector<char> bad_key(static_cast<size_t>(M));
      for (int64_t j = 0; j < M; j++) bad_key[static_cast<size_t>(j)] = !finite_row(k, b, h / group, j) || !finite_row(v, b, h / group, j);
      for (int64_t i = 0; i < N; i++) {
        const int64_t b_bounds = call.bounds_batch ? b : 0, h_bounds = call.bounds_head ? h : 0;
        const auto start = static_cast<int64_t>(drawn_call.start.at(b_bounds, h_bounds, 0, i));
        const auto stop = static_cast<int64_t>(drawn_call.stop.at(b_bounds, h_bounds, 0, i));
        std::vector<double> scores(static_cast<size_t>(M), -INFINITE);
        double largest = -INFINITE;
        bool bad = !finite_row(q, b, h, i);
        for (int64_t j = start; j < stop; j++) {
          const double bias = drawn_call.bias ? drawn_call.bias.at(b, h, i, j) : 0;
          if ((drawn_call.seen && drawn_call.seen.at(b, h, i, j) == 0) || bias == -INFINITE) continue;
          double score = 0;
          for (int64_t x = 0; x < call.head_dim; x++) score += q(b, h, i, x) * k(b, h / group, j, x);
          score *= call.scale;
          if (call.softcap > 0) {
            const double share = tanh(score / call.softcap);
            score = call.softcap * share;
            naive.capped(b, h, i, j) = 1 - share * share;
          }
          score += bias;
          naive.seen(b, h, i, j) = 1;
          bad |= bad_key[static_cast<size_t>(j)] || !isfinite(score);
          scores[static_cast<size_t>(j)] = score;
          if (score > largest) largest = score;
        }
        bool any = false;
        for (int64_t j = start; j < stop; j++) any |= naive.seen(b, h, i, j) != 0;
        if (!any) {
          naive.logsumexp(b, h, i) = -INFINITE;
          continue;
        }
        double total = 0;
        const double sink = drawn_call.sinks ? drawn_call.sinks.at(h, 0, 0) : -INFINITE;
        if (sink > largest) largest = sink;
        for (double score : scores) total += exp(score - largest);
        total += exp(sink - largest);
        const double logsumexp = bad ? NOT_A_NUMBER : largest + log(total);
        naive.logsumexp(b, h, i) = logsumexp;
        for (int64_t j = start; j < stop; j++)
          if (naive.seen(b, h, i, j)) naive.p(b, h, i, j) = exp(scores[static_cast<size_t>(j)] - logsumexp);
      }
    }
}

inline bool row_is_nan(const Naive &naive, int64_t b, int64_t h, int64_t i) { return isnan(naive.logsumexp(b, h, i)); }

// Output and statistics. `kept` is what dropout multiplies the weights by.
inline void attend(const Drawn &drawn_call, const Dense &kept, Naive &naive) {
  const Call &call = drawn_call.call;
  const int64_t B = call.batch, H = call.heads, N = call.queries, M = call.keys, group = H / call.kv_heads;
  const Dense v = Dense::of(drawn_call.v);
  naive.output = Dense(B, H, N, call.value_dim);
  naive.entropy = naive.squares = naive.largest_weight = naive.mean_distance = naive.distance_spread = Dense(B, H, N, 1);
  naive.on_given_key = naive.on_special_keys = Dense(B, H, N, 1);
  naive.at_offsets = Dense(call.num_offsets * B, H, N, 1);
  for (int64_t b = 0; b < B; b++)
    for (int64_t h = 0; h < H; h++)
      for (int64_t i = 0; i < N; i++) {
        if (row_is_nan(naive, b, h, i)) {
          for (int64_t x = 0; x < call.value_dim; x++) naive.output(b, h, i, x) = NOT_A_NUMBER;
          for (Dense *each : {&naive.entropy, &naive.squares, &naive.largest_weight, &naive.mean_distance, &naive.distance_spread,
                              &naive.on_given_key, &naive.on_special_keys})
            (*each)(b, h, i) = NOT_A_NUMBER;
          for (int64_t o = 0; o < call.num_offsets; o++) naive.at_offsets(o * B + b, h, i) = NOT_A_NUMBER;
          continue;
        }
        int64_t position = i + call.first_row;
        if (drawn_call.query_start) position += static_cast<int64_t>(drawn_call.query_start.at(b, 0, 0));
        double total = 0;
        for (int64_t j = 0; j < M; j++) {
          const double p = naive.p(b, h, i, j), away = fabs(static_cast<double>(position - j));
          if (p == 0) continue;
          for (int64_t x = 0; x < call.value_dim; x++) naive.output(b, h, i, x) += p * kept(b, h, i, j) * v(b, h / group, j, x);
          total += p;
          naive.entropy(b, h, i) -= p * log(p);
          naive.squares(b, h, i) += p * p;
          naive.largest_weight(b, h, i) = fmax(naive.largest_weight(b, h, i), p);
          naive.mean_distance(b, h, i) += p * away;
          if (drawn_call.special_keys && drawn_call.special_keys.at(b, 0, 0, j) != 0) naive.on_special_keys(b, h, i) += p;
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
        if (drawn_call.given_key) naive.on_given_key(b, h, i) = on(static_cast<int64_t>(drawn_call.given_key.at(b, 0, 0)));
        for (int64_t o = 0; o < call.num_offsets; o++)
          naive.at_offsets(o * B + b, h, i) = on(position + static_cast<int64_t>(drawn_call.offsets.at(o, 0, 0)));
      }
}

// The gradients. Rows that are NaN have gradients of 0 to give, and are left out.
inline void backward(const Drawn &drawn_call, const Dense &kept, Naive &naive) {
  const Call &call = drawn_call.call;
  const int64_t B = call.batch, H = call.heads, N = call.queries, M = call.keys, G = call.kv_heads, group = H / G;
  const Dense q = Dense::of(drawn_call.q), k = Dense::of(drawn_call.k), v = Dense::of(drawn_call.v);
  naive.delta = Dense(B, H, N, 1);
  naive.dq = Dense(B, H, N, call.head_dim);
  naive.dk = Dense(B, G, M, call.head_dim);
  naive.dv = Dense(B, G, M, call.value_dim);
  const auto axis = [&](int64_t size, int64_t stride) { return drawn_call.bias && stride ? size : int64_t{1}; };
  const int64_t b_bias = axis(B, call.bias_batch), h_bias = axis(H, call.bias_head), i_bias = axis(N, call.bias_row), j_bias = axis(M, call.bias_key);
  naive.dbias = Dense(b_bias, h_bias, i_bias, j_bias);
  for (int64_t b = 0; b < B; b++)
    for (int64_t h = 0; h < H; h++)
      for (int64_t i = 0; i < N; i++) {
        if (!isfinite(naive.logsumexp(b, h, i))) continue;
        double delta = drawn_call.of_logsumexp ? -drawn_call.of_logsumexp.at(b, h, i) : 0;
        for (int64_t x = 0; x < call.value_dim; x++) delta += drawn_call.of_output.at(b, h, i, x) * naive.output(b, h, i, x);
        naive.delta(b, h, i) = delta;
        for (int64_t j = 0; j < M; j++) {
          const double p = naive.p(b, h, i, j), z = kept(b, h, i, j);
          if (p == 0) continue;
          double of_p = 0;
          for (int64_t x = 0; x < call.value_dim; x++) {
            const double of_output = drawn_call.of_output.at(b, h, i, x);
            of_p += of_output * v(b, h / group, j, x);
            naive.dv(b, h / group, j, x) += p * z * of_output;
          }
          const double of_score = p * (of_p * z - delta), of_product = of_score * naive.capped(b, h, i, j) * call.scale;
          naive.dbias(b % b_bias, h % h_bias, i % i_bias, j % j_bias) += of_score;
          for (int64_t x = 0; x < call.head_dim; x++) {
            naive.dq(b, h, i, x) += of_product * k(b, h / group, j, x);
            naive.dk(b, h / group, j, x) += of_product * q(b, h, i, x);
          }
        }
      }
}

inline void receive(const Drawn &drawn_call, Naive &naive) {
  const Call &call = drawn_call.call;
  const int64_t B = call.batch, H = call.heads, N = call.queries, M = call.keys;
  naive.received = Dense(B, H, M, 1);
  naive.pooled = Dense(B, H, (N + call.pool_rows - 1) / call.pool_rows, (M + call.pool_keys - 1) / call.pool_keys);
  for (int64_t b = 0; b < B; b++)
    for (int64_t h = 0; h < H; h++)
      for (int64_t i = 0; i < N; i++)
        for (int64_t j = 0; j < M && !row_is_nan(naive, b, h, i); j++) {
          naive.received(b, h, j) += naive.p(b, h, i, j);
          naive.pooled(b, h, i / call.pool_rows, j / call.pool_keys) += naive.p(b, h, i, j);
        }
}
