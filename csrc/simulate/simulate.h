// Runs all ranks of a plan in one process on plain memory, to prove that the plan is right and costs what it says.
//
// Every rank runs its own compiled program. Values are doubles, chosen so that each element is recognisable and the
// result of each reduction is known. Memory that was not written is NaN, and memory that was released is gone. So if an
// instruction reads too early or too late, the comparison or the run fails.
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

// Throws an InvariantError that names plan, rank and element if a result is wrong, if the bytes moved or the peak
// memory differ from what plan and program promise, or if ranks would wait for each other forever.
SimulationReport simulate(const Plan& plan);

// Estimates how much memory `simulate` takes, rather too high than too low, and at most 2^62. `peak_bytes` is what the
// program of the worst rank allocates.
int64_t simulation_bytes(const Plan& plan, int64_t peak_bytes);

}  // namespace shardwright
