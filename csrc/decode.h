// The forward pass for few queries, as in decoding: unpacked K and V are read once for all query heads of a group.
//
// The rows of a kv head are the (query head of its group, query) pairs, which are computed together block by block of
// keys. A task is one part of the keys of a kv head, so that few heads make enough tasks (as in Flash-Decoding). The
// softmax rows of the parts are then merged in the order of the keys. The division depends on shapes alone, so the bits
// do not depend on the number of threads.
//
// Keys that are not finite are rare, so a part is computed without looking for them in k and v. Where a score or a sum
// turns out not to be finite, the part is computed again, with a check of each key.
//
// Decoding looks for NaN afterwards. A separate check of each value took a fifth of the time in bfloat16. For finite
// inputs nothing else is read. Dot products of bfloat16 (`vdpbf16ps`) were tried for the scores, and were slower than
// converted keys (0.85).
//
// Decoding uses several threads from half a million multiplications on, a quarter of what other passes need, because it
// is bound by memory: with 1,024 keys and 8 heads two threads take 0.43 of the time of one.
//
// Decoding with grouped heads is bound by arithmetic in bfloat16 (Sapphire Rapids, one thread, four query heads per kv
// head). A key and its value of head_dim 64 take 32 multiply-adds of 512 bits, 8 conversions, 7 instructions for the
// sums of lanes and 4 for the softmax, on two ports: 26 cycles or 9.5 ns, while the plain read of these 256 bytes takes
// 9 ns from the L3 cache and 2 ns from L2. So the ratio of the two was 0.77 for data in L3, and 0.79 for data in
// memory; 0.87 and 0.96 with two and one query heads. In float32 the same arithmetic takes half of the time of the
// read, and the ratio is 0.87 to 0.92. What was measured on the way: repeating 16 bytes of a key for four rows, to have
// fewer lanes to add, was no faster, because the converted keys must be stored and loaded; the compiler computed the
// addresses of keys as a vector, which took longer than their products; a division of 64 bits per pair of values in
// int8 took a quarter of the time. Prefetching the block after the next one into L2 makes data in memory 7 to 9 %
// faster and data in L3 6 % slower, so it is done from 64 MiB on. Blocks of 128 keys, and prefetching into L2 alone,
// were slower.
#pragma once
#include "call.h"
#include "forward.h"
#include "matvec.h"
#include "pack.h"
#include "simd.h"
#include "softmax.h"
#include "threads.h"
#include "workspace.h"

namespace {

constexpr int64_t DECODE_MIN_TASKS = 32;  // per call, where parts of DECODE_MIN_PART keys allow it
constexpr int64_t DECODE_MIN_PART = 512;
constexpr double WORK_PER_MULTIPLICATION = 4;  // of a matrix product: decoding waits for memory
constexpr int64_t DECODE_MEMORY_BYTES = int64_t(64) << 20;  // of k and v, which are expected in no cache from here on
static_assert(DECODE_KEYS / 2 % COLUMNS == 0, "blocks are whole panels");
static_assert(DECODE_KEYS <= MAX_BLOCK_KEYS, "a row can add a block");

// ---------------------------------------------------------------- sizes and workspace

struct DecodePlan {
  int64_t rows;          // of a kv head
  int64_t heads;         // kv heads of the whole batch
  int64_t parts, part;   // parts of the keys of a head, keys of a part
  int64_t block;         // keys of a block
  int64_t ahead;         // keys by which the second prefetch is ahead, see Prefetcher
  int64_t depth, width;  // padded head_dim and value_dim

  explicit DecodePlan(const Call &call) {
    rows = call.heads / max(call.kv_heads, 1) * call.queries;
    heads = call.batch * call.kv_heads;
    const int64_t wanted = min(ceil_div(DECODE_MIN_TASKS, max(heads, 1)), ceil_div(call.keys, DECODE_MIN_PART));
    part = round_up(ceil_div(call.keys, max(wanted, 1)), DECODE_KEYS);
    parts = max(ceil_div(call.keys, max(part, 1)), 1);
    const int64_t size = call.k_scales ? 1 : call.dtype == Dtype::FLOAT32 ? 4 : 2;
    const int64_t bytes = (call.head_dim + call.value_dim) * size;
    block = DECODE_KEYS * bytes <= 32 << 10 ? DECODE_KEYS : DECODE_KEYS / 2;  // fits into the L1 cache
    ahead = heads * call.keys * bytes >= DECODE_MEMORY_BYTES ? block : 0;
    depth = round_up(call.head_dim, LANES);
    width = round_up(call.value_dim, LANES);
  }
};

// The memory that all threads share: the results of each part of each kv head.
struct DecodeParts {
  int64_t *remaining;  // (heads): parts that are not finished
  SoftmaxRow *rows;    // (heads, parts, rows)
  float *sums;         // (heads, parts, rows, width): weighted sums of the values
  int64_t bytes;

  DecodeParts(const DecodePlan &plan, char *memory) {
    Workspace workspace{memory};
    remaining = workspace.take<int64_t>(plan.heads);
    rows = workspace.take<SoftmaxRow>(plan.heads * plan.parts * plan.rows);
    sums = workspace.take<float>(plan.heads * plan.parts * plan.rows * plan.width);
    bytes = workspace.bytes;
  }
};

// The memory of one thread.
struct DecodeScratch {
  Query *queries;      // (rows)
  float *q;            // (rows, depth), or as many numbers in int16
  float *q_scales;     // (rows): factors of the numbers in int16; NaN for a query that is not finite
  float *scores;       // (rows, DECODE_STRIDE): scores, replaced by weights
  float *factors;      // (rows): factors of the sums over earlier keys
  int16_t *pairs;      // (rows, DECODE_KEYS): weights of values in int8
  float *pair_scales;  // (rows): their factors; NaN where a weight is not finite
  float *special;      // (DECODE_KEYS): 1 for special keys, else 0
  float *values;       // (DECODE_KEYS, width): values of a block without those of non-finite keys; before, a query
  int64_t bytes;

  DecodeScratch(const DecodePlan &plan, char *memory) {
    Workspace workspace{memory};
    queries = workspace.take<Query>(plan.rows);
    q = workspace.take<float>(plan.rows * plan.depth);
    q_scales = workspace.take<float>(plan.rows);
    scores = workspace.take<float>(plan.rows * DECODE_STRIDE);
    factors = workspace.take<float>(plan.rows);
    pairs = workspace.take<int16_t>(plan.rows * DECODE_KEYS);
    pair_scales = workspace.take<float>(plan.rows);
    special = workspace.take<float>(DECODE_KEYS);
    values = workspace.take<float>(max(DECODE_KEYS * plan.width, plan.depth));
    bytes = workspace.bytes;
  }
};

// ---------------------------------------------------------------- a part of the keys of one head

// The type of q in multiply_keys, and of the sums of its products.
template <class Stored>
struct NumberOf {
  using Type = float;
  using Products = Floats;
};
template <>
struct NumberOf<Int8> {
  using Type = int16_t;
  using Products = Ints;
};

// Round a row of `dim` floats to int16 for multiply_keys, and return the factor of these numbers. The error, 1/65534 of
// the largest element, is small next to that of keys in int8. Sums of products fit into 32 bits.
INLINE float round_row(const float *from, int64_t dim, int64_t padded, int16_t *to) {
  Floats sizes = (Floats){};
  for (int64_t x = 0; x < padded; x += LANES) sizes = maximum(sizes, absolute(load(from + x)));
  const float largest = reduce_max(sizes), limit = 32767.f / static_cast<float>(ceil_div(dim, 512));
  const float inverse = largest > 0 ? limit / largest : 0.f;
  for (int64_t x = 0; x < padded; x += LANES) {
    // Adding 1.5 * 2^23 rounds to an integer, which is then in the last bits of the sum.
    const Ints bits = (Ints)(load(from + x) * broadcast(inverse) + broadcast(12582912.f));
    const Shorts numbers = __builtin_convertvector(bits, Shorts);
    __builtin_memcpy(to + x, &numbers, sizeof numbers);
  }
  return largest / limit;
}

// Round `count` weights to int16 for add_paired_values, followed by zeros, and return their factor; NaN where a weight is
// not finite.
INLINE float round_weights(float *weights, int64_t count, int16_t *to) {
  const int64_t padded = round_up(count, LANES);
  for (int64_t i = count; i < padded; i++) weights[i] = 0;
  const float factor = round_row(weights, count, padded, to);
  return all_finite(weights, padded) ? factor : NOT_A_NUMBER;
}

// The rows of a part of the keys of one kv head.
struct DecodeRows {
  const Call &call;
  const DecodePlan &plan;
  const DecodeScratch &scratch;
  const int64_t batch;
  SoftmaxRow *const rows;  // (rows)
  float *const sums;       // (rows, width)

  template <class Stored>
  typename NumberOf<Stored>::Type *query(int64_t row) const {
    return reinterpret_cast<typename NumberOf<Stored>::Type *>(scratch.q) + row * plan.depth;
  }

  void clear() const {
    for (int64_t row = 0; row < plan.rows; row++) clear_row(call, rows[row], batch, row % call.queries);
    memset(sums, 0, sizeof(float) * static_cast<size_t>(plan.rows * plan.width));
  }

  // Compute the scores of `count` keys, from column `offset` on, and prefetch their values.
  template <class Stored>
  NOINLINE void compute_scores(const Stored *k, const Stored *v, int64_t count, int64_t offset) const {
    Prefetcher prefetcher(v, call.v_strides.row, call.value_dim, count, plan.ahead);
    for_rows(plan.rows, Scores<Stored>{*this, k, count, offset, prefetcher});
  }

  // Turn the scores of a block of keys [first, end) into weights.
  template <Statistics STATISTICS>
  NOINLINE void compute_weights(int64_t first, int64_t end) const {
    const bool terms = call.softcap > 0 || call.bias || call.visible;
    const float *special = mark_special_keys(call, batch, first, end, scratch.special);
    bool all_plain = STATISTICS == Statistics::NONE && !terms && call.dropout == 0;
    for (int64_t row = 0; row < plan.rows; row++)
      all_plain &= scratch.queries[row].start <= first && scratch.queries[row].stop >= end;
    for_rows(plan.rows, Weights<STATISTICS>{*this, first, end, special, terms, all_plain});
  }

  // Add `count` values times their weights, from column `offset` on, to the sums, and prefetch the keys of the next block.
  template <class Value>
  NOINLINE void add_weighted(const Value *v, int64_t stride, int64_t count, int64_t offset, const Value *next_k,
                             int64_t next_count) const {
    Prefetcher prefetcher(next_k, call.k_strides.row, call.head_dim, next_count, plan.ahead);
    for_rows(plan.rows, Values<Value>{*this, v, stride, count, offset, prefetcher});
  }

 private:
  template <class Stored>
  struct Scores {
    const DecodeRows &all;
    const Stored *k;
    int64_t count, offset;
    Prefetcher &prefetcher;

    template <int COUNT>
    inline __attribute__((always_inline)) void run(int64_t row) const {
      using Products = typename NumberOf<Stored>::Products;
      const Call &call = all.call;
      const int64_t depth = all.plan.depth;
      const auto *q = all.query<Stored>(row);
      float *scores = all.scratch.scores + row * DECODE_STRIDE + offset;
      if constexpr (HAS_KEY_PAIRS<Stored> && COUNT >= 3)
        multiply_key_pairs<COUNT, Products>(q, depth, k, call.k_strides.row, call.head_dim, count, prefetcher, scores);
      else
        multiply_keys<COUNT, Products>(q, depth, k, call.k_strides.row, call.head_dim, count, prefetcher, scores);
    }
  };

  template <Statistics STATISTICS>
  struct Weights {
    const DecodeRows &all;
    int64_t first, end;
    const float *special;
    bool terms, all_plain;

    template <int COUNT>
    inline __attribute__((always_inline)) void run(int64_t from) const {
      const DecodeScratch &scratch = all.scratch;
      float *scores = scratch.scores + from * DECODE_STRIDE, *const no_copy = nullptr;
      if constexpr (STATISTICS == Statistics::NONE)
        if (all_plain &&
            update_plain_rows<COUNT>(all.rows + from, scores, DECODE_STRIDE, end - first, scratch.factors + from))
          return;
      for (int64_t row = from; row < from + COUNT; row++, scores += DECODE_STRIDE) {
        const Query &query = scratch.queries[row];
        const bool plain = !terms && query.start <= first && query.stop >= end;
        scratch.factors[row] =
            update_row<STATISTICS>(all.call, query, all.rows[row], scores, first, end, plain, special, no_copy);
      }
    }
  };

  template <class Value>
  struct Values {
    const DecodeRows &all;
    const Value *v;
    int64_t stride, count, offset;
    Prefetcher &prefetcher;

    template <int COUNT>
    inline __attribute__((always_inline)) void run(int64_t row) const {
      const DecodeScratch &scratch = all.scratch;
      const int64_t width = all.plan.width, dim = all.call.value_dim;
      const float *factors = scratch.factors + row;
      float *sums = all.sums + row * width;
      int64_t done = 0;
      if constexpr (sizeof(Value) == 1 && HAS_PAIRS)
        done = add_paired_values<COUNT>(scratch.pairs + row * DECODE_KEYS, scratch.pair_scales + row, factors, v, stride,
                                        count, dim, prefetcher, sums, width);
      add_values<COUNT>(scratch.scores + row * DECODE_STRIDE + offset, factors, v, stride, count, dim, done, prefetcher,
                        sums, width);
    }
  };
};

// Stored: the elements of k and v.
template <class Stored>
class DecodePass {
 public:
  DecodePass(const Call &call, const DecodePlan &plan, const DecodeScratch &scratch, int64_t kv_head, SoftmaxRow *rows,
             float *sums)
      : call_(call), plan_(plan), scratch_(scratch), batch_(kv_head / call.kv_heads),
        all_{call, plan, scratch, kv_head / call.kv_heads, rows, sums} {
    const int64_t head = kv_head % call.kv_heads;
    first_head_ = head * (call.heads / call.kv_heads);
    k_ = row_of<Stored>(call.k, call.k_strides, batch_, head);
    v_ = row_of<Stored>(call.v, call.v_strides, batch_, head);
    if (!SCALED) return;
    k_scales_ = row_of<float>(call.k_scales, call.k_scales_strides, batch_, head);
    v_scales_ = row_of<float>(call.v_scales, call.v_scales_strides, batch_, head);
  }

  // Attend to the keys [first, end).
  void attend(int64_t first, int64_t end) {
    int64_t start = end, stop = first;  // keys that some row sees
    for (int64_t row = 0; row < plan_.rows; row++) {
      const Query &query = scratch_.queries[row] = read_query(call_, batch_, head_of(row), row % call_.queries);
      if (query.start == query.stop) continue;
      start = min(start, query.start);
      stop = max(stop, query.stop);
    }
    start = max(start, first);
    stop = min(stop, end);
    if (start >= stop) return all_.clear();
    for (int64_t row = 0; row < plan_.rows; row++) {
      float *to = SCALED ? scratch_.values : scratch_.q + row * plan_.depth;
      read_query_row(row, to);
      if constexpr (!SCALED) {
        const bool paired = HAS_KEY_PAIRS<Stored> && in_large_group(row, plan_.rows);
        paired ? reorder_row<Stored, false, LANES>(call_.head_dim, to) : reorder_row<Stored, false>(call_.head_dim, to);
      }
      if constexpr (SCALED) {
        const bool finite_row = finite(to[0]);
        if (!finite_row) memset(to, 0, sizeof(float) * static_cast<size_t>(plan_.depth));
        scratch_.q_scales[row] = round_row(to, call_.head_dim, plan_.depth, all_.query<Stored>(row));
        if (!finite_row) scratch_.q_scales[row] = NOT_A_NUMBER;
      }
    }
    if (!attend(start, stop, false)) attend(start, stop, true);
    for (int64_t row = 0; row < plan_.rows; row++)
      reorder_row<Stored, true>(call_.value_dim, all_.sums + row * plan_.width);
  }

 private:
  static constexpr bool SCALED = sizeof(Stored) == 1;

  int64_t head_of(int64_t row) const { return first_head_ + row / call_.queries; }
  bool finite_query(int64_t row) const {
    if constexpr (SCALED) return finite(scratch_.q_scales[row]);
    else return call_.head_dim == 0 || finite(all_.query<Stored>(row)[0]);
  }

  void read_query_row(int64_t row, float *to) const {
    const float factor = static_cast<float>(call_.scale) * LOG2_E;
    with_element(call_, [&](auto element) {
      const auto *q = row_of<decltype(element)>(call_.q, call_.q_strides, batch_, head_of(row), row % call_.queries);
      pack_row(q, call_.head_dim, plan_.depth, factor, to);
    });
  }

  // Attend to the keys [start, stop). Unless the keys are `checked`, return false where a score or a sum is not finite.
  bool attend(int64_t start, int64_t stop, bool checked) {
    all_.clear();
    for (int64_t key = start / COLUMNS * COLUMNS; key < stop; key += plan_.block)
      if (!block(key, min(key + plan_.block, round_up(stop, COLUMNS)), max(start, key), min(stop, key + plan_.block),
                 stop, checked))
        return false;
    for (int64_t row = 0; !checked && row < plan_.rows; row++)
      if (finite_query(row) && !all_finite(all_.sums + row * plan_.width, plan_.width)) return false;
    return true;
  }

  // A block of keys [first, end) in whole panels, of which some row sees [start, stop). Later blocks reach `last_stop`.
  bool block(int64_t first, int64_t end, int64_t start, int64_t stop, int64_t last_stop, bool checked) {
    const Stored *k = k_ + start * call_.k_strides.row, *v = v_ + start * call_.v_strides.row;
    const int64_t count = stop - start, offset = start - first;
    all_.compute_scores(k, v, count, offset);
    Floats zeros = (Floats){};  // scores times 0: NaN where one of them is not finite
    for (int64_t row = 0; row < plan_.rows; row++) {
      float *scores = scratch_.scores + row * DECODE_STRIDE;
      if (SCALED) multiply(scores + offset, k_scales_ + start, scratch_.q_scales[row], count);
      for (int64_t i = 0; i < offset; i++) scores[i] = 0;
      for (int64_t i = offset + count; i < end - first; i++) scores[i] = 0;
      if (checked || !finite_query(row)) continue;
      for (int64_t i = 0; i < end - first; i += LANES) zeros += load(scores + i) * broadcast(0.f);
    }
    if (!(sum(zeros) == 0)) return false;
    if (checked) exclude_nonfinite_keys(k, v, start, count, offset);
    with_statistics(call_, [&](auto constant) { all_.compute_weights<decltype(constant)::VALUE>(first, end); });
    if (checked) {
      all_.add_weighted<float>(scratch_.values, plan_.width, count, offset, nullptr, 0);
    } else {
      for (int64_t row = 0; SCALED && row < plan_.rows; row++) {
        float *weights = scratch_.scores + row * DECODE_STRIDE + offset;
        multiply(weights, v_scales_ + start, 1, count);
        if (HAS_PAIRS) scratch_.pair_scales[row] = round_weights(weights, count, scratch_.pairs + row * DECODE_KEYS);
      }
      all_.add_weighted(v, call_.v_strides.row, count, offset, k + count * call_.k_strides.row,
                        min(last_stop - stop, plan_.block));
    }
    return true;
  }

  // Scores of a key that is not finite, in k or v, become NaN, and its value becomes 0, as in pack_keys.
  void exclude_nonfinite_keys(const Stored *k, const Stored *v, int64_t start, int64_t count, int64_t offset) const {
    for (int64_t key = 0; key < count; key++) {
      const Stored *value = v + key * call_.v_strides.row;
      bool good = row_finite(k + key * call_.k_strides.row, call_.head_dim) && row_finite(value, call_.value_dim);
      if (SCALED) good &= finite(k_scales_[start + key]) && finite(v_scales_[start + key]);
      float *copy = scratch_.values + key * plan_.width, *scores = scratch_.scores + offset + key;
      const float scale = SCALED ? v_scales_[start + key] : 1.f;
      for (int64_t x = 0; x < call_.value_dim; x++)
        copy[loading_place<Stored>(x, call_.value_dim)] = good ? to_float(value + x) * scale : 0.f;
      for (int64_t row = 0; row < plan_.rows && !good; row++) scores[row * DECODE_STRIDE] = NOT_A_NUMBER;
    }
  }

  const Call &call_;
  const DecodePlan &plan_;
  const DecodeScratch &scratch_;
  const int64_t batch_;
  const DecodeRows all_;
  int64_t first_head_;
  const Stored *k_, *v_;
  const float *k_scales_ = nullptr, *v_scales_ = nullptr;  // (keys)
};

// ---------------------------------------------------------------- the pass

// Merge the parts of the rows of a kv head, and write their results. Uses `factors`, (rows).
NOINLINE void write_merged_parts(const Call &call, const DecodePlan &plan, const DecodeParts &parts, int64_t kv_head,
                                 float *factors) {
  const int64_t batch = kv_head / call.kv_heads, first_head = kv_head % call.kv_heads * (call.heads / call.kv_heads);
  SoftmaxRow *const rows = parts.rows + kv_head * plan.parts * plan.rows;
  float *const sums = parts.sums + kv_head * plan.parts * plan.rows * plan.width;
  for (int64_t i = plan.rows; i < plan.parts * plan.rows; i++) {
    const int64_t row = i % plan.rows;
    const MergeFactors merged = merge_rows(call, rows[row], rows[i]);
    if (merged.later == 0 && merged.earlier == 1) continue;
    float *total = sums + row * plan.width;
    const float *later = sums + i * plan.width;
    for (int64_t x = 0; x < plan.width; x++) total[x] = total[x] * merged.earlier + later[x] * merged.later;
  }
  // The rows are the queries of one head after the other.
  write_softmax_of_rows(call, (batch * call.heads + first_head) * call.queries, plan.rows, rows, factors);
  for (int64_t row = 0, head = first_head; row < plan.rows; row += call.queries, head++)
    write_outputs(call, batch, head, 0, call.queries, sums + row * plan.width, plan.width, factors + row);
}

template <class Stored>
void decode_all(const Call &call, char *workspace) {
  const DecodePlan plan(call);
  const DecodeParts parts(plan, workspace);
  const int64_t thread_bytes = DecodeScratch(plan, nullptr).bytes;
  for (int64_t head = 0; head < plan.heads; head++) parts.remaining[head] = plan.parts;
  const int64_t work = plan.heads * plan.rows * call.keys * (call.head_dim + call.value_dim);
  run_parallel(team_size(call.threads, WORK_PER_MULTIPLICATION * static_cast<double>(work)), [&](Team &team) {
    const DecodeScratch scratch(plan, workspace + parts.bytes + team.thread * thread_bytes);
    team.for_each(plan.heads * plan.parts, [&](int64_t task) {
      const int64_t kv_head = task / plan.parts, first = task % plan.parts * plan.part, row = task * plan.rows;
      DecodePass<Stored> pass(call, plan, scratch, kv_head, parts.rows + row, parts.sums + row * plan.width);
      pass.attend(first, min(first + plan.part, call.keys));
      // The thread that finishes the last part of a head merges all its parts, always in the same order, so that no
      // thread has to wait.
      if (__atomic_sub_fetch(&parts.remaining[kv_head], 1, __ATOMIC_ACQ_REL) > 0) return;
      write_merged_parts(call, plan, parts, kv_head, scratch.factors);
    });
  });
}

// Whether this pass is faster than forward.h: for so few queries per head, packing and partly empty tiles do not pay.
// (Where pairs of packed bfloat16 are multiplied without conversion, fewer queries pay for packing.) Only this pass reads
// int8.
bool decode_is_faster(const Call &call) {
  return call.k_scales || call.queries <= (BF16_DOT && call.dtype == Dtype::BFLOAT16 ? 4 : 8);
}

int64_t decode_workspace(const Call &call) {
  const DecodePlan plan(call);
  return DecodeParts(plan, nullptr).bytes + call.threads * DecodeScratch(plan, nullptr).bytes;
}
void decode_run(const Call &call, char *workspace) {
  if (call.k_scales) return decode_all<Int8>(call, workspace);
  with_element(call, [&](auto element) { decode_all<decltype(element)>(call, workspace); });
}

}  // namespace
