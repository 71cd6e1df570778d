// Operations on scores between the product q . k and the softmax (softcap, bias, mask), and dropout after the softmax.
//
// Scores are kept in units of log2, where the factor would overflow from 2^127 on; there a bias has the slope 1/2
// (`to_log2` in `score_terms.h`), which keeps the order of distinct numbers, and their differences are too large to
// matter. Next to a bias of the lowest float even float64 loses the logarithm of a row's sum: weights and statistics
// subtract the largest bias of such a row first (`score_base` in `probes/tile.py`). The gradient of a row whose keys
// all have such a bias is not normalised.
#pragma once
#include "call.h"
#include "simd.h"

namespace {

// Call body(element) with an element of the call's dtype, which stands for its type.
template <class Body>
INLINE auto with_element(const Call &call, Body body) {
  switch (call.dtype) {
    case Dtype::BFLOAT16: return body(Bfloat16{});
    case Dtype::FLOAT16: return body(Float16{});
    default: return body(float{});
  }
}

// Row `row` of a head of a tensor (batch, heads, rows, dim).
template <class Element>
INLINE const Element *row_of(const void *tensor, const RowStrides &strides, int64_t batch, int64_t head,
                             int64_t row = 0) {
  return static_cast<const Element *>(tensor) + batch * strides.batch + head * strides.head + row * strides.row;
}
template <class Element>
INLINE Element *row_of(void *tensor, const RowStrides &strides, int64_t batch, int64_t head, int64_t row = 0) {
  return static_cast<Element *>(tensor) + batch * strides.batch + head * strides.head + row * strides.row;
}

// Row `row` of a head of a tensor (batch, heads, queries, keys); null for null.
template <class Item>
INLINE Item *row_of(Item *tensor, const CellStrides &strides, int64_t batch, int64_t head, int64_t row) {
  return tensor ? tensor + batch * strides.batch + head * strides.head + row * strides.row : nullptr;
}

// One query of one head: its visible keys, and its rows of the bias and of the mask.
struct Query {
  int64_t start, stop;      // keys; both 0 where it sees none
  const float *bias;        // or null
  const uint8_t *visible;   // or null, where every key of the interval is visible
  uint32_t dropout_key[2];  // seeds the random numbers of its dropout
};

INLINE Query read_query(const Call &call, int64_t batch, int64_t head, int64_t row) {
  Query query;
  query.start = call.start[batch * call.bounds_batch_stride + row];
  query.stop = call.stop[batch * call.bounds_batch_stride + row];
  if (query.start >= query.stop) query.start = query.stop = 0;
  query.bias = row_of(call.bias, call.bias_strides, batch, head, row);
  query.visible = row_of(call.visible, call.visible_strides, batch, head, row);
  if (call.dropout > 0) {
    const uint64_t seed = static_cast<uint64_t>(call.seed);
    const int64_t heads = call.total_heads ? call.total_heads : call.heads;
    const uint64_t head_index = static_cast<uint64_t>((call.batch_start + batch) * heads + call.head_start + head);
    const uint64_t position = static_cast<uint64_t>(call.first_row + row);
    uint32_t mixed = mix_bits(static_cast<uint32_t>(seed));
    mixed = mix_bits(mixed ^ static_cast<uint32_t>(seed >> 32));
    mixed = mix_bits(mixed ^ static_cast<uint32_t>(head_index));
    query.dropout_key[0] = mix_bits(mixed ^ static_cast<uint32_t>(position));
    query.dropout_key[1] = mix_bits(query.dropout_key[0] + 0x9e3779b9u);
  }
  return query;
}

// The keys that some query of several sees, [any_start, any_stop), and those that all of them see, [all_start,
// all_stop).
struct Span {
  int64_t any_start, any_stop, all_start, all_stop;

  void add(const Query &query) {
    if (query.start < query.stop) {
      any_start = min(any_start, query.start);
      any_stop = max(any_stop, query.stop);
    }
    all_start = max(all_start, query.start);
    all_stop = min(all_stop, query.stop);
  }
  void add(const Span &span) {
    any_start = min(any_start, span.any_start);
    any_stop = max(any_stop, span.any_stop);
    all_start = max(all_start, span.all_start);
    all_stop = min(all_stop, span.all_stop);
  }
  bool empty() const { return any_start >= any_stop; }
  bool overlaps(int64_t first, int64_t count) const { return any_start < first + count && any_stop > first; }
  bool covers(int64_t first, int64_t count) const { return all_start <= first && all_stop >= first + count; }
};
INLINE Span span_of_no_query(const Call &call) { return {call.keys, 0, 0, call.keys}; }

// Elements first, ..., first + LANES - 1 of a row; those from `count` on are 0.
INLINE Floats load_lanes(const float *from, int64_t stride, int64_t first, int64_t count) {
  if (stride == 0) return broadcast(*from);
  if (stride == 1 && first + LANES <= count) return load(from + first);
  Floats value = (Floats){};
  for (int64_t lane = 0; lane < LANES && first + lane < count; lane++) value[lane] = from[(first + lane) * stride];
  return value;
}
INLINE Ints load_lanes(const uint8_t *from, int64_t stride, int64_t first, int64_t count) {
  if (stride == 0) return (Ints){} + *from;
  if (stride == 1 && first + LANES <= count) return load_bytes(from + first);
  Ints value = (Ints){};
  for (int64_t lane = 0; lane < LANES && first + lane < count; lane++) value[lane] = from[(first + lane) * stride];
  return value;
}

// Numbers from natural units to units of log2, in which scores are kept, and back. From 2^127 on, where the factor would
// overflow, the slope is 1/2: the order of distinct numbers remains, and their differences are too large to matter.
constexpr float STEEP = 0x1p127f, STEEP_OFFSET = STEEP * (LOG2_E - 0.5f);
INLINE Floats with_sign_of(Floats x, float size) {
  return (Floats)(((Ints)x & (int32_t)0x80000000) | (Ints)broadcast(size));
}
// Any NaN becomes the quiet NaN that exp2 propagates.
INLINE Floats to_log2(Floats x) {
  const Floats distant = x * broadcast(0.5f) + with_sign_of(x, STEEP_OFFSET);
  const Floats result = select(absolute(x) > broadcast(STEEP), distant, x * broadcast(LOG2_E));
  return select(x == x, result, broadcast(NOT_A_NUMBER));
}
INLINE Floats from_log2(Floats x) {
  const Floats rest = x - with_sign_of(x, STEEP_OFFSET);
  return select(absolute(x) > broadcast(STEEP * LOG2_E), rest + rest, x * broadcast(LN_2));
}

// The c of the softcap c tanh(score / c) in units of log2. Outside of these limits neither it nor 1 / c is finite.
INLINE float softcap_of(const Call &call) {
  const double cap = call.softcap < 1e-37 ? 1e-37 : call.softcap > 1e38 ? 1e38 : call.softcap;
  return static_cast<float>(cap) * LOG2_E;
}

// The softcap of scores in units of log2.
INLINE Floats apply_softcap(const Call &call, Floats score) {
  const float cap = softcap_of(call);
  return broadcast(cap) * tanh(score * broadcast(1 / cap));
}

// Which of the keys first, ..., first + LANES - 1 the query sees: inside its interval, before the end of the keys, not
// hidden by `visible`, and without a bias of -inf.
INLINE Ints visible_lanes(const Call &call, const Query &query, int64_t first) {
  const Ints key = index_from(0);
  // Clamped, because a distant start or stop does not fit into 32 bits and only its side of these lanes matters.
  const int32_t start = static_cast<int32_t>(max(-1, min(query.start - first, LANES)));
  const int32_t stop = static_cast<int32_t>(max(-1, min(query.stop - first, LANES)));
  Ints seen = (key >= start) & (key < stop);
  if (query.visible) seen &= load_lanes(query.visible, call.visible_strides.key, first, call.keys) != 0;
  if (query.bias) seen &= load_lanes(query.bias, call.bias_strides.key, first, call.keys) != broadcast(-INF);
  return seen;
}

// The bias of LANES keys in units of log2.
INLINE Floats scaled_bias(const Call &call, const Query &query, int64_t first) {
  return to_log2(load_lanes(query.bias, call.bias_strides.key, first, call.keys));
}

// The factors of dropout for the weights of LANES keys: 0 or 1 / (1 - dropout). They depend on the seed and the cell
// alone, so the backward pass computes the same factors again.
INLINE Floats dropout_factors(const Call &call, const Query &query, int64_t first) {
  const Words key = (Words)index_from(0) + static_cast<uint32_t>(call.key_start + first);
  const Words random = mix_bits(mix_bits(key ^ query.dropout_key[0]) + query.dropout_key[1]);
  const double limit = call.dropout * 4294967296.0;  // a random number below it drops the weight
  const uint32_t dropped = static_cast<uint32_t>(limit < 4294967295.0 ? limit : 4294967295.0);
  const float factor = call.dropout < 1 ? static_cast<float>(1 / (1 - call.dropout)) : 0.f;
  return select((Ints)(random >= dropped), broadcast(factor), (Floats){});
}

}  // namespace
