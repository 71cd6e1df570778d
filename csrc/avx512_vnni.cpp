// The kernel for AVX-512 with dot products of integers.
//
// On Intel's processors without AMX the set `avx512_vnni` is the fastest, for bfloat16 too. `vdpbf16ps` multiplies 32
// pairs in two cycles there, and two FMAs multiply 32 floats in one: half the rate (measured on Sapphire Rapids; 0.75
// and 0.19 ns per instruction). bfloat16 is converted once, when it is packed, and its weights are not rounded. AMD's
// processors multiply bfloat16 at twice the rate of floats and use `avx512_bf16`.
#define MULTIHEAD_SET multihead_avx512_vnni
#define LANES 16
#define TILE_ROWS 12
#define BF16_DOT 0
#include "kernel.h"
