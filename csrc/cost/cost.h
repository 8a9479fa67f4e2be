// What a move is predicted to take, from what its worst rank does. One table for all ranks, integers throughout, so
// that ties break alike everywhere.
#pragma once

#include <cstdint>

#include "cost/topology.h"

namespace shardwright {

// The worst rank's share of one step, each figure by itself.
struct StepFigures {
  int64_t received_bytes = 0;
  int64_t sent_bytes = 0;
  int64_t messages = 0;       // received
  int64_t touched_bytes = 0;  // local copies: what is held afterwards
  int64_t collectives = 1;    // one behind the other
};

// Step latency + messages x message latency + the larger of bytes received and sent over the slowest link that the
// group crosses + local copies. A local step only copies.
int64_t predicted_picoseconds(bool local, const StepFigures& figures, const Link& link, const Topology& topology);

// Picoseconds for some bytes at a rate, a product, and a sum, all held below a ceiling that no sum of a plan overflows
// from.
int64_t scaled(int64_t bytes, int64_t ps_per_kib);
int64_t saturating_product(int64_t a, int64_t b);
int64_t saturating_sum(int64_t a, int64_t b);

}  // namespace shardwright
