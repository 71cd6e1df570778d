// The kernel for Arm's NEON: a tile of 8 rows by 2 vectors is accumulated in 16 of the 32 registers; 8 hold four columns of
// A, whose elements are factors without a broadcast, and 8 the four rows of B.
//
// NEON has 32 registers of 4 floats. A tile of 8 rows by 8 columns takes 16 of them for
// its sums. `fmla` multiplies a vector by one lane of another one, so 8 registers hold four columns of the rows, and
// nothing is broadcast: 80 instructions for 64 products of vectors. (A tile of 12 rows would leave registers for two
// columns, and load more often.) `bfdot` does the same with pairs of bfloat16, in the order in which `avx512_bf16`
// packs them; `bfmmla` multiplies twice as many, but needs another order. Per score of head_dim 64 the products of the
// forward pass take 40 instructions (68 in the scalar set, 20 with `bfdot`) and the exponential 5.3; AVX2, with vectors
// twice as wide, takes 32 and 2.2 (`make arm` counts them). `bfdot` rounds to odd: a program compares its sums with the
// documented arithmetic, bit for bit (`csrc/fuzz/bfdot.cpp`). Linux reports by `AT_HWCAP` which set a CPU runs, macOS
// by `sysctl`. Both sets have been compiled by GCC for Linux and run in an emulator; they have not been timed. That
// they are used instead of PyTorch's kernel, and `neon_bf16` where the CPU has it, are assumptions.
#define MULTIHEAD_SET multihead_neon
#define LANES 4
#define TILE_ROWS 8
#define BF16_DOT 0
#define NEON 1
#include "kernel.h"
