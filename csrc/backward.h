// The backward pass: the gradients of queries, keys, values and bias, in one pass over the scores (arXiv:2205.14135).
//
//   P = exp(S - L)    dP = dO V^T    dS = P (Z dP - delta), delta_i = dO_i . O_i - dL_i, Z the dropout's factors
//   dV = (Z P)^T dO   dK = scale dS^T Q    dQ = scale dS K    dbias = dS; with a softcap, dS (1 - tanh^2) in dK and dQ
//
// A task is one chunk of the keys of one kv head, with all query heads of its group: no other task adds to its dK and
// dV. Each chunk has a partial dQ; these are added in the order of the chunks. Chunks depend on shapes alone, so the
// bits do not depend on the number of threads. Tasks that would add to the same cells of dbias are one task.
//
// Non-finite elements are replaced by 0 in the copies that multiply dS and P, because 0 times them would be NaN for
// rows that do not see them. Rows that see them are NaN through their logsumexp.
#pragma once
#include "backward_block.h"
#include "backward_memory.h"
#include "call.h"
#include "pack.h"
#include "score_terms.h"
#include "simd.h"
#include "threads.h"

namespace {

// ---------------------------------------------------------------- rows

// Copy a row as floats, with 0 for non-finite elements and up to `width`. Returns whether the row is finite throughout.
template <class Element>
INLINE bool pack_finite_row(const Element *from, int64_t dim, int64_t width, float *to) {
  if (copy_rows(from, 0, 1, dim, width, to, 0)) return true;
  zero_nonfinite(to, width);
  return false;
}

// The dot product of two rows.
template <class Element>
INLINE float dot(const Element *a, const Element *b, int64_t dim) {
  Floats sums = (Floats){};
  float rest = 0;
  int64_t x = 0;
  for (; x + LANES <= dim; x += LANES) sums += load(a + x) * load(b + x);
  for (; x < dim; x++) rest += to_float(a + x) * to_float(b + x);
  return sum(sums) + rest;
}

template <class Element>
INLINE bool all_zero(const Element *row, int64_t dim) {
  for (int64_t x = 0; x < dim; x++)
    if (to_float(row + x) != 0) return false;
  return true;
}


// ---------------------------------------------------------------- the pass

class Backward {
 public:
  Backward(const Call &call, char *workspace) : call_(call), plan_(backward_plan(call)), threads_(workspace) {
    heads_ = workspace + plan_.threads * plan_.thread_bytes;
  }

  void run() {
    if (plan_.kv_heads == 0 || plan_.group == 0) return;
    run_parallel(plan_.threads, [this](Team &team) {
      KeyBlock keys(plan_, call_, threads_ + team.thread * plan_.thread_bytes);
      for (int64_t begin = 0; begin < plan_.kv_heads; begin += plan_.wave) {
        const int64_t heads = min(plan_.wave, plan_.kv_heads - begin);
        const int64_t blocks = plan_.blocks, parts = heads * plan_.group * blocks, tasks = heads * plan_.chunks;
        team.for_each(parts, [&](int64_t part) {
          const PackedHead head = head_at(begin, part / blocks);
          with_element(call_, [&](auto element) { pack_block<decltype(element)>(head, part % blocks); });
        });
        // The first chunks first: under a causal mask they take longest.
        team.for_each(tasks, [&](int64_t part) { task(begin, heads, part % heads, part / heads, keys); });
        team.for_each(parts, [&](int64_t part) { write_block(head_at(begin, part / blocks), part % blocks); });
      }
    });
  }

 private:
  // Query head `index` of the wave that begins with kv head `begin`.
  PackedHead head_at(int64_t begin, int64_t index) const {
    const int64_t head = begin * plan_.group + index;  // of the whole batch
    return PackedHead(plan_, head / call_.heads, head % call_.heads, heads_ + index * plan_.head_bytes);
  }

  // ------------------------------------------------------------ queries

  template <class Element>
  NOINLINE void pack_block(const PackedHead &head, int64_t block) const {
    const int64_t first = block * BACKWARD_QUERIES, end = min(plan_.rows, first + BACKWARD_QUERIES);
    for (int64_t chunk = 0; chunk < plan_.chunks; chunk++) head.started[chunk * plan_.blocks + block] = 0;
    Span block_span = span_of_no_query(call_);
    for (int64_t tile = first / ROWS; tile < end / ROWS; tile++) {
      Span span = span_of_no_query(call_);
      for (int64_t row = tile * ROWS; row < tile * ROWS + ROWS; row++) {
        begin_query<Element>(head, row);
        span.add(head.queries[row]);
      }
      head.tiles[tile] = span;
      block_span.add(span);
    }
    head.blocks[block] = block_span;
    if (block_span.empty()) return;  // its rows will not be read
    for (int64_t row = first; row < end; row++) pack_query<Element>(head, row);
  }

  // Read the visible keys and the logsumexp of a row, and compute its delta. Rows past the last query see no key.
  template <class Element>
  void begin_query(const PackedHead &head, int64_t row) const {
    head.queries[row] = {};
    head.logsumexp[row] = head.delta[row] = 0;
    if (row >= call_.queries) return;
    const int64_t index = (head.batch * call_.heads + head.head) * call_.queries + row;
    const float logsumexp = call_.logsumexp[index];
    const float grad_logsumexp = call_.grad_logsumexp ? call_.grad_logsumexp[index] : 0.f;
    const Element *grad_output = grad_output_row<Element>(head, row);
    // A NaN row that the loss does not use must not affect the gradients of its keys.
    const bool unused = logsumexp != logsumexp && grad_logsumexp == 0 && all_zero(grad_output, call_.value_dim);
    if (logsumexp != -INF && !unused) {
      const Element *output = row_of<Element>(call_.output, call_.output_strides, head.batch, head.head, row);
      head.queries[row] = read_query(call_, head.batch, head.head, row);
      head.logsumexp[row] = to_log2(broadcast(logsumexp))[0];
      head.delta[row] = dot(grad_output, output, call_.value_dim) - grad_logsumexp;
    }
    call_.delta[index] = head.delta[row];
  }

  template <class Element>
  void pack_query(const PackedHead &head, int64_t row) const {
    float *q = head.q + row * plan_.q_stride, *grad_output = head.grad_output + row * plan_.v_stride;
    if (row >= call_.queries) {
      memset(q, 0, static_cast<size_t>(plan_.q_width) * sizeof(float));
      memset(grad_output, 0, static_cast<size_t>(plan_.v_width) * sizeof(float));
      return;
    }
    const Element *from = row_of<Element>(call_.q, call_.q_strides, head.batch, head.head, row);
    pack_finite_row(from, call_.head_dim, plan_.q_width, q);
    if (!pack_finite_row(grad_output_row<Element>(head, row), call_.value_dim, plan_.v_width, grad_output))
      head.logsumexp[row] = NOT_A_NUMBER;  // then its P is NaN
  }

  template <class Element>
  const Element *grad_output_row(const PackedHead &head, int64_t row) const {
    return row_of<Element>(call_.grad_output, call_.grad_output_strides, head.batch, head.head, row);
  }

  // Add the partial dQ of the chunks of a block, in their order, and write the sum.
  void write_block(const PackedHead &head, int64_t block) const {
    const int64_t first = block * BACKWARD_QUERIES, end = min(call_.queries, first + BACKWARD_QUERIES);
    const int64_t width = plan_.q_width;
    float *sum = nullptr;
    for (int64_t chunk = 0; chunk < plan_.chunks; chunk++) {
      if (!head.started[chunk * plan_.blocks + block]) continue;
      float *part = head.dq + (chunk * plan_.rows + first) * width;
      const int64_t count = sum ? (end - first) * width : 0;
      for (int64_t x = 0; x < count; x += LANES) store(sum + x, load(sum + x) + load(part + x));
      if (!sum) sum = part;
    }
    write_rows(sum, width, end - first, call_.head_dim, static_cast<float>(call_.scale), call_.dq, call_.dq_strides,
               head.batch, head.head, first);
  }

  // Write rows (count, dim) of floats times a factor, from row `first` of a head of a tensor on; zeros for null.
  NOINLINE void write_rows(const float *from, int64_t width, int64_t count, int64_t dim, float factor, void *tensor,
                           const RowStrides &strides, int64_t batch, int64_t head, int64_t first) const {
    with_element(call_, [&](auto element) {
      auto *to = row_of<decltype(element)>(tensor, strides, batch, head, first);
      for (int64_t row = 0; row < count; row++)
        write_row(from ? from + row * width : nullptr, dim, factor, to + row * strides.row);
    });
  }

  // ------------------------------------------------------------ keys

  // Chunk `chunk` of kv head begin + index. Heads of the wave that share their dbias are computed by the task of the
  // first of them, in their order.
  void task(int64_t begin, int64_t heads, int64_t index, int64_t chunk, KeyBlock &keys) const {
    if (!call_.dbias) return chunk_of(begin, index, chunk, keys);
    for (int64_t earlier = 0; earlier < index; earlier++)
      if (same_dbias(begin + earlier, begin + index)) return;
    for (int64_t later = index; later < heads; later++)
      if (same_dbias(begin + index, begin + later)) chunk_of(begin, later, chunk, keys);
  }
  bool same_dbias(int64_t a, int64_t b) const {
    return (a / call_.kv_heads == b / call_.kv_heads || call_.dbias_strides.batch == 0) &&
           (a % call_.kv_heads == b % call_.kv_heads || call_.dbias_strides.head == 0);
  }

  void chunk_of(int64_t begin, int64_t index, int64_t chunk, KeyBlock &keys) const {
    const int64_t batch = (begin + index) / call_.kv_heads, kv_head = (begin + index) % call_.kv_heads;
    const int64_t end = min(call_.keys, (chunk + 1) * plan_.chunk_keys);
    for (keys.first = chunk * plan_.chunk_keys; keys.first < end; keys.first += plan_.block_keys) {
      keys.count = min(plan_.block_keys, end - keys.first);
      keys.padded = round_up(keys.count, COLUMNS);
      bool packed = false;
      for (int64_t i = 0; i < plan_.group; i++) {
        const PackedHead head = head_at(begin, index * plan_.group + i);
        for (int64_t block = 0; block < plan_.blocks; block++) {
          if (!head.blocks[block].overlaps(keys.first, keys.count)) continue;
          if (!packed)
            with_element(call_, [&](auto element) { pack_keys<decltype(element)>(batch, kv_head, keys); });
          packed = true;
          BlockPair(call_, plan_, head, block, keys).run(chunk);
        }
      }
      write_keys(batch, kv_head, packed, keys);
    }
  }

  template <class Element>
  NOINLINE void pack_keys(int64_t batch, int64_t kv_head, const KeyBlock &keys) const {
    const Element *k = row_of<Element>(call_.k, call_.k_strides, batch, kv_head, keys.first);
    const Element *v = row_of<Element>(call_.v, call_.v_strides, batch, kv_head, keys.first);
    pack_transposed(k, call_.k_strides.row, keys.count, keys.padded, call_.head_dim, keys.k_panels);
    pack_transposed(v, call_.v_strides.row, keys.count, keys.padded, call_.value_dim, keys.v_panels);
    for (int64_t key = 0; key < keys.count; key++)
      pack_finite_row(k + key * call_.k_strides.row, call_.head_dim, plan_.q_width, keys.k + key * plan_.q_stride);
    for (int64_t key = keys.count; key < keys.padded; key++)
      memset(keys.k + key * plan_.q_stride, 0, static_cast<size_t>(plan_.q_width) * sizeof(float));
    memset(keys.dk, 0, static_cast<size_t>((keys.padded + ROWS) * plan_.q_width) * sizeof(float));
    memset(keys.dv, 0, static_cast<size_t>((keys.padded + ROWS) * plan_.v_width) * sizeof(float));
  }

  void write_keys(int64_t batch, int64_t kv_head, bool packed, const KeyBlock &keys) const {
    write_rows(packed ? keys.dk : nullptr, plan_.q_width, keys.count, call_.head_dim, static_cast<float>(call_.scale),
               call_.dk, call_.dk_strides, batch, kv_head, keys.first);
    write_rows(packed ? keys.dv : nullptr, plan_.v_width, keys.count, call_.value_dim, 1.f, call_.dv, call_.dv_strides,
               batch, kv_head, keys.first);
  }

  const Call &call_;
  const BackwardPlan plan_;
  char *threads_, *heads_;  // the memory of the threads, and of the packed heads of a wave
};

// A block of keys per thread; float copies of Q and dO, and a partial dQ per chunk, for a wave of heads.
int64_t backward_workspace(const Call &call) {
  const BackwardPlan plan = backward_plan(call);
  return plan.threads * plan.thread_bytes + plan.wave * plan.group * plan.head_bytes;
}

void backward_run(const Call &call, char *workspace) { Backward(call, workspace).run(); }

}  // namespace
