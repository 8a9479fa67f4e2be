// A rank's operations on its own memory: strided copies and reductions. On CPU these are our own loops, elsewhere
// ATen's operators or functions that a device registers.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "program/program.h"
#include "program/strided_copy.h"

namespace shardwright {

// src and dst are tensors of one dtype on one device, at whose first elements the boxes begin, and must not overlap. On
// CPU the dtype does not matter.
void run(const StridedCopy& copy, const at::Tensor& src, at::Tensor& dst);

// The same box by box with ATen's copy_, between any dtypes and devices.
void copy_with_aten(const std::vector<Box>& boxes, const at::Tensor& src, at::Tensor& dst);

// The same with each element divided, for floating and complex dtypes. ATen does it, box by box.
void run_divided(const StridedCopy& copy, double divisor, const at::Tensor& src, at::Tensor& dst);

// A copy for one type of device, in a separate file that is built only if the device's toolkit is installed. On other
// devices ATen's copy_ copies the boxes one by one.
using DeviceCopy = void (*)(const StridedCopy& copy, const at::Tensor& src, at::Tensor& dst);
bool register_device_copy(at::DeviceType device, DeviceCopy copy);

// Computes dst[i] = (op over parts[m][i], in order of m) / divisor. All tensors are flat, of one size and dtype, and
// dst is not one of the parts. float16 and bfloat16 are accumulated and divided in float32 and rounded once. Only
// floating and complex dtypes are divided. Throws c10::TypeError on dtypes without the op.
//
// On CPU, and on devices with their own reduction, every part is read once and the result written once. ATen does so
// for two parts, and for 16-bit sums of parts that are the rows of one tensor; it adds other parts to the result one
// after the other. It needs a float32 tensor of the result's size to divide 16-bit sums, and also a copy of the parts
// to sum more than two 16-bit parts that are not rows of one tensor.
void reduce_parts(ReduceOp op, const std::vector<at::Tensor>& parts, double divisor, at::Tensor& dst);
// The same with ATen, whatever the device.
void reduce_parts_with_aten(ReduceOp op, const std::vector<at::Tensor>& parts, double divisor, at::Tensor& dst);

// A reduction for one type of device, in a separate file as above. Returns false, having done nothing, if ATen should
// do it.
using DeviceReduce = bool (*)(ReduceOp op, const std::vector<at::Tensor>& parts, double divisor, at::Tensor& dst);
bool register_device_reduce(at::DeviceType device, DeviceReduce reduce);

// The same for parts of `count` elements in CPU memory.
void reduce_parts(ReduceOp op, const std::vector<const void*>& parts, int64_t count, double divisor, void* dst,
                  at::ScalarType dtype);

}  // namespace shardwright
