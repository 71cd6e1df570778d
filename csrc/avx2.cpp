// The kernel for AVX2 with FMA: a tile of 6 rows by 2 vectors is accumulated in 12 of the 16 registers.
#define MULTIHEAD_SET multihead_avx2
#define LANES 8
#define TILE_ROWS 6
#define BF16_DOT 0
#include "kernel.h"
