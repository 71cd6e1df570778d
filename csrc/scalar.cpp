// The kernel in plain instructions: vectors of 4 floats, for whichever the compiler may take what every CPU has.
#define MULTIHEAD_SET multihead_scalar
#define LANES 4
#define TILE_ROWS 4
#define BF16_DOT 0
#include "kernel.h"
