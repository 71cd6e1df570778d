// The kernel for AVX-512 with dot products of bfloat16, which multiply pairs of features in one instruction.
#define MULTIHEAD_SET multihead_avx512_bf16
#define LANES 16
#define TILE_ROWS 12
#define BF16_DOT 1
#include "kernel.h"
