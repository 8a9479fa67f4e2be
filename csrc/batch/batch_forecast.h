// The data that a batch moves, and the time that is predicted for it: by destination, and by link from one rank to
// another.
#pragma once

#include <cstdint>
#include <vector>

#include "batch/batch_plan.h"
#include "cost/topology.h"

namespace shardwright {

struct BatchForecast {
  struct OfDestination {
    int64_t received_bytes = 0;      // by all ranks
    int64_t received_bytes_max = 0;  // by one rank
    int64_t kept_bytes = 0;          // copied on their ranks, all ranks together
    int first_round = -1;            // -1 where nothing travels
    int last_round = -1;
    int64_t predicted_ps = 0;  // of the busiest rank, for this destination alone, without latencies
  };
  struct OfLink {
    Rank from{};
    Rank to{};
    int64_t bytes = 0;
    int64_t messages = 0;  // at most: a piece of a small message may be empty
    int64_t predicted_ps = 0;
  };

  std::vector<OfDestination> destinations;  // as in the batch
  std::vector<OfLink> links;                // by sender, then receiver
  // Of reducing the sources with pending reductions, one after the other, with the lowering that takes longest. Their
  // bytes are in neither of the lists.
  int64_t reducing_ps = 0;
  // That, and of the busiest rank: the latency of its rounds and messages, the larger of what it sends and receives
  // over its links, and packing and unpacking alongside where there is more than one bucket.
  int64_t predicted_ps = 0;
};

// Takes time in proportion to messages of kinds, once for all destinations whose items are of the same kinds.
BatchForecast forecast(const BatchPlan& plan, const Topology& topology);

}  // namespace shardwright
