// What a plan may be asked for besides its two layouts.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "moves/plan.h"

namespace shardwright {

// Whether "fast" (no), "float32" (where `src` has pending sums, averages or norms of a 16-bit type) or "ordered" (yes)
// asks for ordered reductions. Throws UserError on other names.
bool is_ordered(const std::string& reduce, const Layout& src);

struct PlanOptions {
  Lowering lowering = Lowering::kNccl;
  Objective objective = Objective::kTime;
  // One reduction over all that is due, exchanged and summed here in rank order, 16-bit types in float32: results do
  // not depend on plan, topology and algorithm, and are rounded once.
  bool ordered = false;
  // Default: that of the lowering. Meshes are not asked (planning/context.h does that).
  std::optional<Topology> topology = std::nullopt;
  // The sets of mesh dims that moves may span; empty: any.
  std::vector<MeshDimSet> groups = {};
  // Elements that a rank may hold in between; 0: any number.
  int64_t max_held = 0;

  bool operator==(const PlanOptions& other) const = default;
};

}  // namespace shardwright
