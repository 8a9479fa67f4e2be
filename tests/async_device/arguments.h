// Argument checks of strict process groups, and the parts of their operations.
#pragma once

#include <ATen/ATen.h>

#include <vector>

#include "communicator.h"

namespace async_device {

using Tensors = std::vector<at::Tensor>;

// Checks that a tensor is on this device, dense and contiguous. Otherwise throws c10::ValueError that names the
// operation `what`.
void check_tensor(const at::Tensor& tensor, const char* what);
// Checks the same, and that NCCL supports the dtype. Returns the tensor's memory.
Memory memory_of(const at::Tensor& tensor, const char* what);
const at::Tensor& only(const Tensors& tensors, const char* what);
void check_root(int64_t root, int size, const char* what);

Communicator::Body moving(Kind kind, int64_t detail, Moves moves);
Communicator::Body in_turn(std::vector<Communicator::Body> pieces);

}  // namespace async_device
