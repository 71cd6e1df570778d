// The C functions of the library: list the instruction sets, check a call, and run it on the set that it names.
// Compiled without flags of any instruction set, so that every CPU can run this file.
#include <stdlib.h>
#if defined(__linux__) && defined(__x86_64__)
#include <sys/syscall.h>
#include <unistd.h>
#elif defined(__linux__) && defined(__aarch64__)
#include <sys/auxv.h>
#elif defined(__APPLE__) && defined(__aarch64__)
#include <sys/sysctl.h>
#endif

#include "call.h"

extern const Kernels multihead_scalar, multihead_avx2, multihead_avx512, multihead_avx512_vnni, multihead_avx512_bf16;
extern const Kernels multihead_amx, multihead_neon, multihead_neon_bf16, multihead_emulated, multihead_emulated_amx;

namespace {

struct InstructionSet {
  const char *name;
  const Kernels *kernels;  // null where this build does not contain the set
  bool (*runs)();          // null where the compiler does not know the set
  bool (*fast)();  // whether it is faster than the sets before it
};

// SET(1, ...) is a set that was compiled, SET(0, ...) one that the compiler does not know, SET(2, ...) one that this build
// leaves out.
#define SET(compiled, ...) SET_IF(compiled, __VA_ARGS__)
#define SET_IF(compiled, ...) SET_##compiled(__VA_ARGS__)
#define SET_1(name, features, advantage) {#name, &multihead_##name, [] { return features; }, [] { return advantage; }}
#define SET_0(name, features, advantage) {#name, nullptr, nullptr, nullptr}
#define SET_2(name, features, advantage) {#name, nullptr, [] { return features; }, [] { return advantage; }}
#define CPU(feature) (__builtin_cpu_supports(feature) != 0)  // true only if the operating system saves its registers
// Intel's cores multiply pairs of bfloat16 at half the rate of floats (vdpbf16ps takes two cycles, and two FMAs take
// one), so that floats, converted once when they are packed, are faster there. AMD's multiply them at twice the rate.
#define FAST_BF16 (__builtin_cpu_is("intel") == 0)
#define CPU_AVX512 CPU("avx512f") && CPU("avx512bw") && CPU("avx512dq") && CPU("avx512vl") && CPU("fma")
#define CPU_VNNI CPU_AVX512 && CPU("avx512vnni")

#if defined(__x86_64__)
// Ask Linux for the tile registers of AMX, which a process may not use before: their 8 KB are saved at each switch
// between threads. A system may refuse it, and other systems are not known to need or to permit it.
bool tile_registers_permitted() {
#if defined(__linux__)
  constexpr long ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18;  // asm/prctl.h, which older systems lack
  static const bool permitted = syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
  return permitted;
#else
  return false;
#endif
}
#elif defined(__aarch64__)
// Whether an Arm CPU has NEON, and bfloat16 in it.
bool has_neon() {
#if defined(__linux__)
  return getauxval(AT_HWCAP) & 1ul << 1;  // HWCAP_ASIMD
#else
  return true;
#endif
}
bool has_neon_bf16() {
#if defined(__linux__)
  return has_neon() && getauxval(AT_HWCAP2) & 1ul << 14;  // HWCAP2_BF16, which older headers lack
#elif defined(__APPLE__)
  int32_t found = 0;
  size_t size = sizeof found;
  return sysctlbyname("hw.optional.arm.FEAT_BF16", &found, &size, nullptr, 0) == 0 && found;
#else
  return false;
#endif
}
#endif

// An index means the same set in every build.
const InstructionSet SETS[] = {
    SET(1, scalar, true, true),
    SET(MULTIHEAD_HAS_AVX2, avx2, CPU("avx2") && CPU("fma"), true),  // such CPUs have F16C too
    SET(MULTIHEAD_HAS_AVX512, avx512, CPU_AVX512, true),
    SET(MULTIHEAD_HAS_AVX512_VNNI, avx512_vnni, CPU_VNNI, true),
    SET(MULTIHEAD_HAS_AVX512_BF16, avx512_bf16, CPU_VNNI && CPU("avx512bf16"), FAST_BF16),
    SET(MULTIHEAD_HAS_AMX, amx, CPU_VNNI && CPU("avx512bf16") && CPU("amx-bf16") && tile_registers_permitted(), true),
    SET(MULTIHEAD_HAS_NEON, neon, has_neon(), true),
    SET(MULTIHEAD_HAS_NEON_BF16, neon_bf16, has_neon_bf16(), true),
    SET(MULTIHEAD_HAS_EMULATED, emulated, true, false),
    SET(MULTIHEAD_HAS_EMULATED, emulated_amx, true, false),
};
constexpr int64_t COUNT = sizeof SETS / sizeof SETS[0];

const PassFunctions *functions_of(int64_t set, Pass pass) {
  if (!multihead_runs(set)) return nullptr;
  const Kernels &kernels = *SETS[set].kernels;
  switch (pass) {
    case Pass::FORWARD: return &kernels.forward;
    case Pass::BACKWARD: return &kernels.backward;
    case Pass::KEY_SUMS: return &kernels.key_sums;
  }
  return nullptr;  // a caller may pass any number
}

// Whether every start and stop lies in [0, keys]. Bounds that all samples share are checked once.
bool bounds_are_valid(const Call &call) {
  const int64_t batch = call.bounds_batch_stride || call.batch < 1 ? call.batch : 1;
  bool outside = false;
  for (int64_t sample = 0; sample < batch; sample++)
    for (int64_t row = 0; row < call.queries; row++) {
      const int64_t index = sample * call.bounds_batch_stride + row, start = call.start[index], stop = call.stop[index];
      outside |= (start < 0) | (start > call.keys) | (stop < 0) | (stop > call.keys);
    }
  return !outside;
}

}  // namespace

EXPORT const char *multihead_layout() { return MULTIHEAD_LAYOUT; }

EXPORT const char *multihead_instruction_set(int64_t index) {
  return index >= 0 && index < COUNT ? SETS[index].name : nullptr;
}

EXPORT int64_t multihead_compiled(int64_t index) { return index >= 0 && index < COUNT && SETS[index].kernels; }

EXPORT int64_t multihead_runs(int64_t index) { return multihead_compiled(index) && SETS[index].runs(); }

EXPORT int64_t multihead_fastest() {
  int64_t fastest = 0;
  for (int64_t index = 0; index < COUNT; index++)
    if (multihead_runs(index) && SETS[index].fast()) fastest = index;
  return fastest;
}

EXPORT int64_t multihead_fastest_of_cpu() {
  int64_t fastest = 0;
  for (int64_t index = 0; index < COUNT; index++)
    if (SETS[index].runs && SETS[index].runs() && SETS[index].fast()) fastest = index;
  return fastest;
}

EXPORT int64_t multihead_tile_rows(int64_t index) {
  return multihead_compiled(index) ? SETS[index].kernels->tile_rows : 0;
}
EXPORT int64_t multihead_tile_columns(int64_t index) {
  return multihead_compiled(index) ? SETS[index].kernels->tile_columns : 0;
}

EXPORT int64_t multihead_workspace(const Call *call, Pass pass) {
  const PassFunctions *functions = functions_of(call->instruction_set, pass);
  return functions ? functions->workspace(*call) : -1;
}

EXPORT Status multihead_run(const Call *call, Pass pass) {
  const PassFunctions *functions = functions_of(call->instruction_set, pass);
  if (!functions || (call->k_scales && pass != Pass::FORWARD)) return Status::NO_SUCH_PASS;
  if (call->num_offsets < 0 || call->num_offsets > MAX_OFFSETS) return Status::TOO_MANY_OFFSETS;
  if (!bounds_are_valid(*call)) return Status::BAD_BOUNDS;
  const int64_t bytes = functions->workspace(*call);
  void *workspace = nullptr;
  if (bytes > 0 && posix_memalign(&workspace, 64, static_cast<size_t>(bytes))) return Status::NO_MEMORY;
  functions->run(*call, static_cast<char *>(workspace));
  free(workspace);
  return Status::DONE;
}
