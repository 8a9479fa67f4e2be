#include "runtime/gemm.h"

#include <ATen/ops/addmm.h>
#include <ATen/ops/as_strided.h>
#include <ATen/ops/baddbmm.h>
#include <ATen/ops/bmm.h>
#include <ATen/ops/mm.h>

#include <array>
#include <cstdint>

namespace shardwright {
namespace {

DeviceGemms& device_gemms(at::DeviceType device) {
  static std::array<DeviceGemms, at::COMPILE_TIME_MAX_DEVICE_TYPES> gemms{};
  return gemms[static_cast<size_t>(device)];
}

at::Tensor view(const at::Tensor& buffer, const Matrix& matrix, int64_t rows, int64_t columns) {
  return at::as_strided(buffer, {rows, columns}, {matrix.row_stride, matrix.column_stride},
                        buffer.storage_offset() + matrix.offset);
}

at::Tensor batch_view(const at::Tensor& buffer, const Matrix& matrix, int64_t count, int64_t batch_stride, int64_t rows,
                      int64_t columns) {
  return at::as_strided(buffer, {count, rows, columns}, {batch_stride, matrix.row_stride, matrix.column_stride},
                        buffer.storage_offset() + matrix.offset);
}

void multiply_matrices(const at::Tensor& lhs, const at::Tensor& rhs, at::Tensor dst, bool accumulates,
                       const at::Tensor& bias) {
  const at::Tensor& added = accumulates ? dst : bias;
  if (dst.scalar_type() == lhs.scalar_type()) {
    if (added.defined()) {
      at::addmm_out(dst, added, lhs, rhs);
    } else {
      at::mm_out(dst, lhs, rhs);
    }
  } else if (dst.device().is_cuda()) {
    if (added.defined()) {
      at::addmm_out(dst, added.to(dst.scalar_type()), lhs, rhs, dst.scalar_type());
    } else {
      at::mm_out(dst, lhs, rhs, dst.scalar_type());
    }
  } else {  // CPU has no product of mixed dtypes
    multiply_matrices(lhs.to(dst.scalar_type()), rhs.to(dst.scalar_type()), dst, accumulates,
                      bias.defined() ? bias.to(dst.scalar_type()) : bias);
  }
}

// What multiply_scaled promises to refuse; the kernels of a device would only say that they have nothing to offer.
constexpr int64_t kScaledUnit = 16;

bool is_8_bit_float(at::ScalarType dtype) { return dtype == at::kFloat8_e4m3fn || dtype == at::kFloat8_e5m2; }

void check_scaled_dtypes(const at::Tensor& lhs, const at::Tensor& rhs, const at::Tensor& dst) {
  const bool both_are_e5m2 = lhs.scalar_type() == at::kFloat8_e5m2 && rhs.scalar_type() == at::kFloat8_e5m2;
  TORCH_CHECK_VALUE(is_8_bit_float(lhs.scalar_type()) && is_8_bit_float(rhs.scalar_type()) && !both_are_e5m2,
                    "lhs, rhs: are ", lhs.scalar_type(), " and ", rhs.scalar_type(),
                    "; a scaled product takes Float8_e4m3fn and Float8_e5m2, not Float8_e5m2 twice");
  TORCH_CHECK_VALUE(dst.scalar_type() == at::kBFloat16 || dst.scalar_type() == at::kFloat, "dst: is ",
                    dst.scalar_type(), "; a scaled product is BFloat16 or Float");
}

// `dense_size`: along the stride of 1, where it has to be a multiple too.
void check_scaled_matrix(const char* name, const at::Tensor& buffer, int64_t offset, int64_t dense_size,
                         int64_t num_lines, int64_t line_stride, int64_t count, int64_t batch_stride) {
  const auto is_multiple = [](int64_t n) { return n % kScaledUnit == 0; };
  TORCH_CHECK_VALUE(num_lines == 1 || line_stride >= dense_size, name, ": has ", num_lines, " lines of ", dense_size,
                    " elements that are ", line_stride, " apart; a scaled product wants them side by side; copy them");
  TORCH_CHECK_VALUE(is_multiple(dense_size) && (num_lines == 1 || is_multiple(line_stride)) &&
                        (count == 1 || is_multiple(batch_stride)),
                    name, ": has ", num_lines, " lines of ", dense_size, " elements, ", line_stride, " apart, in ",
                    count, " matrices, ", batch_stride, " apart; a scaled product wants multiples of ", kScaledUnit,
                    " elements; pad them");
  const auto begin = reinterpret_cast<uintptr_t>(buffer.const_data_ptr()) + offset * buffer.element_size();
  TORCH_CHECK_VALUE(begin % kScaledUnit == 0, name, ": begins ", begin % kScaledUnit, " bytes behind a multiple of ",
                    kScaledUnit, "; a scaled product wants it to begin at one; copy it");
}

void check_scaled_layout(const Gemm& gemm, const at::Tensor& lhs, const at::Tensor& rhs, const at::Tensor& dst) {
  TORCH_CHECK_VALUE(!gemm.bias, "gemm: has a bias, which a scaled product does not take; add it afterwards");
  TORCH_CHECK_VALUE(gemm.k > 0, "gemm: has k = 0, with which a scaled product has nothing to multiply");
  TORCH_CHECK_VALUE(gemm.lhs.column_stride == 1 && gemm.rhs.row_stride == 1, "lhs, rhs: their strides along k are ",
                    gemm.lhs.column_stride, " and ", gemm.rhs.row_stride,
                    "; a scaled product wants both to be 1: lhs row-major, rhs column-major");
  const bool is_row_major = gemm.dst.column_stride == 1;
  TORCH_CHECK_VALUE(is_row_major || gemm.dst.row_stride == 1, "dst: its strides are (", gemm.dst.row_stride, ", ",
                    gemm.dst.column_stride, "); a scaled product wants one of them to be 1");
  check_scaled_matrix("lhs", lhs, gemm.lhs.offset, gemm.k, gemm.m, gemm.lhs.row_stride, gemm.count,
                      gemm.lhs_batch_stride);
  check_scaled_matrix("rhs", rhs, gemm.rhs.offset, gemm.k, gemm.n, gemm.rhs.column_stride, gemm.count,
                      gemm.rhs_batch_stride);
  check_scaled_matrix("dst", dst, gemm.dst.offset, is_row_major ? gemm.n : gemm.m, is_row_major ? gemm.m : gemm.n,
                      is_row_major ? gemm.dst.row_stride : gemm.dst.column_stride, gemm.count, gemm.dst_batch_stride);
}

// Several scales are loaded in words; of a single one a multiple of its own size is enough.
void check_scales(const Gemm& gemm, const at::Tensor& lhs, const at::Tensor& lhs_scale, const at::Tensor& rhs_scale) {
  for (const at::Tensor* scale : {&lhs_scale, &rhs_scale}) {
    const auto begin = reinterpret_cast<uintptr_t>(scale->const_data_ptr());
    TORCH_CHECK_VALUE(scale->numel() == 1 || begin % kScaledUnit == 0, "lhs_scale, rhs_scale: one begins ",
                      begin % kScaledUnit, " bytes behind a multiple of ", kScaledUnit, "; copy it");
    TORCH_CHECK_VALUE(scale->scalar_type() == at::kFloat && scale->is_contiguous() && scale->device() == lhs.device(),
                      "lhs_scale, rhs_scale: one is ", scale->scalar_type(), " of strides ", scale->strides(), " on ",
                      scale->device(), "; scales are Float, contiguous, and on the device of the operands, ",
                      lhs.device());
  }
  const bool is_by_tensor = lhs_scale.numel() == 1 && rhs_scale.numel() == 1;
  const bool is_by_row = lhs_scale.numel() == gemm.m && rhs_scale.numel() == gemm.n && gemm.count == 1;
  TORCH_CHECK_VALUE(is_by_tensor || is_by_row, "lhs_scale, rhs_scale: have ", lhs_scale.numel(), " and ",
                    rhs_scale.numel(), " elements for ", gemm.count, " products of m = ", gemm.m, " and n = ", gemm.n,
                    "; allowed are 1 and 1, or for a single product m and n");
}

// A loop over the products, but for the batches that ATen's own products of batches take.
void multiply_with_aten(const Gemm& gemm, const at::Tensor& lhs, const at::Tensor& rhs, at::Tensor& dst,
                        const at::Tensor& bias) {
  const at::Tensor added = gemm.bias ? view(bias, *gemm.bias, gemm.m, gemm.n) : at::Tensor();
  const bool is_one_call =
      gemm.count > 1 && !added.defined() && dst.device().is_cuda() && dst.scalar_type() == lhs.scalar_type();
  if (is_one_call) {
    const at::Tensor a = batch_view(lhs, gemm.lhs, gemm.count, gemm.lhs_batch_stride, gemm.m, gemm.k);
    const at::Tensor b = batch_view(rhs, gemm.rhs, gemm.count, gemm.rhs_batch_stride, gemm.k, gemm.n);
    at::Tensor c = batch_view(dst, gemm.dst, gemm.count, gemm.dst_batch_stride, gemm.m, gemm.n);
    gemm.accumulates ? at::baddbmm_out(c, c, a, b) : at::bmm_out(c, a, b);
    return;
  }
  for (int64_t i = 0; i < gemm.count; ++i) {
    Gemm one = gemm;
    one.lhs.offset += i * gemm.lhs_batch_stride;
    one.rhs.offset += i * gemm.rhs_batch_stride;
    one.dst.offset += i * gemm.dst_batch_stride;
    multiply_matrices(view(lhs, one.lhs, gemm.m, gemm.k), view(rhs, one.rhs, gemm.k, gemm.n),
                      view(dst, one.dst, gemm.m, gemm.n), gemm.accumulates, added);
  }
}

}  // namespace

bool register_device_gemms(at::DeviceType device, const DeviceGemms& gemms) {
  device_gemms(device) = gemms;
  return true;
}

void multiply(const Gemm& gemm, const at::Tensor& lhs, const at::Tensor& rhs, at::Tensor& dst, const at::Tensor& bias,
              const GemmHints& hints) {
  const DeviceGemms& gemms = device_gemms(dst.device().type());
  if (gemms.multiply != nullptr && gemms.multiply(gemm, lhs, rhs, dst, bias, hints)) return;
  multiply_with_aten(gemm, lhs, rhs, dst, bias);
}

void multiply_scaled(const Gemm& gemm, const at::Tensor& lhs, const at::Tensor& rhs, const at::Tensor& lhs_scale,
                     const at::Tensor& rhs_scale, at::Tensor& dst, const GemmHints& hints) {
  if (gemm.m == 0 || gemm.n == 0 || gemm.count == 0) return;
  check_scaled_dtypes(lhs, rhs, dst);
  check_scaled_layout(gemm, lhs, rhs, dst);
  check_scales(gemm, lhs, lhs_scale, rhs_scale);
  const DeviceGemms& gemms = device_gemms(dst.device().type());
  TORCH_CHECK_NOT_IMPLEMENTED(gemms.multiply_scaled != nullptr, "shardwright has no product of 8-bit floats on ",
                              dst.device(), "; it has one where its CUDA half is built, on CUDA");
  gemms.multiply_scaled(gemm, lhs, rhs, lhs_scale, rhs_scale, dst, hints);
}

std::optional<double> waves_of(const Gemm& gemm, at::ScalarType operands, at::ScalarType dst, at::Device device,
                               const GemmHints& hints) {
  const DeviceGemms& gemms = device_gemms(device.type());
  return gemms.waves_of == nullptr ? std::nullopt : gemms.waves_of(gemm, operands, dst, device, hints);
}

}  // namespace shardwright
