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
  Layout layout;     // the end of the leg at the crossing
  Layout from;       // the first layout of the leg
  Layout to;         // its last layout
  int64_t elements;  // size of the largest part at the crossing
  Cost cost_bound;   // lower bound; exact once the steps are known
  std::optional<std::vector<Step>> steps;
  int64_t sent_bytes = 0;      // sum over steps of the bytes that the busiest rank sends; 0 until the steps are known
  int64_t received_bytes = 0;  // sum over steps of the bytes that the busiest rank receives

  // Computes the steps and their exact cost, on the first call.
  void find_steps(const PlanOptions& options, const Topology& topology);
};

// Adds a leg, unless a rank would hold more than options.max_held or the layout is known. Always adds the first leg.
void add_leg(std::vector<Leg>& legs, const Layout& layout, const Layout& from, const Layout& to,
             const PlanOptions& options, const Topology& topology);

}  // namespace shardwright
