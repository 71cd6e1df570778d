// The one kernel source: included by a file for each instruction set, which says how wide its vectors are.
//
// LANES          floats of a vector
// TILE_ROWS      rows of a register tile: with two vectors a row they must leave registers for B's two and one of A's
// BF16_DOT       1 where pairs of bfloat16 are multiplied as they are
// MULTIHEAD_SET  the name of the table that this file offers
//
// Nothing here has external linkage but that table, and nothing comes from templates of the C++ library: the linker
// keeps one copy of a shared inline function, and a copy with wide instructions would crash a CPU without them.
#pragma once
#include "call.h"

#include "backward.h"
#include "few.h"
#include "forward.h"
#include "received.h"

namespace {

int64_t forward_workspace(const Call &call) { return few_takes(call) ? few_workspace(call) : attend_workspace(call); }
void forward_run(const Call &call, char *workspace) {
  few_takes(call) ? few_run(call, workspace) : attend_run(call, workspace);
}

}  // namespace

extern const Kernels MULTIHEAD_SET;
const Kernels MULTIHEAD_SET = {
    {forward_workspace, forward_run},
    {backward_workspace, backward_run},
    {received_workspace, received_run},
};
