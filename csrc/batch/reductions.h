// The layouts to which sources of a batch with pending reductions are reduced before anything moves.
//
// Contributions that travelled straight to all replicas of a destination would take k * n transfers per element, where
// reducing first takes k + n - 1, which is the bound. So each such source is reduced by a plan of its own, in a fixed
// order, to a layout in which the mesh dims that had contributions cut a tensor dim instead: the one from which least
// is left to be received by all ranks of the batch, and of those the one whose largest part is smallest.
//
//   [P(sum)] to [S(1)] on the same mesh: reduced to [S(1)], and nothing is left
//   [P(sum)] of (2, 64) on 4 ranks to [R] elsewhere: reduced to [S(1)], since [S(0)] would leave two ranks without a
//   part [P(sum)] of a scalar: reduced to [R]
#pragma once

#include <vector>

#include "batch/batch.h"

namespace shardwright {

struct BatchReduction {
  int source = 0;
  Layout before;
  Layout after;
};

// In the order of sources.
std::vector<BatchReduction> reductions_of(const Batch& batch);

}  // namespace shardwright
