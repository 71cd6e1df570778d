// A call drawn at random: shapes, strides, bounds, terms, what is not finite, and what is asked for.
#pragma once
#include "../call.h"
#include "tensor.h"

constexpr double INFINITE = __builtin_inf(), NOT_A_NUMBER = __builtin_nan("");
constexpr int64_t MOST_WORK = 1500000;  // products of a case

// What goes in, and what the answers are asked for. Addresses of answers are filled in by each run.
struct Drawn {
  Call call = {};
  Tensor q, k, v, start, stop, seen, bias, sinks, query_start, offsets, given_key, special_keys, of_output, of_logsumexp;
  bool entropy = false, squares = false, largest_weight = false, largest_key = false, mean_distance = false;
  bool distance_spread = false, at_offsets = false, on_given_key = false, on_special_keys = false, pooled = false;
  bool dbias = false;
  uint64_t strides_seed = 0;  // of the answers' strides
};

inline void draw_shape(Random &random, Call &call) {
  const int64_t dims[] = {1, 2, 3, 7, 8, 15, 16, 17, 31, 32, 33, 64, 65, 80, 128};
  const auto dim = [&] { return dims[drawn(random, 0, 14)]; };
  call.batch = drawn(random, 1, 3);
  call.kv_heads = drawn(random, 1, 3);
  int64_t group = drawn(random, 1, 3);
  call.head_dim = dim();
  call.value_dim = chance(random, 0.5) ? call.head_dim : dim();
  switch (drawn(random, 0, 3)) {
    case 0: call.queries = drawn(random, 0, 12), call.keys = drawn(random, 0, 40); break;
    case 1: call.queries = drawn(random, 1, 4), call.keys = drawn(random, 1, 900); break;
    case 2: call.queries = drawn(random, 80, 210), call.keys = drawn(random, 1, 70); break;
    default: call.queries = drawn(random, 1, 210), call.keys = drawn(random, 1, 620); break;
  }
  const auto work = [&] { return call.batch * call.kv_heads * group * call.queries * call.keys * (call.head_dim + call.value_dim); };
  while (work() > MOST_WORK) {
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

inline Tensor numbers(Random &random, Tensor made, double size) {
  made.each([&](int64_t a, int64_t b, int64_t c, int64_t d) { made.put(size * normal(random), a, b, c, d); });
  return made;
}

inline void draw_bounds(Random &random, Drawn &drawn_call) {
  Call &call = drawn_call.call;
  const bool by_batch = chance(random, 0.4), by_head = chance(random, 0.3);
  const int64_t batch = by_batch ? call.batch : 1, heads = by_head ? call.heads : 1, gap = drawn(random, 0, 5);
  for (Tensor *bounds : {&drawn_call.start, &drawn_call.stop}) *bounds = Tensor(Type::INT64, batch, heads, 1, call.queries + gap);
  call.bounds_batch = by_batch ? drawn_call.start.strides[0] : 0;
  call.bounds_head = by_head ? drawn_call.start.strides[1] : 0;
  const int64_t kind = drawn(random, 0, 4), window = drawn(random, 1, 80), shift = drawn(random, -3, call.keys);
  for (int64_t b = 0; b < batch; b++)
    for (int64_t h = 0; h < heads; h++)
      for (int64_t i = 0; i < call.queries; i++) {
        int64_t start = 0, stop = call.keys;
        if (kind == 1 || kind == 2) stop = i + 1 + shift;
        if (kind == 2) start = stop - window;
        if (kind == 3) start = drawn(random, 0, call.keys), stop = drawn(random, 0, call.keys);  // often crossed
        if (kind == 4) start = i / 16 * 32, stop = start + drawn(random, 0, 70);
        if (chance(random, 0.03)) stop = start;
        const auto within = [&](int64_t bound) { return static_cast<double>(bound < 0 ? 0 : bound > call.keys ? call.keys : bound); };
        drawn_call.start.put(within(start), b, h, 0, i);
        drawn_call.stop.put(within(stop), b, h, 0, i);
      }
}

inline void draw_terms(Random &random, Drawn &drawn_call) {
  Call &call = drawn_call.call;
  if (chance(random, 0.25)) {
    Tensor seen = Tensor::broadcasting(random, Type::BYTE, call.batch, call.heads, call.queries, call.keys, true);
    const double share = chance(random, 0.5) ? 0.9 : 0.3;
    seen.each([&](int64_t a, int64_t b, int64_t c, int64_t d) { seen.put(chance(random, share), a, b, c, d); });
    drawn_call.seen = std::move(seen);
  }
  if (chance(random, 0.3)) {
    Tensor bias = Tensor::broadcasting(random, Type::FLOAT, call.batch, call.heads, call.queries, call.keys, true);
    const double hidden = chance(random, 0.5) ? 0.1 : 0;
    bias.each([&](int64_t a, int64_t b, int64_t c, int64_t d) {
      bias.put(chance(random, hidden) ? -INFINITE : normal(random), a, b, c, d);
    });
    if (chance(random, 0.2) && !bias.empty())
      bias.put(chance(random, 0.5) ? NOT_A_NUMBER : INFINITE, drawn(random, 0, call.batch - 1), drawn(random, 0, call.heads - 1),
               drawn(random, 0, call.queries - 1), drawn(random, 0, call.keys - 1));
    drawn_call.bias = std::move(bias);
    drawn_call.dbias = chance(random, 0.8);
  }
  if (chance(random, 0.3)) drawn_call.sinks = numbers(random, Tensor(Type::FLOAT, call.heads, 1, 1, 1), 2);
  if (chance(random, 0.25)) call.softcap = chance(random, 0.5) ? 1.5 : 20;
  if (chance(random, 0.3)) call.dropout = chance(random, 0.5) ? 0.5 : 0.1;
}

// Put NaN and infinities where the contract speaks of them.
inline void poison(Random &random, Drawn &drawn_call) {
  for (int64_t count = drawn(random, 1, 3); count > 0; count--) {
    Tensor *tensors[] = {&drawn_call.q, &drawn_call.k, &drawn_call.v};
    Tensor &tensor = *tensors[drawn(random, 0, 2)];
    if (tensor.empty()) continue;
    const int64_t last = tensor.sizes[2] - 1;
    const double bad[] = {NOT_A_NUMBER, INFINITE, -INFINITE};
    tensor.put(bad[drawn(random, 0, 2)], drawn(random, 0, tensor.sizes[0] - 1), drawn(random, 0, tensor.sizes[1] - 1),
               chance(random, 0.5) ? last : drawn(random, 0, last), drawn(random, 0, tensor.sizes[3] - 1));
  }
}

inline void draw_watched(Random &random, Drawn &drawn_call) {
  Call &call = drawn_call.call;
  if (chance(random, 0.4)) return;
  const double share = chance(random, 0.5) ? 1 : 0.4;
  for (bool *wanted : {&drawn_call.entropy, &drawn_call.squares, &drawn_call.largest_weight, &drawn_call.largest_key,
                       &drawn_call.mean_distance, &drawn_call.distance_spread, &drawn_call.at_offsets,
                       &drawn_call.on_given_key, &drawn_call.on_special_keys})
    *wanted = chance(random, share);
  call.first_row = chance(random, 0.3) ? drawn(random, 0, 50) : 0;
  if (chance(random, 0.7)) {
    drawn_call.query_start = Tensor(Type::INT64, call.batch, 1, 1, 1);
    for (int64_t b = 0; b < call.batch; b++) drawn_call.query_start.put(static_cast<double>(drawn(random, -3, call.keys)), b, 0, 0);
  }
  if (drawn_call.at_offsets) {
    call.num_offsets = drawn(random, 1, 3);
    drawn_call.offsets = Tensor(Type::INT64, call.num_offsets, 1, 1, 1);
    for (int64_t i = 0; i < call.num_offsets; i++) drawn_call.offsets.put(static_cast<double>(drawn(random, -3, 3)), i, 0, 0);
  }
  if (drawn_call.on_given_key) {
    drawn_call.given_key = Tensor(Type::INT64, call.batch, 1, 1, 1);
    for (int64_t b = 0; b < call.batch; b++) drawn_call.given_key.put(static_cast<double>(drawn(random, -1, call.keys - 1)), b, 0, 0);
  }
  if (drawn_call.on_special_keys) {
    drawn_call.special_keys = Tensor(Type::BYTE, call.batch, 1, 1, call.keys);
    Tensor &special = drawn_call.special_keys;
    special.each([&](int64_t a, int64_t b, int64_t c, int64_t d) { special.put(chance(random, 0.2), a, b, c, d); });
  }
}

inline Drawn draw(uint64_t seed) {
  Random random(seed);
  Drawn made;
  Call &call = made.call;
  draw_shape(random, call);
  call.dtype = chance(random, 0.4);
  call.seed = drawn(random, INT64_MIN, INT64_MAX);
  call.threads = drawn(random, 1, 3);
  call.scale = (chance(random, 0.1) ? -1 : 1) * (chance(random, 0.5) ? 1.0 : 0.3) / __builtin_sqrt(static_cast<double>(call.head_dim));
  const Type type = call.dtype ? Type::BFLOAT16 : Type::FLOAT;
  made.q = numbers(random, Tensor(random, type, call.batch, call.heads, call.queries, call.head_dim, true), 1);
  made.k = numbers(random, Tensor(random, type, call.batch, call.kv_heads, call.keys, call.head_dim, true), 1);
  if (chance(random, 0.1))  // keys that repeat, for equal weights
    made.k.each([&](int64_t a, int64_t b, int64_t c, int64_t d) { made.k.put(made.k.at(a, b, c % 3, d), a, b, c, d); });
  made.v = numbers(random, Tensor(random, type, call.batch, call.kv_heads, call.keys, call.value_dim, true), 1);
  draw_bounds(random, made);
  draw_terms(random, made);
  if (chance(random, 0.25)) poison(random, made);
  draw_watched(random, made);
  made.of_output = numbers(random, Tensor(random, type, call.batch, call.heads, call.queries, call.value_dim, true), 1);
  if (chance(random, 0.4)) made.of_logsumexp = numbers(random, Tensor(Type::FLOAT, call.batch, call.heads, call.queries, 1), 1);
  made.pooled = chance(random, 0.5);
  call.pool_rows = drawn(random, 1, 40);
  call.pool_keys = drawn(random, 1, 60);
  made.strides_seed = random();

  const auto strides = [](const Tensor &tensor, int64_t &batch, int64_t &head, int64_t &row) {
    batch = tensor.strides[0], head = tensor.strides[1], row = tensor.strides[2];
  };
  strides(made.q, call.q_batch, call.q_head, call.q_row);
  strides(made.k, call.k_batch, call.k_head, call.k_row);
  strides(made.v, call.v_batch, call.v_head, call.v_row);
  strides(made.of_output, call.of_output_batch, call.of_output_head, call.of_output_row);
  strides(made.seen, call.seen_batch, call.seen_head, call.seen_row);
  strides(made.bias, call.bias_batch, call.bias_head, call.bias_row);
  call.seen_key = made.seen.strides[3];
  call.bias_key = made.bias.strides[3];
  call.q = made.q.data(), call.k = made.k.data(), call.v = made.v.data();
  call.start = made.start.data(), call.stop = made.stop.data();
  call.seen = made.seen.data(), call.bias = made.bias.data(), call.sinks = made.sinks.data();
  call.query_start = made.query_start.data(), call.offsets = made.offsets.data();
  call.given_key = made.given_key.data(), call.special_keys = made.special_keys.data();
  call.of_output = made.of_output.data(), call.of_logsumexp = made.of_logsumexp.data();
  return made;
}
