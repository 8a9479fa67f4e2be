// Steps in which some weights are gathered in chunks, inside the products that use them, and some gradients are reduced
// in chunks, inside the products that make them.
//
// A gather ahead of its use is exposed where little is computed before it, as at the beginning of a forward, or where
// memory is short. In n chunks alongside its product of length g, a gather of length c exposes max(0, c - g) + c/n, and
// takes the memory of the chunks under way instead of that of the weight.
//
// In a schedule, a weight in chunks is one more weight, its *form*, which takes its place in the uses that were chosen.
// The form's gather is that of what is not chunked, such as biases. It may stay from one pass to another; the chunks
// are gathered in each.
//
// Example: weights a and b with gathers of 30 and 10, forwards of 50. In 3 chunks, a exposes one of them:
//
//     compute    ...aaaaabbbbb     130      compute    aaaaaabbbbb     110
//     transfers  aaab.........              transfers  baaa.......
//
// The same holds for the reduction of a gradient that nothing is computed alongside, as at the end of a backward: in n
// chunks it exposes max(0, c - g) + c/n. Its memory stays about that of the gradient, because contributions are added
// up when all are there.
#pragma once

#include <cstdint>
#include <vector>

#include "schedule/schedule.h"

namespace shardwright {

// The gather of a weight in chunks.
struct ChunkedForm {
  int weight = 0;           // index
  int64_t use_bytes = 0;    // of what is gathered before the use all the same
  int64_t gather_ps = 0;    // how long that takes; 0: not known
  int64_t chunk_bytes = 0;  // of the chunks that exist at a time. They are counted as held all the time
  int64_t transfer_ps = 0;  // how long all chunks take, one after the other
  int64_t num_chunks = 1;
  bool in_backwards = false;        // whether it may be gathered in chunks there too
  ChunkedReduction reduction = {};  // of its gradient; without products: never in chunks
};

// Chunks must shorten the predicted step by so much of what compute waits for, a gather or a reduction.
constexpr int64_t kLeastChunkingPercent = 25;
// The number of gathers and reductions that are tried.
constexpr int kMostUsesTried = 8;

struct ChunkingOptions {
  ScheduleOptions schedule;
  bool chooses_prefetch = false;  // as `fastest_schedule` does, instead of options.schedule.prefetch
  bool may_add_chunks = false;    // to the budget: it is not a limit
};

// Plans a step. Weights with forms may be gathered in chunks in forwards and backwards that are single uses of theirs,
// or several during which no other weights come and go (what modules need that have others within them stays whole, and
// so does what a recomputation has just needed). Gradients may be reduced in chunks wherever they are made.
//
//   1. The step is planned without chunks. If it does not fit, all gathers that may are planned in chunks. If that does
//      not fit either, the error is that of the plan without.
//   2. With times: of the gathers and reductions that compute waits for, the one with the longest wait first, each is
//      planned in chunks, and stays so if the predicted step becomes shorter by kLeastChunkingPercent of the wait.
//
// A weight is never whole and in chunks at one use. Throws as `make_schedule` does, and for forms of unknown weights.
StepSchedule schedule_with_chunks(const std::vector<Weight>& weights, const std::vector<Use>& uses,
                                  const std::vector<ChunkedForm>& forms, const ChunkingOptions& options);

}  // namespace shardwright
