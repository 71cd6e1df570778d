// The kernel for Arm's NEON with BFDOT, which multiplies pairs of bfloat16: the tile of neon.cpp, with pairs as elements.
#define MULTIHEAD_SET multihead_neon_bf16
#define LANES 4
#define TILE_ROWS 8
#define BF16_DOT 1
#define NEON 1
#include "kernel.h"
