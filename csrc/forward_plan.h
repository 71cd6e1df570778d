// How the forward pass for many queries divides a call: blocks of queries times blocks of packed keys.
//
// A thread packs the heads that it computes, where the heads divide evenly among the threads: it waits for no other
// thread, and a packed head is still in its cache. Packing all heads first and computing them afterwards took 1.3 times
// as long at 2,048 keys.
#pragma once
#include "call.h"
#include "gemm_tile.h"
#include "score_terms.h"
#include "simd.h"
#include "threads.h"

namespace {

constexpr int64_t FORWARD_QUERIES = 96;  // per block: the scores of 96 x 256 cells stay in the L2 cache
constexpr int64_t FORWARD_KEYS = 256;    // per block
constexpr int64_t MAX_PACKED_BYTES = int64_t(16) << 20;    // of K and V that are packed at once, but at least one head

static_assert(FORWARD_QUERIES % ROWS == 0, "blocks are whole tiles");
static_assert(FORWARD_QUERIES % COLUMNS == 0 && FORWARD_KEYS % COLUMNS == 0, "blocks are whole panels");

// The type in which an element is packed: bfloat16 where the instruction set multiplies it, else float.
template <class Element>
struct Packing {
  using Type = float;
};
#if BF16_DOT
template <>
struct Packing<Bfloat16> {
  using Type = Bfloat16;
};
#endif
template <class Element>
using PackedOf = typename Packing<Element>::Type;

// Call body(element) as with_element, for the elements that are packed as Packed.
template <class Packed, class Body>
INLINE void with_element_packed_as(const Call &call, Body body) {
  with_element(call, [&](auto element) __attribute__((always_inline)) {
    if constexpr (sizeof(PackedOf<decltype(element)>) == sizeof(Packed)) body(element);
  });
}

// Whether a call is packed as bfloat16.
INLINE bool packed_narrow(const Call &call) { return BF16_DOT && call.dtype == Dtype::BFLOAT16; }

// Call body(packed) with an element of the type in which the elements of a call are packed.
template <class Body>
INLINE auto with_packed(const Call &call, Body body) {
  if constexpr (BF16_DOT)
    if (packed_narrow(call)) return body(Bfloat16{});
  return body(float{});
}

// The head_dim as it is packed.
INLINE int64_t packed_depth(const Call &call) {
  return packed_narrow(call) ? round_up(call.head_dim, PAIRED_DEPTH) : call.head_dim;
}

struct ForwardPlan {
  int64_t keys, depth, width;  // padded keys, head_dim and value_dim
  int64_t heads, group;        // kv_heads of the whole batch, query heads of each
  int64_t blocks;              // of queries, per head
  bool streams;                // whether a block of keys is packed when the only block of queries needs it
  int64_t held;                // keys of a head that are packed at once
  int64_t k_size, v_size;      // elements of a packed head
  int64_t threads;
  bool own;              // whether each thread packs the heads that it computes: no thread waits for another
  int64_t wave_heads;    // heads that are packed at once
  int64_t head_bytes;    // of a packed head
  int64_t packed_bytes;  // of all heads that are packed at once

  explicit ForwardPlan(const Call &call) {
    keys = round_up(call.keys, COLUMNS);
    depth = packed_depth(call);
    width = round_up(call.value_dim, COLUMNS);
    heads = call.batch * call.kv_heads;
    group = call.kv_heads ? call.heads / call.kv_heads : 0;
    blocks = ceil_div(call.queries, FORWARD_QUERIES);
    const int64_t work = call.batch * call.heads * call.queries * call.keys * (call.head_dim + call.value_dim);
    threads = team_size(call.threads, static_cast<double>(work));
    const bool balanced = heads % threads == 0 || heads >= 8 * threads;
    streams = balanced && blocks == 1 && group == 1;
    held = streams ? min(keys, FORWARD_KEYS) : keys;
    k_size = (held + ROWS) * depth;  // the last tile may end after the last key
    v_size = held * width;
    head_bytes = round_up((k_size + v_size) * (packed_narrow(call) ? 2 : 4), 64);
    own = streams || (balanced && threads * head_bytes <= MAX_PACKED_BYTES);
    wave_heads = own ? threads : max(1, min(heads, MAX_PACKED_BYTES / max(head_bytes, 1)));
    packed_bytes = wave_heads * head_bytes;
  }
};

// Packed keys and values of a head from some key on: k is (keys, depth) in the order of its way, v is panels of COLUMNS
// columns at a distance of plan.held * COLUMNS.
template <class Packed>
struct PackedKeys {
  Packed *k, *v;
};

}  // namespace
