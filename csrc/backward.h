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
#include "call.h"
#include "lanes.h"
#include "pack.h"
#include "product.h"
#include "team.h"
#include "terms.h"

namespace {

// ---------------------------------------------------------------- sizes and memory

constexpr int64_t BLOCK_ROWS = 96;         // queries that meet a block of keys at once
constexpr int64_t MOST_BLOCK_KEYS = 192;   // both: their scores, 80 KB, stay in the second cache
constexpr int64_t KEY_UNIT = 3 * COLUMNS;  // whole tiles, whether keys are their rows or their columns
constexpr int64_t BLOCK_TILES = BLOCK_ROWS / ROWS, MOST_KEY_TILES = MOST_BLOCK_KEYS / ROWS;
constexpr int64_t LINE = 16;                                  // floats of a cache line
constexpr int64_t SCORES_STRIDE = MOST_BLOCK_KEYS + LINE;     // odd in lines: a column's rows fall into different sets
constexpr int64_t BLOCK_BYTES = int64_t{1} << 19;             // of a block of keys, half of a second cache
constexpr int64_t WAVE_BYTES = int64_t{1} << 24;              // of packed heads, for each thread; see `wave`
constexpr int64_t LEAST_CHUNK_KEYS = 512, ENOUGH_TASKS = 32;  // fewer keys are not worth a part of dQ
static_assert(BLOCK_ROWS % ROWS == 0 && KEY_UNIT % ROWS == 0 && MOST_BLOCK_KEYS % KEY_UNIT == 0, "blocks of whole tiles");

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
  }
  bool meets(int64_t first, int64_t count) const { return some_start < first + count && some_stop > first; }
  bool covers(int64_t first, int64_t count) const { return all_start <= first && all_stop >= first + count; }
};

struct BackwardSizes {
  int64_t shared;               // query heads of a kv head
  int64_t groups, wave, waves;  // kv heads of the whole batch; those whose query heads are packed at once
  int64_t rows, blocks;         // of a query head, rows in whole tiles
  int64_t q_width, v_width;     // dims in whole tiles
  int64_t q_stride, v_stride;   // of rows that are read downwards
  int64_t chunks, chunk_keys, block_keys;
  int64_t threads, head_bytes, thread_bytes;
};

// A query head, packed once for all its chunks.
struct PackedHead {
  float *q, *of_output;      // (rows, stride)
  float *logsumexp, *delta;  // (rows), logsumexp in units of log2
  Query *queries;            // (rows), those to be skipped see nothing
  Span *tiles, *blocks;      // of the rows of a tile, of a block
  float *dq;                 // (chunks, rows, q_width), without the scale
  uint8_t *begun;            // (chunks, blocks): whether this part of dq holds anything

  PackedHead(const BackwardSizes &sizes, Carver carver) {
    const int64_t chunks = most(sizes.chunks, 1);
    q = carver.take<float>(sizes.rows * sizes.q_stride);
    of_output = carver.take<float>(sizes.rows * sizes.v_stride);
    logsumexp = carver.take<float>(sizes.rows);
    delta = carver.take<float>(sizes.rows);
    queries = carver.take<Query>(sizes.rows);
    tiles = carver.take<Span>(sizes.rows / ROWS);
    blocks = carver.take<Span>(sizes.blocks);
    dq = carver.take<float>(chunks * sizes.rows * sizes.q_width);
    begun = carver.take<uint8_t>(chunks * sizes.blocks);
    bytes = carver.bytes;
  }
  int64_t bytes;
};

// A block of keys, and what becomes of its scores: a thread's own.
struct KeyBlock {
  float *k_columns, *v_columns;  // panels for S = Q K^T and dP = dO V^T
  float *k;                      // (keys, q_stride), for dQ
  float *dk, *dv;                // (keys, width)
  float *scores;                 // (BLOCK_ROWS, SCORES_STRIDE): Z P, then dS
  float *weights, *slopes;       // P where there is dropout; 1 - tanh^2 where there is a softcap
  int64_t first, count, padded;  // its keys; with zeros behind the last, in whole panels

  KeyBlock(const BackwardSizes &sizes, const Call &call, Carver carver) {
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
  int64_t bytes;
};

INLINE int64_t odd_lines(int64_t floats) { return whole(floats, LINE) / 2 * 2 * LINE + LINE; }

BackwardSizes backward_sizes(const Call &call) {
  BackwardSizes sizes;
  sizes.shared = call.kv_heads ? call.heads / call.kv_heads : 0;
  sizes.groups = call.batch * call.kv_heads;
  sizes.rows = up(call.queries, ROWS);
  sizes.blocks = whole(sizes.rows, BLOCK_ROWS);
  sizes.q_width = up(call.head_dim, COLUMNS);
  sizes.v_width = up(call.value_dim, COLUMNS);
  sizes.q_stride = odd_lines(sizes.q_width);
  sizes.v_stride = odd_lines(sizes.v_width);

  // Where there are fewer kv heads than many threads would like, chunks make tasks of them.
  const int64_t tasks = call.dbias && (call.dbias_batch == 0 || call.dbias_head == 0) ? 1 : most(sizes.groups, 1);
  const int64_t wanted = most(1, least(whole(ENOUGH_TASKS, tasks), call.keys / LEAST_CHUNK_KEYS));
  sizes.chunk_keys = up(whole(most(call.keys, 1), wanted), KEY_UNIT);
  sizes.chunks = whole(call.keys, sizes.chunk_keys);
  const int64_t key_bytes = 4 * (3 * sizes.q_width + 2 * sizes.v_width);
  const int64_t fitting = most(KEY_UNIT, least(MOST_BLOCK_KEYS, BLOCK_BYTES / most(key_bytes, 1)) / KEY_UNIT * KEY_UNIT);
  sizes.block_keys = up(whole(sizes.chunk_keys, whole(sizes.chunk_keys, fitting)), KEY_UNIT);

  // A small call is done before a second thread has begun.
  const double work = static_cast<double>(call.batch * call.heads) * static_cast<double>(call.queries) *
                      static_cast<double>(call.keys) * static_cast<double>(3 * call.head_dim + 2 * call.value_dim);
  sizes.threads = work < 1e6 ? 1 : most(1, call.threads);
  sizes.head_bytes = PackedHead(sizes, {nullptr, 0}).bytes;
  sizes.thread_bytes = KeyBlock(sizes, call, {nullptr, 0}).bytes;
  const int64_t fit = WAVE_BYTES * most(2, sizes.threads) / most(1, sizes.shared * sizes.head_bytes);
  sizes.waves = whole(sizes.groups, most(1, least(fit, sizes.groups)));
  sizes.wave = sizes.waves ? whole(sizes.groups, sizes.waves) : 0;
  return sizes;
}

// ---------------------------------------------------------------- products

// C = A B of one tile as in product.h, but with the rows of B `b_stride` apart: one copy of Q serves as A and as B.
template <bool TRANSPOSED, class End>
INLINE void product_of_rows(const float *a, int64_t a_stride, const float *b, int64_t b_stride, int64_t depth, End end) {
  Floats c[ROWS][2];
#pragma GCC unroll 16
  for (int64_t row = 0; row < ROWS; row++) c[row][0] = c[row][1] = (Floats){};
  for (int64_t k = 0; k < depth; k++) {
    const Floats left = load(b + k * b_stride), right = load(b + k * b_stride + LANES);
#pragma GCC unroll 16
    for (int64_t row = 0; row < ROWS; row++) {
      const Floats x = broadcast(TRANSPOSED ? a[k * a_stride + row] : a[row * a_stride + k]);
      c[row][0] += x * left;
      c[row][1] += x * right;
    }
  }
#pragma GCC unroll 16
  for (int64_t row = 0; row < ROWS; row++) end(row, c[row][0], c[row][1]);
}

// Add A B, or A^T B, to rows of `width` floats; B is (depth, width).
template <bool TRANSPOSED>
INLINE void add_product(const float *a, const float *b, int64_t b_stride, int64_t depth, float *to, int64_t width) {
  for (int64_t column = 0; column < width; column += COLUMNS) {
    float *corner = to + column;
    product_of_rows<TRANSPOSED>(a, SCORES_STRIDE, b + column, b_stride, depth,
                                [=](int64_t row, Floats left, Floats right) __attribute__((always_inline)) {
                                  float *at = corner + row * width;
                                  store(at, load(at) + left);
                                  store(at + LANES, load(at + LANES) + right);
                                });
  }
}

// ---------------------------------------------------------------- packing

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

// Write a row of floats times a factor.
template <class Element>
INLINE void write_row(const float *from, int64_t dim, float factor, Element *to) {
  int64_t x = 0;
  for (; x + LANES <= dim; x += LANES) store(to + x, load(from + x) * broadcast(factor));
  for (; x < dim; x++) set(to + x, from[x] * factor);
}

// ---------------------------------------------------------------- the pass

template <class Element>
class Backward {
 public:
  Backward(const Call &call, char *workspace) : call_(call), sizes_(backward_sizes(call)), workspace_(workspace) {
    plain_ = !call.bias && !call.dbias && !call.seen && !(call.softcap > 0) && !(call.dropout > 0);
  }

  void run() {
    if (sizes_.groups == 0 || sizes_.shared == 0) return;
    parallel(sizes_.threads, [this](Team &team) {
      KeyBlock own(sizes_, call_, {workspace_ + team.member * sizes_.thread_bytes, 0});
      for (int64_t begin = 0; begin < sizes_.groups; begin += sizes_.wave) {
        const int64_t groups = least(sizes_.wave, sizes_.groups - begin), heads = groups * sizes_.shared;
        const int64_t first_head = begin * sizes_.shared, blocks = sizes_.blocks;
        team.each(heads * blocks, [&](int64_t part) { pack(first_head, part / blocks, part % blocks); });
        // The first chunks first: under a causal mask they have the most to do.
        team.each(groups * sizes_.chunks, [&](int64_t part) { task(begin, groups, part % groups, part / groups, own); });
        team.each(heads * blocks, [&](int64_t part) { finish(first_head, part / blocks, part % blocks); });
      }
    });
  }

 private:
  // Head `head` of the whole batch, with its place in memory.
  struct Head {
    int64_t batch, head;
    PackedHead packed;
  };
  Head head_at(int64_t first_head, int64_t slot) const {
    char *heads = workspace_ + sizes_.threads * sizes_.thread_bytes;
    const int64_t head = first_head + slot;
    return {head / call_.heads, head % call_.heads, PackedHead(sizes_, {heads + slot * sizes_.head_bytes, 0})};
  }

  // Row `row` of a tensor (batch, heads, rows, dim).
  template <class Item>
  static Item *row_at(const void *tensor, int64_t offset) {
    return const_cast<Item *>(static_cast<const Item *>(tensor)) + offset;
  }

  // ------------------------------------------------------------ queries

  void pack(int64_t first_head, int64_t slot, int64_t block) const {
    const Head at = head_at(first_head, slot);
    const PackedHead &packed = at.packed;
    const int64_t begin = block * BLOCK_ROWS, end = least(sizes_.rows, begin + BLOCK_ROWS);
    for (int64_t chunk = 0; chunk < sizes_.chunks; chunk++) packed.begun[chunk * sizes_.blocks + block] = 0;
    Span seen = {call_.keys, 0, 0, call_.keys};
    for (int64_t tile = begin / ROWS; tile < end / ROWS; tile++) {
      Span &span = packed.tiles[tile] = {call_.keys, 0, 0, call_.keys};
      for (int64_t row = tile * ROWS; row < tile * ROWS + ROWS; row++) {
        pack_query(at, row);
        span.add(packed.queries[row]);
      }
      seen.add(span);
    }
    packed.blocks[block] = seen;
    if (seen.some_start >= seen.some_stop) return;  // nobody will look at its rows
    for (int64_t row = begin; row < end; row++) pack_row_of(at, row);
  }

  // What row `row` sees, and its delta.
  void pack_query(const Head &at, int64_t row) const {
    const PackedHead &packed = at.packed;
    packed.queries[row] = {};
    packed.logsumexp[row] = packed.delta[row] = 0;
    if (row >= call_.queries) return;
    const int64_t place = (at.batch * call_.heads + at.head) * call_.queries + row;
    const float logsumexp = static_cast<const float *>(call_.logsumexp)[place];
    const float of_logsumexp = call_.of_logsumexp ? static_cast<const float *>(call_.of_logsumexp)[place] : 0.f;
    const Element *of_output = of_output_row(at, row);
    const bool skipped = logsumexp == -INFINITE ||
                         (logsumexp != logsumexp && of_logsumexp == 0 && all_zero(of_output, call_.value_dim));
    if (!skipped) {
      const int64_t offset = at.batch * call_.output_batch + at.head * call_.output_head + row * call_.output_row;
      packed.queries[row] = query_of(call_, at.batch, at.head, row);
      packed.logsumexp[row] = logsumexp * LOG2_E;
      packed.delta[row] = dot(of_output, row_at<const Element>(call_.output, offset), call_.value_dim) - of_logsumexp;
    }
    *row_at<float>(call_.delta, place) = packed.delta[row];
  }

  void pack_row_of(const Head &at, int64_t row) const {
    float *q = at.packed.q + row * sizes_.q_stride, *of_output = at.packed.of_output + row * sizes_.v_stride;
    if (row >= call_.queries) {
      memset(q, 0, static_cast<size_t>(sizes_.q_width) * sizeof(float));
      memset(of_output, 0, static_cast<size_t>(sizes_.v_width) * sizeof(float));
      return;
    }
    const int64_t offset = at.batch * call_.q_batch + at.head * call_.q_head + row * call_.q_row;
    pack_finite_row(row_at<const Element>(call_.q, offset), call_.head_dim, sizes_.q_width, q);
    if (!pack_finite_row(of_output_row(at, row), call_.value_dim, sizes_.v_width, of_output))
      at.packed.logsumexp[row] = NOT_A_NUMBER;  // makes its P NaN
  }

  const Element *of_output_row(const Head &at, int64_t row) const {
    return row_at<const Element>(call_.of_output, at.batch * call_.of_output_batch + at.head * call_.of_output_head +
                                                      row * call_.of_output_row);
  }

  static bool all_zero(const Element *row, int64_t dim) {
    for (int64_t x = 0; x < dim; x++)
      if (one(row + x) != 0) return false;
    return true;
  }

  // ------------------------------------------------------------ keys

  // Chunk `chunk` of kv head begin + index, and of the later ones of this wave whose dbias is the same; the first does
  // it for all of them, in their order.
  void task(int64_t begin, int64_t groups, int64_t index, int64_t chunk, KeyBlock &own) const {
    if (!call_.dbias) return keys_of(begin, index, chunk, own);
    for (int64_t earlier = 0; earlier < index; earlier++)
      if (same_dbias(begin + earlier, begin + index)) return;
    for (int64_t later = index; later < groups; later++)
      if (same_dbias(begin + index, begin + later)) keys_of(begin, later, chunk, own);
  }
  bool same_dbias(int64_t a, int64_t b) const {
    return (a / call_.kv_heads == b / call_.kv_heads || call_.dbias_batch == 0) &&
           (a % call_.kv_heads == b % call_.kv_heads || call_.dbias_head == 0);
  }

  void keys_of(int64_t begin, int64_t index, int64_t chunk, KeyBlock &own) const {
    const int64_t batch = (begin + index) / call_.kv_heads, kv_head = (begin + index) % call_.kv_heads;
    const int64_t stop = least(call_.keys, (chunk + 1) * sizes_.chunk_keys);
    for (own.first = chunk * sizes_.chunk_keys; own.first < stop; own.first += sizes_.block_keys) {
      own.count = least(sizes_.block_keys, stop - own.first);
      own.padded = up(own.count, COLUMNS);
      bool packed = false;
      for (int64_t shared = 0; shared < sizes_.shared; shared++) {
        const Head at = head_at(begin * sizes_.shared, index * sizes_.shared + shared);
        for (int64_t block = 0; block < sizes_.blocks; block++) {
          if (!at.packed.blocks[block].meets(own.first, own.count)) continue;
          if (!packed) pack_keys(batch, kv_head, own);
          packed = true;
          meet(at, block, chunk, own);
        }
      }
      write_keys(batch, kv_head, packed, own);
    }
  }

  void pack_keys(int64_t batch, int64_t kv_head, const KeyBlock &own) const {
    const auto *k = row_at<const Element>(call_.k, batch * call_.k_batch + kv_head * call_.k_head + own.first * call_.k_row);
    const auto *v = row_at<const Element>(call_.v, batch * call_.v_batch + kv_head * call_.v_head + own.first * call_.v_row);
    pack_transposed(k, call_.k_row, own.count, own.padded, call_.head_dim, own.k_columns);
    pack_transposed(v, call_.v_row, own.count, own.padded, call_.value_dim, own.v_columns);
    for (int64_t key = 0; key < own.count; key++)
      pack_finite_row(k + key * call_.k_row, call_.head_dim, sizes_.q_width, own.k + key * sizes_.q_stride);
    for (int64_t key = own.count; key < own.padded; key++)
      memset(own.k + key * sizes_.q_stride, 0, static_cast<size_t>(sizes_.q_width) * sizeof(float));
    memset(own.dk, 0, static_cast<size_t>((own.padded + ROWS) * sizes_.q_width) * sizeof(float));
    memset(own.dv, 0, static_cast<size_t>((own.padded + ROWS) * sizes_.v_width) * sizeof(float));
  }

  void write_keys(int64_t batch, int64_t kv_head, bool packed, const KeyBlock &own) const {
    auto *dk = row_at<Element>(call_.dk, batch * call_.dk_batch + kv_head * call_.dk_head + own.first * call_.dk_row);
    auto *dv = row_at<Element>(call_.dv, batch * call_.dv_batch + kv_head * call_.dv_head + own.first * call_.dv_row);
    for (int64_t key = 0; key < own.count; key++) {
      Element *dk_row = dk + key * call_.dk_row, *dv_row = dv + key * call_.dv_row;
      if (packed) {
        write_row(own.dk + key * sizes_.q_width, call_.head_dim, static_cast<float>(call_.scale), dk_row);
        write_row(own.dv + key * sizes_.v_width, call_.value_dim, 1.f, dv_row);
      } else {
        memset(static_cast<void *>(dk_row), 0, static_cast<size_t>(call_.head_dim) * sizeof(Element));
        memset(static_cast<void *>(dv_row), 0, static_cast<size_t>(call_.value_dim) * sizeof(Element));
      }
    }
  }

  // ------------------------------------------------------------ a block of queries meets a block of keys

  // The columns of keys that each tile of rows sees, and the rows that see each tile of keys; within the block.
  struct Meeting {
    int64_t tiles, begin[BLOCK_TILES], end[BLOCK_TILES];
    int64_t key_tiles, first_row[MOST_KEY_TILES], last_row[MOST_KEY_TILES];  // behind the last
  };

  // Returns whether any tile sees a key. Scores that no tile computes become 0 here.
  bool find(const Span *tiles, int64_t count, const KeyBlock &own, Meeting &meeting) const {
    meeting.tiles = count;
    meeting.key_tiles = whole(own.padded, ROWS);
    for (int64_t key = 0; key < meeting.key_tiles; key++) {
      meeting.first_row[key] = BLOCK_ROWS;
      meeting.last_row[key] = 0;
    }
    bool found = false;
    for (int64_t tile = 0; tile < count; tile++) {
      int64_t begin = most(tiles[tile].some_start - own.first, 0) / COLUMNS * COLUMNS;
      int64_t end = least(up(most(tiles[tile].some_stop - own.first, 0), COLUMNS), own.padded);
      if (begin >= end) begin = end = 0;
      meeting.begin[tile] = begin;
      meeting.end[tile] = end;
      for (int64_t row = tile * ROWS; row < tile * ROWS + ROWS && end - begin < own.padded; row++) {
        float *scores = own.scores + row * SCORES_STRIDE;
        memset(scores, 0, static_cast<size_t>(begin) * sizeof(float));
        memset(scores + end, 0, static_cast<size_t>(own.padded - end) * sizeof(float));
      }
      for (int64_t key = begin / ROWS; key * ROWS < end; key++) {
        meeting.first_row[key] = least(meeting.first_row[key], tile * ROWS);
        meeting.last_row[key] = tile * ROWS + ROWS;
        found = true;
      }
    }
    return found;
  }

  void meet(const Head &at, int64_t block, int64_t chunk, const KeyBlock &own) const {
    const PackedHead &packed = at.packed;
    const int64_t first_row = block * BLOCK_ROWS, rows = least(BLOCK_ROWS, sizes_.rows - first_row);
    Meeting meeting;
    if (!find(packed.tiles + first_row / ROWS, rows / ROWS, own, meeting)) return;

    for (int64_t column = 0; column < own.padded; column += COLUMNS)
      for (int64_t tile = 0; tile < meeting.tiles; tile++)
        if (meeting.begin[tile] <= column && column < meeting.end[tile]) weigh(at, first_row, tile, column, own);
    add_to_keys(meeting, packed.of_output + first_row * sizes_.v_stride, sizes_.v_stride, own.scores, own.dv, sizes_.v_width);
    for (int64_t column = 0; column < own.padded; column += COLUMNS)
      for (int64_t tile = 0; tile < meeting.tiles; tile++)
        if (meeting.begin[tile] <= column && column < meeting.end[tile]) differentiate(at, first_row, tile, column, own);
    add_to_keys(meeting, packed.q + first_row * sizes_.q_stride, sizes_.q_stride, own.scores, own.dk, sizes_.q_width);

    float *dq = packed.dq + (chunk * sizes_.rows + first_row) * sizes_.q_width;
    uint8_t &begun = packed.begun[chunk * sizes_.blocks + block];
    if (!begun) memset(dq, 0, static_cast<size_t>(rows * sizes_.q_width) * sizeof(float));
    begun = 1;
    for (int64_t tile = 0; tile < meeting.tiles; tile++) {
      const int64_t begin = meeting.begin[tile], count = meeting.end[tile] - begin;
      if (count == 0) continue;
      add_product<false>(own.scores + tile * ROWS * SCORES_STRIDE + begin, own.k + begin * sizes_.q_stride, sizes_.q_stride,
                         count, dq + tile * ROWS * sizes_.q_width, sizes_.q_width);
    }
  }

  // dV += P^T dO, or dK += dS^T Q.
  static void add_to_keys(const Meeting &meeting, const float *rows, int64_t stride, const float *scores, float *to,
                          int64_t width) {
    for (int64_t key = 0; key < meeting.key_tiles; key++) {
      const int64_t first = meeting.first_row[key], count = meeting.last_row[key] - first;
      if (count > 0)
        add_product<true>(scores + first * SCORES_STRIDE + key * ROWS, rows + first * stride, stride, count,
                          to + key * ROWS * width, width);
    }
  }

  // ------------------------------------------------------------ a tile of scores

  // Z P of one tile.
  void weigh(const Head &at, int64_t first_row, int64_t tile, int64_t column, const KeyBlock &own) const {
    const PackedHead &packed = at.packed;
    const int64_t row = first_row + tile * ROWS, first = own.first + column;
    const float *q = packed.q + row * sizes_.q_stride, *panel = own.k_columns + column * call_.head_dim;
    const int64_t corner = tile * ROWS * SCORES_STRIDE + column;
    float *scores = own.scores + corner;
    const Floats factor = broadcast(static_cast<float>(call_.scale) * LOG2_E);
    if (plain_ && packed.tiles[row / ROWS].covers(first, COLUMNS)) {
      const float *logsumexp = packed.logsumexp + row;
      product<false>(q, sizes_.q_stride, panel, call_.head_dim,
                     [=](int64_t i, Floats left, Floats right) __attribute__((always_inline)) {
                       const Floats shift = broadcast(logsumexp[i]);
                       store(scores + i * SCORES_STRIDE, exp2(left * factor - shift));
                       store(scores + i * SCORES_STRIDE + LANES, exp2(right * factor - shift));
                     });
      return;
    }
    product<false>(q, sizes_.q_stride, panel, call_.head_dim,
                   [=](int64_t i, Floats left, Floats right) __attribute__((always_inline)) {
                     store(scores + i * SCORES_STRIDE, left * factor);
                     store(scores + i * SCORES_STRIDE + LANES, right * factor);
                   });
    for (int64_t i = 0; i < ROWS; i++)
      for (int64_t half = 0; half < COLUMNS; half += LANES)
        weigh_lanes(packed.queries[row + i], packed.logsumexp[row + i], first + half, corner + i * SCORES_STRIDE + half, own);
  }

  // The same where some key is hidden, or where more than the product makes the score: LANES scores of one row.
  void weigh_lanes(const Query &query, float logsumexp, int64_t first, int64_t place, const KeyBlock &own) const {
    float *scores = own.scores + place;
    if (query.start >= first + LANES || query.stop <= first) return store(scores, (Floats){});
    const Ints may = shown(call_, query, first);
    Floats score = load(scores);
    if (call_.softcap > 0) {
      score = softcapped(call_, score);
      const Floats part = score * broadcast(1 / (static_cast<float>(call_.softcap) * LOG2_E));  // tanh
      store(own.slopes + place, select(may, broadcast(1.f) - part * part, (Floats){}));
    }
    if (query.bias) score += bias_of(call_, query, first);
    Floats weight = select(may, exp2(score - broadcast(logsumexp)), (Floats){});
    if (call_.dropout > 0) {
      store(own.weights + place, weight);
      weight *= kept(call_, query, first);
    }
    store(scores, weight);
  }

  // dS of one tile, in place of its weights.
  void differentiate(const Head &at, int64_t first_row, int64_t tile, int64_t column, const KeyBlock &own) const {
    const PackedHead &packed = at.packed;
    const int64_t row = first_row + tile * ROWS, first = own.first + column;
    const float *of_output = packed.of_output + row * sizes_.v_stride, *panel = own.v_columns + column * call_.value_dim;
    const int64_t corner = tile * ROWS * SCORES_STRIDE + column;
    if (plain_ && packed.tiles[row / ROWS].covers(first, COLUMNS)) {
      const float *delta = packed.delta + row;
      float *scores = own.scores + corner;
      product<false>(of_output, sizes_.v_stride, panel, call_.value_dim,
                     [=](int64_t i, Floats left, Floats right) __attribute__((always_inline)) {
                       const Floats shift = broadcast(delta[i]);
                       float *weights = scores + i * SCORES_STRIDE;
                       store(weights, load(weights) * (left - shift));
                       store(weights + LANES, load(weights + LANES) * (right - shift));
                     });
      return;
    }
    float of_weights[ROWS * COLUMNS];
    product<false>(of_output, sizes_.v_stride, panel, call_.value_dim,
                   [&](int64_t i, Floats left, Floats right) __attribute__((always_inline)) {
                     store(of_weights + i * COLUMNS, left);
                     store(of_weights + i * COLUMNS + LANES, right);
                   });
    for (int64_t i = 0; i < ROWS; i++)
      for (int64_t half = 0; half < COLUMNS; half += LANES)
        differentiate_lanes(at, row + i, first + half, load(of_weights + i * COLUMNS + half),
                            corner + i * SCORES_STRIDE + half, own);
  }

  void differentiate_lanes(const Head &at, int64_t row, int64_t first, Floats of_weight, int64_t place,
                           const KeyBlock &own) const {
    const Query &query = at.packed.queries[row];
    float *scores = own.scores + place;
    if (query.start >= first + LANES || query.stop <= first) return store(scores, (Floats){});
    const Floats weight = load((call_.dropout > 0 ? own.weights : own.scores) + place);
    if (call_.dropout > 0) of_weight *= kept(call_, query, first);
    const Floats of_score = weight * (of_weight - broadcast(at.packed.delta[row]));
    Floats result = select(shown(call_, query, first), of_score, (Floats){});
    if (call_.dbias) {
      const int64_t offset = at.batch * call_.dbias_batch + at.head * call_.dbias_head + row * call_.dbias_row;
      float *dbias = row_at<float>(call_.dbias, offset + first * call_.dbias_key);
      if (call_.dbias_key == 1 && first + LANES <= call_.keys)
        store(dbias, load(dbias) + result);
      else
        for (int64_t lane = 0; lane < LANES && first + lane < call_.keys; lane++) dbias[lane * call_.dbias_key] += result[lane];
    }
    if (call_.softcap > 0) result *= load(own.slopes + place);
    store(scores, result);
  }

  // ------------------------------------------------------------ dQ

  // Add the chunks' parts of dQ, in their order.
  void finish(int64_t first_head, int64_t slot, int64_t block) const {
    const Head at = head_at(first_head, slot);
    const int64_t begin = block * BLOCK_ROWS, end = least(call_.queries, begin + BLOCK_ROWS), width = sizes_.q_width;
    float *sum = nullptr;
    for (int64_t chunk = 0; chunk < sizes_.chunks; chunk++) {
      if (!at.packed.begun[chunk * sizes_.blocks + block]) continue;
      float *part = at.packed.dq + (chunk * sizes_.rows + begin) * width;
      if (sum)
        for (int64_t x = 0; x < (end - begin) * width; x += LANES) store(sum + x, load(sum + x) + load(part + x));
      else
        sum = part;
    }
    for (int64_t row = begin; row < end; row++) {
      const int64_t offset = at.batch * call_.dq_batch + at.head * call_.dq_head + row * call_.dq_row;
      Element *dq = row_at<Element>(call_.dq, offset);
      if (sum)
        write_row(sum + (row - begin) * width, call_.head_dim, static_cast<float>(call_.scale), dq);
      else
        memset(static_cast<void *>(dq), 0, static_cast<size_t>(call_.head_dim) * sizeof(Element));
    }
  }

  const Call &call_;
  const BackwardSizes sizes_;
  char *const workspace_;
  bool plain_;  // the scores are products and nothing else
};

// ---------------------------------------------------------------- for kernel.h

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
