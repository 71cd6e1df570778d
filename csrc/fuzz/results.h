// The results of a call: their memory, and their comparison with the expected ones.
#pragma once
#include <stdio.h>

#include <string>

#include "naive.h"

// The results of one run.
struct Results {
  Tensor output, logsumexp;
  Tensor entropy, largest_weight, largest_key, mean_distance, distance_spread;
  Tensor offset_weights, target_key_weight, special_keys_weight, near_weight;
  Tensor delta, dq, dk, dv, dbias, key_sums, pooled_map;

  template <class Visit>
  void each(Visit visit) const {
    const std::pair<const char *, const Tensor *> named[] = {
        {"output", &output}, {"logsumexp", &logsumexp}, {"entropy", &entropy},
        {"largest_weight", &largest_weight}, {"largest_key", &largest_key}, {"mean_distance", &mean_distance},
        {"distance_spread", &distance_spread}, {"offset_weights", &offset_weights},
        {"target_key_weight", &target_key_weight}, {"special_keys_weight", &special_keys_weight},
        {"near_weight", &near_weight},
        {"delta", &delta}, {"dq", &dq}, {"dk", &dk}, {"dv", &dv},
        {"dbias", &dbias}, {"key_sums", &key_sums}, {"pooled_map", &pooled_map}};
    for (const auto &[name, tensor] : named)
      if (*tensor) visit(name, *tensor);
  }
};

// Rows of the dtype of the call, with the strides that the input draws.
inline Tensor rows(const RandomCall &input, Random &random, int64_t batch, int64_t heads, int64_t rows, int64_t dim) {
  const Type type = type_of(input.call);
  if (!input.strides_seed) return Tensor(type, batch, heads, rows, dim);
  return Tensor(random, type, batch, heads, rows, dim, false);
}

// Set the addresses and strides of the results of the forward pass. The other passes read its logsumexp and output.
inline void prepare_forward(const RandomCall &input, Call &call, Results &results, bool statistics = true) {
  Random random(input.strides_seed);
  results.output = rows(input, random, call.batch, call.heads, call.queries, call.value_dim);
  call.output_strides = row_strides(results.output);
  call.output = results.output.data();
  if (input.k_scales) {
    const auto scale_strides = [](const Tensor &scales) { return RowStrides{scales.strides[0], scales.strides[1], 1}; };
    call.k = input.k_int8.data(), call.v = input.v_int8.data();
    call.k_strides = row_strides(input.k_int8), call.v_strides = row_strides(input.v_int8);
    call.k_scales = input.k_scales.data<float>(), call.v_scales = input.v_scales.data<float>();
    call.k_scales_strides = scale_strides(input.k_scales), call.v_scales_strides = scale_strides(input.v_scales);
  }
  results.logsumexp = Tensor(Type::FLOAT, call.batch, call.heads, call.queries, 1);
  call.logsumexp = results.logsumexp.data<float>();
  if (!statistics) {
    call.num_offsets = 0;
    return;
  }
  const auto allocate = [&](bool wanted, Tensor &tensor, float *&address, int64_t copies = 1) {
    if (!wanted) return;
    tensor = Tensor(Type::FLOAT, copies * call.batch, call.heads, call.queries, 1);
    address = tensor.data<float>();
  };
  allocate(input.entropy, results.entropy, call.entropy);
  allocate(input.largest_weight, results.largest_weight, call.largest_weight);
  allocate(input.mean_distance, results.mean_distance, call.mean_distance);
  allocate(input.distance_spread, results.distance_spread, call.distance_spread);
  allocate(input.offset_weights, results.offset_weights, call.offset_weights, call.num_offsets);
  allocate(input.target_key_weight, results.target_key_weight, call.target_key_weight);
  allocate(input.special_keys_weight, results.special_keys_weight, call.special_keys_weight);
  allocate(input.near_weight, results.near_weight, call.near_weight);
  if (input.largest_key) {
    results.largest_key = Tensor(Type::INT64, call.batch, call.heads, call.queries, 1);
    call.largest_key = results.largest_key.data<int64_t>();
  }
}

inline void prepare_backward(const RandomCall &input, Call &call, Results &results) {
  Random random(input.strides_seed + 1);
  results.dq = rows(input, random, call.batch, call.heads, call.queries, call.head_dim);
  results.dk = rows(input, random, call.batch, call.kv_heads, call.keys, call.head_dim);
  results.dv = rows(input, random, call.batch, call.kv_heads, call.keys, call.value_dim);
  results.delta = Tensor(Type::FLOAT, call.batch, call.heads, call.queries, 1);
  call.output_strides = row_strides(results.output);
  call.dq_strides = row_strides(results.dq);
  call.dk_strides = row_strides(results.dk);
  call.dv_strides = row_strides(results.dv);
  call.output = results.output.data(), call.logsumexp = results.logsumexp.data<float>();
  call.delta = results.delta.data<float>();
  call.dq = results.dq.data(), call.dk = results.dk.data(), call.dv = results.dv.data();
  if (input.dbias) {  // summed over the axes along which the bias repeats; added to its contents, which are 0
    const auto size = [](int64_t size, int64_t stride) { return stride ? size : int64_t{1}; };
    const CellStrides &bias = call.bias_strides;
    Tensor &dbias = results.dbias;
    dbias = Tensor(Type::FLOAT, size(call.batch, bias.batch), size(call.heads, bias.head), size(call.queries, bias.row),
                   size(call.keys, bias.key));
    dbias.each([&](int64_t a, int64_t b, int64_t c, int64_t d) { dbias.set(0, a, b, c, d); });
    const CellStrides strides = cell_strides(dbias);
    call.dbias_strides = {bias.batch ? strides.batch : 0, bias.head ? strides.head : 0, bias.row ? strides.row : 0,
                          bias.key ? strides.key : 0};
    call.dbias = dbias.data<float>();
  }
}

inline void prepare_key_sums(const RandomCall &input, Call &call, Results &results) {
  results.key_sums = Tensor(Type::FLOAT, call.batch, call.heads, call.keys, 1);
  call.logsumexp = results.logsumexp.data<float>();
  call.key_sums = results.key_sums.data<float>();
  if (input.pooled_map) {
    const int64_t row_cells = (call.queries + call.pool_rows - 1) / call.pool_rows;
    const int64_t key_cells = (call.keys + call.pool_keys - 1) / call.pool_keys;
    results.pooled_map = Tensor(Type::FLOAT, call.batch, call.heads, row_cells, key_cells);
    call.pooled_map = results.pooled_map.data<float>();
  }
}

// ---------------------------------------------------------------- comparison

// The tolerance of a result, relative to its largest value.
inline double tolerance_of(const std::string &name, Dtype dtype) {
  // Weights are rounded to bfloat16 before the product with the values where the CPU multiplies bfloat16.
  const double exact = 5e-4, rounded = dtype == Dtype::BFLOAT16 ? 6e-2 : dtype == Dtype::FLOAT16 ? 1.5e-2 : exact;
  for (const char *each : {"output", "delta", "dq", "dk", "dv", "dbias"})
    if (name == each) return rounded;
  return name == "distance_spread" ? 10 * exact : exact;
}

// The first element that differs by more than `tolerance` times the largest value, or `least` where that is larger.
inline std::string differs(const std::string &name, const Tensor &got, const Dense &wanted, double tolerance,
                           double least = 1) {
  double size = least;
  for (double value : wanted.values)
    if (isfinite(value)) size = fmax(size, fabs(value));
  std::string error;
  got.each([&](int64_t a, int64_t b, int64_t c, int64_t d) {
    const double x = got.at(a, b, c, d), y = wanted(a, b, c, d);
    if (!error.empty() || x == y || (isnan(x) && isnan(y)) || fabs(x - y) <= tolerance * size) return;
    char line[200];
    snprintf(line, sizeof line, "%s[%ld, %ld, %ld, %ld] is %g, and should be %g", name.c_str(), static_cast<long>(a),
             static_cast<long>(b), static_cast<long>(c), static_cast<long>(d), x, y);
    error = line;
  });
  return error;
}

// The largest key must have the largest weight within rounding, and be the first of exactly equal ones; -1 for no key.
inline std::string wrong_key(const Tensor &got, const Naive &naive) {
  std::string error;
  got.each([&](int64_t b, int64_t h, int64_t i, int64_t) {
    const auto key = static_cast<int64_t>(got.at(b, h, i));
    bool right = key == -1;
    if (isfinite(naive.logsumexp(b, h, i))) {
      right = key >= 0 && key < naive.p.sizes[3] && naive.visible(b, h, i, key) != 0;
      right = right && naive.p(b, h, i, key) >= 0.999 * naive.largest_weight(b, h, i);
      for (int64_t j = 0; right && j < key; j++) right = naive.p(b, h, i, j) != naive.p(b, h, i, key);
    }
    const std::string where = " for query " + std::to_string(i) + " of head " + std::to_string(h);
    if (!right) error = "largest_key is " + std::to_string(key) + where;
  });
  return error;
}

inline std::string wrong(const RandomCall &input, const Results &results, const Naive &naive, double least = 1) {
  std::string error;
  results.each([&](const std::string &name, const Tensor &tensor) {
    if (!error.empty()) return;
    if (!tensor.gaps_untouched()) error = name + " was written to in a gap between its rows";
    else if (name == "largest_key") error = wrong_key(tensor, naive);
  });
  const auto compare = [&](const char *name, const Tensor &got, const Dense &wanted, double factor = 1) {
    if (error.empty() && got) error = differs(name, got, wanted, factor * tolerance_of(name, input.call.dtype), least);
  };
  compare("output", results.output, naive.output);
  compare("logsumexp", results.logsumexp, naive.logsumexp);
  compare("entropy", results.entropy, naive.entropy);
  compare("largest_weight", results.largest_weight, naive.largest_weight);
  compare("mean_distance", results.mean_distance, naive.mean_distance);
  compare("distance_spread", results.distance_spread, naive.distance_spread);
  compare("offset_weights", results.offset_weights, naive.offset_weights);
  compare("target_key_weight", results.target_key_weight, naive.target_key_weight);
  compare("special_keys_weight", results.special_keys_weight, naive.special_keys_weight);
  compare("near_weight", results.near_weight, naive.near_weight);
  compare("delta", results.delta, naive.delta);
  compare("dq", results.dq, naive.dq);
  compare("dk", results.dk, naive.dk);
  compare("dv", results.dv, naive.dv);
  // A number of dbias adds up the rounding of delta over all queries and heads that share it.
  const double cells = static_cast<double>(naive.p.values.size()) / fmax(1, static_cast<double>(naive.dbias.values.size()));
  compare("dbias", results.dbias, naive.dbias, fmax(1, sqrt(cells) / 4));
  compare("key_sums", results.key_sums, naive.key_sums);
  compare("pooled_map", results.pooled_map, naive.pooled_map);
  return error;
}
