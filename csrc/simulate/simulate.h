// Runs all ranks of a plan in one process on plain memory, to prove that the plan's result and costs are correct.
//
// Every rank runs its own compiled program. Values are doubles, chosen such that each element is recognizable and the
// result of each reduction is known. Memory that was not written is NaN, and memory that was released is gone. So if an
// instruction reads too early or too late, the comparison or the run fails.
#pragma once

#include <cstdint>
#include <map>

#include "moves/plan.h"

namespace shardwright {

// The measured costs of a simulated plan.
struct SimulationReport {
  std::map<Rank, int64_t> received_bytes;
  std::map<Rank, int64_t> peak_bytes;
  int64_t received_bytes_sum = 0;
  int64_t elements_checked = 0;  // elements of all ranks' results, all of which were correct
};

// Simulates the plan. Throws an InvariantError that names plan, rank and element if a result is wrong. Also throws if
// the bytes moved or the peak memory differ from those that plan and program predict, and on a deadlock.
SimulationReport simulate(const Plan& plan);

// Returns an estimate, rather too high, of the bytes of memory that `simulate` needs; at most 2^62. `peak_bytes` is the
// memory that the worst rank's program allocates (planning/memory_limit.h).
int64_t simulation_bytes(const Plan& plan, int64_t peak_bytes);

}  // namespace shardwright
