// A leg of a plan between two meshes: the moves on one mesh before or after the crossing.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "moves/step.h"
#include "search/options.h"
#include "search/search.h"

namespace shardwright {

struct Leg {
  Layout layout;     // the end of the leg at the crossing: `to` before the crossing, `from` after it
  Layout from;       // the first layout of the leg
  Layout to;         // the last layout of the leg
  int64_t elements;  // elements of the largest part of `layout`
  Cost cost_bound;   // lower bound on the cost of the leg; exact once the steps are known
  std::optional<std::vector<Step>> steps;  // set by find_steps(); empty if `from` and `to` are equal
  int64_t sent_bytes = 0;      // sum over steps of the bytes that the busiest rank sends; 0 until the steps are known
  int64_t received_bytes = 0;  // sum over steps of the bytes that the worst rank receives; 0 until the steps are known

  // Computes the steps and their exact cost, on the first call.
  void find_steps(const PlanOptions& options, const Topology& topology);
};

// Adds the leg from `from` to `to`, whose end at the crossing is `layout`. Does not add it if a known leg has this
// layout, or if a rank would hold more than options.max_held elements of it. The first leg is always added.
void add_leg(std::vector<Leg>& legs, const Layout& layout, const Layout& from, const Layout& to,
             const PlanOptions& options, const Topology& topology);

}  // namespace shardwright
