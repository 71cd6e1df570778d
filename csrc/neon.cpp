// The kernel for Arm's NEON: a tile of 8 rows by 2 vectors is accumulated in 16 of the 32 registers; 8 hold four columns of
// A, whose elements are factors without a broadcast, and 8 the four rows of B.
#define MULTIHEAD_SET multihead_neon
#define LANES 4
#define TILE_ROWS 8
#define BF16_DOT 0
#define NEON 1
#include "kernel.h"
