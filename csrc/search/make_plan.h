// Makes plans between two layouts, or through given ones.
#pragma once

#include <cstdint>
#include <vector>

#include "search/options.h"

namespace shardwright {

// Finds the cheapest moves, on one mesh or from one to another. Throws UserError if the layouts differ in shape or
// dtype, if PyTorch's semantics define no such redistribution (P(sum) to P(max), S to P(max), R to P(product)), if the
// allowed groups do not suffice, and if groups are named for two meshes.
Plan make_plan(const Layout& src, const Layout& dst, const PlanOptions& options = {});

// Returns the plan that goes through these layouts in order, with one move between each two. It serves to cost a plan
// from elsewhere, or to force one. `layouts` begins with the source and ends with the destination. There is no step
// between neighbours that hold the same parts, and a crossing between neighbours on different meshes. Throws UserError
// if two neighbours are more than one move apart.
Plan plan_through(const std::vector<Layout>& layouts, const PlanOptions& options = {});

// A lower bound, with this plan's topology, on the predicted time of any plan between the same layouts.
int64_t least_picoseconds(const Plan& plan);

}  // namespace shardwright
