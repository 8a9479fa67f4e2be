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

// The predicted times (in picoseconds) and bytes of one method: maxima over the examined ranks. Examined are all of up
// to four ranks, else the first, the middle and the last one.
struct AttentionForecast {
  AttentionMethod method = AttentionMethod::kSerial;
  int64_t forward_ps = 0;
  int64_t backward_ps = 0;     // 0 without a backward
  int64_t compute_ps = 0;      // products of the forward, without transfers
  int64_t received_bytes = 0;  // by one rank in the forward
  int64_t peak_bytes = 0;      // memory that the forward allocates on one rank, with its results

  int64_t total_ps() const { return forward_ps + backward_ps; }
};

// Returns one forecast for each method that supports this attention on this topology, serial first. If no keys move
// (one rank, or every rank holds all keys), returns only the forecast of serial. Ignores the attention's method
// and ranks_per_node. Throws UserError as check() does.
std::vector<AttentionForecast> forecasts(const Attention& attention, const Topology& topology, const GemmModel& model,
                                         bool with_backward);

// Returns the method with the least predicted time. Of the methods that take at most 2% longer, returns the one with
// the least memory. Returns serial unless the fastest method saves at least kLeastGainPercent (products/timeline.h) of
// serial's time. The time includes the backward if `with_backward` is true. Throws UserError as check() does. The
// choice depends on arguments that are the same on all ranks, so all ranks make the same choice.
AttentionMethod choose(const Attention& attention, const Topology& topology, const GemmModel& model,
                       bool with_backward);

// Returns the text of `explain`: the sizes, the block products of each of the first 16 ranks, and the
// predictions. Throws UserError as check() does.
std::string describe(const Attention& attention, const Topology& topology, const GemmModel& model);

}  // namespace shardwright
