// Runs the instructions of attention on buffers, on the current stream, with ATen's fused kernels, without dropout.
//
//   device   kernel
//   CPU      flash attention for CPU; blocks that are neither full nor a triangle get a bias
//   CUDA     flash attention if operands have 16 bits, their depth is a multiple of 8 up to 256, and the block is full
//            or a triangle; otherwise memory-efficient attention, with heads of keys and values repeated
//   others   _scaled_dot_product_fused_attention_overrideable, with heads of keys and values repeated;
//            c10::NotImplementedError if the device does not implement it
//
// A bias is made for one tile of rows at a time (program/attend_tiles.h). If keys and values have different depths, the
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

// Merges the partial result `right` into `left`, row by row: results are averaged with weights exp(lse). On CPU every
// row is merged by scalar functions in one order, so the bits of a row depend on that row alone. A row that sees no key
// on either side keeps zeros and an lse of minus infinity. For example:
//
//   left     out 2, lse log(1)   weight 1
//   right    out 8, lse log(3)   weight 3
//   merged   out (1 * 2 + 3 * 8) / 4 = 6.5, lse log(1 + 3) = log(4)
void merge(const Merge& merge, const Buffers& buffers);
// Computes dst += src, for gradients.
void accumulate(const Accumulate& accumulate, const Buffers& buffers);

}  // namespace shardwright
