// The kernel of one instruction set: all passes, included by a source file per set that defines the width of a vector.
//
// LANES          floats of a vector
// TILE_ROWS      rows of a register tile; with two vectors per row, three registers must remain free for A and B
// BF16_DOT       1 where pairs of bfloat16 are multiplied without conversion
// AMX            1 where tile registers multiply them
// NEON           1 where vectors have the instructions of Arm's NEON
// MULTIHEAD_SET  name of the table of passes that the source file defines
//
// Only that table has external linkage, and no templates of the C++ library are used: the linker keeps one copy of a
// shared inline function, and a copy with wide instructions would crash a CPU without them.
//
// Element types are template parameters only where elements are read or written, and statistics only in the loop over
// the weights of a block of keys, so that a set takes 7 to 16 seconds to compile (GCC 12) and 0.2 to 0.5 MB.
#pragma once
#include "call.h"

#include "backward.h"
#include "decode.h"
#include "forward.h"
#include "key_sums.h"

namespace {

int64_t forward_workspace(const Call &call) {
  return decode_is_faster(call) ? decode_workspace(call) : blocked_workspace(call);
}
void forward_run(const Call &call, char *workspace) {
  decode_is_faster(call) ? decode_run(call, workspace) : blocked_run(call, workspace);
}

}  // namespace

extern const Kernels MULTIHEAD_SET;
const Kernels MULTIHEAD_SET = {
    {forward_workspace, forward_run},
    {backward_workspace, backward_run},
    {key_sums_workspace, key_sums_run},
    ROWS,
    COLUMNS,
};
