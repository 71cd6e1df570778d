// The forward pass for many queries: blocks of queries times blocks of packed keys, with an online softmax
// (arXiv:2205.14135).
//
// Where one block of queries reads a head, its keys are packed a block at a time, just before they are used. So they
// stay in the cache: 16 to 64 queries on 2,048 to 8,192 keys take 0.6 to 0.95 of the time that packing the whole head
// first took.
#pragma once
#include "call.h"
#include "forward_panels.h"
#include "forward_plan.h"
#include "forward_rows.h"
#include "softmax.h"
#include "threads.h"

namespace {

// Block is one of the two ways to compute a block of queries, BlockOfRows and BlockOfPanels. The workspace holds the
// packed K and V of the heads of a wave, then the memory of a block for each thread.
template <class Block>
class BlockedPass {
  using Packed = typename Block::Packed;
  using Memory = typename Block::Memory;

 public:
  BlockedPass(const Call &call, const ForwardPlan &plan, char *workspace)
      : call_(call),
        plan_(plan),
        packed_(reinterpret_cast<Packed *>(workspace)),
        memory_(workspace + plan.packed_bytes) {}

  void run() const {
    const int64_t thread_bytes = Memory(plan_, nullptr).bytes;
    run_parallel(plan_.threads, [&](Team &team) {
      const TileSizes tile_sizes(sizeof(Packed) == sizeof(Bfloat16));
      const Memory memory(plan_, memory_ + team.thread * thread_bytes);
      plan_.own ? run_own(team, memory) : run_waves(team, memory);
    });
  }

 private:
  // A task is a kv head with its query heads.
  void run_own(Team &team, const Memory &memory) const {
    team.for_each(plan_.heads, [&](int64_t head) {
      if (!plan_.streams) pack(team.thread, head, 0, plan_.keys);
      for (int64_t i = 0; i < plan_.group; i++)
        for (int64_t first = 0; first < call_.queries; first += FORWARD_QUERIES)
          attend(memory, team.thread, head, i, first);
    });
  }

  // The threads pack all heads of a wave together; a task is then a block of queries.
  void run_waves(Team &team, const Memory &memory) const {
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
        attend(memory, member, wave + member, part % plan_.group, (plan_.blocks - 1 - part / heads) * FORWARD_QUERIES);
      });
    }
  }

  // A packed head from key `first` on.
  PackedKeys<Packed> packed(int64_t member, int64_t first) const {
    Packed *k = packed_ + member * (plan_.head_bytes / static_cast<int64_t>(sizeof(Packed)));
    const int64_t place = plan_.streams ? 0 : first;
    return {k + place * plan_.depth, k + plan_.k_size + place * COLUMNS};
  }

  PackedKeys<Packed> pack(int64_t member, int64_t head, int64_t first, int64_t end) const {
    const PackedKeys<Packed> to = packed(member, first);
    with_element_packed_as<Packed>(call_, [&](auto element) {
      constexpr auto pack_elements = Block::template pack<decltype(element)>;
      pack_elements(call_, plan_, head / call_.kv_heads, head % call_.kv_heads, first, end, to);
    });
    return to;
  }

  // Query head `index` of a kv head, and its block of queries that begins with query `first`.
  void attend(const Memory &memory, int64_t member, int64_t kv_head, int64_t index, int64_t first) const {
    const int64_t head = kv_head % call_.kv_heads * plan_.group + index;
    Block block(call_, plan_, memory, kv_head / call_.kv_heads, head, first,
                min(FORWARD_QUERIES, call_.queries - first));
    block.attend([&](int64_t key, int64_t end) {
      return plan_.streams ? pack(member, kv_head, key, end) : packed(member, key);
    });
  }

  const Call &call_;
  const ForwardPlan &plan_;
  Packed *const packed_;
  char *const memory_;
};

template <class Block>
int64_t blocked_bytes(const ForwardPlan &plan) {
  return plan.packed_bytes + plan.threads * typename Block::Memory(plan, nullptr).bytes;
}

int64_t blocked_workspace(const Call &call) {
  const ForwardPlan plan(call);
  if (panels_apply(call)) return blocked_bytes<BlockOfPanels>(plan);
  return with_packed(call, [&](auto packed) { return blocked_bytes<BlockOfRows<decltype(packed)>>(plan); });
}

void blocked_run(const Call &call, char *workspace) {
  const ForwardPlan plan(call);
  if (panels_apply(call)) return BlockedPass<BlockOfPanels>(call, plan, workspace).run();
  with_packed(call, [&](auto packed) { BlockedPass<BlockOfRows<decltype(packed)>>(call, plan, workspace).run(); });
}

}  // namespace
