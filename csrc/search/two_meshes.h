// Searches for the cheapest way from a layout on one mesh to a layout on another.
#pragma once

#include <vector>

#include "search/search.h"

namespace shardwright {

// Three legs: moves on the mesh of `src`, one crossing, moves on the mesh of `goal`. The layouts at both ends of
// the crossing are chosen together. Each mesh dim may do there what it does in `src` or `goal`, cut another tensor dim,
// or cut nothing:
//
//   before    All pending reductions are done, into cuts or replicas, and replicas may reduce a part each. Cuts may be
//             gathered or exchanged, so that fewer messages cross.
//   after     Replicated mesh dims may cut a tensor dim while the tensor crosses. Their ranks receive a stripe each and
//             gather the stripes on their own mesh. Afterwards cuts may be exchanged, or replicas cut.
//             If `may_split` and a plan is far from what is possible, the largest replicated mesh dim of `goal` may be
//             split in two or three for this leg (search/split.h), which then ends with the same parts as `goal`
//             on that mesh: ranks on one node gather there what the node has received once, and many ranks gather in
//             several steps of few messages.
//   relays    Where many messages would be sent and few received, or the other way round, several crossings may follow
//             one another, over levels of relays (search/over_relays.h).
//   crossing  The sending is shared in whole messages or to the element, whichever is faster.
//
// If a rank of both meshes sends more than the least, and the tensor may go in segments, plans are compared by the time
// of their segments too, also with balanced stripes (search/balanced.h).
//
// The moves of a leg are those of cheapest_moves(). Layouts that differ from `src` or `goal` in few mesh dims come
// first; for meshes of many dims only these are tried (two_meshes.cpp). If costs are equal, the direct crossing wins,
// else the first in an order that depends only on the layouts. `goal` has no partials. options.groups is empty.
std::vector<Step> cheapest_crossing(const Layout& src, const Layout& goal, const PlanOptions& options,
                                    const Topology& topology, bool may_split);

// Returns a lower bound on the predicted picoseconds of every way between the two: one step and message of the fastest
// link, what some rank must receive or send, what must enter or leave some node divided by its ranks, and the copy of
// the result.
int64_t least_picoseconds_between(const Layout& src, const Layout& dst, const Topology& topology);

}  // namespace shardwright
