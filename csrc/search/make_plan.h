// Plans for two layouts, or through several.
#pragma once

#include <cstdint>
#include <vector>

#include "search/options.h"

namespace shardwright {

// Finds the cheapest moves. Throws UserError where the layouts differ in mesh, shape or dtype, where PyTorch's
// semantics define no such redistribution (P(sum) to P(max), S to P(max), R to P(product)), and where the groups that
// are allowed do not suffice.
Plan make_plan(const Layout& src, const Layout& dst, const PlanOptions& options = {});

// The plan that takes these layouts one after the other, one move each: to cost somebody else's plan, or to force one.
// `layouts` begins with the source and ends with the destination. Throws UserError where two neighbours are not one
// move apart; where they hold the same parts there is no step.
Plan plan_through(const std::vector<Layout>& layouts, const PlanOptions& options = {});

// Picoseconds that no plan for the same layouts is predicted to go below, by this plan's topology.
int64_t least_picoseconds(const Plan& plan);

}  // namespace shardwright
