// When the events of a scheduled step happen, on two lanes: compute, and transfers. Where parts at rest are on the
// host, two more have the copies to and from it, which run at the same time.
//
// Both lanes do one thing at a time. Transfers run in the order in which they start; a gather can begin when the use
// before it has ended, a reduction when the gradient is complete. A use begins when its weights are gathered and the
// reductions that should be done by then are.
//
// Chunks are transferred during a use, after what was started before. Those of weights run alongside the product that
// needs them: all of a forward, but in a backward only the first half, in which the gradient of the input is computed.
// Chunks of a gradient run alongside the second half. The use ends when its chunks are there and what is computed after
// them is done and, besides, one chunk's time later: nothing is computed alongside the first gather and the last
// reduction. Of several uses that follow each other, the longest has the chunks of a weight; those of a gradient are in
// the use that makes it.
//
// A copy to the device starts with its gather, which is carried out when the copy is done; transfers that start later
// come after it. A copy to the host starts when compute has waited for the reduction. The step ends when it is done.
//
// Activations are gathered on the lane of transfers too. A use that some have their turns in is cut into as many equal
// stretches, each of which begins when its activation is there.
//
// Example: two weights, gathers of 30, reductions of 20, forwards of 50, backwards of 100, one gather ahead.
//
//     compute    ...aaaaabbbbbBBBBBBBBBBAAAAAAAAAA..     300 of 350
//     transfers  aaabbb.................BB........AA     the first gather and the last reduction are exposed
//
// With the gradient of a reduced in 4 chunks of 5, 335: one of them is exposed.
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

// All chunks that are transferred for a weight within a use.
struct ChunksSpan {
  int weight = 0;
  int use = 0;
  bool is_reduction = false;  // of its gradient; otherwise the weight is gathered
  LaneSpan span;
};

struct StepLanes {
  std::vector<LaneSpan> uses;         // the compute of each
  std::vector<LaneSpan> gathers;      // as in the schedule
  std::vector<LaneSpan> reductions;   // as in the schedule; of those in chunks, the rest
  std::vector<ChunksSpan> chunks;     // in the order in which they begin
  std::vector<LaneSpan> fetches;      // by gather: the copy from the host
  std::vector<LaneSpan> sends;        // by reduction: the copy to the host
  std::vector<LaneSpan> activations;  // the gather of each
  int64_t compute_ps = 0;             // all of it
  int64_t transfer_ps = 0;            // all of it
  int64_t copy_ps = 0;                // all of it, from the host and to it
  int64_t total_ps = 0;
  int64_t exposed_ps() const { return total_ps - compute_ps; }  // what nothing is computed alongside
};

// Returns whether it is known how long each use takes, and each gather and reduction of weights with bytes.
bool has_times(const StepSchedule& schedule);

StepLanes predict(const StepSchedule& schedule);

// Two rows of `width` characters, compute and transfers: the last digit of a use's number for its compute, that of the
// weight's number for a gather or reduction, * for an activation. With copies, two rows more.
std::string lanes_text(const StepSchedule& schedule, int width = 72);

}  // namespace shardwright
