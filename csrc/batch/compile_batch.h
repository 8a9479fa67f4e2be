// Compiles one rank's part of a batch to a Program.
//
// With b = BatchPlan::buckets(), at most b rounds are in flight at a time:
//
//   buffers       the sources (inputs), the destinations, and b buckets
//   instructions  round 0 starts ... round b-1 starts, local copies, round 0 ends, round b starts, round 1 ends, ...
//
//     round starts  copies from sources into the start of the round's bucket; one message to and from each peer, each
//                   a range of bytes of the bucket
//     local copies  copies from sources to destinations of all elements that stay on the rank
//     round ends    a Wait, and copies from the bucket to destinations
//
// Rounds in which this rank sends and receives nothing are left out; the remaining rounds are numbered from 0 above.
// Sender and receiver order the items of a message by BatchPlan::order(). Copies into or out of a bucket cast elements
// if the dtypes differ. Step 0 of the program has the local copies, and step 1 + r has round r of the plan.
#pragma once

#include <cstdint>
#include <vector>

#include "batch/batch_plan.h"
#include "program/program.h"

namespace shardwright {

// Strides in elements of a rank's local tensors: a list of strides for each source and each destination.
struct BatchStrides {
  std::vector<std::vector<int64_t>> sources;
  std::vector<std::vector<int64_t>> destinations;
  bool operator==(const BatchStrides&) const = default;
};

// Returns the program of a rank. Its only group has ranks 0 to `group_size` - 1, which must include all ranks of the
// batch. A rank that is on none of the meshes gets a program without work. With `through_host`, messages are sent from
// and received in buckets in host memory (Program::stages_on_host).
Program compile_batch(const BatchPlan& plan, Rank rank, int64_t group_size, const BatchStrides& strides,
                      bool through_host = false);

}  // namespace shardwright
