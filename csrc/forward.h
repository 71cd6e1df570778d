// The forward pass for many queries: blocks of queries times blocks of packed keys, with an online softmax
// (arXiv:2205.14135).
#pragma once
#include "call.h"
#include "forward_columns.h"
#include "forward_plan.h"
#include "forward_rows.h"
#include "softmax.h"
#include "threads.h"

namespace {

// The two ways to compute a block of queries.
template <class Element, Statistics STATISTICS>
struct QueriesAsRows {
  using Packed = PackedOf<Element>;
  using Blocks = ForwardBlocks<Packed>;
  static constexpr auto pack = pack_keys<Element>;
  static constexpr auto attend = attend_block<Element, STATISTICS>;
};
template <class Element, Statistics STATISTICS>
struct QueriesAsColumns {
  using Packed = float;
  using Blocks = ColumnsBlocks;
  static constexpr auto pack = pack_key_rows<Element>;
  static constexpr auto attend = attend_columns<Element, STATISTICS>;
};

// The workspace holds the packed K and V of the heads of a wave, then the blocks of each thread.
template <class Element, class Way>
class BlockedPass {
  using Packed = typename Way::Packed;
  using Blocks = typename Way::Blocks;

 public:
  BlockedPass(const Call &call, const ForwardPlan<Element> &plan, char *workspace)
      : call_(call),
        plan_(plan),
        packed_(reinterpret_cast<Packed *>(workspace)),
        blocks_(workspace + plan.packed_bytes) {}

  void run() const {
    const int64_t thread_bytes = Blocks(plan_, nullptr).bytes;
    run_parallel(plan_.threads, [&](Team &team) {
      const TileSizes tile_sizes(sizeof(Packed) == sizeof(Bfloat16));
      const Blocks block(plan_, blocks_ + team.thread * thread_bytes);
      plan_.own ? run_own(team, block) : run_waves(team, block);
    });
  }

 private:
  // A task is a kv head with its query heads.
  void run_own(Team &team, const Blocks &block) const {
    team.for_each(plan_.heads, [&](int64_t head) {
      pack(team.thread, head, 0, plan_.keys);
      for (int64_t i = 0; i < plan_.group; i++)
        for (int64_t first = 0; first < call_.queries; first += FORWARD_QUERIES)
          attend(block, team.thread, head, i, first);
    });
  }

  // The threads pack all heads of a wave together; a task is then a block of queries.
  void run_waves(Team &team, const Blocks &block) const {
    const int64_t chunks = ceil_div(plan_.keys, FORWARD_KEYS);
    for (int64_t wave = 0; wave < plan_.heads; wave += plan_.wave_heads) {
      const int64_t members = min(plan_.wave_heads, plan_.heads - wave), heads = members * plan_.group;
      team.for_each(members * chunks, [&](int64_t part) {
        const int64_t member = part / chunks, first = part % chunks * FORWARD_KEYS;
        pack(member, wave + member, first, min(first + FORWARD_KEYS, plan_.keys));
      });
      // The last queries first: under a causal mask they take longest.
      team.for_each(heads * plan_.blocks, [&](int64_t part) {
        const int64_t member = part % heads / plan_.group;
        attend(block, member, wave + member, part % plan_.group, (plan_.blocks - 1 - part / heads) * FORWARD_QUERIES);
      });
    }
  }

  Packed *packed(int64_t member) const {
    return packed_ + member * (plan_.head_bytes / static_cast<int64_t>(sizeof(Packed)));
  }

  void pack(int64_t member, int64_t head, int64_t first, int64_t end) const {
    Packed *k = packed(member);
    Way::pack(call_, plan_, head / call_.kv_heads, head % call_.kv_heads, first, end, k, k + plan_.k_size);
  }

  // Query head `index` of a kv head, and its block of queries that begins with query `first`.
  void attend(const Blocks &block, int64_t member, int64_t kv_head, int64_t index, int64_t first) const {
    const Packed *k = packed(member);
    const int64_t head = kv_head % call_.kv_heads * plan_.group + index;
    Way::attend(call_, plan_, block, kv_head / call_.kv_heads, head, first,
                min(FORWARD_QUERIES, call_.queries - first), k, k + plan_.k_size);
  }

  const Call &call_;
  const ForwardPlan<Element> &plan_;
  Packed *const packed_;
  char *const blocks_;
};

template <class Element, Statistics STATISTICS>
void blocked_with(const Call &call, char *workspace) {
  const ForwardPlan<Element> plan(call);
  if constexpr (HAS_COLUMNS<Element>)
    if (columns_apply<Element>(call))
      return BlockedPass<Element, QueriesAsColumns<Element, STATISTICS>>(call, plan, workspace).run();
  BlockedPass<Element, QueriesAsRows<Element, STATISTICS>>(call, plan, workspace).run();
}

template <class Element>
void blocked_all(const Call &call, char *workspace) {
  switch (required_statistics(call)) {
    case Statistics::NONE: return blocked_with<Element, Statistics::NONE>(call, workspace);
    case Statistics::WEIGHTS: return blocked_with<Element, Statistics::WEIGHTS>(call, workspace);
    case Statistics::DISTANCES: return blocked_with<Element, Statistics::DISTANCES>(call, workspace);
  }
}

template <class Element>
int64_t blocked_bytes(const Call &call) {
  const ForwardPlan<Element> plan(call);
  const int64_t thread_bytes = columns_apply<Element>(call) ? ColumnsBlocks(plan, nullptr).bytes
                                                            : ForwardBlocks<PackedOf<Element>>(plan, nullptr).bytes;
  return plan.packed_bytes + plan.threads * thread_bytes;
}

int64_t blocked_workspace(const Call &call) {
  return with_element(call, [&](auto element) { return blocked_bytes<decltype(element)>(call); });
}
void blocked_run(const Call &call, char *workspace) {
  with_element(call, [&](auto element) { blocked_all<decltype(element)>(call, workspace); });
}

}  // namespace
