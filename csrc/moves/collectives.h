// Reductions, and the traffic of their collectives. A *native* reduction is the backend's own collective. In a
// *composed* reduction, ranks exchange their contributions, and this library sums them.
#pragma once

#include <cstdint>

#include "cost/cost.h"
#include "cost/lowering.h"
#include "layout/region.h"
#include "moves/step.h"

namespace shardwright {

// Returns true if the pending reductions of a layout over these mesh dims are native: the lowering has reductions, the
// dtype is a float or an integer other than int16, and no op is bitwise. All of `mesh_dims` must be partial.
bool reduces_natively(const Layout& layout, MeshDimSet mesh_dims, Lowering lowering);
// Returns true if the reduction of a step is native. An ordered step is never native. For steps that do not reduce, the
// result has no meaning.
bool reduces_natively(const Step& step, Lowering lowering);

// Returns true if a step can be split into rounds (moves/step.h). Local steps and native all-reduces cannot.
bool can_run_in_rounds(const Step& step, Lowering lowering);

// Returns the number of consecutive collectives in each round of a step: 2 for a composed all-reduce of more than two
// ranks (reduce chunks, then distribute them), otherwise 1, also for local steps.
int64_t num_collectives(StepOp op, int64_t group_size, bool native);

// Return the traffic of one rank in a reduction over k ranks that all hold `num_held` elements. In a reduce-scatter,
// this rank keeps `num_kept` elements. In an all-reduce, `index` is its place among the k ranks, by ascending rank;
// a native all-reduce does not read it. All counts are those of one round.
//
// Example: 10 elements of 4 bytes over 4 ranks.
//   native all-reduce     each rank receives and sends 2 x 40 x 3/4 = 60 bytes in 6 messages: a ring
//   composed all-reduce   chunks of 3, 3, 3 and 1 elements. Rank 0 receives 3 contributions to its chunk, then 3 other
//                         chunks: 3 x 3 + 7 = 16 elements in 6 messages. Rank 3 receives 3 x 1 + 9 = 12 elements
Traffic reduce_scatter_traffic(int64_t num_held, int64_t num_kept, int64_t k, int64_t item_bytes);
Traffic all_reduce_traffic(int64_t num_held, int64_t k, int64_t index, int64_t item_bytes, bool native);

// Returns the index of the rank at `position` within its group over `mesh_dims`, by ascending rank.
int64_t index_in_group(const Mesh& mesh, int64_t position, MeshDimSet mesh_dims);

// Returns chunk `index` of the k chunks of a flat range of n elements. Chunks have ceil(n / k) elements; the last ones
// may be short or empty.
Interval flat_chunk(int64_t n, int64_t k, int64_t index);

}  // namespace shardwright
