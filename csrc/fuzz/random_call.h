// A random call: shapes, strides, intervals, score terms, non-finite elements, and the wanted results.
#pragma once
#include "../call.h"
#include "tensor.h"

constexpr double INF = __builtin_inf(), NOT_A_NUMBER = __builtin_nan("");
constexpr int64_t MAX_WORK = 1500000;  // multiplications per case

// The inputs of a call, and which results are wanted. The addresses of results are set by each run.
struct RandomCall {
  Call call = {};
  Tensor q, k, v, start, stop, visible, bias, sinks;
  Tensor k_int8, v_int8, k_scales, v_scales;  // what the forward pass reads instead of k and v, or empty
  Tensor query_start, offsets, target_key, special_keys, grad_output, grad_logsumexp;
  bool entropy = false, largest_weight = false, largest_key = false, mean_distance = false, distance_spread = false;
  bool offset_weights = false, target_key_weight = false, special_keys_weight = false, near_weight = false;
  bool dbias = false, pooled_map = false;
  uint64_t strides_seed = 0;  // of the strides of the results; 0 for contiguous ones
};

inline Type type_of(const Call &call) {
  return call.dtype == Dtype::BFLOAT16 ? Type::BFLOAT16 : call.dtype == Dtype::FLOAT16 ? Type::FLOAT16 : Type::FLOAT;
}
inline RowStrides row_strides(const Tensor &tensor) { return {tensor.strides[0], tensor.strides[1], tensor.strides[2]}; }
inline CellStrides cell_strides(const Tensor &tensor) {
  return {tensor.strides[0], tensor.strides[1], tensor.strides[2], tensor.strides[3]};
}

inline void draw_shape(Random &random, Call &call) {
  const int64_t dims[] = {1, 2, 3, 7, 8, 15, 16, 17, 31, 32, 33, 64, 65, 80, 128};
  const auto dim = [&] { return chance(random, 0.02) ? 1100 : dims[uniform(random, 0, 14)]; };
  call.batch = uniform(random, 1, 3);
  call.kv_heads = uniform(random, 1, 3);
  int64_t group = uniform(random, 1, 3);
  call.head_dim = dim();
  call.value_dim = chance(random, 0.5) ? call.head_dim : dim();
  switch (uniform(random, 0, 3)) {
    case 0: call.queries = uniform(random, 0, 12), call.keys = uniform(random, 0, 40); break;
    case 1: call.queries = uniform(random, 1, 4), call.keys = uniform(random, 1, 900); break;
    case 2: call.queries = uniform(random, 80, 210), call.keys = uniform(random, 1, 70); break;
    default: call.queries = uniform(random, 1, 210), call.keys = uniform(random, 1, 620); break;
  }
  const auto work = [&] {
    return call.batch * call.kv_heads * group * call.queries * call.keys * (call.head_dim + call.value_dim);
  };
  while (work() > MAX_WORK) {
    if (group > 1 && chance(random, 0.5)) group--;
    else if (call.batch > 1) call.batch--;
    else if (call.kv_heads > 1) call.kv_heads--;
    else if (call.head_dim > 8) call.head_dim = (call.head_dim + 1) / 2;
    else if (call.value_dim > 8) call.value_dim = (call.value_dim + 1) / 2;
    else if (call.queries > call.keys) call.queries = call.queries * 3 / 4;
    else call.keys = call.keys * 3 / 4;
  }
  call.heads = call.kv_heads * group;
}

inline Tensor numbers(Random &random, Tensor result, double size) {
  result.each([&](int64_t a, int64_t b, int64_t c, int64_t d) { result.set(size * normal(random), a, b, c, d); });
  return result;
}

inline Tensor integers(Random &random, Tensor result, int64_t min, int64_t max) {
  result.each([&](int64_t a, int64_t b, int64_t c, int64_t d) {
    result.set(static_cast<double>(uniform(random, min, max)), a, b, c, d);
  });
  return result;
}

inline void draw_bounds(Random &random, RandomCall &input) {
  Call &call = input.call;
  const bool by_batch = chance(random, 0.4);
  const int64_t batch = by_batch ? call.batch : 1, gap = uniform(random, 0, 5);
  for (Tensor *bounds : {&input.start, &input.stop}) *bounds = Tensor(Type::INT64, batch, 1, 1, call.queries + gap);
  call.bounds_batch_stride = by_batch ? input.start.strides[0] : 0;
  const int64_t kind = uniform(random, 0, 4), window = uniform(random, 1, 80), shift = uniform(random, -3, call.keys);
  for (int64_t b = 0; b < batch; b++)
    for (int64_t i = 0; i < call.queries; i++) {
      int64_t start = 0, stop = call.keys;
      if (kind == 1 || kind == 2) stop = i + 1 + shift;
      if (kind == 2) start = stop - window;
      if (kind == 3) start = uniform(random, 0, call.keys), stop = uniform(random, 0, call.keys);  // in any order
      if (kind == 4) start = i / 16 * 32, stop = start + uniform(random, 0, 70);
      if (chance(random, 0.03)) stop = start;
      const auto clamped = [&](int64_t key) {
        return static_cast<double>(key < 0 ? 0 : key > call.keys ? call.keys : key);
      };
      input.start.set(clamped(start), b, 0, 0, i);
      input.stop.set(clamped(stop), b, 0, 0, i);
    }
}

inline void draw_terms(Random &random, RandomCall &input) {
  Call &call = input.call;
  if (chance(random, 0.25)) {
    Tensor visible = Tensor::broadcasting(random, Type::BYTE, call.batch, call.heads, call.queries, call.keys, true);
    const double share = chance(random, 0.5) ? 0.9 : 0.3;  // of visible cells
    visible.each([&](int64_t a, int64_t b, int64_t c, int64_t d) { visible.set(chance(random, share), a, b, c, d); });
    input.visible = std::move(visible);
  }
  if (chance(random, 0.3)) {
    Tensor bias = Tensor::broadcasting(random, Type::FLOAT, call.batch, call.heads, call.queries, call.keys, true);
    const double hidden = chance(random, 0.5) ? 0.1 : 0;
    bias.each([&](int64_t a, int64_t b, int64_t c, int64_t d) {
      bias.set(chance(random, hidden) ? -INF : normal(random), a, b, c, d);
    });
    if (chance(random, 0.2) && !bias.empty())
      bias.set(chance(random, 0.5) ? NOT_A_NUMBER : INF, uniform(random, 0, call.batch - 1),
               uniform(random, 0, call.heads - 1), uniform(random, 0, call.queries - 1),
               uniform(random, 0, call.keys - 1));
    input.bias = std::move(bias);
    input.dbias = chance(random, 0.8);
  }
  if (chance(random, 0.3)) input.sinks = numbers(random, Tensor(Type::FLOAT, call.heads, 1, 1, 1), 2);
  if (chance(random, 0.25)) call.softcap = chance(random, 0.5) ? 1.5 : 20;
  if (chance(random, 0.3)) call.dropout = chance(random, 0.5) ? 0.5 : 0.1;
}

// Set some elements of q, k and v to NaN or infinity.
inline void draw_nonfinite(Random &random, RandomCall &input) {
  for (int64_t count = uniform(random, 1, 3); count > 0; count--) {
    Tensor *tensors[] = {&input.q, &input.k, &input.v};
    Tensor &tensor = *tensors[uniform(random, 0, 2)];
    if (tensor.empty()) continue;
    const int64_t last = tensor.sizes[2] - 1;
    const double bad[] = {NOT_A_NUMBER, INF, -INF};
    tensor.set(bad[uniform(random, 0, 2)], uniform(random, 0, tensor.sizes[0] - 1),
               uniform(random, 0, tensor.sizes[1] - 1), chance(random, 0.5) ? last : uniform(random, 0, last), uniform(random, 0, tensor.sizes[3] - 1));
  }
}

// The keys or values that int8 numbers, (batch, kv_heads, keys, dim), and scales, (batch, kv_heads, 1, keys), stand for.
inline Tensor product_of_int8(Type type, const Tensor &numbers, const Tensor &scales) {
  Tensor product(type, numbers.sizes[0], numbers.sizes[1], numbers.sizes[2], numbers.sizes[3]);
  product.each([&](int64_t a, int64_t b, int64_t c, int64_t d) {
    const double scale = scales.at(a, b, 0, c);  // 0 * infinity is NaN, and so is the key
    product.set(scale - scale == 0 ? numbers.at(a, b, c, d) * scale : NOT_A_NUMBER, a, b, c, d);
  });
  return product;
}

// Replace k or v by int8 with scales. The product of both is exact in bfloat16 too: scales are powers of two, unless
// they are not finite.
inline void draw_int8(Random &random, Tensor &expanded, Tensor &numbers, Tensor &scales) {
  const int64_t *sizes = expanded.sizes;
  numbers = Tensor(random, Type::INT8, sizes[0], sizes[1], sizes[2], sizes[3], true);
  scales = Tensor(random, Type::FLOAT, sizes[0], sizes[1], 1, sizes[2], true);
  numbers = integers(random, std::move(numbers), -127, 127);
  const double bad[] = {NOT_A_NUMBER, INF, -INF}, share = chance(random, 0.2) ? 0.02 : 0;
  scales.each([&](int64_t a, int64_t b, int64_t c, int64_t d) {
    const double good = 1.0 / static_cast<double>(int64_t{32} << uniform(random, 0, 2));
    scales.set(chance(random, share) ? bad[uniform(random, 0, 2)] : good, a, b, c, d);
  });
  expanded = product_of_int8(expanded.type, numbers, scales);
}

inline void draw_statistics(Random &random, RandomCall &input) {
  Call &call = input.call;
  if (chance(random, 0.4)) return;
  const double share = chance(random, 0.5) ? 1 : 0.4;
  for (bool *wanted : {&input.entropy, &input.largest_weight, &input.largest_key,
                       &input.mean_distance, &input.distance_spread, &input.offset_weights,
                       &input.target_key_weight, &input.special_keys_weight, &input.near_weight})
    *wanted = chance(random, share);
  call.reach = chance(random, 0.8) ? uniform(random, 0, 4) : uniform(random, 0, 2 * call.keys);
  call.first_row = chance(random, 0.3) ? uniform(random, 0, 50) : 0;
  const auto per_sample = [&] { return Tensor(Type::INT64, call.batch, 1, 1, 1); };
  if (chance(random, 0.7)) input.query_start = integers(random, per_sample(), -3, call.keys);
  if (input.offset_weights) {
    call.num_offsets = uniform(random, 1, 3);
    input.offsets = integers(random, Tensor(Type::INT64, call.num_offsets, 1, 1, 1), -3, 3);
  }
  if (input.target_key_weight) input.target_key = integers(random, per_sample(), -1, call.keys - 1);
  if (input.special_keys_weight) {
    input.special_keys = Tensor(Type::BYTE, call.batch, 1, 1, call.keys);
    Tensor &special = input.special_keys;
    special.each([&](int64_t a, int64_t b, int64_t c, int64_t d) { special.set(chance(random, 0.2), a, b, c, d); });
  }
}

// Set the addresses and strides of the inputs.
inline void set_addresses(RandomCall &input) {
  Call &call = input.call;
  call.q_strides = row_strides(input.q);
  call.k_strides = row_strides(input.k);
  call.v_strides = row_strides(input.v);
  call.grad_output_strides = row_strides(input.grad_output);
  call.visible_strides = cell_strides(input.visible);
  call.bias_strides = cell_strides(input.bias);
  call.q = input.q.data(), call.k = input.k.data(), call.v = input.v.data();
  call.start = input.start.data<int64_t>(), call.stop = input.stop.data<int64_t>();
  call.visible = input.visible.data<uint8_t>();
  call.bias = input.bias.data<float>(), call.sinks = input.sinks.data<float>();
  call.query_start = input.query_start.data<int64_t>(), call.offsets = input.offsets.data<int64_t>();
  call.target_key = input.target_key.data<int64_t>(), call.special_keys = input.special_keys.data<uint8_t>();
  call.grad_output = input.grad_output.data(), call.grad_logsumexp = input.grad_logsumexp.data<float>();
}

inline RandomCall draw(uint64_t seed) {
  Random random(seed);
  RandomCall result;
  Call &call = result.call;
  draw_shape(random, call);
  call.dtype = chance(random, 0.5) ? Dtype::FLOAT32 : chance(random, 0.5) ? Dtype::BFLOAT16 : Dtype::FLOAT16;
  call.seed = uniform(random, INT64_MIN, INT64_MAX);
  call.threads = uniform(random, 1, 3);
  const double sign = chance(random, 0.1) ? -1 : 1, factor = chance(random, 0.5) ? 1 : 0.3;
  call.scale = sign * factor / __builtin_sqrt(static_cast<double>(call.head_dim));
  const Type type = type_of(call);
  result.q = numbers(random, Tensor(random, type, call.batch, call.heads, call.queries, call.head_dim, true), 1);
  result.k = numbers(random, Tensor(random, type, call.batch, call.kv_heads, call.keys, call.head_dim, true), 1);
  if (chance(random, 0.1))  // equal keys, for equal weights
    result.k.each(
        [&](int64_t a, int64_t b, int64_t c, int64_t d) { result.k.set(result.k.at(a, b, c % 3, d), a, b, c, d); });
  result.v = numbers(random, Tensor(random, type, call.batch, call.kv_heads, call.keys, call.value_dim, true), 1);
  draw_bounds(random, result);
  draw_terms(random, result);
  if (chance(random, 0.25)) draw_nonfinite(random, result);
  if (chance(random, 0.25)) {
    draw_int8(random, result.k, result.k_int8, result.k_scales);
    draw_int8(random, result.v, result.v_int8, result.v_scales);
  }
  draw_statistics(random, result);
  Tensor grad_output(random, type, call.batch, call.heads, call.queries, call.value_dim, true);
  result.grad_output = numbers(random, std::move(grad_output), 1);
  if (chance(random, 0.4))
    result.grad_logsumexp = numbers(random, Tensor(Type::FLOAT, call.batch, call.heads, call.queries, 1), 1);
  result.pooled_map = chance(random, 0.5);
  call.pool_rows = uniform(random, 1, 40);
  call.pool_keys = uniform(random, 1, 60);
  result.strides_seed = random();

  set_addresses(result);
  return result;
}
