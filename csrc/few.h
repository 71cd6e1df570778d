// The forward pass for few queries, as in decoding: K and V are read once for all query heads of a group, unpacked.
//
// The rows of a key/value head are the (head of its group, query) pairs; they go together through blocks of its keys.
// A task takes one part of the keys, so that there are tasks enough where there are few heads; the parts' rows of the
// softmax are merged afterwards, in the order of the keys. All of that depends on shapes alone: the same bits for any
// number of threads.
#pragma once
#include "call.h"
#include "forward.h"
#include "lanes.h"
#include "pack.h"
#include "rows.h"
#include "team.h"
#include "unpacked.h"

namespace {

constexpr int64_t FEW_TASKS = 32, FEW_PART = 512;  // wanted at least: tasks of a call, keys of a part
static_assert(FEW_KEYS / 2 % COLUMNS == 0, "blocks are whole panels");

// ---------------------------------------------------------------- sizes and workspace

struct FewPlan {
  int64_t rows;          // of a key/value head
  int64_t heads;         // key/value heads of the batch
  int64_t parts, part;   // of the keys, and keys of a part
  int64_t block;         // keys of a block
  int64_t depth, width;  // padded numbers of q's features, of v's
  int64_t left;          // bytes of the counts of parts that are still to be done, one a head
  int64_t states, sums;  // bytes that all parts of all heads hold: rows of the softmax, values summed by weight
  int64_t own;           // bytes of a thread

  explicit FewPlan(const Call &call) {
    rows = call.heads / most(call.kv_heads, 1) * call.queries;
    heads = call.batch * call.kv_heads;
    const int64_t wanted = least(whole(FEW_TASKS, most(heads, 1)), whole(call.keys, FEW_PART));
    part = up(whole(call.keys, most(wanted, 1)), FEW_KEYS);
    parts = most(whole(call.keys, most(part, 1)), 1);
    const int64_t bytes = (call.head_dim + call.value_dim) * (call.dtype ? 2 : 4);
    block = FEW_KEYS * bytes <= 32 << 10 ? FEW_KEYS : FEW_KEYS / 2;  // in the first cache, with what is fetched
    depth = up(call.head_dim, LANES);
    width = up(call.value_dim, LANES);
    left = up(heads * static_cast<int64_t>(sizeof(int64_t)), 64);
    states = up(heads * parts * rows * static_cast<int64_t>(sizeof(Row)), 64);
    sums = up(heads * parts * rows * width * 4, 64);
    own = up(rows * static_cast<int64_t>(sizeof(Query)), 64) +
          4 * (up(rows * depth, 16) + up(rows * FEW_STRIDE, 16) + up(rows, 16) + FEW_KEYS + FEW_KEYS * up(width, 16));
  }
};

// One thread's memory.
struct FewScratch {
  Query *queries;  // (rows)
  float *q;        // (rows, depth)
  float *scores;   // (rows, FEW_STRIDE), then weights
  float *factors;  // (rows) what earlier sums are multiplied by
  float *special;  // (FEW_KEYS)
  float *values;   // (FEW_KEYS, width) where what is not finite had to be left out

  FewScratch(const FewPlan &plan, char *memory) {
    queries = reinterpret_cast<Query *>(memory);
    q = reinterpret_cast<float *>(memory + up(plan.rows * static_cast<int64_t>(sizeof(Query)), 64));
    scores = q + up(plan.rows * plan.depth, 16);
    factors = scores + up(plan.rows * FEW_STRIDE, 16);
    special = factors + up(plan.rows, 16);
    values = special + FEW_KEYS;
  }
};

// ---------------------------------------------------------------- a part of the keys of one head

template <class Element>
class FewPass {
 public:
  FewPass(const Call &call, const FewPlan &plan, const FewScratch &scratch, int64_t kv_head, Row *rows, float *sums)
      : call_(call), plan_(plan), scratch_(scratch), batch_(kv_head / call.kv_heads), rows_(rows), sums_(sums) {
    const int64_t head = kv_head % call.kv_heads;
    first_head_ = head * (call.heads / call.kv_heads);
    k_ = head_of<Element>(call.k, batch_, call.k_batch, head, call.k_head);
    v_ = head_of<Element>(call.v, batch_, call.v_batch, head, call.v_head);
  }

  // Attend to the keys [first, behind).
  void attend(int64_t first, int64_t behind) {
    int64_t start = behind, stop = first;  // what some row sees of them
    for (int64_t row = 0; row < plan_.rows; row++) {
      const int64_t head = first_head_ + row / call_.queries, i = row % call_.queries;
      Query &query = scratch_.queries[row] = query_of(call_, batch_, head, i);
      rows_[row] = row_before(call_, batch_, i);
      if (query.start == query.stop) continue;
      start = least(start, query.start);
      stop = most(stop, query.stop);
    }
    for (int64_t x = 0; x < plan_.rows * plan_.width; x++) sums_[x] = 0;
    start = most(start, first);
    stop = least(stop, behind);
    if (start >= stop) return;
    for (int64_t row = 0; row < plan_.rows; row++) {
      const int64_t head = first_head_ + row / call_.queries, i = row % call_.queries;
      const Element *q = head_of<Element>(call_.q, batch_, call_.q_batch, head, call_.q_head) + i * call_.q_row;
      const float factor = static_cast<float>(call_.scale) * LOG2_E;
      pack_row(q, call_.head_dim, plan_.depth, factor, scratch_.q + row * plan_.depth);
    }
    const int64_t size = plan_.block;
    for (int64_t key = start / COLUMNS * COLUMNS; key < stop; key += size)
      block(key, least(key + size, up(stop, COLUMNS)), most(start, key), least(stop, key + size), stop);
  }

 private:
  // A block of keys [first, behind), whole panels, of which some row sees [start, stop); more follow up to `end`.
  void block(int64_t first, int64_t behind, int64_t start, int64_t stop, int64_t end) {
    const Element *k = k_ + start * call_.k_row, *v = v_ + start * call_.v_row;
    const int64_t count = stop - start, offset = start - first;
    Ahead values(v, call_.v_row, call_.value_dim, count);
    by_rows(plan_.rows, Scores{*this, k, values, count, offset});
    for (int64_t row = 0; row < plan_.rows; row++) {
      float *scores = scratch_.scores + row * FEW_STRIDE;
      for (int64_t i = 0; i < offset; i++) scores[i] = 0;
      for (int64_t i = offset + count; i < behind - first; i++) scores[i] = 0;
    }
    Ahead keys(k + count * call_.k_row, call_.k_row, call_.head_dim, least(end - stop, plan_.block));
    const bool good = block_finite(v, count, behind - first, keys);
    if (!good) leave_out_bad_keys(k, v, count, offset);
    switch (watched(call_)) {
      case NOTHING: absorb_block<NOTHING>(first, behind); break;
      case SOME: absorb_block<SOME>(first, behind); break;
      case ALL: absorb_block<ALL>(first, behind); break;
    }
    if (good) by_rows(plan_.rows, Values<Element>{*this, v, keys, call_.v_row, count, offset});
    else by_rows(plan_.rows, Values<float>{*this, scratch_.values, keys, plan_.width, count, offset});
  }

  struct Scores {
    const FewPass &pass;
    const Element *k;
    Ahead &next;
    int64_t count, offset;

    template <int COUNT>
    inline __attribute__((always_inline)) void take(int64_t row) const {
      const Call &call = pass.call_;
      const int64_t depth = pass.plan_.depth;
      few_scores<COUNT>(pass.scratch_.q + row * depth, depth, k, call.k_row, call.head_dim, count, next,
                        pass.scratch_.scores + row * FEW_STRIDE + offset);
    }
  };

  template <class Value>
  struct Values {
    const FewPass &pass;
    const Value *v;
    Ahead &next;
    int64_t stride, count, offset;

    template <int COUNT>
    inline __attribute__((always_inline)) void take(int64_t row) const {
      const FewScratch &scratch = pass.scratch_;
      const int64_t width = pass.plan_.width;
      add_values<COUNT>(scratch.scores + row * FEW_STRIDE + offset, scratch.factors + row, v, stride, count,
                        pass.call_.value_dim, next, pass.sums_ + row * width, width);
    }
  };

  // Whether the block's keys and values are all finite. A key that is not has no finite score with a finite query.
  bool block_finite(const Element *v, int64_t count, int64_t padded, Ahead &next) const {
    for (int64_t row = 0; row < plan_.rows; row++) {
      const bool bad_query = call_.head_dim > 0 && scratch_.q[row * plan_.depth] != scratch_.q[row * plan_.depth];
      if (!bad_query && !all_finite(scratch_.scores + row * FEW_STRIDE, padded)) return false;
    }
    return rows_finite(v, call_.v_row, count, call_.value_dim, next);
  }

  // A key that is not finite, in k or v, gets NaN for a score and 0 for a value, as when it is packed.
  void leave_out_bad_keys(const Element *k, const Element *v, int64_t count, int64_t offset) const {
    for (int64_t key = 0; key < count; key++) {
      const Element *value = v + key * call_.v_row;
      const bool good = row_finite(k + key * call_.k_row, call_.head_dim) && row_finite(value, call_.value_dim);
      float *copy = scratch_.values + key * plan_.width, *scores = scratch_.scores + offset + key;
      for (int64_t x = 0; x < call_.value_dim; x++) copy[x] = good ? one(value + x) : 0.f;
      for (int64_t row = 0; row < plan_.rows && !good; row++) scores[row * FEW_STRIDE] = NOT_A_NUMBER;
    }
  }

  // Turn the block's scores into weights.
  template <Watch WATCH>
  void absorb_block(int64_t first, int64_t behind) {
    const float *special = nullptr;
    if (WATCH != NOTHING && call_.on_special_keys) {
      special = scratch_.special;
      const uint8_t *flags = static_cast<const uint8_t *>(call_.special_keys) + batch_ * call_.keys;
      for (int64_t key = first; key < behind; key++)
        scratch_.special[key - first] = key < call_.keys && flags[key] ? 1.f : 0.f;
    }
    const bool terms = call_.softcap > 0 || call_.bias || call_.seen;
    for (int64_t row = 0; row < plan_.rows; row++) {
      const Query &query = scratch_.queries[row];
      const bool plain = !terms && query.start <= first && query.stop >= behind;
      scratch_.factors[row] = absorb<WATCH>(call_, query, rows_[row], scratch_.scores + row * FEW_STRIDE, first, behind,
                                            plain, special, leave_wide);
    }
  }

  const Call &call_;
  const FewPlan &plan_;
  const FewScratch &scratch_;
  const int64_t batch_;
  Row *const rows_;    // (rows)
  float *const sums_;  // (rows, width)
  int64_t first_head_;
  const Element *k_, *v_;
};

// ---------------------------------------------------------------- the pass

// Merge the parts of one row of one key/value head, and write it.
template <class Element>
void finish_parts(const Call &call, const FewPlan &plan, int64_t kv_head, int64_t row, Row *rows, float *sums) {
  const int64_t first = kv_head * plan.parts * plan.rows + row;
  Row &merged = rows[first];
  float *total = sums + first * plan.width;
  for (int64_t part = 1; part < plan.parts; part++) {
    const int64_t index = first + part * plan.rows;
    const Factors factors = merge(call, merged, rows[index]);
    if (factors.theirs == 0 && factors.mine == 1) continue;
    const float *later = sums + index * plan.width;
    for (int64_t x = 0; x < plan.width; x++) total[x] = total[x] * factors.mine + later[x] * factors.theirs;
  }
  const int64_t head = kv_head % call.kv_heads * (call.heads / call.kv_heads) + row / call.queries;
  finish<Element>(call, merged, kv_head / call.kv_heads, head, row % call.queries, total);
}

template <class Element>
void few_all(const Call &call, char *workspace) {
  const FewPlan plan(call);
  int64_t *left = reinterpret_cast<int64_t *>(workspace);
  Row *rows = reinterpret_cast<Row *>(workspace + plan.left);
  float *sums = reinterpret_cast<float *>(workspace + plan.left + plan.states);
  char *own = workspace + plan.left + plan.states + plan.sums;
  for (int64_t head = 0; head < plan.heads; head++) left[head] = plan.parts;
  const int64_t work = plan.heads * plan.rows * call.keys * (call.head_dim + call.value_dim);
  parallel(work < WORTH_A_TEAM ? 1 : call.threads, [&](Team &team) {
    const FewScratch scratch(plan, own + team.member * plan.own);
    team.each(plan.heads * plan.parts, [&](int64_t task) {
      const int64_t kv_head = task / plan.parts, first = task % plan.parts * plan.part, row = task * plan.rows;
      FewPass<Element> pass(call, plan, scratch, kv_head, rows + row, sums + row * plan.width);
      pass.attend(first, least(first + plan.part, call.keys));
      // Who does a head's last part merges them all, in the same order whoever it is: nobody has to wait.
      if (__atomic_sub_fetch(&left[kv_head], 1, __ATOMIC_ACQ_REL) > 0) return;
      for (int64_t i = 0; i < plan.rows; i++) finish_parts<Element>(call, plan, kv_head, i, rows, sums);
    });
  });
}

// Whether this pass is the faster one: packing and half-empty tiles do not pay for so few queries a head. (Of bfloat16
// there is half as much to read, and what is packed may be multiplied by pairs.)
bool few_takes(const Call &call) { return call.queries <= (call.dtype ? 4 : 8); }

int64_t few_workspace(const Call &call) {
  const FewPlan plan(call);
  return plan.left + plan.states + plan.sums + call.threads * plan.own;
}
void few_run(const Call &call, char *workspace) {
  call.dtype ? few_all<Bfloat16>(call, workspace) : few_all<float>(call, workspace);
}

}  // namespace
