// Predicts how long each method takes, and chooses one.
//
// The program of each method is run through the clock of products/timeline.h. So what is compared is what would run,
// hidden transfers included.
#pragma once

#include <string>
#include <vector>

#include "attention/attention.h"
#include "cost/gemm_model.h"
#include "cost/topology.h"

namespace shardwright {

struct AttentionForecast {
  AttentionMethod method = AttentionMethod::kSerial;
  // The worst of the ranks that are looked at: all of up to four, else the first, the one in the middle and the last.
  int64_t forward_ps = 0;
  int64_t backward_ps = 0;
  int64_t compute_ps = 0;  // of the forward, alone
  int64_t received_bytes = 0;
  int64_t peak_bytes = 0;  // results included

  int64_t total_ps() const { return forward_ps + backward_ps; }
};

// One for each method, serial first; two_level where the topology has levels. The backward is left out where it is not
// asked for.
std::vector<AttentionForecast> forecasts(const Attention& attention, const Topology& topology, const GemmModel& model,
                                         bool with_backward);

// Returns the method with the least predicted time, the one with less memory where two are within 2%; serial unless
// another one saves kLeastGainPercent (products/timeline.h). It depends on arguments that are the same on all ranks, so
// all ranks make the same choice.
AttentionMethod choose(const Attention& attention, const Topology& topology, const GemmModel& model,
                       bool with_backward);

// The figures that `explain` shows: the sizes, what each rank computes, and the predictions.
std::string describe(const Attention& attention, const Topology& topology, const GemmModel& model);

}  // namespace shardwright
