// The backward pass: the gradients of queries, keys, values and bias, in one pass over the scores (arXiv:2205.14135).
//
//   P = exp(S - L)    dP = dO V^T    dS = P (Z dP - delta), delta_i = dO_i . O_i - dL_i, Z the dropout's factors
//   dV = (Z P)^T dO   dK = scale dS^T Q    dQ = scale dS K    dbias = dS; with a softcap, dS (1 - tanh^2) in dK and dQ
//
// A task is the keys of one chunk of one kv head. It meets every query head of the group, so its dK and dV are its own;
// of dQ it has its chunk's part. The parts are added in the order of the chunks, and chunks depend on nothing but the
// call's sizes: the bits do not depend on the threads. Tasks that would add to the same cells of dbias are one task.
//
// What is not finite is 0 in the copies that multiply dS and P, because 0 times it would be NaN for rows that may not
// see it. The rows that do see it are NaN through their logsumexp.
#pragma once
#include "backward_block.h"
#include "backward_memory.h"
#include "call.h"
#include "lanes.h"
#include "pack.h"
#include "team.h"
#include "terms.h"

namespace {

// ---------------------------------------------------------------- rows

// A row as floats, with 0 where it is not finite and from `dim` to `width`. Returns whether all of it is finite.
template <class Element>
INLINE bool pack_finite_row(const Element *from, int64_t dim, int64_t width, float *to) {
  Floats zeros = (Floats){};
  float zero = 0;
  int64_t x = 0;
  for (; x + LANES <= dim; x += LANES) {
    const Floats value = load(from + x);
    zeros += value * broadcast(0.f);
    store(to + x, value);
  }
  for (; x < dim; x++) zero += (to[x] = one(from + x)) * 0.f;
  for (; x < width; x++) to[x] = 0;
  if (sum(zeros) + zero == 0) return true;
  zero_what_is_not_finite(to, width);
  return false;
}

// The product of two rows.
template <class Element>
INLINE float dot(const Element *a, const Element *b, int64_t dim) {
  Floats sums = (Floats){};
  float rest = 0;
  int64_t x = 0;
  for (; x + LANES <= dim; x += LANES) sums += load(a + x) * load(b + x);
  for (; x < dim; x++) rest += one(a + x) * one(b + x);
  return sum(sums) + rest;
}

// Write a row of floats times a factor; zeros where there is none.
template <class Element>
INLINE void write_row(const float *from, int64_t dim, float factor, Element *to) {
  if (!from) {
    memset(static_cast<void *>(to), 0, static_cast<size_t>(dim) * sizeof(Element));
    return;
  }
  int64_t x = 0;
  for (; x + LANES <= dim; x += LANES) store(to + x, load(from + x) * broadcast(factor));
  for (; x < dim; x++) set(to + x, from[x] * factor);
}

template <class Element>
INLINE bool all_zero(const Element *row, int64_t dim) {
  for (int64_t x = 0; x < dim; x++)
    if (one(row + x) != 0) return false;
  return true;
}

// What lies `offset` elements behind the first of a tensor.
template <class Item>
INLINE Item *element(const void *tensor, int64_t offset) {
  return const_cast<Item *>(static_cast<const Item *>(tensor)) + offset;
}

// ---------------------------------------------------------------- the pass

template <class Element>
class Backward {
 public:
  Backward(const Call &call, char *workspace) : call_(call), sizes_(backward_sizes(call)), threads_(workspace) {
    heads_ = workspace + sizes_.threads * sizes_.thread_bytes;
  }

  void run() {
    if (sizes_.groups == 0 || sizes_.shared == 0) return;
    parallel(sizes_.threads, [this](Team &team) {
      KeyBlock keys(sizes_, call_, threads_ + team.member * sizes_.thread_bytes);
      for (int64_t begin = 0; begin < sizes_.groups; begin += sizes_.wave) {
        const int64_t groups = least(sizes_.wave, sizes_.groups - begin);
        const int64_t blocks = sizes_.blocks, parts = groups * sizes_.shared * blocks, tasks = groups * sizes_.chunks;
        team.each(parts, [&](int64_t part) { pack_block(head_at(begin, part / blocks), part % blocks); });
        // The first chunks first: under a causal mask they have the most to do.
        team.each(tasks, [&](int64_t part) { task(begin, groups, part % groups, part / groups, keys); });
        team.each(parts, [&](int64_t part) { write_block(head_at(begin, part / blocks), part % blocks); });
      }
    });
  }

 private:
  // Query head `index` of the wave that begins with kv head `begin`.
  PackedHead head_at(int64_t begin, int64_t index) const {
    const int64_t head = begin * sizes_.shared + index;  // of the whole batch
    return PackedHead(sizes_, head / call_.heads, head % call_.heads, heads_ + index * sizes_.head_bytes);
  }

  // ------------------------------------------------------------ queries

  void pack_block(const PackedHead &head, int64_t block) const {
    const int64_t first = block * BLOCK_ROWS, behind = least(sizes_.rows, first + BLOCK_ROWS);
    for (int64_t chunk = 0; chunk < sizes_.chunks; chunk++) head.begun[chunk * sizes_.blocks + block] = 0;
    Span seen = no_rows(call_);
    for (int64_t tile = first / ROWS; tile < behind / ROWS; tile++) {
      Span span = no_rows(call_);
      for (int64_t row = tile * ROWS; row < tile * ROWS + ROWS; row++) {
        begin_query(head, row);
        span.add(head.queries[row]);
      }
      head.tiles[tile] = span;
      seen.add(span);
    }
    head.blocks[block] = seen;
    if (seen.empty()) return;  // nobody will look at its rows
    for (int64_t row = first; row < behind; row++) pack_query(head, row);
  }

  // What row `row` sees, its logsumexp and its delta. Rows behind the last see nothing.
  void begin_query(const PackedHead &head, int64_t row) const {
    head.queries[row] = {};
    head.logsumexp[row] = head.delta[row] = 0;
    if (row >= call_.queries) return;
    const int64_t place = (head.batch * call_.heads + head.head) * call_.queries + row;
    const float logsumexp = *element<const float>(call_.logsumexp, place);
    const float of_logsumexp = call_.of_logsumexp ? *element<const float>(call_.of_logsumexp, place) : 0.f;
    const Element *of_output = of_output_of(head, row);
    // A row that is NaN and that the loss leaves out must not reach the gradients of its keys.
    const bool left_out = logsumexp != logsumexp && of_logsumexp == 0 && all_zero(of_output, call_.value_dim);
    if (logsumexp != -INFINITE && !left_out) {
      const int64_t offset = head.batch * call_.output_batch + head.head * call_.output_head + row * call_.output_row;
      head.queries[row] = query_of(call_, head.batch, head.head, row);
      head.logsumexp[row] = logsumexp * LOG2_E;
      head.delta[row] = dot(of_output, element<const Element>(call_.output, offset), call_.value_dim) - of_logsumexp;
    }
    *element<float>(call_.delta, place) = head.delta[row];
  }

  void pack_query(const PackedHead &head, int64_t row) const {
    float *q = head.q + row * sizes_.q_stride, *of_output = head.of_output + row * sizes_.v_stride;
    if (row >= call_.queries) {
      memset(q, 0, static_cast<size_t>(sizes_.q_width) * sizeof(float));
      memset(of_output, 0, static_cast<size_t>(sizes_.v_width) * sizeof(float));
      return;
    }
    const int64_t offset = head.batch * call_.q_batch + head.head * call_.q_head + row * call_.q_row;
    pack_finite_row(element<const Element>(call_.q, offset), call_.head_dim, sizes_.q_width, q);
    if (!pack_finite_row(of_output_of(head, row), call_.value_dim, sizes_.v_width, of_output))
      head.logsumexp[row] = NOT_A_NUMBER;  // makes its P NaN
  }

  const Element *of_output_of(const PackedHead &head, int64_t row) const {
    const int64_t offset = head.batch * call_.of_output_batch + head.head * call_.of_output_head;
    return element<const Element>(call_.of_output, offset + row * call_.of_output_row);
  }

  // dQ of a block: its chunks' parts, added in their order.
  void write_block(const PackedHead &head, int64_t block) const {
    const int64_t first = block * BLOCK_ROWS, behind = least(call_.queries, first + BLOCK_ROWS);
    const int64_t width = sizes_.q_width;
    float *sum = nullptr;
    for (int64_t chunk = 0; chunk < sizes_.chunks; chunk++) {
      if (!head.begun[chunk * sizes_.blocks + block]) continue;
      float *part = head.dq + (chunk * sizes_.rows + first) * width;
      const int64_t count = sum ? (behind - first) * width : 0;
      for (int64_t x = 0; x < count; x += LANES) store(sum + x, load(sum + x) + load(part + x));
      if (!sum) sum = part;
    }
    for (int64_t row = first; row < behind; row++) {
      const int64_t offset = head.batch * call_.dq_batch + head.head * call_.dq_head + row * call_.dq_row;
      write_row(sum ? sum + (row - first) * width : nullptr, call_.head_dim, static_cast<float>(call_.scale),
                element<Element>(call_.dq, offset));
    }
  }

  // ------------------------------------------------------------ keys

  // Chunk `chunk` of kv head begin + index, and of the later ones of this wave whose dbias is the same: the first does
  // it for all of them, in their order.
  void task(int64_t begin, int64_t groups, int64_t index, int64_t chunk, KeyBlock &keys) const {
    if (!call_.dbias) return chunk_of(begin, index, chunk, keys);
    for (int64_t earlier = 0; earlier < index; earlier++)
      if (same_dbias(begin + earlier, begin + index)) return;
    for (int64_t later = index; later < groups; later++)
      if (same_dbias(begin + index, begin + later)) chunk_of(begin, later, chunk, keys);
  }
  bool same_dbias(int64_t a, int64_t b) const {
    return (a / call_.kv_heads == b / call_.kv_heads || call_.dbias_batch == 0) &&
           (a % call_.kv_heads == b % call_.kv_heads || call_.dbias_head == 0);
  }

  void chunk_of(int64_t begin, int64_t index, int64_t chunk, KeyBlock &keys) const {
    const int64_t batch = (begin + index) / call_.kv_heads, kv_head = (begin + index) % call_.kv_heads;
    const int64_t behind = least(call_.keys, (chunk + 1) * sizes_.chunk_keys);
    for (keys.first = chunk * sizes_.chunk_keys; keys.first < behind; keys.first += sizes_.block_keys) {
      keys.count = least(sizes_.block_keys, behind - keys.first);
      keys.padded = up(keys.count, COLUMNS);
      bool packed = false;
      for (int64_t shared = 0; shared < sizes_.shared; shared++) {
        const PackedHead head = head_at(begin, index * sizes_.shared + shared);
        for (int64_t block = 0; block < sizes_.blocks; block++) {
          if (!head.blocks[block].meets(keys.first, keys.count)) continue;
          if (!packed) pack_keys(batch, kv_head, keys);
          packed = true;
          Meeting(call_, sizes_, head, block, keys).run(chunk);
        }
      }
      write_keys(batch, kv_head, packed, keys);
    }
  }

  void pack_keys(int64_t batch, int64_t kv_head, const KeyBlock &keys) const {
    const int64_t k_offset = batch * call_.k_batch + kv_head * call_.k_head + keys.first * call_.k_row;
    const int64_t v_offset = batch * call_.v_batch + kv_head * call_.v_head + keys.first * call_.v_row;
    const auto *k = element<const Element>(call_.k, k_offset), *v = element<const Element>(call_.v, v_offset);
    pack_transposed(k, call_.k_row, keys.count, keys.padded, call_.head_dim, keys.k_columns);
    pack_transposed(v, call_.v_row, keys.count, keys.padded, call_.value_dim, keys.v_columns);
    for (int64_t key = 0; key < keys.count; key++)
      pack_finite_row(k + key * call_.k_row, call_.head_dim, sizes_.q_width, keys.k + key * sizes_.q_stride);
    for (int64_t key = keys.count; key < keys.padded; key++)
      memset(keys.k + key * sizes_.q_stride, 0, static_cast<size_t>(sizes_.q_width) * sizeof(float));
    memset(keys.dk, 0, static_cast<size_t>((keys.padded + ROWS) * sizes_.q_width) * sizeof(float));
    memset(keys.dv, 0, static_cast<size_t>((keys.padded + ROWS) * sizes_.v_width) * sizeof(float));
  }

  void write_keys(int64_t batch, int64_t kv_head, bool packed, const KeyBlock &keys) const {
    const int64_t dk_offset = batch * call_.dk_batch + kv_head * call_.dk_head + keys.first * call_.dk_row;
    const int64_t dv_offset = batch * call_.dv_batch + kv_head * call_.dv_head + keys.first * call_.dv_row;
    Element *dk = element<Element>(call_.dk, dk_offset), *dv = element<Element>(call_.dv, dv_offset);
    for (int64_t key = 0; key < keys.count; key++) {
      const float *from_dk = keys.dk + key * sizes_.q_width, *from_dv = keys.dv + key * sizes_.v_width;
      write_row(packed ? from_dk : nullptr, call_.head_dim, static_cast<float>(call_.scale), dk + key * call_.dk_row);
      write_row(packed ? from_dv : nullptr, call_.value_dim, 1.f, dv + key * call_.dv_row);
    }
  }

  const Call &call_;
  const BackwardSizes sizes_;
  char *threads_, *heads_;  // their memory
};

// ---------------------------------------------------------------- for kernel.h

// Each thread holds a block of keys; for a wave of heads there are float copies of Q and dO, and dQ once a chunk.
int64_t backward_workspace(const Call &call) {
  const BackwardSizes sizes = backward_sizes(call);
  return sizes.threads * sizes.thread_bytes + sizes.wave * sizes.shared * sizes.head_bytes;
}

void backward_run(const Call &call, char *workspace) {
  if (call.dtype == 0)
    Backward<float>(call, workspace).run();
  else
    Backward<Bfloat16>(call, workspace).run();
}

}  // namespace
