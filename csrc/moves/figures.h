// What the worst rank does in a step, and how long that is predicted to take.
#pragma once

#include <cstdint>

#include "cost/cost.h"
#include "crossing/crossing.h"
#include "moves/plan.h"

namespace shardwright {

// Returns the link between nodes if some parcel goes from one node to another, else the link inside. (The links of mesh
// dims apply within one mesh only.)
Link link_of(const Crossing& crossing, const Topology& topology);

// Returns the figures of the worst rank among the corners of position 0's group (moves/extremes.h): there parts are
// largest and smallest, and furthest from each other. Along mesh dims whose parts do not descend, the ranks that
// Corners names are compared; for a crossing, all ranks. Where parts are equal, and for crossings, the figures are
// exact. Otherwise another rank may do more (totals() in moves/traffic.h has the maxima), and times predicted from the
// figures are estimates. An exchange has at least one message.
StepFigures figures(const Step& step, Lowering lowering);

// Like predicted_picoseconds in cost/cost.h, plus the collectives of every further round.
int64_t predicted_picoseconds(const Step& step, const StepFigures& figures, const Topology& topology);
int64_t predicted_picoseconds(const Step& step, Lowering lowering, const Topology& topology);
int64_t predicted_picoseconds(const Plan& plan);

}  // namespace shardwright
