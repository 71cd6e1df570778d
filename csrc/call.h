// What crosses from Python into the kernels: addresses, counts and real numbers of 8 bytes each, and no type of torch.
//
// Layouts, the last axis of each contiguous unless a stride says otherwise; strides count elements, not bytes:
//   q, output, of_output, dq (batch, heads, queries, dim)     k, v, dk, dv (batch, kv_heads, keys, dim)
//   start, stop (batch, heads, queries) int64, the keys [start, stop) a query may see; batch and head strides may be 0
//   seen (batch, heads, queries, keys) bytes, 0 hides; bias likewise in float, -inf hides; any stride may be 0
//   logsumexp, of_logsumexp, delta and the statistics (batch, heads, queries), contiguous, in float
#pragma once
#include <stdint.h>

// A field's name is its name in `multihead.kernels.library` too; the order is the same, which is checked when it loads.
#define MULTIHEAD_CALL_FIELDS(ADDRESS, COUNT, REAL)                                                          \
  /* inputs: seen, bias and sinks may be null */                                                             \
  ADDRESS(q) ADDRESS(k) ADDRESS(v) ADDRESS(start) ADDRESS(stop) ADDRESS(seen) ADDRESS(bias) ADDRESS(sinks)   \
  /* what the forward pass gives, and the backward pass takes */                                             \
  ADDRESS(output) ADDRESS(logsumexp)                                                                         \
  /* statistics a query, each null where nobody wants it; largest_key is int64, at_offsets (offsets, batch, heads, queries) */ \
  ADDRESS(entropy) ADDRESS(squares) ADDRESS(largest_weight) ADDRESS(largest_key) ADDRESS(mean_distance)      \
  ADDRESS(distance_spread) ADDRESS(at_offsets) ADDRESS(on_given_key) ADDRESS(on_special_keys)                \
  /* what they need: positions of the first queries (batch) int64, offsets int64, given_key (batch) int64,   \
     special_keys (batch, keys) bytes */                                                                     \
  ADDRESS(query_start) ADDRESS(offsets) ADDRESS(given_key) ADDRESS(special_keys)                             \
  /* the backward pass: of_logsumexp may be null; delta is written by it; dbias is float with strides of its own, or null */ \
  ADDRESS(of_output) ADDRESS(of_logsumexp) ADDRESS(delta) ADDRESS(dq) ADDRESS(dk) ADDRESS(dv) ADDRESS(dbias) \
  /* the second pass: received (batch, heads, keys) float; pooled (batch, heads, row cells, key cells) float, or null */ \
  ADDRESS(received) ADDRESS(pooled)                                                                          \
  COUNT(batch) COUNT(heads) COUNT(kv_heads) COUNT(queries) COUNT(keys) COUNT(head_dim) COUNT(value_dim)      \
  COUNT(q_batch) COUNT(q_head) COUNT(q_row) COUNT(k_batch) COUNT(k_head) COUNT(k_row)                        \
  COUNT(v_batch) COUNT(v_head) COUNT(v_row) COUNT(output_batch) COUNT(output_head) COUNT(output_row)         \
  COUNT(bounds_batch) COUNT(bounds_head) COUNT(seen_batch) COUNT(seen_head) COUNT(seen_row) COUNT(seen_key)  \
  COUNT(bias_batch) COUNT(bias_head) COUNT(bias_row) COUNT(bias_key)                                         \
  COUNT(of_output_batch) COUNT(of_output_head) COUNT(of_output_row)                                          \
  COUNT(dq_batch) COUNT(dq_head) COUNT(dq_row) COUNT(dk_batch) COUNT(dk_head) COUNT(dk_row)                  \
  COUNT(dv_batch) COUNT(dv_head) COUNT(dv_row)                                                               \
  COUNT(dbias_batch) COUNT(dbias_head) COUNT(dbias_row) COUNT(dbias_key)                                     \
  /* dtype: 0 float32, 1 bfloat16. instruction_set: an index, see dispatch.cpp. seed: of the dropout. */     \
  COUNT(dtype) COUNT(instruction_set) COUNT(threads) COUNT(num_offsets) COUNT(seed)                          \
  /* first_row: which query of a longer call row 0 is, for its position and its dropout. pool_*: cells of the map. */ \
  COUNT(first_row) COUNT(pool_rows) COUNT(pool_keys)                                                         \
  /* scale times q . k; softcap 0 and dropout 0 mean none */                                                 \
  REAL(scale) REAL(softcap) REAL(dropout)

struct Call {
#define MULTIHEAD_ADDRESS(name) const void *name;
#define MULTIHEAD_COUNT(name) int64_t name;
#define MULTIHEAD_REAL(name) double name;
  MULTIHEAD_CALL_FIELDS(MULTIHEAD_ADDRESS, MULTIHEAD_COUNT, MULTIHEAD_REAL)
#undef MULTIHEAD_ADDRESS
#undef MULTIHEAD_COUNT
#undef MULTIHEAD_REAL
};

constexpr int64_t MOST_OFFSETS = 8;  // that at_offsets can ask for at once

// The passes over an attention. Each says how many bytes of workspace it needs, and runs in the workspace it is given.
struct Pass {
  int64_t (*workspace)(const Call &call);
  void (*run)(const Call &call, char *workspace);  // aligned to 64 bytes
};

// What one instruction set offers.
struct Kernels {
  Pass forward, backward, received;
};

// The C functions of the library; all of them may be called from any thread at any time.
//   multihead_layout          the fields' names, one space between them
//   multihead_instruction_set  a set's name for index 0, 1, ..., null behind the last; widest last
//   multihead_compiled        1 if this build has the set, else 0
//   multihead_runs            1 if it has and this CPU can run it, else 0
//   multihead_workspace       bytes that a pass (0 forward, 1 backward, 2 received) will hold
//   multihead_run             0 done, 1 no memory for the workspace, 2 a bound lies outside [0, keys], 3 no such set or
//                             pass, 4 more than MOST_OFFSETS offsets
extern "C" {
const char *multihead_layout();
const char *multihead_instruction_set(int64_t index);
int64_t multihead_compiled(int64_t index);
int64_t multihead_runs(int64_t index);
int64_t multihead_workspace(const Call *call, int64_t pass);
int64_t multihead_run(const Call *call, int64_t pass);
}
