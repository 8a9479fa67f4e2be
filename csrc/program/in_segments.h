// Programs of plans in segments (moves/segments.h): parts of the tensor that pass through the steps of a plan one after
// the other, so that several steps run at once.
#pragma once

#include <algorithm>
#include <cstdint>

#include "program/program.h"

namespace shardwright {

// Returns the program of a rank, as compile() does for other plans. It interleaves the programs of all segments (one
// program for all uniform segments) as a pipeline. A stage ends with the transfer of a step; the Wait for this transfer
// begins the segment's next stage. Each segment is one stage behind the segment before it:
//
//   stage 0   segment 0: copy from the input, pack, start crossing
//   stage 1   segment 0: wait, unpack, start gathering      segment 1: copy from the input, pack, start crossing
//   stage 2   segment 0: wait, copy to the result           segment 1: wait, unpack, start gathering
//
// A step communicates at most once, so on all ranks the transfers of a group are in the same order.
Program compile_in_segments(const Plan& plan, Rank rank);

// Calls `visit(segment, stage)` in the order of the program, even for stages in which a segment does nothing. `stage`
// is counted from the segment's first stage. In a segment's last stage, number `num_steps`, its result is copied. With
// 2 segments of 2 steps, the calls are (0, 0), (0, 1), (1, 0), (0, 2), (1, 1), (1, 2).
template <typename Visit>
void for_each_stage(int64_t num_segments, int64_t num_steps, Visit visit) {
  for (int64_t stage = 0; stage < num_segments + num_steps; ++stage) {
    const int64_t last = std::min(stage, num_segments - 1);
    for (int64_t segment = std::max<int64_t>(stage - num_steps, 0); segment <= last; ++segment) {
      visit(segment, stage - segment);
    }
  }
}

}  // namespace shardwright
