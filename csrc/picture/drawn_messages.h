// The messages of a step, element by element, for pictures of few ranks. A picture has one row per rank.
#pragma once

#include <cstdint>
#include <map>
#include <vector>

#include "moves/step.h"

namespace shardwright {

// The elements that the rank in row `to` receives from the rank in row `from`, or keeps if the rows are equal.
struct DrawnMessage {
  int64_t from = 0;
  int64_t to = 0;
  int64_t bytes = 0;
  std::vector<Region> parts;  // the elements, as indices of the full tensor
};

// Returns true if the step is a reduce-scatter or an all-reduce.
bool reduces(const Step& step);

// Returns the messages and kept elements of a step, sorted by sender, then receiver. For reductions, returns kept
// elements only. `rows` has the row of every rank of the step. Visits all pairs of ranks that communicate.
std::vector<DrawnMessage> drawn_messages(const Step& step, const std::map<Rank, int64_t>& rows);

}  // namespace shardwright
