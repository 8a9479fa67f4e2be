// A rank's operations on its own memory: strided copies and reductions. On CPU they are loops of this library,
// elsewhere ATen's operators or functions that a device registers.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "program/program.h"
#include "program/strided_copy.h"

namespace shardwright {

// Copies the boxes of a prepared copy from src to dst, which are tensors of one dtype on one device and must not
// overlap. The boxes' offsets count from the tensors' first elements. On CPU the dtype does not matter.
void run(const StridedCopy& copy, const at::Tensor& src, at::Tensor& dst);

// Copies box by box with ATen's copy_, between any dtypes and devices. Elements are cast if the dtypes differ.
void copy_with_aten(const std::vector<Box>& boxes, const at::Tensor& src, at::Tensor& dst);

// Copies box by box with ATen and divides each element by `divisor`. Floating and complex dtypes only.
void run_divided(const StridedCopy& copy, double divisor, const at::Tensor& src, at::Tensor& dst);

// The copy function of one type of device, in a separate file that is built only if the device's toolkit is installed.
// Without one, ATen's copy_ copies the boxes one by one.
using DeviceCopy = void (*)(const StridedCopy& copy, const at::Tensor& src, at::Tensor& dst);
bool register_device_copy(at::DeviceType device, DeviceCopy copy);

// Computes dst[i] = (op over parts[m][i], in order of m) / divisor. All tensors are flat, of one size and dtype, and
// dst is not one of the parts. float16 and bfloat16 are accumulated and divided in float32 and rounded once. Only
// floating and complex dtypes are divided. Throws c10::TypeError on dtypes without the op.
//
// On CPU, and on devices with their own reduction, every part is read once and the result is written once. The same
// holds for ATen with two parts, and with 16-bit sums of parts that are the rows of one tensor; it adds other parts to
// the result one by one. To divide 16-bit sums, ATen needs a float32 tensor of the result's size. To sum more than two
// 16-bit parts that are not rows of one tensor, it also needs a copy of the parts.
void reduce_parts(ReduceOp op, const std::vector<at::Tensor>& parts, double divisor, at::Tensor& dst);
// Like reduce_parts, but always with ATen.
void reduce_parts_with_aten(ReduceOp op, const std::vector<at::Tensor>& parts, double divisor, at::Tensor& dst);

// The reduction of one type of device, in a separate file as above. Returns false, with nothing done, if ATen should
// reduce instead.
using DeviceReduce = bool (*)(ReduceOp op, const std::vector<at::Tensor>& parts, double divisor, at::Tensor& dst);
bool register_device_reduce(at::DeviceType device, DeviceReduce reduce);

// Like reduce_parts, for parts of `count` elements in CPU memory.
void reduce_parts(ReduceOp op, const std::vector<const void*>& parts, int64_t count, double divisor, void* dst,
                  at::ScalarType dtype);

}  // namespace shardwright
