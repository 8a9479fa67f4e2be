// Chooses the layouts to which sources with pending reductions are reduced before anything is sent.
//
// Sending k contributions directly to n replicas of a destination takes k * n transfers per element. Reducing first
// takes k + n - 1, which is the lower bound. So each such source is reduced by a plan of its own, in a fixed order, to
// a layout in which the mesh dims of the contributions cut a tensor dim instead. The chosen layout leaves the fewest
// elements to receive, summed over all ranks of the batch. Of several such layouts, the one with the smallest largest
// part is chosen.
//
//   [P(sum)] to [S(1)] on the same mesh: reduced to [S(1)], and nothing is left to send
//   [P(sum)] of (2, 64) on 4 ranks to [R] on another mesh: reduced to [S(1)]; with [S(0)] two ranks would have no part
//   [P(sum)] of a scalar: reduced to [R]
#pragma once

#include <vector>

#include "batch/batch.h"

namespace shardwright {

// The reduction of one source.
struct BatchReduction {
  int source = 0;  // index into Batch::sources
  Layout before;   // layout of the source, with pending reductions
  Layout after;    // the layout to which the source is reduced, on the same mesh
};

// Returns one reduction for each source with pending reductions, in the order of sources. Batch::check() must pass.
std::vector<BatchReduction> reductions_of(const Batch& batch);

}  // namespace shardwright
