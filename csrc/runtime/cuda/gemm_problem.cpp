#include "runtime/cuda/gemm_problem.h"

#include <ATen/Context.h>
#include <ATen/cuda/CUDAContext.h>
#include <ATen/cuda/CUDADataType.h>
#include <c10/util/StringUtil.h>

#include <utility>

namespace shardwright::lt {
namespace {

// True if cuBLASLt can read a view as a column-major matrix.
bool is_column_major(const View& view) {
  return (view.first.row_stride == 1 || view.rows == 1) && (view.first.column_stride >= view.rows || view.columns == 1);
}

// Returns the column-major layout of a matrix, perhaps transposed; nothing if no stride is 1. A single row or column is
// both row-major and column-major. Then the layout is chosen in which the dense side, if there is one, is a column,
// because cuBLASLt loads columns in wider words. For example, of a matrix of 1 row and 6 columns:
//
//   strides (0, 1)   6 x 1, transposed
//   strides (0, 4)   1 x 6, leading dim 4
std::optional<Layout> layout_of(const View& view, at::ScalarType dtype) {
  const View transposed = view.transposed();
  const bool is_transposed = is_column_major(transposed) && (view.rows == 1 || !is_column_major(view));
  const View& matrix = is_transposed ? transposed : view;
  if (!is_column_major(matrix)) return std::nullopt;
  Layout layout;
  layout.dtype = at::cuda::ScalarTypeToCudaDataType(dtype);
  layout.rows = matrix.rows;
  layout.columns = matrix.columns;
  layout.leading_dim = matrix.columns == 1 ? matrix.rows : matrix.first.column_stride;
  layout.batch_stride = matrix.batch_stride;
  layout.is_transposed = is_transposed;
  return layout;
}

// Returns the name of a dtype for error messages.
const char* name_of(cudaDataType_t dtype) {
  switch (dtype) {
    case CUDA_R_16F:
      return "float16";
    case CUDA_R_16BF:
      return "bfloat16";
    case CUDA_R_32F:
      return "float32";
    case CUDA_R_64F:
      return "float64";
    case CUDA_R_8F_E4M3:
      return "float8_e4m3fn";
    case CUDA_R_8F_E5M2:
      return "float8_e5m2";
    default:
      return "another dtype";
  }
}

// Returns the compute type that ATen uses for operands of this dtype, from PyTorch's settings.
cublasComputeType_t compute_type(at::ScalarType operands) {
  if (operands == at::kDouble) return CUBLAS_COMPUTE_64F;
  const bool is_tf32 =
      operands == at::kFloat && at::globalContext().float32Precision(at::Float32Backend::CUDA, at::Float32Op::MATMUL) ==
                                    at::Float32Precision::TF32;
  return is_tf32 ? CUBLAS_COMPUTE_32F_FAST_TF32 : CUBLAS_COMPUTE_32F;
}

// Returns the mask of reduction schemes (ways to add partial sums along k) that PyTorch's settings allow for a dtype.
uint32_t reduction_schemes(at::ScalarType operands) {
  at::CuBLASReductionOption option = at::CuBLASReductionOption::AllowReducedPrecisionWithSplitK;
  if (operands == at::kHalf) option = at::globalContext().allowFP16ReductionCuBLAS();
  if (operands == at::kBFloat16) option = at::globalContext().allowBF16ReductionCuBLAS();
  switch (option) {
    case at::CuBLASReductionOption::DisallowReducedPrecisionAllowSplitK:
      return CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;
    case at::CuBLASReductionOption::DisallowReducedPrecisionDisallowSplitK:
      return CUBLASLT_REDUCTION_SCHEME_NONE;
    default:
      return CUBLASLT_REDUCTION_SCHEME_MASK;
  }
}

// Returns the number of multiprocessors that a product may use; 0 means all.
int num_sms_of(const GemmHints& hints) {
  const int all = at::cuda::getCurrentDeviceProperties()->multiProcessorCount;
  return hints.sms_left > 0 && hints.sms_left < all ? all - hints.sms_left : 0;
}

}  // namespace

uint32_t alignment_of(const void* address, int64_t stride_bytes) {
  constexpr uintptr_t kMaxAlignment = 256;
  const uintptr_t bits = reinterpret_cast<uintptr_t>(address) | static_cast<uintptr_t>(stride_bytes) | kMaxAlignment;
  return static_cast<uint32_t>(bits & (~bits + 1));
}

std::string to_string(const Problem& problem) {
  const Layout& lhs = problem.swaps ? problem.b : problem.a;
  const Layout& rhs = problem.swaps ? problem.a : problem.b;
  const auto order = [&](const Layout& layout) {
    return layout.is_transposed != problem.swaps ? " by rows" : " by columns";
  };
  const int64_t k = problem.a.is_transposed ? problem.a.rows : problem.a.columns;
  const int64_t m = problem.swaps ? problem.d.columns : problem.d.rows;
  const int64_t n = problem.swaps ? problem.d.rows : problem.d.columns;
  return c10::str(problem.count, " x (m = ", m, ", k = ", k, ", n = ", n, ") of ", name_of(lhs.dtype), order(lhs),
                  " and ", name_of(rhs.dtype), order(rhs), " into ", name_of(problem.d.dtype), order(problem.d),
                  ", leading dims ", lhs.leading_dim, ", ", rhs.leading_dim, " and ", problem.d.leading_dim,
                  problem.bias_alignment_bytes > 0 ? ", with a bias" : "",
                  problem.scales == Scales::kByRow ? ", scaled by rows" : "",
                  problem.fast_accumulation ? ", accumulated fast" : "",
                  problem.num_sms > 0 ? c10::str(", for ", problem.num_sms, " multiprocessors") : std::string(),
                  " on cuda:", static_cast<int>(problem.device));
}

void check(cublasStatus_t status, const char* function, const Problem& problem) {
  const bool is_declined = status == CUBLAS_STATUS_NOT_SUPPORTED || status == CUBLAS_STATUS_ARCH_MISMATCH ||
                           status == CUBLAS_STATUS_INVALID_VALUE;
  if (is_declined) throw Unsupported();
  TORCH_CHECK(status == CUBLAS_STATUS_SUCCESS, "shardwright: ", function, " returned ", cublasLtGetStatusName(status),
              " for ", to_string(problem));
}

std::optional<Problem> problem_of(const Gemm& gemm, at::ScalarType lhs_dtype, at::ScalarType rhs_dtype,
                                  at::ScalarType dst_dtype, at::DeviceIndex device, const GemmHints& hints) {
  const bool is_batch = gemm.count > 1;
  const View lhs{gemm.lhs, gemm.m, gemm.k, is_batch ? gemm.lhs_batch_stride : 0};
  const View rhs{gemm.rhs, gemm.k, gemm.n, is_batch ? gemm.rhs_batch_stride : 0};
  const View dst{gemm.dst, gemm.m, gemm.n, is_batch ? gemm.dst_batch_stride : 0};
  auto d = layout_of(dst, dst_dtype);
  if (!d) return std::nullopt;
  Problem problem;
  problem.swaps = std::exchange(d->is_transposed, false);
  auto a = problem.swaps ? layout_of(rhs.transposed(), rhs_dtype) : layout_of(lhs, lhs_dtype);
  auto b = problem.swaps ? layout_of(lhs.transposed(), lhs_dtype) : layout_of(rhs, rhs_dtype);
  if (!a || !b) return std::nullopt;
  problem.a = *a;
  problem.b = *b;
  problem.d = *d;
  problem.count = gemm.count;
  problem.compute = compute_type(lhs_dtype);
  problem.reduction_schemes = reduction_schemes(lhs_dtype);
  problem.num_sms = num_sms_of(hints);
  problem.device = device;
  return problem;
}

void* Buffer::address_of(const Matrix& matrix, Layout& layout) const {
  auto* address = reinterpret_cast<void*>(begin + matrix.offset * item_bytes);
  layout.alignment_bytes = alignment_of(address, layout.batch_stride * item_bytes);
  return address;
}

Pointers pointers_of(Problem& problem, const Gemm& gemm, const Buffer& lhs, const Buffer& rhs, const Buffer& dst) {
  Pointers pointers;
  pointers.a = problem.swaps ? rhs.address_of(gemm.rhs, problem.a) : lhs.address_of(gemm.lhs, problem.a);
  pointers.b = problem.swaps ? lhs.address_of(gemm.lhs, problem.b) : rhs.address_of(gemm.rhs, problem.b);
  pointers.d = dst.address_of(gemm.dst, problem.d);
  return pointers;
}

Pointers pointers_of(Problem& problem, const Gemm& gemm, const at::Tensor& lhs, const at::Tensor& rhs,
                     at::Tensor& dst) {
  const auto buffer = [](const at::Tensor& tensor, const void* begin) {
    return Buffer{reinterpret_cast<uintptr_t>(begin), static_cast<int64_t>(tensor.element_size())};
  };
  return pointers_of(problem, gemm, buffer(lhs, lhs.const_data_ptr()), buffer(rhs, rhs.const_data_ptr()),
                     buffer(dst, dst.mutable_data_ptr()));
}

}  // namespace shardwright::lt
