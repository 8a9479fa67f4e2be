// Programs of plans in pieces (moves/pieces.h).
#pragma once

#include <cstdint>
#include <vector>

#include "program/program.h"

namespace shardwright {

// Returns the program of a rank with the first `num_pieces` of the plan's pieces. It has the instructions of one
// piece's program once for each piece. What a piece does up to a step's transfer is in one slot, and what it does from
// the Wait on in the next slot, before its next transfer; the next piece is one slot behind:
//
//   slot 0   piece 0: copy from the input, pack, start crossing
//   slot 1   piece 0: wait, unpack, start gathering      piece 1: copy from the input, pack, start crossing
//   slot 2   piece 0: wait, copy to the result           piece 1: wait, unpack, start gathering
//
// A step communicates once at most, so on all ranks the transfers of a group are in the same order.
Program compile_in_pieces(const Plan& plan, Rank rank, int64_t num_pieces);

// Returns what the worst of these ranks allocates. Only as many pieces are compiled as can be under way at once,
// because more take no more memory.
int64_t worst_peak_bytes_in_pieces(const Plan& plan, const std::vector<Rank>& ranks);

// The number of ranks whose programs are compiled for that.
constexpr int64_t kMaxProgramsInPieces = 64;

}  // namespace shardwright
