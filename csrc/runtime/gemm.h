// Matrix products on buffers, by ATen on the current stream.
#pragma once

#include <ATen/core/Tensor.h>

#include "program/program.h"

namespace shardwright {

// The buffers are flat tensors on one device; `bias` is looked at where the product has one. lhs and rhs are of one
// floating dtype. dst is of the same, or float32 for 16-bit operands: then sums are not rounded in between.
void multiply(const Gemm& gemm, const at::Tensor& lhs, const at::Tensor& rhs, at::Tensor& dst, const at::Tensor& bias);

}  // namespace shardwright
