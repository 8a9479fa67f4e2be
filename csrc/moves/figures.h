// Figures of the worst rank in a step, and the time that is predicted for them.
#pragma once

#include <cstdint>

#include "cost/cost.h"
#include "exchange/exchange.h"
#include "moves/plan.h"

namespace shardwright {

// Returns the link between nodes if some message goes from one node to another, else the link inside. (The links of
// mesh dims apply within one mesh only.)
Link link_of(const Exchange& exchange, const Topology& topology);
// Returns the slowest link that a step takes.
Link link_of(const Step& step, const Topology& topology);

// Returns the figures of the worst rank among the corners of position 0's group (moves/extremes.h): there parts are
// largest and smallest, and furthest from each other. For crossings, and where parts are unequal and cut by other rules
// than chunks, all classes of ranks are compared. Where parts are equal, and for crossings, the figures are exact; with
// other rules too, up to kMaxRanksWalked classes. Otherwise another rank may do more (totals() in moves/traffic.h has
// the maxima), and times predicted from the figures are estimates. An exchange has at least one message.
StepFigures figures(const Step& step, Lowering lowering);

// Like predicted_picoseconds in cost/cost.h, plus the collectives of every further round.
int64_t predicted_picoseconds(const Step& step, const StepFigures& figures, const Topology& topology);
int64_t predicted_picoseconds(const Step& step, Lowering lowering, const Topology& topology);
// Of a plan: the sum over its steps. In segments: the sum over slots (moves/segments.h). In each slot the communicating
// steps cost their latencies one after the other. Bytes count by rank: those of all steps over links within nodes are
// added up, and those over other links, and the busiest of both of any rank counts. Copies are those of the steps, and
// of segments from the source and to the destination. Where segments are not alike, each counts as one in which ranks
// have the largest share of a step's bytes that a segment has of the longest part before or after it.
int64_t predicted_picoseconds(const Plan& plan);

// Returns the segments with which a plan is predicted to be fastest; one segment if that is as fast, or if the meshes
// have more than kMaxRanksInSegments ranks, whose loads would take long to add up.
constexpr int64_t kMaxRanksInSegments = 4096;
Segments best_segments(const Plan& plan);

// The same with the time that they take, up to rounding.
struct TimedSegments {
  Segments segments;
  int64_t picoseconds = 0;
};
TimedSegments timed_in_best_segments(const Plan& plan);

}  // namespace shardwright
