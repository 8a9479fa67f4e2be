// What a rank does to its own memory: strided copies and reductions, on CPU by our own loops, elsewhere by ATen.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "program/program.h"
#include "program/strided_copy.h"

namespace shardwright {

// src and dst: flat tensors of one dtype on one device, not overlapping.
void run(const StridedCopy& copy, const at::Tensor& src, at::Tensor& dst);

// The same, each element divided on its way: floating and complex dtypes. By ATen, box by box.
void run_divided(const StridedCopy& copy, double divisor, const at::Tensor& src, at::Tensor& dst);

// A copy for one kind of device, in a file of its own that is built only where the device's toolkit is. Elsewhere
// ATen's copy_ does the boxes one by one.
using DeviceCopy = void (*)(const StridedCopy& copy, const at::Tensor& src, at::Tensor& dst);
bool register_device_copy(at::DeviceType device, DeviceCopy copy);

// dst[i] = (op over parts[m][i], in order of m) / divisor; all flat, of one size and dtype, dst none of the parts.
// float16 and bfloat16 are accumulated and divided in float32 and rounded once. Divides floating and complex dtypes
// only. Throws c10::TypeError on dtypes without the op.
void reduce_parts(ReduceOp op, const std::vector<at::Tensor>& parts, double divisor, at::Tensor& dst);

// The same for `count` elements each in CPU memory.
void reduce_parts(ReduceOp op, const std::vector<const void*>& parts, int64_t count, double divisor, void* dst,
                  at::ScalarType dtype);

}  // namespace shardwright
