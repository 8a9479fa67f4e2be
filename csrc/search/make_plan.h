// Makes plans between two layouts, or through given ones.
#pragma once

#include <cstdint>
#include <vector>

#include "search/options.h"

namespace shardwright {

// Returns the cheapest plan, on one mesh or between two. Throws UserError if the layouts differ in shape or dtype, if
// PyTorch defines no such redistribution (P(sum) to P(max), S to P(max), R to P(product)), if the allowed groups do not
// suffice, if groups are given for two meshes or for a rearrangement that sends data, or if the topology is invalid
// (Topology::check).
Plan make_plan(const Layout& src, const Layout& dst, const PlanOptions& options = {});

// Returns the plan that goes through these layouts in order, with one move between neighbors. Use it to cost a plan
// from elsewhere, or to force a plan. `layouts` begins with the source and ends with the destination. There is no step
// between neighbors that hold the same parts, and a crossing between neighbors on different meshes. If neighbors need a
// rearrangement, the steps of make_plan() lead from one to the next. Throws UserError where make_plan() does, and if
// there are fewer than two layouts, if the mesh changes more often than between source and destination, or if neighbors
// that need no rearrangement are more than one move apart, or have partials and are on different meshes.
Plan plan_through(const std::vector<Layout>& layouts, const PlanOptions& options = {});

// Returns a lower bound on the predicted time in picoseconds, with this plan's topology, of any plan between its source
// and its destination; 0 if these are equal.
int64_t least_picoseconds(const Plan& plan);

}  // namespace shardwright
