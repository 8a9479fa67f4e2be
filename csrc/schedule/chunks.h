// Plans steps in which some weights are gathered in chunks, inside the products that use them, and some gradients are
// reduced in chunks, inside the products that compute them.
//
// A gather ahead of its use is exposed if little is computed before it, as at the start of a forward, or if memory is
// short. A gather of length c, in n chunks alongside its product of length g, exposes max(0, c - g) + c/n and takes the
// memory of the chunks in flight instead of that of the weight.
//
// In a schedule, a *chunked weight* is an additional weight, which replaces its original in the chosen uses. Its own
// gather has the parts that are not chunked, such as biases. These parts may stay resident from one pass to another;
// the chunks are gathered in each pass.
//
// Example: weights a and b with gathers of 30 and 10, forwards of 50. With a in 3 chunks, one chunk is exposed:
//
//     compute    ...aaaaabbbbb     130      compute    aaaaaabbbbb     110
//     transfers  aaab.........              transfers  baaa.......
//
// The reduction of a gradient that overlaps no compute, as at the end of a backward, also exposes max(0, c - g) + c/n
// in n chunks. Its memory stays about that of the gradient, because contributions are summed after all are received.
#pragma once

#include <cstdint>
#include <vector>

#include "schedule/schedule.h"

namespace shardwright {

// A weight that may be gathered in chunks.
struct ChunkedWeight {
  int weight = 0;           // index of the original
  int64_t use_bytes = 0;    // bytes of the part that is gathered before the use, not in chunks
  int64_t gather_ps = 0;    // duration of gathering this part; 0 if unknown
  int64_t chunk_bytes = 0;  // bytes of chunks that exist at a time; counted as held all the time
  int64_t transfer_ps = 0;  // duration of the transfers of all chunks, one after the other
  int64_t num_chunks = 1;
  bool in_backwards = false;        // true: also gathered in chunks in backwards, not only in forwards
  ChunkedReduction reduction = {};  // of the weight's gradient; without products, never in chunks
};

constexpr int64_t kLeastChunkingPercent = 25;  // least saving by chunks, relative to the wait of compute for a transfer
constexpr int kMostUsesTried = 8;              // maximum number of gathers and reductions that are tried in chunks

struct ChunkingOptions {
  ScheduleOptions schedule;
  bool chooses_prefetch = false;  // as `fastest_schedule` does; schedule.prefetch is not read
  bool may_add_chunks = false;    // raise the budget by the bytes of chunks
};

// Plans a step. Originals of chunked weights may be gathered in chunks in forwards and backwards in which they have one
// use, or several consecutive uses without other weights. A weight of a module that contains other modules with weights
// is not chunked, and neither is a weight that a recomputation has just used. Gradients may be reduced in chunks
// wherever they are computed.
//
//   1. The step is planned without chunks. If it does not fit into the budget, all possible gathers are planned in
//      chunks. If that does not fit either, the error of the plan without chunks is thrown.
//   2. With times: the gathers and reductions that compute waits for are tried in chunks, one after the other, longest
//      wait first. Each stays in chunks if the predicted step becomes shorter by kLeastChunkingPercent of the wait.
//
// No weight is resident both with and without chunks at the same use. Throws as `make_schedule` does, and for chunked
// weights of unknown originals.
StepSchedule schedule_with_chunks(const std::vector<Weight>& weights, const std::vector<Use>& uses,
                                  const std::vector<ChunkedWeight>& chunked_weights, const ChunkingOptions& options);

}  // namespace shardwright
