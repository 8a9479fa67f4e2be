// Matrix products on buffers, on the current stream. Gemm (program/instructions.h) describes a product and the places
// of its matrices in the buffers. ATen computes products, unless the device registers a function: for cases in which
// ATen would copy, would launch one product after the other, or has no such product.
#pragma once

#include <ATen/core/Tensor.h>

#include <map>
#include <optional>
#include <string>

#include "program/program.h"

namespace shardwright {

// Hints for a product; a device may ignore them.
struct GemmHints {
  int sms_left = 0;  // multiprocessors to leave to transfers, if the device has more
  // For 8-bit floats: sums keep the tensor cores' precision of about 14 bits, instead of being promoted to float32
  // regularly.
  bool fast_accumulation = false;
};

// Returns how many multiprocessors products leave to concurrent transfers, in this process. 0 (the initial value) means
// the number in each product's schedule.
int sm_carveout();
// Throws c10::ValueError if `sms` is negative.
void set_sm_carveout(int sms);

// True if scaled products use fast accumulation where no hint requests it, in this process; initially false.
bool fast_accumulation();
void set_fast_accumulation(bool is_fast);

// Computes a product. The buffers are flat tensors on one device; `bias` is used only if the product has one. lhs and
// rhs have one floating dtype. dst has the same, or float32 for 16-bit operands, so that partial sums are not rounded.
void multiply(const Gemm& gemm, const at::Tensor& lhs, const at::Tensor& rhs, at::Tensor& dst, const at::Tensor& bias,
              const GemmHints& hints = {});

// Computes a product of 8-bit floats with scales. lhs and rhs are float8_e4m3fn or float8_e5m2, not both e5m2; scales
// are float32; dst is bfloat16 or float32. All are on one device. Scales are read when the product runs. Throws
// c10::ValueError for other dtypes.
//
// A device computes it natively if why_not_scaled returns nothing and the device has an algorithm. Otherwise, and on
// CPU, operands are cast to float32 first. Casts are counted, except on CPU, which always casts.
void multiply_scaled(const Gemm& gemm, const at::Tensor& lhs, const at::Tensor& rhs, const at::Tensor& lhs_scale,
                     const at::Tensor& rhs_scale, at::Tensor& dst, const GemmHints& hints = {});

// Returns why hardware for 8-bit floats cannot compute a scaled product with these buffers, or nothing if it can. It
// needs lhs and rhs dense along k, and dst dense along rows or columns; k, all strides other than 1, and the dense side
// of dst must be multiples of 16 elements; and matrices must begin at multiples of 16 bytes.
std::optional<std::string> why_not_scaled(const Gemm& gemm, const at::Tensor& lhs, const at::Tensor& rhs,
                                          const at::Tensor& dst);

// Returns the number of scaled products that were cast, by reason, since the start or the last reset; not on CPU.
std::map<std::string, int64_t> cast_products();
void reset_cast_products();

// Returns the number of waves: the tiles of a product, or of one product of a batch, divided by the tiles that the
// device runs at once. 1.0 keeps the device busy once, and 1.1 takes as long as 2. Assumes buffers with an allocator's
// alignment. Returns nothing if the device does not report it (CPU; an empty product; unsupported dtypes).
//
// The result depends on this rank's device and library, so it must not decide what is sent, which must be the same on
// all ranks.
std::optional<double> waves_of(const Gemm& gemm, at::ScalarType operands, at::ScalarType dst, at::Device device,
                               const GemmHints& hints = {});

// The native products of one type of device, in a separate file that is built only if the device's toolkit is
// installed. A function returns false, with nothing done, if the product should be computed as on other devices.
// `multiply_scaled` is called only if why_not_scaled returns nothing. Its scales are dense, begin at multiples of 16
// bytes, and have one element each, or m and n.
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
