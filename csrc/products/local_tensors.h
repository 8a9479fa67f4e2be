// The shapes and dtypes of the inputs and outputs of a rank's product program, computed without compiling it.
#pragma once

#include <cstdint>
#include <vector>

#include "products/matmul.h"
#include "program/builder.h"

namespace shardwright {

// One rank's part of a tensor.
struct LocalTensor {
  std::vector<int64_t> shape;
  DType dtype;
};

// Inputs and outputs in the order that matmul.h documents.
struct LocalTensors {
  std::vector<LocalTensor> inputs;
  std::vector<LocalTensor> outputs;
};

// Return the inputs and outputs of a rank's program. They do not depend on the schedule. Throw UserError if the rank is
// not on the mesh.
LocalTensors local_tensors(const Matmul& matmul, Rank rank);
LocalTensors local_tensors(const GatherMatmul& matmul, Rank rank);
LocalTensors local_tensors(const MatmulScatter& matmul, Rank rank);

// Declares all inputs of a program, and returns their buffers in order.
std::vector<BufferId> declare_inputs(ProgramBuilder& builder, const LocalTensors& tensors);

}  // namespace shardwright
