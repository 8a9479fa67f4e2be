// The collectives of reductions: which of them are native, and what they send.
#pragma once

#include <cstdint>

#include "cost/cost.h"
#include "cost/lowering.h"
#include "layout/region.h"
#include "moves/step.h"

namespace shardwright {

// Returns whether the backend's own collectives carry out the reduction of a layout over some mesh dims. If not,
// contributions are exchanged and summed here.
bool reduces_natively(const Layout& layout, MeshDimSet mesh_dims, Lowering lowering);
bool reduces_natively(const Step& step, Lowering lowering);

// Returns whether a step can be split into rounds. Local steps cannot, nor can an all-reduce that the backend does in
// place.
bool may_go_in_rounds(const Step& step, Lowering lowering);

// Returns how many collectives a step takes one after the other in each round: two for an all-reduce of more than two
// ranks that is composed here (one reduces chunks, one distributes them), otherwise one.
int64_t collectives_of(StepOp op, int64_t group_size, bool native);

// The traffic of one of k ranks that all hold `held` elements: of one that keeps `kept`, and of the `index`-th by rank.
Traffic reduce_scatter_traffic(int64_t held, int64_t kept, int64_t k, int64_t item_bytes);
Traffic all_reduce_traffic(int64_t held, int64_t k, int64_t index, int64_t item_bytes, bool native);

// Returns the index of a rank among those that differ from it only in these mesh dims, by ascending rank.
int64_t index_in_group(const Mesh& mesh, int64_t position, MeshDimSet mesh_dims);

// Returns one of k chunks of a flat range of n elements: [index * ceil(n / k), ...).
Interval flat_chunk(int64_t n, int64_t k, int64_t index);

}  // namespace shardwright
