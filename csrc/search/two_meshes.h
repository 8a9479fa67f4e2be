// The cheapest way from a layout on one mesh to a layout on another.
#pragma once

#include <vector>

#include "search/search.h"

namespace shardwright {

// Three segments: moves on the mesh of `src`, one crossing, moves on the mesh of `goal`. The layouts at both ends of
// the crossing are chosen together. Each mesh dim may do there what it does in `src` or `goal`, cut another tensor dim,
// or cut nothing:
//
//   before    All that is pending is reduced, into cuts or replicas, and replicas may reduce a part each. Cuts may be
//             gathered or exchanged, so that fewer messages cross.
//   after     Replicated mesh dims may cut a tensor dim while the tensor crosses. Their ranks receive a stripe each and
//             gather them on their own mesh. Cuts may be exchanged or thinned out afterwards.
//   crossing  Shared in whole messages or to the element, whichever is faster.
//
// The moves of a segment are those of cheapest_moves(). Layouts at the ends that differ in few mesh dims come first,
// which for meshes of many dims are all that are tried (two_meshes.cpp). Of equal costs the direct crossing wins, else
// the first in an order that depends on the layouts alone. `goal` has no partials. options.groups is empty.
std::vector<Step> cheapest_crossing(const Layout& src, const Layout& goal, const PlanOptions& options,
                                    const Topology& topology);

// Picoseconds that no way between the two is predicted to go below: one step and message of the fastest link, what some
// rank must receive or send, what must enter some node over the ranks it has there, and the result's copy.
int64_t least_picoseconds_between(const Layout& src, const Layout& dst, const Topology& topology);

}  // namespace shardwright
