// The sums of the weights that each key receives from all queries, and the sums over the cells of a map; without
// values.
//
// A weight is exp(score - logsumexp) of its query, so the pass needs the logsumexp of the forward pass. A task covers
// some whole cells of the keys of a kv head, so that no two tasks add to the same cell. Its keys are packed once for
// all query heads of the group. The queries of each head follow in blocks, and the columns of a tile of weights are
// summed in registers.
#pragma once
#include "call.h"
#include "forward.h"
#include "gemm_tile.h"
#include "pack.h"
#include "score_terms.h"
#include "threads.h"
#include "workspace.h"

namespace {

constexpr int64_t KEY_SUMS_QUERIES = 96;  // per block
constexpr int64_t KEY_SUMS_KEYS = 512;    // packed at once
static_assert(KEY_SUMS_QUERIES % ROWS == 0 && KEY_SUMS_KEYS % COLUMNS == 0, "blocks are whole tiles");

template <class Epilogue>
INLINE void score_tile(const float *rows, const float *panel, int64_t depth, Epilogue epilogue) {
  gemm_tile<false>(rows, depth, panel, depth, epilogue);
}
#if BF16_DOT
template <class Epilogue>
INLINE void score_tile(const Bfloat16 *rows, const Bfloat16 *panel, int64_t depth, Epilogue epilogue) {
  gemm_tile(rows, depth, panel, depth, epilogue);
}
#endif

// ---------------------------------------------------------------- sizes and workspace

struct KeySumsPlan {
  int64_t group;                 // query heads of a kv head
  int64_t depth;                 // head_dim as it is packed
  int64_t cell_rows, cell_keys;  // queries and keys of a cell; convenient sizes where no map is wanted
  int64_t row_cells, key_cells;  // size of the map
  int64_t task_keys, tasks;      // keys of a task, tasks of a kv head
  int64_t packed_keys;           // keys that a task packs at once
  int64_t parts;                 // of a block of queries: a part has one row of cells
};

// The plan depends on shapes alone, so the bits do not depend on the number of threads.
INLINE KeySumsPlan key_sums_plan(const Call &call) {
  KeySumsPlan plan;
  plan.group = call.heads / max(call.kv_heads, 1);
  plan.depth = packed_depth(call);
  plan.cell_rows = call.pooled_map ? min(call.pool_rows, max(call.queries, 1)) : KEY_SUMS_QUERIES;
  plan.cell_keys = call.pooled_map ? min(call.pool_keys, max(call.keys, 1)) : COLUMNS;
  plan.row_cells = ceil_div(call.queries, plan.cell_rows);
  plan.key_cells = ceil_div(call.keys, plan.cell_keys);
  // Whole cells that are also whole tiles, unless that takes too many keys.
  const int64_t common = min(plan.cell_keys & -plan.cell_keys, COLUMNS);  // common divisor, as COLUMNS is a power of 2
  const int64_t tiled = plan.cell_keys / common * COLUMNS;
  const int64_t step = tiled <= KEY_SUMS_KEYS ? tiled : plan.cell_keys;
  // Smaller tasks for few heads, so that there are enough tasks for many threads.
  const int64_t wanted = max(4 * COLUMNS, min(KEY_SUMS_KEYS, call.keys * call.batch * call.kv_heads / 16));
  plan.task_keys = round_up(wanted, step);
  plan.tasks = ceil_div(call.keys, plan.task_keys);
  plan.packed_keys = plan.task_keys <= 2 * KEY_SUMS_KEYS ? round_up(plan.task_keys, COLUMNS) : KEY_SUMS_KEYS;
  plan.parts = min(KEY_SUMS_QUERIES, KEY_SUMS_QUERIES / plan.cell_rows + 2);
  return plan;
}

// A query of the current block.
struct KeySumsRow {
  Query query;
  float logsumexp;  // in units of log2
  int64_t part;     // of the block
};

// The memory of one thread.
template <class Packed>
struct KeySumsScratch {
  double *totals;    // (packed_keys): sums over the blocks of queries so far
  KeySumsRow *rows;  // (KEY_SUMS_QUERIES)
  Span *tiles;       // (KEY_SUMS_QUERIES / ROWS)
  float *sums;       // (parts, packed_keys): sums over each part of the current block
  Packed *keys;      // (packed_keys / COLUMNS, depth, COLUMNS)
  Packed *queries;   // (KEY_SUMS_QUERIES, depth)
  int64_t bytes;

  KeySumsScratch(const KeySumsPlan &plan, char *memory) {
    Workspace workspace{memory};
    totals = workspace.take<double>(plan.packed_keys);
    rows = workspace.take<KeySumsRow>(KEY_SUMS_QUERIES);
    tiles = workspace.take<Span>(KEY_SUMS_QUERIES / ROWS);
    sums = workspace.take<float>(plan.parts * plan.packed_keys);
    keys = workspace.take<Packed>(plan.packed_keys * plan.depth);
    queries = workspace.take<Packed>(KEY_SUMS_QUERIES * plan.depth);
    bytes = workspace.bytes;
  }
};

// ---------------------------------------------------------------- a block of queries

template <class Packed>
class KeySumsPass {
 public:
  KeySumsPass(const Call &call, const KeySumsPlan &plan, const KeySumsScratch<Packed> &scratch)
      : call_(call), plan_(plan), scratch_(scratch), factor_(static_cast<float>(call.scale) * LOG2_E) {}

  // The sums over the keys of one task.
  void task(int64_t batch, int64_t kv_head, int64_t index) {
    const int64_t begin = index * plan_.task_keys, end = min(begin + plan_.task_keys, call_.keys);
    for (int64_t g = 0; call_.pooled_map && g < plan_.group; g++)
      clear_cells(batch, kv_head * plan_.group + g, begin, end);
    for (first_key_ = begin; first_key_ < end; first_key_ += plan_.packed_keys) {
      num_keys_ = min(plan_.packed_keys, end - first_key_);
      // Non-finite keys may stay: they only affect their own column, which no row with a finite logsumexp sees.
      const int64_t padded = round_up(num_keys_, COLUMNS);
      with_element_packed_as<Packed>(call_, [&](auto element) {
        const auto *keys = row_of<decltype(element)>(call_.k, call_.k_strides, batch, kv_head, first_key_);
        pack_transposed(keys, call_.k_strides.row, num_keys_, padded, call_.head_dim, scratch_.keys);
      });
      for (int64_t g = 0; g < plan_.group; g++) head(batch, kv_head * plan_.group + g);
    }
  }

 private:
  float *cells(int64_t batch, int64_t head, int64_t row_cell) const {
    const int64_t row = (batch * call_.heads + head) * plan_.row_cells + row_cell;
    return call_.pooled_map + row * plan_.key_cells;
  }

  void clear_cells(int64_t batch, int64_t head, int64_t begin, int64_t end) {
    const int64_t first = begin / plan_.cell_keys, count = ceil_div(end, plan_.cell_keys) - first;
    for (int64_t row = 0; row < plan_.row_cells; row++) {
      float *to = cells(batch, head, row) + first;
      for (int64_t cell = 0; cell < count; cell++) to[cell] = 0;
    }
  }

  // The sums over the packed keys and the queries of one head.
  void head(int64_t batch, int64_t head) {
    memset(scratch_.totals, 0, num_keys_ * sizeof(double));
    for (int64_t first = 0; first < call_.queries; first += KEY_SUMS_QUERIES) {
      const int64_t count = min(KEY_SUMS_QUERIES, call_.queries - first), tiles = ceil_div(count, ROWS);
      if (!read_rows(batch, head, first, count)) continue;
      pack_rows(batch, head, first, count);
      const int64_t parts = scratch_.rows[count - 1].part + 1;
      memset(scratch_.sums, 0, parts * plan_.packed_keys * sizeof(float));
      for (int64_t column = 0; column < num_keys_; column += COLUMNS) sum_columns(column, tiles);
      add_up(batch, head, first, parts);
    }
    if (!call_.key_sums) return;
    float *key_sums = call_.key_sums + (batch * call_.heads + head) * call_.keys + first_key_;
    for (int64_t key = 0; key < num_keys_; key++) key_sums[key] = static_cast<float>(scratch_.totals[key]);
  }

  // Read the queries of a block. Returns whether any of them sees a packed key.
  bool read_rows(int64_t batch, int64_t head, int64_t first, int64_t count) {
    const float *logsumexp = call_.logsumexp + (batch * call_.heads + head) * call_.queries + first;
    bool any = false;
    for (int64_t tile = 0; tile * ROWS < count; tile++) {
      Span span = span_of_no_query(call_);
      for (int64_t i = tile * ROWS; i < tile * ROWS + ROWS; i++) {
        KeySumsRow &row = scratch_.rows[i];
        // Queries without a finite logsumexp and rows past the last query see no key: their weights count as 0.
        if (i < count && finite(logsumexp[i])) {
          row.query = read_query(call_, batch, head, first + i);
          row.logsumexp = to_log2(broadcast(logsumexp[i]))[0];
        } else {
          row.query = read_query(call_, batch, head, first + min(i, count - 1));
          row.query.start = row.query.stop = 0;
          row.logsumexp = 0;
        }
        row.part = min(first + i, call_.queries - 1) / plan_.cell_rows - first / plan_.cell_rows;
        span.add(row.query);
      }
      any |= span.overlaps(first_key_, num_keys_);
      scratch_.tiles[tile] = span;
    }
    return any;
  }

  void pack_rows(int64_t batch, int64_t head, int64_t first, int64_t count) {
    with_element_packed_as<Packed>(call_, [&](auto element) {
      const auto *q = row_of<decltype(element)>(call_.q, call_.q_strides, batch, head, first);
      for (int64_t i = 0; i < count; i++)
        pack_query(q + i * call_.q_strides.row, scratch_.queries + i * plan_.depth);
    });
    for (int64_t x = count * plan_.depth; x < round_up(count, ROWS) * plan_.depth; x++) scratch_.queries[x] = Packed{0};
  }
  template <class Element>
  void pack_query(const Element *from, float *to) const { pack_row(from, call_.head_dim, plan_.depth, factor_, to); }
  void pack_query(const Bfloat16 *from, Bfloat16 *to) const {
    memcpy(to, from, call_.head_dim * sizeof *to);  // non-finite elements may stay here too: their row counts as 0
    for (int64_t x = call_.head_dim; x < plan_.depth; x++) to[x] = Bfloat16{0};
  }

  // Scores of LANES keys in units of log2, from dot products. Rows of floats are packed with the factor, bfloat16
  // without.
  inline __attribute__((always_inline)) Floats scaled(Floats dots) const {
    return sizeof(Packed) == 2 ? dots * broadcast(factor_) : dots;
  }

  // Weights of LANES visible keys without softcap and bias.
  inline __attribute__((always_inline)) Floats plain_weight(const KeySumsRow &row, Floats dots) const {
    return exp2(scaled(dots) - broadcast(row.logsumexp));
  }

  // Weights of the LANES keys from `key` on, with softcap, bias and mask.
  inline __attribute__((always_inline)) Floats weight(const KeySumsRow &row, Floats dots, int64_t key) const {
    if (row.query.start == row.query.stop) return (Floats){};  // before its bias is read, which may not exist
    Floats score = scaled(dots);
    if (call_.softcap > 0) score = apply_softcap(call_, score);
    if (row.query.bias) score += scaled_bias(call_, row.query, key);
    // Selected, not multiplied by 0, because hidden scores may be NaN or overflow.
    return select(visible_lanes(call_, row.query, key), exp2(score - broadcast(row.logsumexp)), (Floats){});
  }

  // The sums over the columns of a panel, for each part of the block.
  void sum_columns(int64_t column, int64_t tiles) {
    const Packed *panel = scratch_.keys + column * plan_.depth;
    const int64_t key = first_key_ + column;
    const bool plain = !call_.visible && !call_.bias && !(call_.softcap > 0);
    Floats left = (Floats){}, right = (Floats){};
    int64_t part = 0;
    for (int64_t tile = 0; tile < tiles; tile++) {
      const Span &span = scratch_.tiles[tile];
      if (!span.overlaps(key, COLUMNS)) continue;
      const KeySumsRow *rows = scratch_.rows + tile * ROWS;
      const Packed *queries = scratch_.queries + tile * ROWS * plan_.depth;
      const bool full = plain && span.covers(key, COLUMNS);
      if (full && rows[0].part == part && rows[ROWS - 1].part == part) {
        score_tile(queries, panel, plan_.depth, [&](int64_t i, Floats a, Floats b) __attribute__((always_inline)) {
          left += plain_weight(rows[i], a);
          right += plain_weight(rows[i], b);
        });
        continue;
      }
      Floats weights[ROWS][2];
      score_tile(queries, panel, plan_.depth, [&](int64_t i, Floats a, Floats b) __attribute__((always_inline)) {
        weights[i][0] = full ? plain_weight(rows[i], a) : a;
        weights[i][1] = full ? plain_weight(rows[i], b) : b;
      });
      for (int64_t i = 0; i < ROWS; i++) {
        if (rows[i].part != part) {
          add_sums(part, column, left, right);
          left = right = (Floats){};
          part = rows[i].part;
        }
        left += full ? weights[i][0] : weight(rows[i], weights[i][0], key);
        right += full ? weights[i][1] : weight(rows[i], weights[i][1], key + LANES);
      }
    }
    add_sums(part, column, left, right);
  }

  void add_sums(int64_t part, int64_t column, Floats left, Floats right) {
    float *sums = scratch_.sums + part * plan_.packed_keys + column;
    store(sums, load(sums) + left);
    store(sums + LANES, load(sums + LANES) + right);
  }

  // Add the sums of a block to the totals of the keys, in double because there may be many blocks, and to the cells.
  void add_up(int64_t batch, int64_t head, int64_t first_row, int64_t parts) {
    for (int64_t part = 0; part < parts; part++) {
      const float *sums = scratch_.sums + part * plan_.packed_keys;
      for (int64_t key = 0; key < num_keys_; key++) scratch_.totals[key] += sums[key];
      if (!call_.pooled_map) continue;
      float *row = cells(batch, head, first_row / plan_.cell_rows + part);
      for (int64_t key = 0, count; key < num_keys_; key += count) {
        const int64_t cell = (first_key_ + key) / plan_.cell_keys;
        count = min((cell + 1) * plan_.cell_keys - first_key_, num_keys_) - key;
        row[cell] += sum_of(sums + key, count);
      }
    }
  }

  static float sum_of(const float *from, int64_t count) {
    Floats lanes = (Floats){};
    float rest = 0;
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) lanes += load(from + i);
    for (; i < count; i++) rest += from[i];
    return count >= LANES ? sum(lanes) + rest : rest;
  }

  const Call &call_;
  const KeySumsPlan plan_;
  const KeySumsScratch<Packed> scratch_;
  const float factor_;                    // of the scores, in units of log2
  int64_t first_key_ = 0, num_keys_ = 0;  // the packed keys
};

// ---------------------------------------------------------------- the pass

template <class Packed>
void key_sums_all(const Call &call, char *workspace) {
  if (!call.batch || !call.heads || !call.keys) return;
  const KeySumsPlan plan = key_sums_plan(call);
  const int64_t work = call.batch * call.heads * call.queries * call.keys * call.head_dim;
  const int64_t thread_bytes = KeySumsScratch<Packed>(plan, nullptr).bytes;
  run_parallel(team_size(call.threads, static_cast<double>(work)), [&](Team &team) {
    const TileSizes tile_sizes(sizeof(Packed) == sizeof(Bfloat16));
    const KeySumsScratch<Packed> scratch(plan, workspace + team.thread * thread_bytes);
    // Early keys first: under a causal mask most queries see them, and the longest tasks should not come last.
    team.for_each(plan.tasks * call.batch * call.kv_heads, [&](int64_t i) {
      const int64_t kv_heads = call.batch * call.kv_heads, kv_head = i % kv_heads;
      KeySumsPass<Packed> pass(call, plan, scratch);
      pass.task(kv_head / call.kv_heads, kv_head % call.kv_heads, i / kv_heads);
    });
  });
}

int64_t key_sums_workspace(const Call &call) {
  const KeySumsPlan plan = key_sums_plan(call);
  return call.threads *
         with_packed(call, [&](auto packed) { return KeySumsScratch<decltype(packed)>(plan, nullptr).bytes; });
}

void key_sums_run(const Call &call, char *workspace) {
  with_packed(call, [&](auto packed) { key_sums_all<decltype(packed)>(call, workspace); });
}

}  // namespace
