// The traffic of a step on one mesh with aligned replicas, from the regions of every pair of ranks.
#pragma once

#include <algorithm>
#include <cstdint>

#include "moves/step_exchange.h"

namespace shardwright::test {

// Returns the number of elements that `receiver` takes from `source`; 0 if it reads from another replica.
inline int64_t transfer_elements(const Step& step, int64_t source, int64_t receiver) {
  if (!reads_from(step.before, step.mesh_dims, source, receiver)) return 0;
  return shared_elements(step.before.region(source), step.after.region(receiver));
}

inline Traffic pair_by_pair(const Step& step, int64_t position) {
  const int64_t item = step.before.dtype().size_bytes();
  Traffic traffic;
  for (const int64_t peer : step.before.mesh().group(position, step.mesh_dims)) {
    if (peer == position) continue;
    const int64_t received = transfer_elements(step, peer, position);
    const int64_t sent = transfer_elements(step, position, peer);
    traffic =
        traffic + Traffic{received * item, sent * item, std::min(step.rounds, received), std::min(step.rounds, sent)};
  }
  return traffic;
}

}  // namespace shardwright::test
