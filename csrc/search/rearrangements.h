// Plans for layouts that need a rearrangement (exchange/indexed_exchange.h), on one mesh or between two.
#pragma once

#include <vector>

#include "moves/step.h"
#include "search/options.h"

namespace shardwright {

// Returns the moves to `goal`, whose pending reductions must also be pending in `src` on the same mesh. Reductions come
// first: a reduce-scatter into chunks of the longest tensor dim, innermost, or an all-reduce, whichever is predicted to
// be faster. One rearrangement follows, or a slice if ranks have all elements that they need. If that is predicted to
// be faster, ranks that need the same elements receive a stripe each in the rearrangement and gather the stripes: over
// each mesh dim that replicates the goal, or over all of them.
//
// Example: [P, S(0)] on a=2, b=4 to [R, Pieces(...)]. Four sequences are compared:
//   reduce_scatter over a, rearrange
//   reduce_scatter over a, rearrange such that the ranks along a receive a stripe each, gather over a
//   all_reduce over a, rearrange
//   all_reduce over a, rearrange such that the ranks along a receive a stripe each, gather over a
//
// Other intermediate layouts are not searched.
//
// If options.groups is not empty, pending reductions are done over these groups, in one step or over one mesh dim after
// the other. Then ranks must have all elements that they need, because a rearrangement involves all ranks. Throws
// UserError if they do not, or if the groups lack a mesh dim that is reduced.
std::vector<Step> cheapest_rearrangement(const Layout& src, const Layout& goal, const PlanOptions& options,
                                         const Topology& topology);

}  // namespace shardwright
