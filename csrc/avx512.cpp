// The kernel for AVX-512: a tile of 12 rows by 2 vectors is accumulated in 24 of the 32 registers.
#define MULTIHEAD_SET multihead_avx512
#define LANES 16
#define TILE_ROWS 12
#define BF16_DOT 0
#include "kernel.h"
