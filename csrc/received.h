// What each key receives: sums of the weights over the queries and over the cells of a map; a pass without values.
//
// A weight is exp(score - logsumexp) of its query, so the pass needs the logsumexp of the forward pass. A task is a few
// whole cells of a kv head's keys: nobody else adds to what it adds to. Its keys are packed once for all query heads of
// the group; each head's queries come by in blocks, and tiles of weights are summed down their columns in registers.
#pragma once
#include "call.h"
#include "forward.h"
#include "pack.h"
#include "product.h"
#include "team.h"
#include "terms.h"

namespace {

constexpr int64_t RECEIVED_ROWS = 96, RECEIVED_KEYS = 512;  // queries of a block, keys that are packed at a time
static_assert(RECEIVED_ROWS % ROWS == 0 && RECEIVED_KEYS % COLUMNS == 0, "blocks are whole tiles");

template <class End>
INLINE void product_of_rows(const float *rows, const float *panel, int64_t depth, End end) {
  product<false>(rows, depth, panel, depth, end);
}
#if BF16_DOT
template <class End>
INLINE void product_of_rows(const Bfloat16 *rows, const Bfloat16 *panel, int64_t depth, End end) {
  product(rows, depth, panel, depth, end);
}
#endif

// ---------------------------------------------------------------- sizes and workspace

struct ReceivedPlan {
  int64_t group;                 // query heads of a kv head
  int64_t depth;                 // head_dim, filled up to pairs where those are multiplied
  int64_t cell_rows, cell_keys;  // of the map; whatever suits where there is none
  int64_t row_cells, key_cells;
  int64_t task_keys, tasks;      // keys of a task, tasks of a kv head
  int64_t packed_keys;           // a task packs so many keys at a time
  int64_t parts;                 // of a block of queries, cut where the map's rows of cells are
};

// The plan depends on shapes alone: the same bits for any number of threads.
template <class Element>
ReceivedPlan received_plan(const Call &call) {
  ReceivedPlan plan;
  plan.group = call.heads / most(call.kv_heads, 1);
  plan.depth = ForwardPlan<Element>::NARROW ? up(call.head_dim, 2) : call.head_dim;
  plan.cell_rows = call.pooled ? least(call.pool_rows, most(call.queries, 1)) : RECEIVED_ROWS;
  plan.cell_keys = call.pooled ? least(call.pool_keys, most(call.keys, 1)) : COLUMNS;
  plan.row_cells = whole(call.queries, plan.cell_rows);
  plan.key_cells = whole(call.keys, plan.cell_keys);
  // Whole cells that are whole tiles too, unless those are too many keys.
  const int64_t common = least(plan.cell_keys & -plan.cell_keys, COLUMNS);  // divisor, for COLUMNS is a power of 2
  const int64_t tiled = plan.cell_keys / common * COLUMNS;
  const int64_t step = tiled <= RECEIVED_KEYS ? tiled : plan.cell_keys;
  // Few heads: smaller tasks, so that there are enough of them for many threads.
  const int64_t wanted = most(4 * COLUMNS, least(RECEIVED_KEYS, call.keys * call.batch * call.kv_heads / 16));
  plan.task_keys = up(wanted, step);
  plan.tasks = whole(call.keys, plan.task_keys);
  plan.packed_keys = plan.task_keys <= 2 * RECEIVED_KEYS ? up(plan.task_keys, COLUMNS) : RECEIVED_KEYS;
  plan.parts = least(RECEIVED_ROWS, RECEIVED_ROWS / plan.cell_rows + 2);
  return plan;
}

// A query of the block at hand.
struct ReceivedRow {
  Query query;
  float logsumexp;  // in units of log2
  int64_t part;     // of the block, whose sums it adds to
};

// ROWS queries: the keys that one of them sees, and the keys that all of them see.
struct ReceivedTile {
  int64_t first, last;          // keys [first, last) are seen by some
  int64_t all_first, all_last;  // keys [all_first, all_last) by all
};

// What one thread holds.
template <class Element>
struct ReceivedScratch {
  typedef typename Form<Element>::Packed Packed;

  double *totals;       // (packed_keys): what the keys have received so far
  ReceivedRow *rows;    // (RECEIVED_ROWS)
  ReceivedTile *tiles;  // (RECEIVED_ROWS / ROWS)
  float *sums;          // (parts, packed_keys): what they receive from each part of the block at hand
  Packed *keys;         // (packed_keys / COLUMNS, depth, COLUMNS)
  Packed *queries;      // (RECEIVED_ROWS, depth)

  // Lay it out from `place` on; gives its bytes.
  int64_t lay(const ReceivedPlan &plan, char *place) {
    char *const begin = place;
    take(place, totals, plan.packed_keys);
    take(place, rows, RECEIVED_ROWS);
    take(place, tiles, RECEIVED_ROWS / ROWS);
    take(place, sums, plan.parts * plan.packed_keys);
    take(place, keys, plan.packed_keys * plan.depth);
    take(place, queries, RECEIVED_ROWS * plan.depth);
    return place - begin;
  }

 private:
  template <class Item>
  static void take(char *&place, Item *&items, int64_t count) {
    items = reinterpret_cast<Item *>(place);
    place += up(count * static_cast<int64_t>(sizeof(Item)), 64);
  }
};

// ---------------------------------------------------------------- a block of queries

template <class Element>
class ReceivedPass {
  typedef typename Form<Element>::Packed Packed;

 public:
  ReceivedPass(const Call &call, const ReceivedPlan &plan, const ReceivedScratch<Element> &scratch)
      : call_(call), plan_(plan), scratch_(scratch), factor_(static_cast<float>(call.scale) * LOG2_E) {}

  // All that the keys of one task receive.
  void task(int64_t batch, int64_t kv_head, int64_t index) {
    const int64_t begin = index * plan_.task_keys, end = least(begin + plan_.task_keys, call_.keys);
    for (int64_t g = 0; call_.pooled && g < plan_.group; g++) empty_cells(batch, kv_head * plan_.group + g, begin, end);
    for (first_key_ = begin; first_key_ < end; first_key_ += plan_.packed_keys) {
      num_keys_ = least(plan_.packed_keys, end - first_key_);
      const Element *keys = head_of<Element>(call_.k, batch, call_.k_batch, kv_head, call_.k_head);
      // What is not finite may stay: it reaches its own column alone, which the rows that count do not see.
      pack_transposed(keys + first_key_ * call_.k_row, call_.k_row, num_keys_, up(num_keys_, COLUMNS), call_.head_dim,
                      scratch_.keys);
      for (int64_t g = 0; g < plan_.group; g++) head(batch, kv_head * plan_.group + g);
    }
  }

 private:
  float *cells(int64_t batch, int64_t head, int64_t row_cell) const {
    const int64_t row = (batch * call_.heads + head) * plan_.row_cells + row_cell;
    return static_cast<float *>(const_cast<void *>(call_.pooled)) + row * plan_.key_cells;
  }

  void empty_cells(int64_t batch, int64_t head, int64_t begin, int64_t end) {
    const int64_t first = begin / plan_.cell_keys, count = whole(end, plan_.cell_keys) - first;
    for (int64_t row = 0; row < plan_.row_cells; row++) {
      float *to = cells(batch, head, row) + first;
      for (int64_t cell = 0; cell < count; cell++) to[cell] = 0;
    }
  }

  // What the packed keys receive from one query head.
  void head(int64_t batch, int64_t head) {
    memset(scratch_.totals, 0, num_keys_ * sizeof(double));
    for (int64_t first = 0; first < call_.queries; first += RECEIVED_ROWS) {
      const int64_t count = least(RECEIVED_ROWS, call_.queries - first), tiles = whole(count, ROWS);
      if (!read_rows(batch, head, first, count)) continue;
      pack_rows(batch, head, first, count);
      const int64_t parts = scratch_.rows[count - 1].part + 1;
      memset(scratch_.sums, 0, parts * plan_.packed_keys * sizeof(float));
      for (int64_t column = 0; column < num_keys_; column += COLUMNS) sum_columns(column, tiles);
      add_up(batch, head, first, parts);
    }
    if (!call_.received) return;
    float *received = static_cast<float *>(const_cast<void *>(call_.received));
    received += (batch * call_.heads + head) * call_.keys + first_key_;
    for (int64_t key = 0; key < num_keys_; key++) received[key] = static_cast<float>(scratch_.totals[key]);
  }

  // Read what the queries may see; false if none of them sees one of the packed keys.
  bool read_rows(int64_t batch, int64_t head, int64_t first, int64_t count) {
    const float *logsumexp = static_cast<const float *>(call_.logsumexp);
    logsumexp += (batch * call_.heads + head) * call_.queries + first;
    bool seen = false;
    for (int64_t tile = 0; tile * ROWS < count; tile++) {
      ReceivedTile bounds = {call_.keys, 0, 0, call_.keys};
      for (int64_t i = tile * ROWS; i < tile * ROWS + ROWS; i++) {
        ReceivedRow &row = scratch_.rows[i];
        // Queries of an empty row or a row of NaN count as 0, and so does one that is not there: they see no key.
        if (i < count && finite(logsumexp[i])) {
          row.query = query_of(call_, batch, head, first + i);
          row.logsumexp = logsumexp[i] * LOG2_E;
        } else {
          row.query = query_of(call_, batch, head, first + least(i, count - 1));
          row.query.start = row.query.stop = 0;
          row.logsumexp = 0;
        }
        row.part = least(first + i, call_.queries - 1) / plan_.cell_rows - first / plan_.cell_rows;
        bounds.all_first = most(bounds.all_first, row.query.start);
        bounds.all_last = least(bounds.all_last, row.query.stop);
        if (row.query.start == row.query.stop) continue;
        bounds.first = least(bounds.first, row.query.start);
        bounds.last = most(bounds.last, row.query.stop);
      }
      seen |= bounds.first < first_key_ + num_keys_ && bounds.last > first_key_;
      scratch_.tiles[tile] = bounds;
    }
    return seen;
  }

  void pack_rows(int64_t batch, int64_t head, int64_t first, int64_t count) {
    const Element *queries = head_of<Element>(call_.q, batch, call_.q_batch, head, call_.q_head) + first * call_.q_row;
    for (int64_t i = 0; i < count; i++) pack_query(queries + i * call_.q_row, scratch_.queries + i * plan_.depth);
    for (int64_t x = count * plan_.depth; x < up(count, ROWS) * plan_.depth; x++) scratch_.queries[x] = Packed{0};
  }
  void pack_query(const Element *from, float *to) const { pack_row(from, call_.head_dim, plan_.depth, factor_, to); }
  void pack_query(const Bfloat16 *from, Bfloat16 *to) const {
    memcpy(to, from, call_.head_dim * sizeof *to);  // what is not finite may stay here too: its row does not count
    if (plan_.depth > call_.head_dim) to[call_.head_dim] = Bfloat16{0};
  }

  // Scores of LANES keys in units of log2. Float rows hold the factor already; bfloat16 is multiplied as it is.
  inline __attribute__((always_inline)) Floats scaled(Floats product) const {
    return sizeof(Packed) == 2 ? product * broadcast(factor_) : product;
  }

  // Weights of LANES keys that the query sees all of, without softcap and bias.
  inline __attribute__((always_inline)) Floats weight(const ReceivedRow &row, Floats product) const {
    return exp2(scaled(product) - broadcast(row.logsumexp));
  }

  // Weights of LANES keys from `key` on, whatever the call asks for.
  inline __attribute__((always_inline)) Floats any_weight(const ReceivedRow &row, Floats product, int64_t key) const {
    if (row.query.start == row.query.stop) return (Floats){};  // nor is its bias read
    Floats score = scaled(product);
    if (call_.softcap > 0) score = softcapped(call_, score);
    if (row.query.bias) score += bias_of(call_, row.query, key);
    // Selected, not multiplied: hidden scores may be NaN or overflow.
    return select(shown(call_, row.query, key), exp2(score - broadcast(row.logsumexp)), (Floats){});
  }

  // The sums of a panel's columns, by parts of the block.
  void sum_columns(int64_t column, int64_t tiles) {
    const Packed *panel = scratch_.keys + column * plan_.depth;
    const int64_t key = first_key_ + column;
    const bool plain = !call_.seen && !call_.bias && !(call_.softcap > 0);
    Floats left = (Floats){}, right = (Floats){};
    int64_t part = 0;
    for (int64_t tile = 0; tile < tiles; tile++) {
      const ReceivedTile &bounds = scratch_.tiles[tile];
      if (bounds.first >= key + COLUMNS || bounds.last <= key) continue;
      const ReceivedRow *rows = scratch_.rows + tile * ROWS;
      const Packed *queries = scratch_.queries + tile * ROWS * plan_.depth;
      const bool full = plain && bounds.all_first <= key && bounds.all_last >= key + COLUMNS;
      if (full && rows[0].part == part && rows[ROWS - 1].part == part) {
        product_of_rows(queries, panel, plan_.depth, [&](int64_t i, Floats a, Floats b) __attribute__((always_inline)) {
          left += weight(rows[i], a);
          right += weight(rows[i], b);
        });
        continue;
      }
      Floats weights[ROWS][2];
      product_of_rows(queries, panel, plan_.depth, [&](int64_t i, Floats a, Floats b) __attribute__((always_inline)) {
        weights[i][0] = full ? weight(rows[i], a) : a;
        weights[i][1] = full ? weight(rows[i], b) : b;
      });
      for (int64_t i = 0; i < ROWS; i++) {
        if (rows[i].part != part) {
          add_sums(part, column, left, right);
          left = right = (Floats){};
          part = rows[i].part;
        }
        left += full ? weights[i][0] : any_weight(rows[i], weights[i][0], key);
        right += full ? weights[i][1] : any_weight(rows[i], weights[i][1], key + LANES);
      }
    }
    add_sums(part, column, left, right);
  }

  void add_sums(int64_t part, int64_t column, Floats left, Floats right) {
    float *sums = scratch_.sums + part * plan_.packed_keys + column;
    store(sums, load(sums) + left);
    store(sums + LANES, load(sums + LANES) + right);
  }

  // Add a block's sums to what the keys and the cells have received; in double, for there may be many blocks.
  void add_up(int64_t batch, int64_t head, int64_t first_row, int64_t parts) {
    for (int64_t part = 0; part < parts; part++) {
      const float *sums = scratch_.sums + part * plan_.packed_keys;
      for (int64_t key = 0; key < num_keys_; key++) scratch_.totals[key] += sums[key];
      if (!call_.pooled) continue;
      float *row = cells(batch, head, first_row / plan_.cell_rows + part);
      for (int64_t key = 0, count; key < num_keys_; key += count) {
        const int64_t cell = (first_key_ + key) / plan_.cell_keys;
        count = least((cell + 1) * plan_.cell_keys - first_key_, num_keys_) - key;
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
  const ReceivedPlan plan_;
  const ReceivedScratch<Element> scratch_;
  const float factor_;
  int64_t first_key_ = 0, num_keys_ = 0;  // that are packed
};

// ---------------------------------------------------------------- the pass

template <class Element>
int64_t received_bytes(const Call &call) {
  ReceivedScratch<Element> scratch;
  return call.threads * scratch.lay(received_plan<Element>(call), nullptr);
}

template <class Element>
void received_of(const Call &call, char *workspace) {
  if (!call.batch || !call.heads || !call.keys) return;
  const ReceivedPlan plan = received_plan<Element>(call);
  const int64_t work = call.batch * call.heads * call.queries * call.keys * call.head_dim;
  parallel(work < WORTH_A_TEAM ? 1 : call.threads, [&](Team &team) {
    ReceivedScratch<Element> scratch;
    const int64_t bytes = scratch.lay(plan, nullptr);
    scratch.lay(plan, workspace + team.member * bytes);
    // Early keys first: under a causal mask most queries see them, and the longest tasks should not come last.
    team.each(plan.tasks * call.batch * call.kv_heads, [&](int64_t i) {
      const int64_t kv_heads = call.batch * call.kv_heads, kv_head = i % kv_heads;
      ReceivedPass<Element> pass(call, plan, scratch);
      pass.task(kv_head / call.kv_heads, kv_head % call.kv_heads, i / kv_heads);
    });
  });
}

int64_t received_workspace(const Call &call) {
  return call.dtype == 0 ? received_bytes<float>(call) : received_bytes<Bfloat16>(call);
}

void received_run(const Call &call, char *workspace) {
  call.dtype == 0 ? received_of<float>(call, workspace) : received_of<Bfloat16>(call, workspace);
}

}  // namespace
