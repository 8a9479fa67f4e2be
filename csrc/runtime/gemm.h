// Matrix products on buffers, on the current stream. Gemm (program/instructions.h) describes a product and the
// positions of its matrices in the buffers. ATen computes products, unless a function is registered for the device.
// Such functions are for cases in which ATen would copy matrices, launch the products of a batch one by one, or has no
// such product.
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
  // For 8-bit floats: sums stay in the tensor cores' accumulators, with a precision of about 14 bits, instead of being
  // added to float32 accumulators at intervals.
  bool fast_accumulation = false;
};

// Returns this process's setting for the number of multiprocessors that products leave to concurrent transfers. 0 (the
// initial value) means the number in each product's schedule (Program::sms_left).
int sm_carveout();
// Sets the result of sm_carveout. Throws c10::ValueError if `sms` is negative.
void set_sm_carveout(int sms);

// Returns this process's setting: true if programs request GemmHints::fast_accumulation for scaled products. Initially
// false.
bool fast_accumulation();
// Sets the result of fast_accumulation.
void set_fast_accumulation(bool is_fast);

// Computes dst = lhs x rhs + bias, or dst += lhs x rhs (Gemm::accumulates). If k is 0, dst becomes the bias or zeros,
// or stays as it is if the product accumulates. The buffers are flat tensors on one device; `bias` may be undefined if
// the product has none. lhs and rhs have one floating dtype. dst has the same dtype, or float32 for 16-bit operands, so
// that partial sums are not rounded.
void multiply(const Gemm& gemm, const at::Tensor& lhs, const at::Tensor& rhs, at::Tensor& dst, const at::Tensor& bias,
              const GemmHints& hints = {});

// Computes a product of 8-bit floats with scales. lhs and rhs are float8_e4m3fn or float8_e5m2, not both e5m2; scales
// are float32; dst is bfloat16 or float32. All are on one device, which reads the scales when the product runs. Throws
// c10::ValueError for other dtypes.
//
// The device computes the product natively if why_not_scaled returns nothing and its library has an algorithm.
// Otherwise, and always on CPU, the operands are cast to float32 first. Casts on other devices are counted
// (cast_products).
void multiply_scaled(const Gemm& gemm, const at::Tensor& lhs, const at::Tensor& rhs, const at::Tensor& lhs_scale,
                     const at::Tensor& rhs_scale, at::Tensor& dst, const GemmHints& hints = {});

// Returns the reason why hardware for 8-bit floats cannot compute a scaled product with these buffers; nothing if it
// can. The requirements are: lhs and rhs have stride 1 along k, and dst along rows or columns; k, the size of dst along
// its stride-1 dim, and all other strides are multiples of 16 elements; and matrices begin at multiples of 16 bytes.
std::optional<std::string> why_not_scaled(const Gemm& gemm, const at::Tensor& lhs, const at::Tensor& rhs,
                                          const at::Tensor& dst);

// Returns the number of scaled products that were cast on devices other than CPU since the last reset, by reason.
std::map<std::string, int64_t> cast_products();
void reset_cast_products();

// Returns the number of waves: the tiles of a product (of one product of a batch), divided by the number of tiles that
// the device computes at once. A product of 1.1 waves takes as long as one of 2. Assumes buffers with an allocator's
// alignment. Returns nothing if the device does not report it: on CPU, for an empty product, and for unsupported
// dtypes.
//
// The result depends on this rank's device and library. So nothing that must be the same on all ranks, such as the
// transfers of a program, may depend on it.
std::optional<double> waves_of(const Gemm& gemm, at::ScalarType operands, at::ScalarType dst, at::Device device,
                               const GemmHints& hints = {});

// The native products of one type of device, in a separate file that is built only if the device's toolkit is
// installed. `multiply` and `multiply_scaled` return false, with nothing done, if ATen should compute the product.
// `multiply_scaled` is called only if why_not_scaled returns nothing. Its scales are dense, begin at multiples of 16
// bytes, and have one element each, or m and n elements.
struct DeviceGemms {
  bool (*multiply)(const Gemm& gemm, const at::Tensor& lhs, const at::Tensor& rhs, at::Tensor& dst,
                   const at::Tensor& bias, const GemmHints& hints) = nullptr;
  bool (*multiply_scaled)(const Gemm& gemm, const at::Tensor& lhs, const at::Tensor& rhs, const at::Tensor& lhs_scale,
                          const at::Tensor& rhs_scale, at::Tensor& dst, const GemmHints& hints) = nullptr;
  std::optional<double> (*waves_of)(const Gemm& gemm, at::ScalarType operands, at::ScalarType dst, at::Device device,
                                    const GemmHints& hints) = nullptr;
};
// Registers the products of a type of device. Returns true.
bool register_device_gemms(at::DeviceType device, const DeviceGemms& gemms);

}  // namespace shardwright
