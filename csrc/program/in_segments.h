// Programs of plans in segments (moves/segments.h).
#pragma once

#include <algorithm>
#include <cstdint>

#include "program/program.h"

namespace shardwright {

// Returns the program of a rank. It has the instructions of each segment's program, which is the same for all if they
// are alike. What a segment does up to a step's transfer is in one slot, and what it does from the Wait on in the next
// slot, before its next transfer; the next segment is one slot behind:
//
//   slot 0   segment 0: copy from the input, pack, start crossing
//   slot 1   segment 0: wait, unpack, start gathering      segment 1: copy from the input, pack, start crossing
//   slot 2   segment 0: wait, copy to the result           segment 1: wait, unpack, start gathering
//
// A step communicates once at most, so on all ranks the transfers of a group are in the same order.
Program compile_in_segments(const Plan& plan, Rank rank);

// Calls `visit(segment, slot)` in the order of the program, also for slots in which a segment does nothing. A slot is
// counted from the segment's first; in the last, number `num_steps`, the result is copied.
template <typename Visit>
void for_each_slot(int64_t num_segments, int64_t num_steps, Visit visit) {
  for (int64_t slot = 0; slot < num_segments + num_steps; ++slot) {
    const int64_t last = std::min(slot, num_segments - 1);
    for (int64_t segment = std::max<int64_t>(slot - num_steps, 0); segment <= last; ++segment) {
      visit(segment, slot - segment);
    }
  }
}

}  // namespace shardwright
