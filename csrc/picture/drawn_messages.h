// The messages of a step with their elements, for pictures with one row per rank.
#pragma once

#include <cstdint>
#include <map>
#include <vector>

#include "moves/step.h"

namespace shardwright {

// The elements that row `to` receives from row `from`. Equal rows: the elements that the rank keeps.
struct DrawnMessage {
  int64_t from = 0;
  int64_t to = 0;
  int64_t bytes = 0;
  std::vector<Region> parts;  // the elements, as indices of the full tensor
};

// Returns true if the step is a reduce-scatter or an all-reduce.
bool reduces(const Step& step);

// Returns the messages and kept elements of a step, sorted by sender, then receiver. For reductions, returns kept
// elements only. `rows` has the row of every rank of the step. The cost grows with the pairs of communicating ranks.
std::vector<DrawnMessage> drawn_messages(const Step& step, const std::map<Rank, int64_t>& rows);

}  // namespace shardwright
