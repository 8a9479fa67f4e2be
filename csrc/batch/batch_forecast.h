// Predicted traffic and time of a batch, by destination and by link from one rank to another. Times are in picoseconds
// (ps) and follow the cost model of cost/topology.h. Sums above 2^60 become 2^60.
#pragma once

#include <cstdint>
#include <vector>

#include "batch/batch_plan.h"
#include "cost/topology.h"

namespace shardwright {

// The forecast of one run of a batch.
struct BatchForecast {
  // The traffic of all items with one destination.
  struct OfDestination {
    int64_t received_bytes = 0;      // by all ranks
    int64_t received_bytes_max = 0;  // by one rank
    int64_t kept_bytes = 0;          // copied locally, by all ranks
    int first_round = -1;            // first round that sends elements of the destination; -1 if nothing is sent
    int last_round = -1;             // last round that sends elements of the destination; -1 if nothing is sent
    int64_t predicted_ps = 0;        // longest send or receive time of a rank for this destination, without latencies
  };
  // The traffic from one rank to another.
  struct OfLink {
    Rank from{};
    Rank to{};
    int64_t bytes = 0;
    // Upper bound on the number of messages: the number of rounds with a piece of an item that uses the link. A piece
    // may have no elements of a short message (schedule.h).
    int64_t messages = 0;
    int64_t predicted_ps = 0;  // latencies of the messages, plus the time of their bytes
  };

  std::vector<OfDestination> destinations;  // in the order of Batch::destinations
  std::vector<OfLink> links;                // with traffic only; ordered by sender, then receiver
  // Time to reduce the sources with pending reductions, one after the other, with the slowest lowering. `destinations`
  // and `links` do not include the bytes of these reductions.
  int64_t reducing_ps = 0;
  // reducing_ps plus the time of the busiest rank: the latencies of its rounds and received messages, the larger of its
  // send and receive times, and packing and unpacking, which overlap with transfers if there is more than one bucket.
  int64_t predicted_ps = 0;
};

// Returns the forecast of a plan. Takes time proportional to the number of messages of all kinds. Destinations whose
// items have equal kinds are computed once.
BatchForecast forecast(const BatchPlan& plan, const Topology& topology);

}  // namespace shardwright
