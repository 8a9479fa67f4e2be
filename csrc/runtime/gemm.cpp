#include "runtime/gemm.h"

#include <ATen/ops/addmm.h>
#include <ATen/ops/as_strided.h>
#include <ATen/ops/baddbmm.h>
#include <ATen/ops/bmm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <mutex>

#include "support/error.h"

namespace shardwright {
namespace {

// Returns the native products of a type of device; their functions are null unless registered.
DeviceGemms& device_gemms(at::DeviceType device) {
  static std::array<DeviceGemms, at::COMPILE_TIME_MAX_DEVICE_TYPES> gemms{};
  return gemms[static_cast<size_t>(device)];
}

// Returns the variable that stores sm_carveout().
std::atomic<int>& sm_carveout_setting() {
  static std::atomic<int> sms{0};
  return sms;
}

// Returns the variable that stores fast_accumulation().
std::atomic<bool>& fast_accumulation_setting() {
  static std::atomic<bool> is_fast{false};
  return is_fast;
}

// Returns a view of a matrix in a buffer. A dim of one element gets the stride of a dense matrix, because ATen passes
// strides to BLAS as leading dimensions.
at::Tensor matrix_view(const at::Tensor& buffer, const Matrix& matrix, int64_t rows, int64_t columns) {
  const int64_t row_stride =
      rows == 1 ? std::max(matrix.row_stride, columns * matrix.column_stride) : matrix.row_stride;
  const int64_t column_stride = columns == 1 ? std::max(matrix.column_stride, rows * row_stride) : matrix.column_stride;
  return at::as_strided(buffer, {rows, columns}, {row_stride, column_stride}, buffer.storage_offset() + matrix.offset);
}

// Returns a view of a batch of matrices in a buffer: [count, rows, columns].
at::Tensor batch_view(const at::Tensor& buffer, const Matrix& matrix, int64_t count, int64_t batch_stride, int64_t rows,
                      int64_t columns) {
  return at::as_strided(buffer, {count, rows, columns}, {batch_stride, matrix.row_stride, matrix.column_stride},
                        buffer.storage_offset() + matrix.offset);
}

// Computes dst = lhs x rhs + bias, or dst += lhs x rhs if `accumulates`. The bias may be undefined. If ATen has no
// product of the operands' dtype into dst's, the operands are cast.
void multiply_matrices(const at::Tensor& lhs, const at::Tensor& rhs, at::Tensor dst, bool accumulates,
                       const at::Tensor& bias) {
  const at::Tensor& addend = accumulates ? dst : bias;
  if (dst.scalar_type() == lhs.scalar_type()) {
    if (addend.defined()) {
      at::addmm_out(dst, addend, lhs, rhs);
    } else {
      at::mm_out(dst, lhs, rhs);
    }
  } else if (dst.device().is_cuda()) {  // ATen's products have an out_dtype only on CUDA
    if (addend.defined()) {
      at::addmm_out(dst, addend.to(dst.scalar_type()), lhs, rhs, dst.scalar_type());
    } else {
      at::mm_out(dst, lhs, rhs, dst.scalar_type());
    }
  } else {
    multiply_matrices(lhs.to(dst.scalar_type()), rhs.to(dst.scalar_type()), dst, accumulates,
                      bias.defined() ? bias.to(dst.scalar_type()) : bias);
  }
}

constexpr int64_t kScaledAlignment = 16;  // in elements and in bytes; hardware for 8-bit floats requires it

bool is_8_bit_float(at::ScalarType dtype) { return dtype == at::kFloat8_e4m3fn || dtype == at::kFloat8_e5m2; }

// Throws c10::ValueError for dtypes that multiply_scaled does not support.
void check_scaled_dtypes(const at::Tensor& lhs, const at::Tensor& rhs, const at::Tensor& lhs_scale,
                         const at::Tensor& rhs_scale, const at::Tensor& dst) {
  TORCH_CHECK_VALUE(is_8_bit_float(lhs.scalar_type()) && is_8_bit_float(rhs.scalar_type()),
                    "lhs and rhs must be Float8_e4m3fn or Float8_e5m2, got ", lhs.scalar_type(), " and ",
                    rhs.scalar_type());
  const bool both_are_e5m2 = lhs.scalar_type() == at::kFloat8_e5m2 && rhs.scalar_type() == at::kFloat8_e5m2;
  TORCH_CHECK_VALUE(!both_are_e5m2, "lhs and rhs must not both be Float8_e5m2, got Float8_e5m2 for both");
  TORCH_CHECK_VALUE(dst.scalar_type() == at::kBFloat16 || dst.scalar_type() == at::kFloat,
                    "dst must be BFloat16 or Float, got ", dst.scalar_type());
  TORCH_CHECK_VALUE(lhs_scale.scalar_type() == at::kFloat && rhs_scale.scalar_type() == at::kFloat,
                    "lhs_scale and rhs_scale must be Float, got ", lhs_scale.scalar_type(), " and ",
                    rhs_scale.scalar_type());
}

// Returns the reason why a matrix is not aligned for scaled products; nothing if it is. A line is a row or a column
// whose elements are consecutive: the matrix has `num_lines` lines of `size` elements. `count` matrices are
// `batch_stride` elements apart. `offset` and `line_stride` are in elements, too.
std::optional<std::string> why_not_aligned(const char* name, const at::Tensor& buffer, int64_t offset, int64_t size,
                                           int64_t num_lines, int64_t line_stride, int64_t count,
                                           int64_t batch_stride) {
  const auto is_multiple = [](int64_t n) { return n % kScaledAlignment == 0; };
  if (num_lines > 1 && line_stride < size) return concat(name, " has lines that overlap");
  if (!is_multiple(size) || (num_lines > 1 && !is_multiple(line_stride)) || (count > 1 && !is_multiple(batch_stride))) {
    return concat(name, " has lines or line strides that are not multiples of ", kScaledAlignment, " elements");
  }
  const auto begin = reinterpret_cast<uintptr_t>(buffer.const_data_ptr()) + offset * buffer.element_size();
  if (begin % kScaledAlignment != 0)
    return concat(name, " does not begin at a multiple of ", kScaledAlignment, " bytes");
  return std::nullopt;
}

// Returns the scales of `rows` rows, dense and aligned to 16 bytes: one element for all rows, or one per row. Copies
// the scales only if needed.
at::Tensor dense_scales(const at::Tensor& buffer, const Scale& scale, int64_t rows) {
  const bool is_one = scale.stride == 0;
  at::Tensor view =
      at::as_strided(buffer, {is_one ? 1 : rows}, {is_one ? 1 : scale.stride}, buffer.storage_offset() + scale.offset)
          .contiguous();
  const bool is_aligned = is_one || reinterpret_cast<uintptr_t>(view.const_data_ptr()) % kScaledAlignment == 0;
  return is_aligned ? view : view.clone();
}

// Returns the i-th product of a batch.
Gemm product_at(const Gemm& gemm, int64_t i) {
  Gemm unbatched = gemm;
  unbatched.count = 1;
  unbatched.lhs.offset += i * gemm.lhs_batch_stride;
  unbatched.rhs.offset += i * gemm.rhs_batch_stride;
  unbatched.dst.offset += i * gemm.dst_batch_stride;
  return unbatched;
}

// Computes a scaled product in float32. The scales have one element, or m and n elements.
void multiply_by_casting(const Gemm& gemm, const at::Tensor& lhs, const at::Tensor& rhs, const at::Tensor& lhs_scale,
                         const at::Tensor& rhs_scale, at::Tensor& dst) {
  for (int64_t i = 0; i < gemm.count; ++i) {
    const Gemm unbatched = product_at(gemm, i);
    at::Tensor product = at::empty({gemm.m, gemm.n}, dst.options().dtype(at::kFloat));
    // Autocast would round the product of `at::mm`.
    at::mm_out(product, matrix_view(lhs, unbatched.lhs, gemm.m, gemm.k).to(at::kFloat),
               matrix_view(rhs, unbatched.rhs, gemm.k, gemm.n).to(at::kFloat));
    product.mul_(lhs_scale.unsqueeze(1)).mul_(rhs_scale.unsqueeze(0));
    at::Tensor to = matrix_view(dst, unbatched.dst, gemm.m, gemm.n);
    if (gemm.accumulates) product.add_(to);
    to.copy_(product);
  }
}

// Numbers of scaled products that were cast, by reason.
struct CastProducts {
  std::mutex mutex;
  std::map<std::string, int64_t> by_reason;
};

CastProducts& cast_product_counts() {
  static CastProducts instance;
  return instance;
}

// Counts a product that is cast. Warns at the first one for each reason.
void count_cast(const std::string& reason) {
  CastProducts& counts = cast_product_counts();
  const std::lock_guard<std::mutex> lock(counts.mutex);
  if (++counts.by_reason[reason] == 1) {
    TORCH_WARN("shardwright: a product of 8-bit floats is cast to float32, because ", reason);
  }
}

// Computes a product with k = 0: dst becomes zeros or the bias, or stays as it is if the product accumulates.
void multiply_empty(const Gemm& gemm, at::Tensor& dst, const at::Tensor& bias) {
  if (gemm.accumulates) return;
  at::Tensor all = batch_view(dst, gemm.dst, gemm.count, gemm.dst_batch_stride, gemm.m, gemm.n);
  gemm.bias ? all.copy_(matrix_view(bias, *gemm.bias, gemm.m, gemm.n).expand(all.sizes())) : all.zero_();
}

// Computes a product, or a batch of products: in one call if ATen supports the batch, else one by one.
void multiply_with_aten(const Gemm& gemm, const at::Tensor& lhs, const at::Tensor& rhs, at::Tensor& dst,
                        const at::Tensor& bias) {
  const at::Tensor addend = gemm.bias ? matrix_view(bias, *gemm.bias, gemm.m, gemm.n) : at::Tensor();
  const bool is_batched =
      gemm.count > 1 && !addend.defined() && !dst.device().is_cpu() && dst.scalar_type() == lhs.scalar_type();
  if (is_batched) {
    const at::Tensor a = batch_view(lhs, gemm.lhs, gemm.count, gemm.lhs_batch_stride, gemm.m, gemm.k);
    const at::Tensor b = batch_view(rhs, gemm.rhs, gemm.count, gemm.rhs_batch_stride, gemm.k, gemm.n);
    at::Tensor c = batch_view(dst, gemm.dst, gemm.count, gemm.dst_batch_stride, gemm.m, gemm.n);
    gemm.accumulates ? at::baddbmm_out(c, c, a, b) : at::bmm_out(c, a, b);
    return;
  }
  for (int64_t i = 0; i < gemm.count; ++i) {
    const Gemm unbatched = product_at(gemm, i);
    multiply_matrices(matrix_view(lhs, unbatched.lhs, gemm.m, gemm.k), matrix_view(rhs, unbatched.rhs, gemm.k, gemm.n),
                      matrix_view(dst, unbatched.dst, gemm.m, gemm.n), gemm.accumulates, addend);
  }
}

}  // namespace

int sm_carveout() { return sm_carveout_setting().load(std::memory_order_relaxed); }

void set_sm_carveout(int sms) {
  TORCH_CHECK_VALUE(sms >= 0, "sms must be at least 0, got ", sms);
  sm_carveout_setting() = sms;
}

bool fast_accumulation() { return fast_accumulation_setting().load(std::memory_order_relaxed); }

void set_fast_accumulation(bool is_fast) { fast_accumulation_setting() = is_fast; }

bool register_device_gemms(at::DeviceType device, const DeviceGemms& gemms) {
  device_gemms(device) = gemms;
  return true;
}

void multiply(const Gemm& gemm, const at::Tensor& lhs, const at::Tensor& rhs, at::Tensor& dst, const at::Tensor& bias,
              const GemmHints& hints) {
  if (gemm.k == 0) return multiply_empty(gemm, dst, bias);
  const DeviceGemms& gemms = device_gemms(dst.device().type());
  if (gemms.multiply != nullptr && gemms.multiply(gemm, lhs, rhs, dst, bias, hints)) return;
  multiply_with_aten(gemm, lhs, rhs, dst, bias);
}

void multiply_scaled(const Gemm& gemm, const at::Tensor& lhs, const at::Tensor& rhs, const at::Tensor& lhs_scale,
                     const at::Tensor& rhs_scale, at::Tensor& dst, const GemmHints& hints) {
  check_scaled_dtypes(lhs, rhs, lhs_scale, rhs_scale, dst);
  if (gemm.m == 0 || gemm.n == 0 || gemm.count == 0) return;
  at::Tensor rows = dense_scales(lhs_scale, *gemm.lhs_scale, gemm.m);
  at::Tensor columns = dense_scales(rhs_scale, *gemm.rhs_scale, gemm.n);
  if (gemm.lhs_scale->stride != 0 || gemm.rhs_scale->stride != 0) {  // libraries need both scales of one kind
    rows = rows.expand({gemm.m}).contiguous();
    columns = columns.expand({gemm.n}).contiguous();
  }
  if (dst.device().is_cpu()) return multiply_by_casting(gemm, lhs, rhs, rows, columns, dst);
  const DeviceGemms& gemms = device_gemms(dst.device().type());
  std::optional<std::string> reason = why_not_scaled(gemm, lhs, rhs, dst);
  if (!reason && gemms.multiply_scaled == nullptr) reason = "shardwright was built without products for this device";
  if (!reason) {
    if (gemms.multiply_scaled(gemm, lhs, rhs, rows, columns, dst, hints)) return;
    reason = "the device's library has no algorithm for it";
  }
  count_cast(*reason);
  multiply_by_casting(gemm, lhs, rhs, rows, columns, dst);
}

std::optional<std::string> why_not_scaled(const Gemm& gemm, const at::Tensor& lhs, const at::Tensor& rhs,
                                          const at::Tensor& dst) {
  if (gemm.lhs.column_stride != 1 || gemm.rhs.row_stride != 1) return "operands are not dense along k";
  const bool is_row_major = gemm.dst.column_stride == 1;
  if (!is_row_major && gemm.dst.row_stride != 1) return "the result has no stride of 1";
  auto reason = why_not_aligned("lhs", lhs, gemm.lhs.offset, gemm.k, gemm.m, gemm.lhs.row_stride, gemm.count,
                                gemm.lhs_batch_stride);
  if (reason) return reason;
  reason = why_not_aligned("rhs", rhs, gemm.rhs.offset, gemm.k, gemm.n, gemm.rhs.column_stride, gemm.count,
                           gemm.rhs_batch_stride);
  if (reason) return reason;
  return why_not_aligned("the result", dst, gemm.dst.offset, is_row_major ? gemm.n : gemm.m,
                         is_row_major ? gemm.m : gemm.n, is_row_major ? gemm.dst.row_stride : gemm.dst.column_stride,
                         gemm.count, gemm.dst_batch_stride);
}

std::map<std::string, int64_t> cast_products() {
  CastProducts& counts = cast_product_counts();
  const std::lock_guard<std::mutex> lock(counts.mutex);
  return counts.by_reason;
}

void reset_cast_products() {
  CastProducts& counts = cast_product_counts();
  const std::lock_guard<std::mutex> lock(counts.mutex);
  counts.by_reason.clear();
}

std::optional<double> waves_of(const Gemm& gemm, at::ScalarType operands, at::ScalarType dst, at::Device device,
                               const GemmHints& hints) {
  const DeviceGemms& gemms = device_gemms(device.type());
  return gemms.waves_of == nullptr ? std::nullopt : gemms.waves_of(gemm, operands, dst, device, hints);
}

}  // namespace shardwright
