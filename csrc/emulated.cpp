// The form of avx512_bf16 in plain instructions: slow, and built for tests only, where a CPU lacks the real ones.
#define MULTIHEAD_SET multihead_emulated
#define LANES 16
#define TILE_ROWS 12
#define BF16_DOT 1
#include "kernel.h"
