// How the backward pass divides a call into blocks, chunks and waves, and the memory of each.
#pragma once
#include "call.h"
#include "gemm_tile.h"
#include "score_terms.h"
#include "simd.h"
#include "threads.h"
#include "workspace.h"

namespace {

constexpr int64_t BACKWARD_QUERIES = 96;    // of a block
constexpr int64_t BACKWARD_MAX_KEYS = 192;  // of a block: the scores of both, 80 KB, stay in the L2 cache
constexpr int64_t KEY_UNIT = 3 * COLUMNS;   // a multiple of ROWS and COLUMNS: whole tiles in both orientations
constexpr int64_t BACKWARD_TILES = BACKWARD_QUERIES / ROWS, BACKWARD_MAX_KEY_TILES = BACKWARD_MAX_KEYS / ROWS;
constexpr int64_t LINE = 16;                                 // floats of a cache line
constexpr int64_t SCORES_STRIDE = BACKWARD_MAX_KEYS + LINE;  // odd in lines, so that a column uses many cache sets
constexpr int64_t KEY_BLOCK_BYTES = int64_t(1) << 19;        // half of the L2 cache
constexpr int64_t WAVE_BYTES = int64_t(16) << 20;            // of packed heads per thread, but at least one kv head
constexpr int64_t MIN_CHUNK_KEYS = 512;                      // fewer do not pay for a partial dQ
constexpr int64_t MIN_TASKS = 16;
static_assert(BACKWARD_QUERIES % ROWS == 0 && KEY_UNIT % ROWS == 0 && BACKWARD_MAX_KEYS % KEY_UNIT == 0, "whole tiles");

// ---------------------------------------------------------------- sizes

struct BackwardPlan {
  int64_t group;                           // query heads of a kv head
  int64_t kv_heads, wave;                  // kv heads of the whole batch; those whose query heads are packed at once
  int64_t rows, blocks;                    // of a query head, rows in whole tiles
  int64_t q_width, v_width;                // head_dim and value_dim in whole tiles
  int64_t q_stride, v_stride;              // of packed rows; odd in cache lines, because columns are read
  int64_t chunks, chunk_keys, block_keys;  // chunks of the keys of a kv head, keys of a chunk, keys of a block
  int64_t threads, head_bytes, thread_bytes;
};

// ---------------------------------------------------------------- queries

// A query head, packed once for all its chunks of keys.
struct PackedHead {
  int64_t batch, head;
  float *q, *grad_output;    // (rows, q_stride) and (rows, v_stride), 0 where not finite
  float *logsumexp, *delta;  // (rows), logsumexp in units of log2
  Query *queries;            // (rows), without keys where the row has no gradient
  Span *tiles, *blocks;      // the spans of the queries of each tile and of each block
  float *dq;                 // (chunks, rows, q_width): partial dQ of each chunk, without the scale
  uint8_t *started;          // (chunks, blocks): whether this part of dq was written
  int64_t bytes;

  PackedHead(const BackwardPlan &plan, int64_t batch, int64_t head, char *memory) : batch(batch), head(head) {
    Workspace workspace{memory};
    q = workspace.take<float>(plan.rows * plan.q_stride);
    grad_output = workspace.take<float>(plan.rows * plan.v_stride);
    logsumexp = workspace.take<float>(plan.rows);
    delta = workspace.take<float>(plan.rows);
    queries = workspace.take<Query>(plan.rows);
    tiles = workspace.take<Span>(plan.rows / ROWS);
    blocks = workspace.take<Span>(plan.blocks);
    dq = workspace.take<float>(plan.chunks * plan.rows * plan.q_width);
    started = workspace.take<uint8_t>(plan.chunks * plan.blocks);
    bytes = workspace.bytes;
  }
};

// ---------------------------------------------------------------- keys

// The memory of one thread: a block of keys, and its scores with a block of queries.
struct KeyBlock {
  int64_t first, count, padded;     // first key, keys, keys padded with zeros to whole panels
  float *k_panels, *v_panels;     // panels for S = Q K^T and dP = dO V^T
  float *k;                         // (keys, q_stride) for dQ, 0 where not finite
  float *dk, *dv;                   // (keys + ROWS, width): the last panel may end inside a tile
  float *scores;                    // (BACKWARD_QUERIES, SCORES_STRIDE): Z P, then dS
  float *weights, *softcap_slopes;  // of the same shape: P for dropout; 1 - tanh^2 for a softcap
  int64_t bytes;

  KeyBlock(const BackwardPlan &plan, const Call &call, char *memory) : first(0), count(0), padded(0) {
    Workspace workspace{memory};
    k_panels = workspace.take<float>(plan.block_keys * call.head_dim);
    v_panels = workspace.take<float>(plan.block_keys * call.value_dim);
    k = workspace.take<float>(plan.block_keys * plan.q_stride);
    dk = workspace.take<float>((plan.block_keys + ROWS) * plan.q_width);
    dv = workspace.take<float>((plan.block_keys + ROWS) * plan.v_width);
    scores = workspace.take<float>(BACKWARD_QUERIES * SCORES_STRIDE);
    weights = workspace.take<float>(call.dropout > 0 ? BACKWARD_QUERIES * SCORES_STRIDE : 0);
    softcap_slopes = workspace.take<float>(call.softcap > 0 ? BACKWARD_QUERIES * SCORES_STRIDE : 0);
    bytes = workspace.bytes;
  }
};

// ---------------------------------------------------------------- the sizes of a call

INLINE int64_t odd_lines(int64_t floats) { return ceil_div(floats, LINE) / 2 * 2 * LINE + LINE; }

// Chunks depend on shapes alone, so the bits do not depend on the number of threads. Waves may depend on it: the only
// sum over several waves is dbias, which is added in the order of the heads.
inline BackwardPlan backward_plan(const Call &call) {
  BackwardPlan plan = {};
  plan.group = call.kv_heads ? call.heads / call.kv_heads : 0;
  plan.kv_heads = call.batch * call.kv_heads;
  plan.rows = round_up(call.queries, ROWS);
  plan.blocks = ceil_div(plan.rows, BACKWARD_QUERIES);
  plan.q_width = round_up(call.head_dim, COLUMNS);
  plan.v_width = round_up(call.value_dim, COLUMNS);
  plan.q_stride = odd_lines(plan.q_width);
  plan.v_stride = odd_lines(plan.v_width);

  // Chunks make more tasks where there are fewer kv heads than threads.
  const bool shared_dbias = call.dbias && (call.dbias_strides.batch == 0 || call.dbias_strides.head == 0);
  const int64_t wanted = shared_dbias ? MIN_TASKS : ceil_div(MIN_TASKS, max(plan.kv_heads, 1));
  const int64_t parts = max(1, min(wanted, call.keys / MIN_CHUNK_KEYS));
  plan.chunk_keys = round_up(ceil_div(max(call.keys, 1), parts), KEY_UNIT);
  plan.chunks = ceil_div(call.keys, plan.chunk_keys);
  const int64_t key_bytes = 4 * max(1, 3 * plan.q_width + 2 * plan.v_width);
  const int64_t fitting = max(1, min(BACKWARD_MAX_KEYS, KEY_BLOCK_BYTES / key_bytes) / KEY_UNIT) * KEY_UNIT;
  plan.block_keys = round_up(ceil_div(plan.chunk_keys, ceil_div(plan.chunk_keys, fitting)), KEY_UNIT);

  const double products = static_cast<double>(3 * call.head_dim + 2 * call.value_dim) * static_cast<double>(call.keys);
  const double rows = static_cast<double>(call.batch * call.heads) * static_cast<double>(call.queries);
  plan.threads = team_size(call.threads, products * rows);
  plan.thread_bytes = KeyBlock(plan, call, nullptr).bytes;
  plan.head_bytes = PackedHead(plan, 0, 0, nullptr).bytes;
  const int64_t group_bytes = max(1, plan.group * plan.head_bytes);
  const int64_t fit = max(1, WAVE_BYTES * max(2, plan.threads) / group_bytes);
  plan.wave = ceil_div(plan.kv_heads, max(1, ceil_div(plan.kv_heads, fit)));  // waves of equal size
  return plan;
}

}  // namespace
