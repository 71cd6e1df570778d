// The forward pass: blocks of queries against blocks of keys, K and V packed once, the softmax taken block by block.
#pragma once
#include "call.h"
#include "lanes.h"
#include "pack.h"
#include "product.h"
#include "rows.h"
#include "team.h"

namespace {

constexpr int64_t QUERIES = 96 / ROWS * ROWS;                // of a task: scores of 96 x 256 stay in the second cache
constexpr int64_t KEYS = 256;                                // of a block
constexpr int64_t GROUPS = QUERIES / ROWS;                   // of queries that share a register tile
constexpr int64_t WORTH_A_TEAM = int64_t(1) << 21;           // multiplications; fewer take less time than waking a thread
constexpr int64_t PACKED_AT_ONCE = int64_t(16) << 20;        // bytes of packed K and V held together, at least one head's

#if BF16_DOT
template <class Element>
struct Form {
  using Packed = Element;  // bfloat16 is multiplied as it is, float as float
};
#else
template <class Element>
struct Form {
  using Packed = float;
};
#endif

// How the workspace is laid out: packed heads for all threads, then each thread's blocks.
template <class Element>
struct ForwardPlan {
  using Packed = typename Form<Element>::Packed;
  static constexpr bool NARROW = sizeof(Packed) == 2;

  int64_t keys, depth, width;      // padded numbers of keys, of q's and k's features, of v's
  int64_t heads, at_once, blocks;  // key/value heads of the batch, how many are packed together, query blocks a head
  int64_t k_size, v_size;          // elements of a packed head
  int64_t shared, own;             // bytes

  explicit ForwardPlan(const Call &call) {
    keys = up(call.keys, COLUMNS);
    depth = NARROW ? up(call.head_dim, 2) : call.head_dim;
    width = up(call.value_dim, COLUMNS);
    heads = call.batch * call.kv_heads;
    blocks = whole(call.queries, QUERIES);
    k_size = keys * depth;
    v_size = keys * width;
    const int64_t bytes = (k_size + v_size) * static_cast<int64_t>(sizeof(Packed));
    at_once = most(1, least(heads, PACKED_AT_ONCE / most(bytes, 1)));
    shared = up(at_once * bytes, 64);
    own = up(4 * QUERIES * KEYS, 64) + up(4 * QUERIES * width, 64) + up(4 * QUERIES * depth, 64) +
          (NARROW ? up(2 * QUERIES * KEYS, 64) : 0) + up(4 * QUERIES, 64) + up(4 * KEYS, 64) +
          up(static_cast<int64_t>(sizeof(Row) + sizeof(Query)) * QUERIES, 64) + 64;
  }
};

// One thread's blocks.
template <class Packed>
struct ForwardBlocks {
  float *scores;    // (QUERIES, KEYS), then weights
  float *sums;      // (QUERIES, width) values summed by weight
  Packed *q;        // (QUERIES, depth)
  Packed *weights;  // (QUERIES, KEYS): the scores themselves, or a narrow copy
  float *factors;   // (QUERIES) what earlier sums are multiplied by
  float *special;   // (KEYS)
  Row *rows;
  Query *queries;

  template <class Plan>
  ForwardBlocks(const Plan &plan, char *memory) {
    const auto take = [&memory](int64_t bytes) {
      char *taken = memory;
      memory += up(bytes, 64);
      return taken;
    };
    scores = reinterpret_cast<float *>(take(4 * QUERIES * KEYS));
    sums = reinterpret_cast<float *>(take(4 * QUERIES * plan.width));
    q = reinterpret_cast<Packed *>(take(4 * QUERIES * plan.depth));
    weights = Plan::NARROW ? reinterpret_cast<Packed *>(take(2 * QUERIES * KEYS)) : reinterpret_cast<Packed *>(scores);
    factors = reinterpret_cast<float *>(take(4 * QUERIES));
    special = reinterpret_cast<float *>(take(4 * KEYS));
    rows = reinterpret_cast<Row *>(take(static_cast<int64_t>(sizeof(Row)) * QUERIES));
    queries = reinterpret_cast<Query *>(take(static_cast<int64_t>(sizeof(Query)) * QUERIES));
  }
};

template <class Element>
const Element *head_of(const void *tensor, int64_t batch, int64_t batch_stride, int64_t head, int64_t head_stride) {
  return static_cast<const Element *>(tensor) + batch * batch_stride + head * head_stride;
}

INLINE void put_nan(float *to) { *to = NOT_A_NUMBER; }
INLINE void put_zero(float *to) { *to = 0; }
#if BF16_DOT
INLINE void put_nan(Bfloat16 *to) { to->bits = 0x7fc0; }
INLINE void put_zero(Bfloat16 *to) { to->bits = 0; }
INLINE void store_narrow(Bfloat16 *to, Floats value) {  // faster than `store`, and numbers below 2^-126 become 0
#ifdef __AVX512BF16__
  const __m256bh halves = _mm512_cvtneps_pbh((__m512)value);
  __builtin_memcpy(to, &halves, sizeof halves);
#else
  store(to, value);
#endif
}
#endif

// Pack keys [first, behind) of a key/value head. A key that is not finite, in k or v, gets NaN for a score and 0 for a
// value: queries that see it become NaN by the score, others never meet it.
template <class Element>
void pack_keys(const Call &call, const ForwardPlan<Element> &plan, int64_t batch, int64_t head, int64_t first,
               int64_t behind, typename Form<Element>::Packed *packed_k, typename Form<Element>::Packed *packed_v) {
  constexpr int64_t PAIR = ForwardPlan<Element>::NARROW ? 2 : 1;  // keys beside each other in packed values
  const Element *k = head_of<Element>(call.k, batch, call.k_batch, head, call.k_head) + first * call.k_row;
  const Element *v = head_of<Element>(call.v, batch, call.v_batch, head, call.v_head) + first * call.v_row;
  const int64_t there = least(behind, call.keys) - first, panel = plan.keys * COLUMNS;
  packed_k += first * plan.depth;
  packed_v += first * COLUMNS;
  pack_transposed(k, call.k_row, there, behind - first, call.head_dim, packed_k);
  pack_panels(v, call.v_row, there, behind - first, call.value_dim, packed_v, panel);
  bool good = all_finite(packed_k, (behind - first) * plan.depth);
  for (int64_t column = 0; column < plan.width; column += COLUMNS)
    good &= all_finite(packed_v + column / COLUMNS * panel, (behind - first) * COLUMNS);
  if (good) return;
  for (int64_t key = 0; key < there; key++) {
    if (row_finite(k + key * call.k_row, call.head_dim) && row_finite(v + key * call.v_row, call.value_dim)) continue;
    const int64_t in_panel = key % COLUMNS;
    for (int64_t x = 0; x < plan.depth; x++)
      put_nan(packed_k + (key - in_panel) * plan.depth + x / PAIR * PAIR * COLUMNS + in_panel * PAIR + x % PAIR);
    for (int64_t column = 0; column < plan.width; column++)
      put_zero(packed_v + column / COLUMNS * panel + key / PAIR * PAIR * COLUMNS + column % COLUMNS * PAIR + key % PAIR);
  }
}

// Attend from the queries [first, first + count) of one head.
template <class Element, Watch WATCH>
void attend_block(const Call &call, const ForwardPlan<Element> &plan, const ForwardBlocks<typename Form<Element>::Packed> &block,
                  int64_t batch, int64_t head, int64_t first, int64_t count,
                  const typename Form<Element>::Packed *packed_k, const typename Form<Element>::Packed *packed_v) {
  using Packed = typename Form<Element>::Packed;
  constexpr bool NARROW = ForwardPlan<Element>::NARROW;
  const int64_t padded = up(count, ROWS), groups = padded / ROWS, width = plan.width, depth = plan.depth;
  const float scale = static_cast<float>(call.scale) * LOG2_E;
  const Element *q = head_of<Element>(call.q, batch, call.q_batch, head, call.q_head) + first * call.q_row;
  int64_t lowest = call.keys, highest = 0;
  int64_t group_start[GROUPS], group_stop[GROUPS];  // what some query of a group sees
  for (int64_t group = 0; group < groups; group++) {
    int64_t start = call.keys, stop = 0;
    for (int64_t i = group * ROWS; i < group * ROWS + ROWS; i++) {
      Query &query = block.queries[i];
      if (i < count) query = query_of(call, batch, head, first + i);
      else query = Query{0, 0, nullptr, nullptr, {0, 0}};
      block.rows[i] = row_before(call, batch, first + i);
      if (query.start == query.stop) continue;
      start = least(start, query.start);
      stop = most(stop, query.stop);
    }
    group_start[group] = start / COLUMNS * COLUMNS;
    group_stop[group] = up(stop, COLUMNS);
    lowest = least(lowest, start);
    highest = most(highest, stop);
  }
  for (int64_t i = 0; i < padded; i++) {
    Packed *row = block.q + i * depth;
    if (i >= count) {
      memset(static_cast<void *>(row), 0, sizeof(Packed) * static_cast<size_t>(depth));
      continue;
    }
    if constexpr (NARROW) pack_row(q + i * call.q_row, call.head_dim, depth, row);
    else pack_row(q + i * call.q_row, call.head_dim, depth, scale, row);
  }
  memset(block.sums, 0, sizeof(float) * static_cast<size_t>(padded * width));
  const bool terms = call.softcap > 0 || call.bias || call.seen;

  for (int64_t block_first = lowest / COLUMNS * COLUMNS; block_first < highest; block_first += KEYS) {
    const int64_t block_behind = least(block_first + KEYS, up(highest, COLUMNS));
    const float *special = nullptr;
    if (WATCH != NOTHING && call.on_special_keys) {
      special = block.special;
      const uint8_t *flags = static_cast<const uint8_t *>(call.special_keys) + batch * call.keys;
      for (int64_t key = block_first; key < block_behind; key++)
        block.special[key - block_first] = key < call.keys && flags[key] ? 1.f : 0.f;
    }
    // Each group takes only the panels of keys that some query of it sees.
    int64_t starts[GROUPS], stops[GROUPS];
    for (int64_t group = 0; group < groups; group++) {
      starts[group] = most(group_start[group], block_first);
      stops[group] = least(group_stop[group], block_behind);
    }
    for (int64_t key = block_first; key < block_behind; key += COLUMNS)
      for (int64_t group = 0; group < groups; group++) {
        if (key < starts[group] || key >= stops[group]) continue;
        float *scores = block.scores + group * ROWS * KEYS + (key - block_first);
        if constexpr (NARROW)
          product(block.q + group * ROWS * depth, depth, packed_k + key * depth, depth,
                  [=](int64_t row, Floats left, Floats right) __attribute__((always_inline)) {
                    store(scores + row * KEYS, left * broadcast(scale));
                    store(scores + row * KEYS + LANES, right * broadcast(scale));
                  });
        else
          product<false>(block.q + group * ROWS * depth, depth, packed_k + key * depth, depth,
                         [=](int64_t row, Floats left, Floats right) __attribute__((always_inline)) {
                           store(scores + row * KEYS, left);
                           store(scores + row * KEYS + LANES, right);
                         });
      }
    for (int64_t group = 0; group < groups; group++) {
      if (starts[group] >= stops[group]) continue;
      for (int64_t i = group * ROWS; i < group * ROWS + ROWS; i++) {
        const Query &query = block.queries[i];
        const bool plain = !terms && query.start <= starts[group] && query.stop >= stops[group];
        float *scores = block.scores + i * KEYS + (starts[group] - block_first);
        const float *marks = special ? special + (starts[group] - block_first) : nullptr;
        if constexpr (NARROW) {
          Packed *weights = block.weights + i * KEYS + (starts[group] - block_first);
          const auto narrow = [weights](int64_t at, Floats value) __attribute__((always_inline)) { store_narrow(weights + at, value); };
          block.factors[i] = absorb<WATCH>(call, query, block.rows[i], scores, starts[group], stops[group], plain, marks, narrow);
        } else {
          block.factors[i] = absorb<WATCH>(call, query, block.rows[i], scores, starts[group], stops[group], plain, marks, leave_wide);
        }
      }
    }
    for (int64_t column = 0; column < width; column += COLUMNS)
      for (int64_t group = 0; group < groups; group++) {
        if (starts[group] >= stops[group]) continue;
        float *sums = block.sums + group * ROWS * width + column;
        const float *factors = block.factors + group * ROWS;
        const auto add = [=](int64_t row, Floats left, Floats right) __attribute__((always_inline)) {
          float *to = sums + row * width;
          const Floats factor = broadcast(factors[row]);
          store(to, load(to) * factor + left);
          store(to + LANES, load(to + LANES) * factor + right);
        };
        const Packed *weights = block.weights + group * ROWS * KEYS + (starts[group] - block_first);
        const Packed *values = packed_v + column * plan.keys + starts[group] * COLUMNS;
        if constexpr (NARROW) product(weights, KEYS, values, stops[group] - starts[group], add);
        else product<false>(weights, KEYS, values, stops[group] - starts[group], add);
      }
  }
  for (int64_t i = 0; i < count; i++)
    finish<Element>(call, block.rows[i], batch, head, first + i, block.sums + i * width);
}

template <class Element, Watch WATCH>
void attend_all(const Call &call, char *workspace) {
  using Packed = typename Form<Element>::Packed;
  const ForwardPlan<Element> plan(call);
  Packed *packed = reinterpret_cast<Packed *>(workspace);
  const int64_t group = call.heads / call.kv_heads, chunks = whole(plan.keys, KEYS);
  const int64_t work = call.batch * call.heads * call.queries * call.keys * (call.head_dim + call.value_dim);
  parallel(work < WORTH_A_TEAM ? 1 : call.threads, [&, packed](Team &team) {
    const ForwardBlocks<Packed> block(plan, workspace + plan.shared + team.member * plan.own);
    for (int64_t wave = 0; wave < plan.heads; wave += plan.at_once) {
      const int64_t members = least(plan.at_once, plan.heads - wave);
      team.each(members * chunks, [&](int64_t part) {
        const int64_t member = part / chunks, first = part % chunks * KEYS, head = wave + member;
        Packed *k = packed + member * (plan.k_size + plan.v_size);
        pack_keys<Element>(call, plan, head / call.kv_heads, head % call.kv_heads, first, least(first + KEYS, plan.keys),
                           k, k + plan.k_size);
      });
      // The last queries first: under a causal mask they have the most to do.
      team.each(members * group * plan.blocks, [&](int64_t part) {
        const int64_t member = part % (members * group) / group, of_group = part % group, kv_head = wave + member;
        const int64_t first = (plan.blocks - 1 - part / (members * group)) * QUERIES;
        const Packed *k = packed + member * (plan.k_size + plan.v_size);
        attend_block<Element, WATCH>(call, plan, block, kv_head / call.kv_heads,
                                     kv_head % call.kv_heads * group + of_group, first,
                                     least(QUERIES, call.queries - first), k, k + plan.k_size);
      });
    }
  });
}

template <class Element>
void attend_watched(const Call &call, char *workspace) {
  switch (watched(call)) {
    case NOTHING: return attend_all<Element, NOTHING>(call, workspace);
    case SOME: return attend_all<Element, SOME>(call, workspace);
    case ALL: return attend_all<Element, ALL>(call, workspace);
  }
}

template <class Element>
int64_t packed_workspace(const Call &call) {
  const ForwardPlan<Element> plan(call);
  return plan.shared + call.threads * plan.own;
}

int64_t attend_workspace(const Call &call) {
  return call.dtype ? packed_workspace<Bfloat16>(call) : packed_workspace<float>(call);
}
void attend_run(const Call &call, char *workspace) {
  call.dtype ? attend_watched<Bfloat16>(call, workspace) : attend_watched<float>(call, workspace);
}

}  // namespace
