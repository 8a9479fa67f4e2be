// A rank's operations on its own memory: strided copies and reductions. On CPU they are loops of this library; on other
// devices, functions that are registered for the device, else ATen's operators.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "program/program.h"
#include "program/strided_copy.h"

namespace shardwright {

// Runs a copy of boxes from src to dst, which are tensors of one dtype on one device and must not overlap. The offsets
// of the boxes are relative to the tensors' first elements. On CPU the dtype does not matter.
void run(const StridedCopy& copy, const at::Tensor& src, at::Tensor& dst);

// Copies boxes with ATen, between any dtypes and devices. Elements are cast if the dtypes differ.
void copy_with_aten(const std::vector<Box>& boxes, const at::Tensor& src, at::Tensor& dst);

// Like `run`, but divides each element by `divisor`, with ATen. For floating and complex dtypes only.
void run_divided(const StridedCopy& copy, double divisor, const at::Tensor& src, at::Tensor& dst);

// Computes `run` on one type of device, in a separate file that is built only if the device's toolkit is installed.
using DeviceCopy = void (*)(const StridedCopy& copy, const at::Tensor& src, at::Tensor& dst);
// Registers the copy of a type of device. Returns true. `run` uses copy_with_aten on devices without a registered copy.
bool register_device_copy(at::DeviceType device, DeviceCopy copy);

// Computes dst[i] = (op over parts[m][i], in order of m) / divisor. There is at least one part. All tensors are flat,
// of one size and dtype, and dst is not one of the parts. float16 and bfloat16 are accumulated and divided in float32
// and rounded once; ATen does so only for sums. The divisor of integers must be 1. Throws InvariantError or c10::Error
// on dtypes without the op.
//
// On CPU, and on devices with a registered reduction, every part is read once and the result is written once. On other
// devices, ATen
//   - reads and writes once for two parts, and for 16-bit sums of parts that are the rows of one tensor;
//   - copies the parts first for other 16-bit sums of more than two parts;
//   - adds all other parts to the result one after another;
//   - allocates a float32 tensor of the result's size to divide 16-bit sums.
void reduce_parts(ReduceOp op, const std::vector<at::Tensor>& parts, double divisor, at::Tensor& dst);
// Like reduce_parts, but always with ATen.
void reduce_parts_with_aten(ReduceOp op, const std::vector<at::Tensor>& parts, double divisor, at::Tensor& dst);

// Computes reduce_parts on one type of device, in a separate file like DeviceCopy. Returns false, with nothing done, if
// ATen should reduce instead.
using DeviceReduce = bool (*)(ReduceOp op, const std::vector<at::Tensor>& parts, double divisor, at::Tensor& dst);
// Registers the reduction of a type of device. Returns true.
bool register_device_reduce(at::DeviceType device, DeviceReduce reduce);

// Like reduce_parts, for parts of `count` elements in CPU memory.
void reduce_parts(ReduceOp op, const std::vector<const void*>& parts, int64_t count, double divisor, void* dst,
                  at::ScalarType dtype);

}  // namespace shardwright
