// The C functions: which instruction sets run here, what a call will hold, and a checked call.
// Compiled without any set's flags: whatever CPU this is, it can run this file.
#include <stdlib.h>

#include "call.h"

extern const Kernels multihead_scalar, multihead_avx2, multihead_avx512, multihead_avx512_bf16, multihead_emulated;

namespace {

struct Set {
  const char *name;
  const Kernels *kernels;  // null where it was not compiled
  bool (*runs)();
};

// SET(1, ...) is a set that was compiled, SET(0, ...) one that was not.
#define SET(compiled, ...) SET_IF(compiled, __VA_ARGS__)
#define SET_IF(compiled, ...) SET_##compiled(__VA_ARGS__)
#define SET_1(name, features) {#name, &multihead_##name, [] { return features; }}
#define SET_0(name, features) {#name, nullptr, nullptr}
#define CPU(feature) (__builtin_cpu_supports(feature) != 0)  // and the operating system saves its registers
#define CPU_AVX512 CPU("avx512f") && CPU("avx512bw") && CPU("avx512dq") && CPU("avx512vl") && CPU("fma")

// An index means the same set in every build, whichever sets it has.
const Set SETS[] = {
    SET(1, scalar, true),
    SET(MULTIHEAD_HAS_AVX2, avx2, CPU("avx2") && CPU("fma")),
    SET(MULTIHEAD_HAS_AVX512, avx512, CPU_AVX512),
    SET(MULTIHEAD_HAS_AVX512_BF16, avx512_bf16, CPU_AVX512 && CPU("avx512bf16")),
    SET(MULTIHEAD_HAS_EMULATED, emulated, true),
};
constexpr int64_t COUNT = sizeof SETS / sizeof SETS[0];

int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

const Pass *pass_of(int64_t set, int64_t pass) {
  if (!multihead_runs(set)) return nullptr;
  const Kernels &kernels = *SETS[set].kernels;
  switch (pass) {
    case 0: return &kernels.forward;
    case 1: return &kernels.backward;
    case 2: return &kernels.received;
    default: return nullptr;
  }
}

// Whether every bound lies within [0, keys]. Axes with stride 0 repeat and are looked at once.
bool bounds_hold(const Call &call) {
  const auto *start = static_cast<const int64_t *>(call.start), *stop = static_cast<const int64_t *>(call.stop);
  const int64_t batch = call.bounds_batch ? call.batch : least(call.batch, 1);
  const int64_t heads = call.bounds_head ? call.heads : least(call.heads, 1);
  bool outside = false;
  for (int64_t b = 0; b < batch; b++)
    for (int64_t h = 0; h < heads; h++) {
      const int64_t offset = b * call.bounds_batch + h * call.bounds_head;
      for (int64_t i = 0; i < call.queries; i++) {
        const int64_t first = start[offset + i], behind = stop[offset + i];
        outside |= (first < 0) | (first > call.keys) | (behind < 0) | (behind > call.keys);
      }
    }
  return !outside;
}

}  // namespace

#define EXPORT extern "C" __attribute__((visibility("default")))

EXPORT const char *multihead_layout() {
#define MULTIHEAD_NAME(name) #name " "
  static const char names[] = MULTIHEAD_CALL_FIELDS(MULTIHEAD_NAME, MULTIHEAD_NAME, MULTIHEAD_NAME);
#undef MULTIHEAD_NAME
  return names;
}

EXPORT const char *multihead_instruction_set(int64_t index) {
  return index >= 0 && index < COUNT ? SETS[index].name : nullptr;
}

EXPORT int64_t multihead_compiled(int64_t index) { return index >= 0 && index < COUNT && SETS[index].kernels; }

EXPORT int64_t multihead_runs(int64_t index) { return multihead_compiled(index) && SETS[index].runs(); }

EXPORT int64_t multihead_workspace(const Call *call, int64_t pass) {
  const Pass *found = pass_of(call->instruction_set, pass);
  return found ? found->workspace(*call) : -1;
}

EXPORT int64_t multihead_run(const Call *call, int64_t pass) {
  const Pass *found = pass_of(call->instruction_set, pass);
  if (!found) return 3;
  if (call->num_offsets < 0 || call->num_offsets > MOST_OFFSETS) return 4;
  if (!bounds_hold(*call)) return 2;
  const int64_t bytes = found->workspace(*call);
  void *workspace = nullptr;
  if (bytes > 0 && posix_memalign(&workspace, 64, static_cast<size_t>(bytes))) return 1;
  found->run(*call, static_cast<char *>(workspace));
  free(workspace);
  return 0;
}
