// The dtypes and reductions of NCCL, on the memory of strict process groups.
#pragma once

#include <torch/csrc/distributed/c10d/Types.hpp>

#include <vector>

#include "communicator.h"

namespace async_device {

// Throws c10::TypeError for dtypes that NCCL does not support, such as int16 and complex64.
void check_dtype(at::ScalarType dtype, const char* what);

struct Reduction {
  c10d::ReduceOp::RedOpType op = c10d::ReduceOp::SUM;
  double factor = 1;                  // of PREMUL_SUM
  at::ScalarType dtype = at::kFloat;  // the dtype of the arithmetic: real for complex numbers, uint8 for bool
  int64_t per_element = 1;            // numbers of `dtype` per element
};

// Throws c10::TypeError or c10::ValueError if NCCL would. Complex numbers are treated as pairs if `allows_complex`.
Reduction reduction_of(const c10d::ReduceOp& op, at::ScalarType dtype, bool allows_complex, const char* what);

Communicator::Body all_reducing(const at::Tensor& tensor, const Reduction& reduction, int rank, int size);
Communicator::Body reducing(const at::Tensor& tensor, const Reduction& reduction, int root, int rank, int size);
// `parts[r]` is this rank's contribution to the output of rank r.
Communicator::Body reduce_scattering(const Memory& output, const std::vector<Memory>& parts, const Reduction& reduction,
                                     int rank);

}  // namespace async_device
