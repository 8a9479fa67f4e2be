// Predicts the times of the events of a scheduled step on two lanes: compute and transfers. If sharded parts are
// offloaded to the host, two more lanes have the copies from and to the host, which run at the same time.
//
// A lane does one thing at a time. Transfers run in the order in which they start. A gather can begin when the use
// before it has ended, a reduction when the gradient is complete. A use begins when its weights are gathered and the
// reductions that must finish before it are done.
//
// Chunks are transferred during a use, after transfers that started before it. Chunks of weights run alongside the
// product that needs them: the full forward, but only the first half of a backward, which computes the gradient of the
// input. Chunks of a gradient run alongside the second half. The use ends when its chunks are received and the compute
// that needs them is done, plus the time of one chunk, because the first chunk of a gather and the last chunk of
// a reduction overlap no compute. Of several consecutive uses, the longest has the chunks of a weight. The chunks of a
// gradient are in the use that computes it.
//
// A gather of offloaded parts begins with the copy of these parts to the device. The gather itself runs when the copy
// is done, and transfers that start later run after the gather. A copy to the host starts when compute has waited for
// the reduction. The step ends when all copies are done.
//
// Activations are gathered on the lane of transfers too. A use in which n activations have their turns is cut into n
// equal ranges. Each range begins when its activation is gathered.
//
// Example: two weights, gathers of 30, reductions of 20, forwards of 50, backwards of 100, one gather ahead.
//
//     compute    ...aaaaabbbbbBBBBBBBBBBAAAAAAAAAA..     300 of 350
//     transfers  aaabbb.................BB........AA     the first gather and the last reduction are exposed
//
// If the gradient of a is reduced in 4 chunks of 5, the step takes 335, because one chunk is exposed.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "schedule/schedule.h"

namespace shardwright {

// The time of an event, from the beginning of the step.
struct LaneSpan {
  int64_t begin_ps = 0;
  int64_t end_ps = 0;
};

// The chunks that are transferred for a weight within a use. A reduction has two spans; the second is its last chunk.
struct ChunksSpan {
  int weight = 0;
  int use = 0;
  bool is_reduction = false;  // chunks of the weight's gradient; otherwise of its gather
  LaneSpan span;
};

// The predicted times of a step. Uses, gathers, reductions and activations have the indices of the schedule's lists.
struct StepLanes {
  std::vector<LaneSpan> uses;         // compute of each use
  std::vector<LaneSpan> gathers;      // by gather
  std::vector<LaneSpan> reductions;   // by reduction; for reductions in chunks, only the part that is not in chunks
  std::vector<ChunksSpan> chunks;     // in the order in which they begin
  std::vector<LaneSpan> fetches;      // by gather: the copy from the host
  std::vector<LaneSpan> sends;        // by reduction: the copy to the host
  std::vector<LaneSpan> activations;  // by activation: its gather
  int64_t compute_ps = 0;             // sum of the compute of all uses
  int64_t transfer_ps = 0;            // sum over transfers
  int64_t copy_ps = 0;                // sum over copies from and to the host
  int64_t total_ps = 0;               // end of the step
  int64_t exposed_ps() const { return total_ps - compute_ps; }  // time in which nothing is computed
};

// Returns true if there are uses, and the durations of all uses and of all gathers of weights with bytes are known.
bool has_times(const StepSchedule& schedule);

// Returns the predicted lanes of a step. Unknown durations count as 0.
StepLanes predict(const StepSchedule& schedule);

// Returns the lanes as a diagram: a line with the predicted times, then a row for compute and a row for transfers, each
// with a label and `width` > 0 columns of time. A use is shown by the last digit of its index, a gather or reduction by
// the last digit of the weight's index, the gather of an activation by *. With copies from or to the host, there are
// two more rows.
std::string lanes_text(const StepSchedule& schedule, int width = 72);

}  // namespace shardwright
