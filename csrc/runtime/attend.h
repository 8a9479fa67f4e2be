// The instructions of attention on buffers, on the current stream: ATen's fused kernels, without dropout.
//
//   cpu    flash attention for CPU, with a bias for blocks that are neither full nor a triangle
//   cuda   flash attention, if operands have 16 bits, heads a multiple of 8 elements up to 256, and blocks are full or
//          a triangle; otherwise memory-efficient attention, with heads of keys repeated
//   others PyTorch's operator for them, _scaled_dot_product_fused_attention_overrideable, with heads of keys repeated;
//          c10::NotImplementedError if the device lacks it
//
// A bias is made for one tile of rows at a time (program/attend_tiles.h). If values and keys have different depths, the
// shallower operands are padded with zeros, which changes neither scores nor results. Memory-efficient attention on
// CUDA needs no padding.
//
// `buffers` are the program's flat tensors, by BufferId. program/attend.h defines partial results and lse (the
// logarithm of the sum of the exponentials of a query's scores).
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "program/attend.h"

namespace shardwright {

using Buffers = std::vector<at::Tensor>;

// Computes the partial result of a block product. Queries that see no key get zeros and an lse of minus infinity.
void attend(const Attend& attend, const Buffers& buffers);
// Adds the gradients of a block product to dq, dk and dv.
void attend_backward(const AttendBackward& attend, const Buffers& buffers);

// Merges the partial result `right` into `left`. On CPU every row is merged by scalar functions in one order, so the
// bits of a row depend on that row alone.
void merge(const Merge& merge, const Buffers& buffers);
void accumulate(const Accumulate& accumulate, const Buffers& buffers);  // dst += src, for gradients

}  // namespace shardwright
