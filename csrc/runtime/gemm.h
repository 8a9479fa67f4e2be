// Matrix products on buffers, on the current stream. ATen computes them, unless the device has registered its own
// function for a case in which ATen would copy, would launch one product after the other, or has no such product.
#pragma once

#include <ATen/core/Tensor.h>

#include <map>
#include <optional>
#include <string>

#include "program/program.h"

namespace shardwright {

// Hints on how to compute a product; a device may ignore them.
struct GemmHints {
  int sms_left = 0;  // multiprocessors that the product should leave to transfers, if the device has more
  // For 8-bit floats: sums keep the tensor cores' own precision, about 14 bits, instead of being promoted to float32
  // regularly.
  bool fast_accumulation = false;
};

// The number of multiprocessors that products leave to transfers under way alongside them, in this process. 0, the
// initial value: what their schedules say.
int sm_carveout();
// Throws c10::ValueError below 0.
void set_sm_carveout(int sms);

// Returns whether scaled products use fast accumulation where no hint asks for it, in this process; false at first.
bool fast_accumulation();
void set_fast_accumulation(bool is_fast);

// The buffers are flat tensors on one device; `bias` is used only if the product has one. lhs and rhs have one floating
// dtype. dst has the same, or float32 for 16-bit operands, so that partial sums are not rounded.
void multiply(const Gemm& gemm, const at::Tensor& lhs, const at::Tensor& rhs, at::Tensor& dst, const at::Tensor& bias,
              const GemmHints& hints = {});

// The product of 8-bit floats that have scales: lhs and rhs float8_e4m3fn or float8_e5m2, not both e5m2; scales
// float32; dst bfloat16 or float32. All on one device; scales are read when the product runs. Throws c10::ValueError on
// other dtypes.
//
// A device computes it natively if why_not_scaled returns nothing and the device has an algorithm. Otherwise, and on
// CPU, operands are cast to float32 first. Casts are counted, except on CPU, where there is no other way.
void multiply_scaled(const Gemm& gemm, const at::Tensor& lhs, const at::Tensor& rhs, const at::Tensor& lhs_scale,
                     const at::Tensor& rhs_scale, at::Tensor& dst, const GemmHints& hints = {});

// Returns why units for 8-bit floats cannot compute a scaled product with these buffers, or nothing if they can. They
// need lhs and rhs dense along k, and dst dense along rows or columns; k, all strides other than 1, and the dense side
// of dst must be multiples of 16 elements; and matrices must begin at multiples of 16 bytes.
std::optional<std::string> why_not_scaled(const Gemm& gemm, const at::Tensor& lhs, const at::Tensor& rhs,
                                          const at::Tensor& dst);

// Counts scaled products that were cast, on devices other than CPU, by reason, since the start or the last reset.
std::map<std::string, int64_t> cast_products();
void reset_cast_products();

// Returns how often the tiles of a product, or of one product of a batch, fill the device: 1.0 keeps all of it busy
// once, and 1.1 takes as long as 2.
// Assumes buffers that are aligned as allocators align them. Returns nothing if the device does not report it (CPU; an
// empty product; unsupported dtypes).
//
// This depends on this rank's device and library, so it must not decide what is sent, which must be the same on all
// ranks.
std::optional<double> waves_of(const Gemm& gemm, at::ScalarType operands, at::ScalarType dst, at::Device device,
                               const GemmHints& hints = {});

// The native products of one type of device, in a separate file that is built only if the device's toolkit is
// installed. A function returns false, having done nothing, if the product should be computed as on other devices.
// `multiply_scaled` is called only if why_not_scaled returns nothing, with dense scales at multiples of 16 bytes that
// have one element each, or m and n.
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
