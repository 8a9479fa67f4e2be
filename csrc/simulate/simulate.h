// All ranks of a plan in one process on plain memory: the proof that a plan is right and costs what it says.
//
// Every rank runs its own compiled program. Values are doubles, chosen so that each element is recognisable and each
// reduction is known. Memory that was not written is NaN and memory that was released is gone, so an instruction that
// reads too early or too late fails the comparison or the run.
#pragma once

#include <cstdint>
#include <map>

#include "moves/plan.h"

namespace shardwright {

struct SimulationReport {
  std::map<Rank, int64_t> received_bytes;
  std::map<Rank, int64_t> peak_bytes;
  int64_t received_bytes_sum = 0;
  int64_t elements_checked = 0;
};

// Throws InvariantError naming plan, rank and element where a result is wrong, where bytes moved or peak memory differ
// from what plan and program promise, and where ranks wait for each other forever.
SimulationReport simulate(const Plan& plan);

// About how much memory `simulate` takes, rather too much than too little, at most 2^62. `peak_bytes` is what the
// program of the worst rank allocates.
int64_t simulation_bytes(const Plan& plan, int64_t peak_bytes);

}  // namespace shardwright
