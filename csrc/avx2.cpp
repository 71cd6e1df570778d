// The kernel for AVX2 with fused multiply-add: 6 rows of 2 vectors are summed in 12 of its 16 registers.
#define MULTIHEAD_SET multihead_avx2
#define LANES 8
#define TILE_ROWS 6
#define BF16_DOT 0
#include "kernel.h"
