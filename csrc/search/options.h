// The settings of a plan besides its two layouts.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "moves/plan.h"

namespace shardwright {

// Returns true if this value of the argument `reduce` requires ordered reductions: "ordered" does, "fast" does not, and
// "float32" does if `src` has pending sums, averages or norms of a 16-bit type. Throws UserError on other names.
bool is_ordered(const std::string& reduce, const Layout& src);

struct PlanOptions {
  Lowering lowering = Lowering::kNccl;     // the backend that executes the plan (cost/lowering.h)
  Objective objective = Objective::kTime;  // the quantity that the plan minimizes (moves/plan.h)
  // If true, all pending mesh dims are reduced at once: contributions are exchanged, then summed locally in rank order,
  // 16-bit types in float32. So results do not depend on plan, topology or algorithm, and are rounded once.
  bool ordered = false;
  // Default: the topology of the lowering. The topology of a mesh is not considered here (see planning/context.h).
  std::optional<Topology> topology = std::nullopt;
  // Sets of mesh dims that moves may span; empty: any.
  std::vector<MeshDimSet> groups = {};
  // Maximum number of elements that a rank may hold between two steps; 0: any number. Rearrangements ignore it, and the
  // source, the goal and a reduced source may be larger.
  int64_t max_held = 0;
  // If false, plans between two meshes have one segment (Segments in moves/plan.h).
  bool segments = true;

  bool operator==(const PlanOptions& other) const = default;
};

}  // namespace shardwright
