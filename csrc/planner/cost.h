// What a move is predicted to take. One table for all ranks, integers throughout, so that ties break alike everywhere.
#pragma once

#include <cstdint>
#include <vector>

#include "planner/plan.h"

namespace shardwright {

// The latency + bandwidth ("alpha-beta") model, in picoseconds. Defaults of the right order for their transport:
// NCCL on NVLink-class links; Gloo over loopback.
struct CostTable {
  int64_t step_ps;            // fixed cost of a collective
  int64_t message_ps;         // per message received
  int64_t ps_per_kib;         // wire, the larger of bytes sent and received
  int64_t memory_ps_per_kib;  // local copies
};

CostTable cost_table(Backend backend);

// Of the slowest rank among the first kMaxCostRanks of position 0's group: by torch.chunk that group has the largest
// parts, and its ranks differ only in who talks to whom.
constexpr int64_t kMaxCostRanks = 64;
int64_t predicted_picoseconds(const Step& step, Backend backend);
int64_t predicted_picoseconds(const std::vector<Step>& steps, Backend backend);

}  // namespace shardwright
