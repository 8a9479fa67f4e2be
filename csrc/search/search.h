// The cheapest sequence of moves between two layouts.
#pragma once

#include <vector>

#include "search/options.h"

namespace shardwright {

// What a sequence of moves costs under an objective; compared in this order, added step by step.
//   kTime    predicted picoseconds, steps that communicate, messages, all steps
//   kBytes   bytes received by the worst rank, steps that communicate, messages, all steps
struct Cost {
  int64_t first = 0;
  int64_t steps = 0;
  int64_t messages = 0;
  int64_t all_steps = 0;
  auto operator<=>(const Cost&) const = default;
  Cost operator+(const Cost& other) const;
};

// `goal` has the pending reductions of `src` or fewer. Throws UserError if options.groups do not suffice.
std::vector<Step> cheapest_moves(const Layout& src, const Layout& goal, const PlanOptions& options,
                                 const Topology& topology);

// Picoseconds that no sequence of moves is predicted to go below.
int64_t least_picoseconds(const Layout& src, const Layout& goal, const PlanOptions& options, const Topology& topology);

}  // namespace shardwright
