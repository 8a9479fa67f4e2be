// The instructions of attention on buffers, on the current stream: ATen's fused kernels, without dropout.
//
//   cpu    flash attention for CPU, with a bias where a block is neither full nor a triangle
//   cuda   flash attention for 16-bit operands whose heads have a multiple of 8 elements, up to 256, and blocks that
//          are full or a triangle; otherwise memory-efficient attention, for which heads of keys are repeated
//   others the operator that PyTorch has for them, _scaled_dot_product_fused_attention_overrideable, with heads of keys
//          repeated; c10::NotImplementedError where the device lacks it
//
// A bias is made for one tile of rows at a time (program/attend_tiles.h). Where values have another depth than keys,
// the shallower operands are padded with zeros, which changes neither scores nor results; memory-efficient attention on
// CUDA takes them as they are.
//
// `buffers` are the flat tensors of a program, by BufferId.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "program/attend.h"

namespace shardwright {

using Buffers = std::vector<at::Tensor>;

void attend(const Attend& attend, const Buffers& buffers);
void attend_backward(const AttendBackward& attend, const Buffers& buffers);

// On CPU every row is merged by scalar functions in one order, so the bits of a row depend on that row alone.
void merge(const Merge& merge, const Buffers& buffers);
void accumulate(const Accumulate& accumulate, const Buffers& buffers);

}  // namespace shardwright
