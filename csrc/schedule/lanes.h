// When the events of a scheduled step happen, on two lanes: compute, and transfers.
//
// Both lanes do one thing at a time. Transfers run in the order in which they start; a gather can begin when the use
// before it has ended, a reduction when the gradient is complete. A use begins when its weights are gathered and the
// reductions that should be done by then are. Chunks of weights are transferred during a use, behind what was started
// before; the use ends when they are there and, besides, one chunk's time later than its compute takes.
//
// Example: two weights, gathers of 30, reductions of 20, forwards of 50, backwards of 100, one gather ahead.
//
//     compute    ...aaaaabbbbbBBBBBBBBBBAAAAAAAAAA..     300 of 350
//     transfers  aaabbb.................BB........AA     the first gather and the last reduction are exposed
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "schedule/schedule.h"

namespace shardwright {

struct LaneSpan {
  int64_t begin_ps = 0;
  int64_t end_ps = 0;
};

struct StepLanes {
  std::vector<LaneSpan> uses;        // the compute of each
  std::vector<LaneSpan> gathers;     // as in the schedule
  std::vector<LaneSpan> reductions;  // as in the schedule
  int64_t compute_ps = 0;            // all of it
  int64_t transfer_ps = 0;           // all of it
  int64_t total_ps = 0;
  int64_t exposed_ps() const { return total_ps - compute_ps; }  // transfers that nothing is computed alongside
};

// Whether it is known how long each use takes, and each gather and reduction of weights with bytes.
bool has_times(const StepSchedule& schedule);

StepLanes predict(const StepSchedule& schedule);

// Two rows of `width` characters, compute and transfers: the last digit of a use's number for its compute, that of the
// weight's number for a gather or reduction.
std::string lanes_text(const StepSchedule& schedule, int width = 72);

}  // namespace shardwright
