// Plans for layouts that need a rearrangement (exchange/indexed_exchange.h), on one mesh or between two.
#pragma once

#include <vector>

#include "moves/step.h"
#include "search/options.h"

namespace shardwright {

// Returns the moves to a goal, which has no reductions besides those that are due on both sides. Reductions come first:
// into parts of the source's own, innermost on its longest tensor dim, or to all ranks, whichever is predicted to be
// faster. One rearrangement follows, or a slice where ranks have all that they need. Where that is predicted to be
// faster, ranks that need the same receive a stripe each in the rearrangement and gather the stripes: over each mesh
// dim that replicates the goal, or over all of them.
//
// Not searched: other layouts in between.
//
// If the options name groups, what is due is reduced over these, in one step or over one mesh dim after the other. Then
// ranks must have all that they need, because a rearrangement takes all ranks together; otherwise throws UserError.
std::vector<Step> cheapest_rearrangement(const Layout& src, const Layout& goal, const PlanOptions& options,
                                         const Topology& topology);

}  // namespace shardwright
