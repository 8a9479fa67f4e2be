// Matrix products on buffers, on the current stream: by ATen, or by what a device registers where ATen would copy,
// would launch one product after the other, or has no such product.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "program/program.h"

namespace shardwright {

// Wishes about how a product is done, which a device may ignore.
struct GemmHints {
  int num_sms = 0;  // multiprocessors to lay the product out for, the others being left to transfers; 0: the device's
};

// The buffers are flat tensors on one device; `bias` is looked at where the product has one. lhs and rhs are of one
// floating dtype. dst is of the same, or float32 for 16-bit operands: then sums are not rounded in between.
void multiply(const Gemm& gemm, const at::Tensor& lhs, const at::Tensor& rhs, at::Tensor& dst, const at::Tensor& bias,
              const GemmHints& hints = {});

// The product of 8-bit floats, where the value of an element is the element times its scale: one scale for all of lhs
// and one for all of rhs, or (on GPUs of compute capability 9.0) m for the rows of lhs and n for the columns of rhs.
//
//   lhs, rhs       float8_e4m3fn or float8_e5m2, not both e5m2. lhs has column_stride 1, rhs has row_stride 1: both lie
//                  dense along k
//   dst            bfloat16 or float32, dense along rows or columns
//   scales         float32, contiguous, on the same device; read when the product runs. Per row only where count is 1
//   k, all strides but the 1s, and the side along which dst is dense: multiples of 16 elements, k > 0. Matrices, and
//                  scales of rows, begin at multiples of 16 bytes. No bias
//
// Throws c10::ValueError where this is not so, c10::NotImplementedError where the device has no such product.
void multiply_scaled(const Gemm& gemm, const at::Tensor& lhs, const at::Tensor& rhs, const at::Tensor& lhs_scale,
                     const at::Tensor& rhs_scale, at::Tensor& dst, const GemmHints& hints = {});

// How often a product's tiles fill the device: 1.0 keeps all of it busy once, 1.1 takes as long as 2. For buffers that
// begin where allocators let them. Nothing where the device does not say (CPU; an empty product; dtypes it lacks).
//
// Of this rank's device and library: not to decide what is sent, which has to be the same on all ranks.
std::optional<double> waves_of(const Gemm& gemm, at::ScalarType operands, at::ScalarType dst, at::Device device,
                               const GemmHints& hints = {});

// What one kind of device does by itself, in a file of its own that is built only where the device's toolkit is.
// `multiply` answers false, having done nothing, where ATen is to do it; `multiply_scaled` is given what was checked.
struct DeviceGemms {
  bool (*multiply)(const Gemm& gemm, const at::Tensor& lhs, const at::Tensor& rhs, at::Tensor& dst,
                   const at::Tensor& bias, const GemmHints& hints) = nullptr;
  void (*multiply_scaled)(const Gemm& gemm, const at::Tensor& lhs, const at::Tensor& rhs, const at::Tensor& lhs_scale,
                          const at::Tensor& rhs_scale, at::Tensor& dst, const GemmHints& hints) = nullptr;
  std::optional<double> (*waves_of)(const Gemm& gemm, at::ScalarType operands, at::ScalarType dst, at::Device device,
                                    const GemmHints& hints) = nullptr;
};
bool register_device_gemms(at::DeviceType device, const DeviceGemms& gemms);

}  // namespace shardwright
