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

// Returns one rule that makes all of these divisions, or nullopt if none of the candidates does. The divisions have
// equally many parts. Tries chunks first, then strided cuts, because DTensor has both. Tries pieces last.
std::optional<CutRule> matching_rule(const std::vector<Division>& divisions);

}  // namespace shardwright
