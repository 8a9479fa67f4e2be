// Predicts the time of each method of attention, and chooses one.
//
// The programs of each method are compiled and timed by products/timeline.h, so predictions include overlapped
// transfers.
#pragma once

#include <string>
#include <vector>

#include "attention/attention.h"
#include "cost/gemm_model.h"
#include "cost/topology.h"

namespace shardwright {

struct AttentionForecast {
  AttentionMethod method = AttentionMethod::kSerial;
  // Maxima over the examined ranks: all of up to four ranks, else the first, the middle and the last.
  int64_t forward_ps = 0;
  int64_t backward_ps = 0;
  int64_t compute_ps = 0;  // products of the forward, without transfers
  int64_t received_bytes = 0;
  int64_t peak_bytes = 0;  // results included

  int64_t total_ps() const { return forward_ps + backward_ps; }
};

// Returns one forecast for each possible method, serial first. two_level needs Attention::has_levels for this topology.
// Without `with_backward`, backward_ps is 0.
std::vector<AttentionForecast> forecasts(const Attention& attention, const Topology& topology, const GemmModel& model,
                                         bool with_backward);

// Returns the method with the least predicted time. Among methods within 2% of it, returns the one with the least
// memory. Returns serial unless the fastest saves kLeastGainPercent (products/timeline.h). The choice depends on
// arguments that are the same on all ranks, so all ranks make the same choice.
AttentionMethod choose(const Attention& attention, const Topology& topology, const GemmModel& model,
                       bool with_backward);

// Returns the text of `explain`: the sizes, the block products of each rank, and the predictions.
std::string describe(const Attention& attention, const Topology& topology, const GemmModel& model);

}  // namespace shardwright
