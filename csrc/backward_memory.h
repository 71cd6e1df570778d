// How the backward pass cuts a call into blocks, chunks and waves, and what it holds of each.
#pragma once
#include "call.h"
#include "lanes.h"
#include "product.h"
#include "terms.h"

namespace {

constexpr int64_t BLOCK_ROWS = 96;         // queries that meet a block of keys at once
constexpr int64_t MOST_BLOCK_KEYS = 192;   // both: their scores, 80 KB, stay in the second cache
constexpr int64_t KEY_UNIT = 3 * COLUMNS;  // whole tiles, whether keys are their rows or their columns
constexpr int64_t BLOCK_TILES = BLOCK_ROWS / ROWS, MOST_KEY_TILES = MOST_BLOCK_KEYS / ROWS;
constexpr int64_t LINE = 16;                               // floats of a cache line
constexpr int64_t SCORES_STRIDE = MOST_BLOCK_KEYS + LINE;  // odd in lines: a column's rows fall into different sets
constexpr int64_t KEY_BLOCK_BYTES = int64_t(1) << 19;      // half of a second cache
constexpr int64_t WAVE_BYTES = int64_t(16) << 20;          // of packed heads for each thread, at least one kv head's
constexpr int64_t LEAST_CHUNK_KEYS = 512;                  // fewer are not worth a part of dQ
constexpr int64_t ENOUGH_TASKS = 16;
constexpr double WORTH_THREADS = 1 << 20;  // multiplications; fewer are done before a second thread has begun
static_assert(BLOCK_ROWS % ROWS == 0 && KEY_UNIT % ROWS == 0 && MOST_BLOCK_KEYS % KEY_UNIT == 0, "whole tiles");

// ---------------------------------------------------------------- sizes

struct BackwardSizes {
  int64_t shared;               // query heads of a kv head
  int64_t groups, wave;         // kv heads of the whole batch; those whose query heads are packed at once
  int64_t rows, blocks;         // of a query head; rows in whole tiles
  int64_t q_width, v_width;     // dims in whole tiles
  int64_t q_stride, v_stride;   // of packed rows; odd in lines, as their columns are read downwards
  int64_t chunks, chunk_keys, block_keys;
  int64_t threads, head_bytes, thread_bytes;
};

// Hands out memory piece by piece; without a base it only counts.
struct Carver {
  char *base;
  int64_t bytes;

  template <class Item>
  Item *take(int64_t count) {
    const int64_t at = bytes;
    bytes += up(count * static_cast<int64_t>(sizeof(Item)), 64);
    return base ? reinterpret_cast<Item *>(base + at) : nullptr;
  }
};

// ---------------------------------------------------------------- queries

// The keys that some row sees, and those that all rows see.
struct Span {
  int64_t some_start, some_stop, all_start, all_stop;

  void add(const Query &query) {
    if (query.start < query.stop) {
      some_start = least(some_start, query.start);
      some_stop = most(some_stop, query.stop);
    }
    all_start = most(all_start, query.start);
    all_stop = least(all_stop, query.stop);
  }
  void add(const Span &span) {
    some_start = least(some_start, span.some_start);
    some_stop = most(some_stop, span.some_stop);
    all_start = most(all_start, span.all_start);
    all_stop = least(all_stop, span.all_stop);
  }
  bool empty() const { return some_start >= some_stop; }
  bool meets(int64_t first, int64_t count) const { return some_start < first + count && some_stop > first; }
  bool covers(int64_t first, int64_t count) const { return all_start <= first && all_stop >= first + count; }
};
INLINE Span no_rows(const Call &call) { return {call.keys, 0, 0, call.keys}; }

// A query head, packed once for all its chunks.
struct PackedHead {
  int64_t batch, head;
  float *q, *of_output;      // (rows, stride), 0 where not finite
  float *logsumexp, *delta;  // (rows), logsumexp in units of log2
  Query *queries;            // (rows), those to be skipped see nothing
  Span *tiles, *blocks;      // of the rows of a tile, of a block
  float *dq;                 // (chunks, rows, q_width), without the scale
  uint8_t *begun;            // (chunks, blocks): whether this part of dq holds anything
  int64_t bytes;

  PackedHead(const BackwardSizes &sizes, int64_t batch, int64_t head, char *base) : batch(batch), head(head) {
    Carver carver = {base, 0};
    q = carver.take<float>(sizes.rows * sizes.q_stride);
    of_output = carver.take<float>(sizes.rows * sizes.v_stride);
    logsumexp = carver.take<float>(sizes.rows);
    delta = carver.take<float>(sizes.rows);
    queries = carver.take<Query>(sizes.rows);
    tiles = carver.take<Span>(sizes.rows / ROWS);
    blocks = carver.take<Span>(sizes.blocks);
    dq = carver.take<float>(sizes.chunks * sizes.rows * sizes.q_width);
    begun = carver.take<uint8_t>(sizes.chunks * sizes.blocks);
    bytes = carver.bytes;
  }
};

// ---------------------------------------------------------------- keys

// A block of keys, and what becomes of its scores: a thread's own.
struct KeyBlock {
  int64_t first, count, padded;  // its keys; with zeros behind the last, in whole panels
  float *k_columns, *v_columns;  // panels for S = Q K^T and dP = dO V^T
  float *k;                      // (keys, q_stride) for dQ, 0 where not finite
  float *dk, *dv;                // (keys, width); a tile of keys more, as the last panel may end within a tile
  float *scores;                 // (BLOCK_ROWS, SCORES_STRIDE): Z P, then dS
  float *weights, *slopes;       // P where there is dropout; 1 - tanh^2 where there is a softcap
  int64_t bytes;

  KeyBlock(const BackwardSizes &sizes, const Call &call, char *base) : first(0), count(0), padded(0) {
    Carver carver = {base, 0};
    k_columns = carver.take<float>(sizes.block_keys * call.head_dim);
    v_columns = carver.take<float>(sizes.block_keys * call.value_dim);
    k = carver.take<float>(sizes.block_keys * sizes.q_stride);
    dk = carver.take<float>((sizes.block_keys + ROWS) * sizes.q_width);
    dv = carver.take<float>((sizes.block_keys + ROWS) * sizes.v_width);
    scores = carver.take<float>(BLOCK_ROWS * SCORES_STRIDE);
    weights = carver.take<float>(call.dropout > 0 ? BLOCK_ROWS * SCORES_STRIDE : 0);
    slopes = carver.take<float>(call.softcap > 0 ? BLOCK_ROWS * SCORES_STRIDE : 0);
    bytes = carver.bytes;
  }
};

// ---------------------------------------------------------------- the sizes of a call

INLINE int64_t odd_lines(int64_t floats) { return whole(floats, LINE) / 2 * 2 * LINE + LINE; }

// Chunks come from the sizes alone, so the bits do not depend on the threads. Waves may: nothing is added across them
// but dbias, in the order of the heads.
inline BackwardSizes backward_sizes(const Call &call) {
  BackwardSizes sizes = {};
  sizes.shared = call.kv_heads ? call.heads / call.kv_heads : 0;
  sizes.groups = call.batch * call.kv_heads;
  sizes.rows = up(call.queries, ROWS);
  sizes.blocks = whole(sizes.rows, BLOCK_ROWS);
  sizes.q_width = up(call.head_dim, COLUMNS);
  sizes.v_width = up(call.value_dim, COLUMNS);
  sizes.q_stride = odd_lines(sizes.q_width);
  sizes.v_stride = odd_lines(sizes.v_width);

  // Where there are fewer kv heads than many threads would like, chunks make tasks of them.
  const bool common_dbias = call.dbias && (call.dbias_batch == 0 || call.dbias_head == 0);
  const int64_t wanted = common_dbias ? ENOUGH_TASKS : whole(ENOUGH_TASKS, most(sizes.groups, 1));
  const int64_t parts = most(1, least(wanted, call.keys / LEAST_CHUNK_KEYS));
  sizes.chunk_keys = up(whole(most(call.keys, 1), parts), KEY_UNIT);
  sizes.chunks = whole(call.keys, sizes.chunk_keys);
  const int64_t key_bytes = 4 * most(1, 3 * sizes.q_width + 2 * sizes.v_width);
  const int64_t fitting = most(1, least(MOST_BLOCK_KEYS, KEY_BLOCK_BYTES / key_bytes) / KEY_UNIT) * KEY_UNIT;
  sizes.block_keys = up(whole(sizes.chunk_keys, whole(sizes.chunk_keys, fitting)), KEY_UNIT);

  const double products = static_cast<double>(3 * call.head_dim + 2 * call.value_dim) * static_cast<double>(call.keys);
  const double rows = static_cast<double>(call.batch * call.heads) * static_cast<double>(call.queries);
  sizes.threads = products * rows < WORTH_THREADS ? 1 : most(1, call.threads);
  sizes.thread_bytes = KeyBlock(sizes, call, nullptr).bytes;
  sizes.head_bytes = PackedHead(sizes, 0, 0, nullptr).bytes;
  const int64_t group_bytes = most(1, sizes.shared * sizes.head_bytes);
  const int64_t fit = most(1, WAVE_BYTES * most(2, sizes.threads) / group_bytes);
  sizes.wave = whole(sizes.groups, most(1, whole(sizes.groups, fit)));  // waves of one size
  return sizes;
}

}  // namespace
