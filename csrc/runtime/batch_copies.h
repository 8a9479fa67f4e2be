// The copies of a rank's program in a batch, prepared for tensors with certain strides.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "batch/batch_program.h"
#include "program/strided_copy.h"

namespace shardwright {

// What is copied between one tensor and a bucket, or between two tensors. Any of them may cast.
struct PreparedCopy {
  int source = -1;  // if it is read
  int destination = -1;
  at::ScalarType in_bucket = at::ScalarType::Undefined;  // if a bucket is read or written
  std::vector<Box> boxes;
  std::optional<StridedCopy> copy;  // if nothing is cast
};

struct PreparedBatch {
  struct Round {
    std::vector<PreparedCopy> pack;
    std::vector<PreparedCopy> unpack;
  };
  std::vector<std::vector<int64_t>> strides;  // of sources, then of destinations
  std::vector<at::ScalarType> dtypes;
  std::vector<PreparedCopy> keep;
  std::vector<Round> rounds;  // by index into BatchProgram::rounds()

  bool fits(const std::vector<at::Tensor>& sources, const std::vector<at::Tensor>& destinations) const;
};

// Calls visit(index, tensor) for all sources and then all destinations, as long as it returns true; returns whether it
// always did.
template <typename Visit>
bool all_tensors(const std::vector<at::Tensor>& sources, const std::vector<at::Tensor>& destinations,
                 const Visit& visit) {
  size_t i = 0;
  for (const std::vector<at::Tensor>* tensors : {&sources, &destinations}) {
    for (const at::Tensor& tensor : *tensors) {
      if (!visit(i++, tensor)) return false;
    }
  }
  return true;
}

PreparedBatch prepare_copies(const BatchProgram& program, const std::vector<at::Tensor>& sources,
                             const std::vector<at::Tensor>& destinations);

// Views flat bytes as another dtype; what does not fill an element at the end is left out.
at::Tensor view_as(const at::Tensor& bytes, at::ScalarType dtype);

// `src` and `dst` are where the boxes' offsets count from.
void run_copy(const PreparedCopy& copy, const at::Tensor& src, const at::Tensor& dst);

}  // namespace shardwright
