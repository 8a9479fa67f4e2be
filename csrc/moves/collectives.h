// Reductions: native or composed, and the traffic of their collectives.
#pragma once

#include <cstdint>

#include "cost/cost.h"
#include "cost/lowering.h"
#include "layout/region.h"
#include "moves/step.h"

namespace shardwright {

// Returns true if the backend's own collectives reduce this layout over these mesh dims. Otherwise contributions are
// exchanged and summed by this library.
bool reduces_natively(const Layout& layout, MeshDimSet mesh_dims, Lowering lowering);
bool reduces_natively(const Step& step, Lowering lowering);

// Returns true if a step can be split into rounds: all steps but local ones and all-reduces that the backend does in
// place.
bool may_go_in_rounds(const Step& step, Lowering lowering);

// Returns the number of consecutive collectives in each round of a step: 2 for a composed all-reduce of more than two
// ranks (reduce chunks, then distribute them), otherwise 1.
int64_t collectives_of(StepOp op, int64_t group_size, bool native);

// The traffic of one of k ranks that all hold `held` elements. The rank keeps `kept` elements of a reduce-scatter; it
// is the `index`-th rank, by ascending rank, of an all-reduce.
Traffic reduce_scatter_traffic(int64_t held, int64_t kept, int64_t k, int64_t item_bytes);
Traffic all_reduce_traffic(int64_t held, int64_t k, int64_t index, int64_t item_bytes, bool native);

// Returns the index of the position within its group, the ranks that differ only in these mesh dims, by ascending rank.
int64_t index_in_group(const Mesh& mesh, int64_t position, MeshDimSet mesh_dims);

// Returns chunk `index` of k of a flat range of n elements, which begins at index * ceil(n / k).
Interval flat_chunk(int64_t n, int64_t k, int64_t index);

}  // namespace shardwright
