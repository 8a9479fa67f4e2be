// Matrix products on buffers, on the current stream. ATen computes them, except where a device registers functions of
// its own: where ATen would copy, would launch one product after the other, or has no such product.
#pragma once

#include <ATen/core/Tensor.h>

#include <map>
#include <optional>
#include <string>

#include "program/program.h"

namespace shardwright {

// Hints on how to compute a product; a device may ignore them.
struct GemmHints {
  int sms_left = 0;  // multiprocessors that the product is to leave to transfers, if the device has more
  // For 8-bit floats: sums keep the tensor cores' own precision, about 14 bits, instead of being promoted to float32
  // regularly.
  bool fast_accumulation = false;
};

// How many multiprocessors products leave to transfers under way alongside them, in this process. 0, the initial value:
// what their schedules say.
int sm_carveout();
// Throws c10::ValueError below 0.
void set_sm_carveout(int sms);

// Whether scaled products use fast accumulation where no hint asks for it, in this process; false at first.
bool fast_accumulation();
void set_fast_accumulation(bool is_fast);

// The buffers are flat tensors on one device; `bias` is looked at where the product has one. lhs and rhs are of one
// floating dtype. dst is of the same, or float32 for 16-bit operands: then sums are not rounded in between.
void multiply(const Gemm& gemm, const at::Tensor& lhs, const at::Tensor& rhs, at::Tensor& dst, const at::Tensor& bias,
              const GemmHints& hints = {});

// The product of 8-bit floats that have scales: lhs and rhs float8_e4m3fn or float8_e5m2, not both e5m2; scales
// float32; dst bfloat16 or float32. All on one device; scales are read when the product runs. Throws c10::ValueError on
// other dtypes.
//
// A device computes it natively where why_not_scaled has no objection and the device has an algorithm. Otherwise, and
// on CPU, operands are cast to float32 first. Casts are counted, except on CPU, where there is no other way.
void multiply_scaled(const Gemm& gemm, const at::Tensor& lhs, const at::Tensor& rhs, const at::Tensor& lhs_scale,
                     const at::Tensor& rhs_scale, at::Tensor& dst, const GemmHints& hints = {});

// Why units for 8-bit floats cannot take a scaled product with these buffers, if they cannot. They need lhs and rhs
// dense along k and dst along rows or columns; k, all strides but those of 1, and the dense side of dst to be multiples
// of 16 elements; and matrices to begin at multiples of 16 bytes.
std::optional<std::string> why_not_scaled(const Gemm& gemm, const at::Tensor& lhs, const at::Tensor& rhs,
                                          const at::Tensor& dst);

// Scaled products that were cast on other devices than CPU, by reason, since the start or the last reset.
std::map<std::string, int64_t> cast_products();
void reset_cast_products();

// How often a product's tiles fill the device: 1.0 keeps all of it busy once, and 1.1 takes as long as 2. Assumes
// buffers aligned as allocators align them. Nothing where the device does not report it (CPU; an empty product; dtypes
// it lacks).
//
// This depends on this rank's device and library, so it must not decide what is sent, which must be the same on all
// ranks.
std::optional<double> waves_of(const Gemm& gemm, at::ScalarType operands, at::ScalarType dst, at::Device device,
                               const GemmHints& hints = {});

// What one kind of device computes natively, in a file of its own that is built only where the device's toolkit is
// installed. A function returns false, having done nothing, where the product should be computed as on other devices.
// `multiply_scaled` is called only where why_not_scaled has no objection, with scales that have one element each, or m
// and n, dense, at multiples of 16 bytes.
struct DeviceGemms {
  bool (*multiply)(const Gemm& gemm, const at::Tensor& lhs, const at::Tensor& rhs, at::Tensor& dst,
                   const at::Tensor& bias, const GemmHints& hints) = nullptr;
  bool (*multiply_scaled)(const Gemm& gemm, const at::Tensor& lhs, const at::Tensor& rhs, const at::Tensor& lhs_scale,
                          const at::Tensor& rhs_scale, at::Tensor& dst, const GemmHints& hints) = nullptr;
  std::optional<double> (*waves_of)(const Gemm& gemm, at::ScalarType operands, at::ScalarType dst, at::Device device,
                                    const GemmHints& hints) = nullptr;
};
bool register_device_gemms(at::DeviceType device, const DeviceGemms& gemms);

}  // namespace shardwright
