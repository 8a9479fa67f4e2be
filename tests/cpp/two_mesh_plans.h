// Helpers for tests of plans between two meshes: ranks, nodes, and checks of predictions.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <vector>

#include "cost/topology.h"
#include "moves/describe.h"
#include "moves/traffic.h"
#include "planning/memory_limit.h"
#include "planning/serialize.h"
#include "simulate/simulate.h"

namespace shardwright::test {

inline std::vector<int64_t> ranks_from(int64_t first, int64_t count) {
  std::vector<int64_t> ranks(count);
  std::iota(ranks.begin(), ranks.end(), first);
  return ranks;
}

inline Topology with_nodes(int64_t ranks_per_node) {
  Topology topology = Topology::named("64x8");
  topology.ranks_per_node = ranks_per_node;
  return topology;
}

// Runs the plan on all ranks after a round trip through its bytes, and compares memory and received bytes with the
// predictions.
inline void expect_as_predicted(const Plan& plan) {
  const Plan read = from_bytes(to_bytes(plan));
  ASSERT_EQ(to_bytes(read), to_bytes(plan));
  const SimulationReport report = simulate(read);
  int64_t maximum = 0;
  for (const auto& [rank, peak] : report.peak_bytes) maximum = std::max(maximum, peak);
  ASSERT_EQ(peak_bytes(plan), maximum) << to_string(plan);
  ASSERT_EQ(totals(plan).received_bytes_sum, report.received_bytes_sum) << to_string(plan);
}

}  // namespace shardwright::test
