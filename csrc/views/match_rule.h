// The rule by which lists were divided, found from what each coordinate got.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "layout/cut_rule.h"

namespace shardwright {

// A list of n elements, and the local positions of it that each coordinate got.
struct Division {
  int64_t n = 0;
  std::vector<IntervalList> parts;
};

// Returns a rule that divides all of these lists so, or nothing if there is none. Chunks are preferred, then strided
// cuts, which DTensor has too; pieces come last.
std::optional<CutRule> matching_rule(const std::vector<Division>& divisions);

}  // namespace shardwright
