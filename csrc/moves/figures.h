// What the worst rank does in a step, and how long that is predicted to take.
#pragma once

#include <cstdint>

#include "cost/cost.h"
#include "crossing/crossing.h"
#include "moves/plan.h"

namespace shardwright {

// Between nodes where some parcel goes from one to another, else inside: links of mesh dims are those of one mesh.
Link link_of(const Crossing& crossing, const Topology& topology);

// Among the corners of position 0's group, the ranks whose coordinates are first or last: there parts are largest and
// smallest, and lie furthest from each other. Of a crossing: among all ranks.
StepFigures figures(const Step& step, Lowering lowering);

// As predicted_picoseconds in cost/cost.h, with as many more collectives as the step has rounds.
int64_t predicted_picoseconds(const Step& step, const StepFigures& figures, const Topology& topology);
int64_t predicted_picoseconds(const Step& step, Lowering lowering, const Topology& topology);
int64_t predicted_picoseconds(const Plan& plan);

}  // namespace shardwright
