// Compares maxima and sums over ranks, which the library finds by looking at few ranks, with a walk over every rank.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <vector>

#include "moves/describe.h"
#include "moves/traffic.h"
#include "planning/memory_limit.h"
#include "program/memory.h"
#include "program/program.h"

namespace shardwright::test {

inline void check_traffic(const Plan& plan) {
  TrafficTotals all;
  for (const Rank rank : ranks_of(plan)) {
    const Traffic of_rank = traffic_at(plan, rank);
    all.received_bytes_max = std::max(all.received_bytes_max, of_rank.received_bytes);
    all.received_bytes_sum += of_rank.received_bytes;
    all.sent_bytes_max = std::max(all.sent_bytes_max, of_rank.sent_bytes);
    all.messages_max = std::max(all.messages_max, of_rank.messages);
    all.sent_messages_max = std::max(all.sent_messages_max, of_rank.sent_messages);
  }
  const TrafficTotals found = totals(plan);
  EXPECT_TRUE(found.maxima_are_exact && found.sum_is_exact);
  EXPECT_EQ(found.received_bytes_max, all.received_bytes_max) << to_string(plan);
  EXPECT_EQ(found.received_bytes_sum, all.received_bytes_sum) << to_string(plan);
  EXPECT_EQ(found.sent_bytes_max, all.sent_bytes_max) << to_string(plan);
  EXPECT_EQ(found.messages_max, all.messages_max) << to_string(plan);
  EXPECT_EQ(found.sent_messages_max, all.sent_messages_max) << to_string(plan);
}

// If `compiles`, the peaks of all ranks come from their programs, otherwise from ProgramMemory.
inline void check_peak(const Plan& plan, bool compiles) {
  ProgramMemory memory(plan);
  std::vector<int64_t> maxima(plan.steps.size(), 0);
  for (const Rank rank : ranks_of(plan)) {
    const std::vector<int64_t> peaks =
        compiles ? compile(plan, rank).peak_bytes_by_step() : memory.peak_bytes_by_step(rank);
    for (size_t i = 0; i < peaks.size(); ++i) maxima[i] = std::max(maxima[i], peaks[i]);
  }
  const ProgramMemory::MaxPeaks found = ProgramMemory(plan).max_peak_bytes_by_step(kMaxRanksExamined);
  EXPECT_TRUE(found.is_exact);
  EXPECT_EQ(found.bytes, maxima) << to_string(plan) << plan.lowering.name;
}

}  // namespace shardwright::test
