// Searches for the cheapest sequence of moves between two layouts.
#pragma once

#include <vector>

#include "search/options.h"

namespace shardwright {

// The cost of a sequence of moves under an objective. Costs of steps are added. Members are compared in this order:
//   kTime    predicted picoseconds, steps that communicate, messages, all steps
//   kBytes   bytes received by the worst rank, steps that communicate, messages, all steps
struct Cost {
  int64_t first = 0;      // picoseconds or bytes
  int64_t steps = 0;      // steps that communicate
  int64_t messages = 0;   // sum over steps of the messages that the worst rank receives
  int64_t all_steps = 0;  // local steps included
  auto operator<=>(const Cost&) const = default;
  Cost operator+(const Cost& other) const;
};

// Returns the cheapest sequence of moves; empty if `goal` has the cuts and pending reductions of `src`. The layouts
// must be on one mesh and need no rearrangement, and the pending reductions of `goal` must also be pending in `src`.
// Throws UserError if options.groups do not suffice.
std::vector<Step> cheapest_moves(const Layout& src, const Layout& goal, const PlanOptions& options,
                                 const Topology& topology);

// Returns a lower bound on Cost::first of any sequence of moves between these layouts, as for cheapest_moves():
// picoseconds, or bytes if the objective is kBytes.
int64_t least_first_cost(const Layout& src, const Layout& goal, const PlanOptions& options, const Topology& topology);

}  // namespace shardwright
