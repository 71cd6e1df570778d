// The kernel for AVX-512: 12 rows of 2 vectors are summed in 24 of its 32 registers.
#define MULTIHEAD_SET multihead_avx512
#define LANES 16
#define TILE_ROWS 12
#define BF16_DOT 0
#include "kernel.h"
