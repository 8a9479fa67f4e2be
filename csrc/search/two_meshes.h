// The cheapest way from a layout on one mesh to a layout on another.
#pragma once

#include <vector>

#include "search/search.h"

namespace shardwright {

// Three segments: moves on the mesh of `src`, one crossing, moves on the mesh of `goal`.
//
//   before    all that is pending is reduced: over all its mesh dims at once into cuts of one tensor dim, so that what
//             crosses is spread over them, or into replicas, which share the sending as well. Or some of the cuts, or
//             all, are gathered, so that fewer messages cross.
//   after     some of the replicated mesh dims of `goal`, or all, cut a tensor dim while the tensor crosses. Their
//   ranks
//             receive a stripe each and gather them on their own mesh, where links may be faster: what enters a node or
//             leaves a holder once then crosses once. Or all mesh dims that cut do so on one tensor dim, as a source
//             may, and exchange afterwards.
//   crossing  shared in whole messages or to the element, whichever is faster (Sharing)
//
// Each segment's moves are those of cheapest_moves(). Of equal costs the first in an order that depends on the layouts
// alone is taken; the direct crossing comes first. `goal` has no partials. Between meshes options.groups is not looked
// at.
std::vector<Step> cheapest_crossing(const Layout& src, const Layout& goal, const PlanOptions& options,
                                    const Topology& topology);

// Picoseconds that no way between the two is predicted to go below: one step and message of the fastest link, what some
// rank must receive or send, what must enter some node over the ranks it has there, and the result's copy.
int64_t least_picoseconds_between(const Layout& src, const Layout& dst, const Topology& topology);

}  // namespace shardwright
