// Compiles a rank's part in a batch to a Program.
//
//   buffers       the sources as inputs, the destinations, and a bucket for each round under way
//   instructions  round 0 starts ... round b-1 starts, keep, round 0 ends, round b starts, round 1 ends, ...
//
//     round starts  copies from sources into the round's bucket, from its beginning on; one message to and from each
//                   peer, each a range of bytes of the bucket
//     keep          copies from sources to destinations of all that stays on the rank
//     round ends    a Wait, and copies from the bucket to destinations
//
// Rounds are those in which this rank takes part, and b of them (BatchPlan::buckets) are under way at a time. The items
// of a message follow one another in the order of BatchPlan::order(), on both sides. Copies cast elements whose dtypes
// differ, on the way into or out of a bucket. Steps of the program are what stays on the rank, and then the rounds of
// all ranks.
#pragma once

#include <cstdint>
#include <vector>

#include "batch/batch_plan.h"
#include "program/program.h"

namespace shardwright {

// Of a rank's local tensors, by source and by destination, in elements.
struct BatchStrides {
  std::vector<std::vector<int64_t>> sources;
  std::vector<std::vector<int64_t>> destinations;
  bool operator==(const BatchStrides&) const = default;
};

// Ranks 0 to `group_size` - 1, among them all ranks of the batch, form the only group. A rank of none of the meshes has
// nothing to do. With `through_host`, messages leave from and arrive in buckets in host memory
// (Program::stages_on_host).
Program compile_batch(const BatchPlan& plan, Rank rank, int64_t group_size, const BatchStrides& strides,
                      bool through_host = false);

}  // namespace shardwright
