// Searches for the cheapest plan from a layout on one mesh to a layout on another.
#pragma once

#include <vector>

#include "search/search.h"

namespace shardwright {

// Returns the cheapest steps of three legs: moves on the mesh of `src`, one *crossing* (the move from one mesh to the
// other), moves on the mesh of `goal`. The layouts at both ends of the crossing are chosen together. At these ends each
// mesh dim may do what it does in `src` or `goal`, cut another tensor dim, or cut nothing:
//
//   before    All pending reductions are done, into cuts or replicas, and replicas may reduce a part each. Cuts may be
//             gathered or exchanged, so that fewer messages cross.
//   after     Replicated mesh dims may cut a tensor dim in the crossing. Their ranks receive a stripe each and gather
//             the stripes on their own mesh. Afterwards cuts may be exchanged, or replicas cut. If `may_split` and a
//             plan is far above the lower bound, the largest replicated mesh dim of `goal` may be split in two or three
//             for this leg (search/split.h), which then ends with the same parts as `goal` on that mesh. Ranks on one
//             node then gather what the node has received once, and many ranks gather in several steps of few messages.
//   relays    If the busiest ranks send many messages and receive few, or the reverse, there may be several consecutive
//             crossings over levels of relays (search/over_relays.h).
//   crossing  The senders share the sending in whole messages, to the element, or by nodes, whichever is fastest.
//
// If the meshes share ranks, the busiest sender sends more than the busiest receiver receives, and the tensor may be
// sent in segments, plans in segments are also compared, balanced stripes (search/balanced.h) included.
//
// The moves of a leg are those of cheapest_moves(). Layouts that differ from `src` or `goal` in few mesh dims are tried
// first; for meshes of many dims only these are tried (two_meshes.cpp). If costs are equal, the direct crossing wins,
// else the first in an order that depends only on the layouts. `goal` must have no partials, and options.groups must be
// empty.
std::vector<Step> cheapest_crossing(const Layout& src, const Layout& goal, const PlanOptions& options,
                                    const Topology& topology, bool may_split);

}  // namespace shardwright
