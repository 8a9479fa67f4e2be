// Plans steps in which some weights are gathered in chunks, inside the products that use them, and some gradients are
// reduced in chunks, inside the products that compute them.
//
// The time of a transfer is *exposed* as far as no compute runs meanwhile. A gather ahead of its use is exposed if
// little is computed before the use, as at the start of a forward, or if memory is short. A gather of duration c, in n
// chunks alongside its product of duration g, exposes max(0, c - g) + c/n and takes the memory of the chunks in flight
// instead of the memory of the weight.
//
// In a schedule, a *chunked weight* is an additional weight, which replaces its original in the uses that gather the
// original in chunks. The chunked weight's own gather has the parts that are not chunked, such as biases. These parts
// may stay resident from one pass to another; the chunks are gathered in each pass.
//
// Example: weights a and b with gathers of 30 and 10, forwards of 50. With a in 3 chunks, one chunk is exposed:
//
//     compute    ...aaaaabbbbb     130      compute    aaaaaabbbbb     110
//     transfers  aaab.........              transfers  baaa.......
//
// The reduction of a gradient in n chunks exposes max(0, c - g) + c/n too. This is useful if the reduction would
// overlap no compute, as at the end of a backward. It takes about the memory of the full gradient, because
// contributions are summed after all of them are received.
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
  int64_t chunk_bytes = 0;  // bytes of the chunks that exist at a time; the budget counts them during the full step
  int64_t transfer_ps = 0;  // duration of the transfers of all chunks, one after the other
  int64_t num_chunks = 1;
  bool in_backwards = false;        // true: also gathered in chunks in backwards, not only in forwards
  ChunkedReduction reduction = {};  // of the weight's gradient; without products, never in chunks
};

constexpr int64_t kLeastChunkingPercent = 25;  // least saving by chunks, relative to the wait of compute for a transfer
constexpr int kMostUsesTried = 8;              // maximum number of gathers and reductions that are tried in chunks

struct ChunkingOptions {
  ScheduleOptions schedule;
  bool chooses_prefetch = false;  // true: `fastest_schedule` chooses the prefetch, and schedule.prefetch is not read
  bool may_add_chunks = false;    // true: the bytes that chunks take are added to the budget
};

// Plans a step. The original of a chunked weight may be gathered in chunks for a forward or a backward in which it has
// one use, or several consecutive uses that need no other weights. So the weight of a module that contains other
// modules with weights is not gathered in chunks. Neither is a weight for a backward right after a recomputation that
// used it. Gradients may be reduced in chunks wherever they are computed.
//
//   1. The step is planned without chunks. If it does not fit into the budget, it is planned with all gathers in chunks
//      that may be. If that does not fit either, the error of the plan without chunks is thrown.
//   2. With times: the gathers and reductions that compute waits for are tried in chunks, one after the other, longest
//      wait first. Each stays in chunks if the predicted step becomes shorter by kLeastChunkingPercent of the wait.
//
// At no use are a chunked weight and its original both resident. Throws UserError as `make_schedule` does, and if a
// field of a chunked weight is negative, num_chunks is below 1, or the original does not exist.
StepSchedule schedule_with_chunks(const std::vector<Weight>& weights, const std::vector<Use>& uses,
                                  const std::vector<ChunkedWeight>& chunked_weights, const ChunkingOptions& options);

}  // namespace shardwright
