// What happens to scores between the product and the softmax: softcap, bias, what is hidden; and the dropout behind it.
#pragma once
#include "call.h"
#include "lanes.h"

namespace {

// One query of one head: what it may see, and where its row of bias and of `seen` begins.
struct Query {
  int64_t start, stop;        // its keys; both 0 where it sees none
  const float *bias;          // null where there is none
  const uint8_t *seen;        // null where the interval says it all
  uint32_t dropout_key[2];    // what its dropout is drawn from
};

INLINE const int64_t *bounds_row(const Call &call, const void *bounds, int64_t batch, int64_t head) {
  return static_cast<const int64_t *>(bounds) + batch * call.bounds_batch + head * call.bounds_head;
}

INLINE Query query_of(const Call &call, int64_t batch, int64_t head, int64_t row) {
  Query query;
  query.start = bounds_row(call, call.start, batch, head)[row];
  query.stop = bounds_row(call, call.stop, batch, head)[row];
  if (query.start >= query.stop) query.start = query.stop = 0;
  query.bias = static_cast<const float *>(call.bias);
  if (query.bias) query.bias += batch * call.bias_batch + head * call.bias_head + row * call.bias_row;
  query.seen = static_cast<const uint8_t *>(call.seen);
  if (query.seen) query.seen += batch * call.seen_batch + head * call.seen_head + row * call.seen_row;
  if (call.dropout > 0) {
    const uint64_t seed = static_cast<uint64_t>(call.seed), place = static_cast<uint64_t>(batch * call.heads + head);
    const uint64_t position = static_cast<uint64_t>(call.first_row + row);
    uint32_t mixed = scattered(static_cast<uint32_t>(seed));
    mixed = scattered(mixed ^ static_cast<uint32_t>(seed >> 32));
    mixed = scattered(mixed ^ static_cast<uint32_t>(place));
    query.dropout_key[0] = scattered(mixed ^ static_cast<uint32_t>(position));
    query.dropout_key[1] = scattered(query.dropout_key[0] + 0x9e3779b9u);
  }
  return query;
}

// LANES values of a row from `first`, of which those from `count` on are not there and stand as 0.
INLINE Floats row_of(const float *from, int64_t stride, int64_t first, int64_t count) {
  if (stride == 0) return broadcast(*from);
  if (stride == 1 && first + LANES <= count) return load(from + first);
  Floats value = (Floats){};
  for (int64_t lane = 0; lane < LANES && first + lane < count; lane++) value[lane] = from[(first + lane) * stride];
  return value;
}
INLINE Ints row_of(const uint8_t *from, int64_t stride, int64_t first, int64_t count) {
  if (stride == 0) return (Ints){} + *from;
  if (stride == 1 && first + LANES <= count) return load_bytes(from + first);
  Ints value = (Ints){};
  for (int64_t lane = 0; lane < LANES && first + lane < count; lane++) value[lane] = from[(first + lane) * stride];
  return value;
}

INLINE Floats softcapped(const Call &call, Floats score) {  // in units of log2
  const float cap = static_cast<float>(call.softcap) * LOG2_E;
  return broadcast(cap) * tanh(score * broadcast(1 / cap));
}

// Which of LANES keys from `first` the query may see: within its interval, not behind the last key, shown by `seen`,
// and without a bias of -inf.
INLINE Ints shown(const Call &call, const Query &query, int64_t first) {
  const Ints key = index_from(0);
  // A start or stop far away does not fit a lane; only what lies within these lanes matters.
  const int32_t start = static_cast<int32_t>(most(-1, least(query.start - first, LANES)));
  const int32_t stop = static_cast<int32_t>(most(-1, least(query.stop - first, LANES)));
  Ints may = (key >= start) & (key < stop);
  if (query.seen) may &= row_of(query.seen, call.seen_key, first, call.keys) != 0;
  if (query.bias) may &= row_of(query.bias, call.bias_key, first, call.keys) != broadcast(-INFINITE);
  return may;
}

// The bias of LANES keys in units of log2; what is NaN becomes the plain NaN, which exp2 keeps.
INLINE Floats bias_of(const Call &call, const Query &query, int64_t first) {
  const Floats bias = row_of(query.bias, call.bias_key, first, call.keys);
  return select(bias == bias, bias * broadcast(LOG2_E), broadcast(NOT_A_NUMBER));
}

// What dropout multiplies the weights of LANES keys by: 0, or 1 / (1 - dropout). A function of the seed and the cell
// alone, so the backward pass draws the same again.
INLINE Floats kept(const Call &call, const Query &query, int64_t first) {
  const Words key = (Words)index_from(0) + static_cast<uint32_t>(first);
  const Words drawn = scattered(scattered(key ^ query.dropout_key[0]) + query.dropout_key[1]);
  const uint32_t dropped = static_cast<uint32_t>(call.dropout * 4294967296.0 < 4294967295.0 ? call.dropout * 4294967296.0 : 4294967295.0);
  const float factor = call.dropout < 1 ? static_cast<float>(1 / (1 - call.dropout)) : 0.f;
  return select((Ints)(drawn >= dropped), broadcast(factor), (Floats){});
}

}  // namespace
