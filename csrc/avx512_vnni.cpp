// The kernel for AVX-512 with dot products of integers.
#define MULTIHEAD_SET multihead_avx512_vnni
#define LANES 16
#define TILE_ROWS 12
#define BF16_DOT 0
#include "kernel.h"
