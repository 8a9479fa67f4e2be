// Finds the cut rule (layout/cut_rule.h) that divides lists into given parts.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "layout/cut_rule.h"

namespace shardwright {

// A division of a list of n elements.
struct Division {
  int64_t n = 0;
  std::vector<IntervalList> parts;  // the local positions that each coordinate gets
};

// Returns one rule that makes all of these divisions, or nullopt if none of the candidates does. There must be at least
// one division, and all must have equally many parts. Tries chunks first, then strided cuts, because DTensor has both.
// Tries pieces last.
//
// Examples, each with two coordinates:
//   5 elements into [0, 3) [3, 5), and 3 elements into [0, 2) [2, 3)   chunks
//   8 elements into [0, 2) [4, 6) and [2, 4) [6, 8)                    strided with split factor 2
//   20 elements into [0, 12) [12, 20)                                  blocks of 4
//   5 elements into [0, 1) [1, 5)                                      ragged, sizes 1 and 4
std::optional<CutRule> matching_rule(const std::vector<Division>& divisions);

}  // namespace shardwright
