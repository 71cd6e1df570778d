// The kernel without instruction set flags: vectors of 4 floats, which the compiler maps to what every CPU has.
#define MULTIHEAD_SET multihead_scalar
#define LANES 4
#define TILE_ROWS 4
#define BF16_DOT 0
#include "kernel.h"
