// The kernel for AVX-512 with AMX, whose tile registers multiply matrices of bfloat16.
#define MULTIHEAD_SET multihead_amx
#define LANES 16
#define TILE_ROWS 12
#define BF16_DOT 1
#define AMX 1
#include "kernel.h"
