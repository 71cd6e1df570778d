// The algorithm of amx in plain instructions: slow, built only to test it on CPUs without that set.
#define MULTIHEAD_SET multihead_emulated_amx
#define LANES 16
#define TILE_ROWS 12
#define BF16_DOT 1
#define AMX 1
#include "kernel.h"
