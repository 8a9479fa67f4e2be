// Costs of the worst rank in a step (bytes, messages), and the time predicted from them, in picoseconds.
#pragma once

#include <cstdint>
#include <span>

#include "cost/cost.h"
#include "exchange/exchange.h"
#include "moves/plan.h"

namespace shardwright {

// Returns the link between nodes if any message goes from one node to another, else the link within nodes. Ignores the
// links of single mesh dims.
Link link_of(const Exchange& exchange, const Topology& topology);
// Returns the slowest link that a step uses.
Link link_of(const Step& step, const Topology& topology);

// Returns the maxima over ranks of a step's bytes and messages; an exchange has at least one message. Examines these
// ranks:
//
//   - For crossings and rearrangements: all ranks.
//   - With several rounds or kEvenBytes, or if parts are unequal and some rule is neither chunks nor strided: one rank
//     of each class (moves/rank_classes.h).
//   - Otherwise: the corners of position 0's group, where parts are largest, smallest and furthest apart.
//
// The result is exact for equal parts, for crossings and rearrangements, and for up to kMaxRanksExamined classes.
// Otherwise another rank may do more (totals() in moves/traffic.h has the maxima), and times predicted from the result
// are estimates.
StepCounts step_counts(const Step& step, Lowering lowering);

// Return the predicted time of a step: that of one round (predicted_picoseconds in cost/cost.h), plus the latency of
// the collectives of each further round. `counts` is the result of step_counts(); without it, it is computed.
int64_t predicted_picoseconds(const Step& step, const StepCounts& counts, const Topology& topology);
int64_t predicted_picoseconds(const Step& step, Lowering lowering, const Topology& topology);
// Returns the predicted time of a plan: the sum over its steps, or with segments, the sum over pipeline stages
// (moves/segments.h). The time of a pipeline stage is the sum of its steps' latencies, plus the largest transfer time
// of a rank: its bytes of all steps are added up, separately by direction and for links within nodes and other links.
// Local copies are the copies within steps, and the copies of segments out of the source and into the destination.
// Non-uniform segments all count as the largest: their share of a step's bytes is the largest share that any segment
// has of the longest part before or after the step.
//
// Example: a first step of 1 us + 8 us between nodes, a second of 1 us + 8 us within nodes, no local copies.
//   1 segment     (1 + 8) + (1 + 8)                     18 us
//   2 segments    (1 + 4) + (2 + 4) + (1 + 4)           16 us: in the middle, both kinds of links are in use
//   4 segments    (1 + 2) + 3 x (2 + 2) + (1 + 2)       18 us: more latencies
int64_t predicted_picoseconds(const Plan& plan);

// Returns the segments (moves/segments.h) with which a plan of one segment is predicted to be fastest. Returns one
// segment if that is as fast, or if the meshes have more than kMaxRanksInSegments ranks, because adding up the bytes of
// all ranks takes long. Non-uniform segments must save more than 2% of the time, because each has its own program.
constexpr int64_t kMaxRanksInSegments = 4096;
Segments best_segments(const Plan& plan);

// The result of best_segments(), and the predicted time of the plan in these segments, up to rounding.
struct TimedSegments {
  Segments segments;
  int64_t picoseconds = 0;
};
TimedSegments best_timed_segments(const Plan& plan);

// Returns a lower bound on the time of a plan in any number of segments. `times` has the time of each move, `latencies`
// the sum of their latencies. With n segments, the longest move takes its full time, every other move 1/n of its time,
// and all latencies are paid n - 1 more times:
//
//   longest + others / n + (n - 1) * latencies,  which is least for n = sqrt(others / latencies)
//
// Example: moves of 12, 4 and 2 us with latencies of 1.5 us: 12 + 2 sqrt(6 x 1.5) - 1.5 = 16.5 us, with 2 segments.
int64_t segments_lower_bound(std::span<const int64_t> times, int64_t latencies);

}  // namespace shardwright
